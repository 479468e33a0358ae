"""A program as the agent of an episode: a real one, started as it would be."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from outpace.errors import BadInput
from outpace.models.dialect import TemplateDialect
from outpace.rollouts.agent_process import as_rollout
from outpace.rollouts.episodes import run_episode
from outpace.rollouts.policy.client import PolicyClient
from outpace.types import GroupOrder, Task

AGENT = [sys.executable, str(Path(__file__).parent / "agent_program.py")]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|end|>'
NOTHING_ASKED = "the rollout asked the policy nothing"
TASK = Task("sums/1", "1 + 2 = ?", {"answer": "it is 3"})


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.fixture
def client_of(gateway: Any, tokenizer: Any, make_settings: Any) -> Callable[..., PolicyClient]:
    """The client of an episode, with the gateway behind it."""

    def make(engine: Any) -> PolicyClient:
        dialect = TemplateDialect(tokenizer, (tokenizer.eos_token_id,))
        settings = make_settings(max_tokens=2000, stop_strings=())
        return PolicyClient(engine, dialect, settings, GroupOrder(7, 0, 0, 0, 1), 0, doors=gateway)

    return make


async def test_a_program_that_knows_nothing_of_outpace_makes_an_episode(
    client_of: Any, typing_engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    client = client_of(typing_engine(CALL, "it is 3<|end|>"))
    episode = await run_episode(as_rollout(AGENT), TASK, client, 60)
    assert (episode.error, episode.stop, episode.completion) == (None, "stop", "it is 3")
    assert len(episode.trajectories) == 1
    assert episode.requests == ["7.0.0", "7.0.1"]
    assert "thoughts for the log: it is 3 sums/1" in capfd.readouterr().err


async def test_a_program_that_fails_is_a_failed_episode_with_its_last_words(client_of: Any, typing_engine: Any) -> None:
    client = client_of(typing_engine(CALL, "it is 4<|end|>"))
    episode = await run_episode(as_rollout(AGENT), TASK, client, 60)
    assert episode.error == "the agent exited with code 1: but the model said it is 4"
    assert sum(int(trajectory.mask.sum()) for trajectory in episode.trajectories) > 0  # for the accounts


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import sys; sys.exit(3)", "the agent exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "the agent was killed by SIGKILL"),
        ("raise KeyError('nobody')", "the agent exited with code 1: KeyError: 'nobody'"),
        ("pass", NOTHING_ASKED),
    ],
)
async def test_how_a_program_ends_is_told(text: str, told: str, client_of: Any, typing_engine: Any) -> None:
    episode = await run_episode(as_rollout(program(text)), TASK, client_of(typing_engine("x")), 60)
    assert episode.error == told


async def test_the_task_comes_in_whole_and_its_columns_need_not_be_read(client_of: Any, typing_engine: Any) -> None:
    large = Task("x/ö", [{"role": "user", "content": "hi"}], {"data": "y" * 1_000_000, "path": Path("/tmp")})
    reads = program(
        "import json, os, sys; task = json.load(sys.stdin);"
        "sys.exit(' '.join([task['id'], task['prompt'][0]['content'], str(len(task['data'])), task['path']]))"
    )
    client = client_of(typing_engine("x"))
    assert (
        await run_episode(as_rollout(reads), large, client, 60)
    ).error == "the agent exited with code 1: x/ö hi 1000000 /tmp"
    ignores = program("import sys; sys.exit('no')")
    assert (await run_episode(as_rollout(ignores), large, client, 60)).error == "the agent exited with code 1: no"


async def test_a_program_sees_where_its_model_is(
    gateway: Any, client_of: Any, typing_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("NO_PROXY", "intranet")
    names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "OUTPACE_TASK_ID", "ANTHROPIC_BASE_URL", "NO_PROXY"]
    text = f"import os, sys; sys.exit(' '.join(map(os.environ.get, {names})) + str(os.environ.get('PYTHONPATH')))"
    client = client_of(typing_engine("x"))
    endpoint = await client.endpoint()
    episode = await run_episode(as_rollout(program(text)), TASK, client, 60)
    session = endpoint.base_url.removesuffix("/v1")
    seen = f"{endpoint.base_url} {endpoint.api_key} policy-model sums/1 {session} intranet,127.0.0.1None"
    assert episode.error == f"the agent exited with code 1: {seen}"


FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", {mark!r}], start_new_session=True)
print("ready", file=sys.stderr, flush=True)
{then}
"""


def alive(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)  # noqa: PERF401
    return found


@pytest.mark.parametrize("how", ["time limit", "cancelled", "by itself"])
async def test_a_program_ends_with_its_episode_and_all_its_family(
    how: str, client_of: Any, typing_engine: Any, tmp_path: Path
) -> None:
    mark = f"family-of-{os.getpid()}-{how}"
    text = FAMILY.format(mark=mark, then="" if how == "by itself" else "time.sleep(1000)")
    client = client_of(typing_engine("x"))
    episode = asyncio.create_task(
        run_episode(as_rollout(program(text)), TASK, client, 3 if how == "time limit" else 60)
    )
    if how == "cancelled":
        while not await asyncio.to_thread(alive, mark):  # noqa: ASYNC110 - another process knows nothing of events
            await asyncio.sleep(0.02)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
    else:
        ended = await episode
        assert ended.error == {"time limit": "took longer than rollout.timeout_s = 3 s"}.get(how, NOTHING_ASKED)
    assert alive(mark) == []


async def test_a_program_that_talks_without_end_is_cut_short(
    client_of: Any, typing_engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "import sys; sys.stdout.write('x' * 3_000_000); sys.exit('enough')"
    episode = await run_episode(as_rollout(program(text)), TASK, client_of(typing_engine("x")), 60)
    assert episode.error == "the agent exited with code 1: enough"
    logged = capfd.readouterr().err
    assert len(logged) < 200_000
    assert "an agent printed more than" in logged


async def test_a_program_that_does_not_exist_ends_the_run(client_of: Any, typing_engine: Any) -> None:
    with pytest.raises(BadInput, match=r"^rollout\.agent: cannot start /no/such/program"):
        await run_episode(as_rollout(["/no/such/program"]), TASK, client_of(typing_engine("x")), 60)
    with pytest.raises(BadInput, match=r"^rollout\.agent: name the program"):
        as_rollout([])
