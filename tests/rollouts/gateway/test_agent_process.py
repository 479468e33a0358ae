"""Agent programs: a real one, started as in a run."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from outpace.engines.fleet import EngineFleet
from outpace.errors import BadInput
from outpace.models.chat_format import TemplateChatFormat
from outpace.rollouts.agent_process import agent_rollout, wait_until_ended
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.episode import run_episode
from outpace.rollouts.worker import RewardFunctions, RolloutWorker
from outpace.runtime.child_process import MAX_OUTPUT
from outpace.types import GroupOrder, Task
from rollouts_support import RecordingJournal
from support import naming

AGENT = [sys.executable, str(Path(__file__).parent / "agent_program.py")]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|end|>'
TASK = Task("sums/1", "1 + 2 = ?", {"answer": "it is 3"})


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.fixture
def client_of(gateway: Any, tokenizer: Any, make_settings: Any) -> Callable[..., PolicyClient]:
    """Makes the client of an episode with a gateway."""

    def make(engine: Any) -> PolicyClient:
        chat_format = TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,))
        settings = make_settings(max_tokens=2000, stop_strings=())
        return PolicyClient(engine, chat_format, settings, GroupOrder(7, 0, 0, 0, 1), 0, gateway=gateway)

    return make


@pytest.fixture
async def no_request_error(client_of: Any, typing_engine: Any) -> str:
    """The error of an episode that sends no request."""

    async def silent(task: Task, client: Any) -> None: ...

    error = (await run_episode(silent, TASK, client_of(typing_engine("x")), 60)).error
    assert error
    return error


async def test_a_program_that_does_not_import_outpace_produces_an_episode(
    client_of: Any, typing_engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    client = client_of(typing_engine(CALL, "it is 3<|end|>"))
    episode = await run_episode(agent_rollout(AGENT), TASK, client, 60)
    assert (episode.error, episode.stop, episode.completion) == (None, "stop", "it is 3")
    assert len(episode.trajectories) == 1
    assert episode.requests == ["7.0.0", "7.0.1"]
    assert "thoughts for the log: it is 3 sums/1" in capfd.readouterr().err


async def test_a_failing_program_fails_its_episode_with_its_last_output(client_of: Any, typing_engine: Any) -> None:
    client = client_of(typing_engine(CALL, "it is 4<|end|>"))
    episode = await run_episode(agent_rollout(AGENT), TASK, client, 60)
    assert re.search(naming("code 1", "but the model said it is 4"), episode.error or "")
    assert sum(int(trajectory.mask.sum()) for trajectory in episode.trajectories) > 0  # still counted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit(3)", ("agent", "code 3")),
        ("import os; os.kill(os.getpid(), 9)", ("agent", "SIGKILL")),
        ("raise KeyError('missing')", ("agent", "code 1", "KeyError: 'missing'")),
        ("pass", ()),
    ],
)
async def test_the_error_names_how_a_program_ended(
    text: str, words: tuple[str, ...], client_of: Any, typing_engine: Any, no_request_error: str
) -> None:
    episode = await run_episode(agent_rollout(program(text)), TASK, client_of(typing_engine("x")), 60)
    assert re.search(naming(*words), episode.error or "")
    assert (episode.error == no_request_error) == (not words)


async def test_a_program_gets_the_whole_task_on_standard_input_and_need_not_read_it(
    client_of: Any, typing_engine: Any
) -> None:
    large = Task("x/ö", [{"role": "user", "content": "hi"}], {"data": "y" * 1_000_000, "path": Path("/tmp")})
    reads = program(
        "import json, os, sys; task = json.load(sys.stdin);"
        "sys.exit(' '.join([task['id'], task['prompt'][0]['content'], str(len(task['data'])), task['path']]))"
    )
    engine = typing_engine("x")
    read = await run_episode(agent_rollout(reads), large, client_of(engine), 60)
    assert re.search(naming("code 1", "x/ö hi 1000000 /tmp"), read.error or "")
    ignores = program("import sys; sys.exit('no')")
    unread = await run_episode(agent_rollout(ignores), large, client_of(engine), 60)
    assert re.search(r"code 1\b.*\bno$", unread.error or "")


async def test_a_program_gets_its_endpoint_in_environment_variables(
    gateway: Any, client_of: Any, typing_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("NO_PROXY", "intranet")
    names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "OUTPACE_TASK_ID", "ANTHROPIC_BASE_URL", "NO_PROXY"]
    text = f"import os, sys; sys.exit(' '.join(map(os.environ.get, {names})) + str(os.environ.get('PYTHONPATH')))"
    client = client_of(typing_engine("x"))
    endpoint = await client.endpoint()
    episode = await run_episode(agent_rollout(program(text)), TASK, client, 60)
    session = endpoint.base_url.removesuffix("/v1")
    seen = f"{endpoint.base_url} {endpoint.api_key} policy-model sums/1 {session} intranet,127.0.0.1None"
    assert re.search(naming("code 1", seen), episode.error or "")


STARTS_A_CHILD = """
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
async def test_a_program_and_its_process_tree_end_with_the_episode(
    how: str, client_of: Any, typing_engine: Any, no_request_error: str
) -> None:
    mark = f"process-tree-of-{os.getpid()}-{how}"
    text = STARTS_A_CHILD.format(mark=mark, then="" if how == "by itself" else "time.sleep(1000)")
    client = client_of(typing_engine("x"))
    episode = asyncio.create_task(
        run_episode(agent_rollout(program(text)), TASK, client, 3 if how == "time limit" else 60)
    )
    if how == "cancelled":
        while not await asyncio.to_thread(alive, mark):  # noqa: ASYNC110 - another process cannot set an event
            await asyncio.sleep(0.02)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
    else:
        ended = await episode
        timed_out = re.search(naming("rollout.timeout_s", "3 s"), ended.error or "")
        assert timed_out if how == "time limit" else ended.error == no_request_error
    assert alive(mark) == []


async def test_the_logged_output_of_a_program_is_truncated(
    client_of: Any, typing_engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "import sys; sys.stdout.write('x' * 3_000_000); sys.exit('enough')"
    episode = await run_episode(agent_rollout(program(text)), TASK, client_of(typing_engine("x")), 60)
    assert re.search(naming("code 1", "enough"), episode.error or "")
    logged = capfd.readouterr().err
    assert len(logged) < 200_000
    assert re.search(naming("agent", str(MAX_OUTPUT)), logged)


async def wait_until_started(mark: str, count: int = 1) -> None:
    while len(await asyncio.to_thread(alive, mark)) < count:  # noqa: ASYNC110 - another process cannot set an event
        await asyncio.sleep(0.02)


SLEEPS = "import time; time.sleep(1000)"


async def test_the_program_of_a_repeatedly_cancelled_episode_still_ends(client_of: Any, typing_engine: Any) -> None:
    mark = f"twice-{os.getpid()}"
    rollout = agent_rollout([*program(SLEEPS), mark])
    episode = asyncio.create_task(rollout(TASK, client_of(typing_engine("x"))))
    await wait_until_started(mark)
    while not episode.done():
        episode.cancel()
        await asyncio.sleep(0)
    await wait_until_ended()
    assert alive(mark) == []


@pytest.mark.parametrize("heldout", [True, False])
@pytest.mark.parametrize("impatient", [True, False])
async def test_closing_a_worker_ends_the_agents_of_training_groups_and_evaluations(
    impatient: bool, heldout: bool, gateway: Any, typing_engine: Any, tokenizer: Any, make_settings: Any
) -> None:
    mark = f"closing-{os.getpid()}-{heldout}-{impatient}"
    worker = RolloutWorker(
        make_settings(), EngineFleet({"e": typing_engine("x")}),
        TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,)),
        [TASK], {"": [TASK]}, agent_rollout([*program(SLEEPS), mark]), RewardFunctions([], []), RecordingJournal(),
        gateway,
    )  # fmt: skip
    running = asyncio.create_task(worker.run(GroupOrder(1, 0, 0, 0, 3, heldout=heldout)))
    await wait_until_started(mark, 3)
    running.cancel()  # as when the connection to the controller closes: nothing awaits it
    while impatient and not running.done():
        await asyncio.sleep(0)
        running.cancel()  # repeatedly, also during cleanup
    await worker.close()
    assert alive(mark) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_the_agents_of_a_killed_worker_end() -> None:
    parent = f"""
import asyncio, os, sys
from outpace.rollouts.agent_process import AgentProcess

async def main():
    agent = AgentProcess([sys.executable, "-c", {SLEEPS!r}], dict(os.environ))
    print((await agent._starting).pid, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    ended = subprocess.run(program(parent), capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    try:
        agent = psutil.Process(int(ended.stdout))
        agent.wait(timeout=30)
    except psutil.NoSuchProcess:
        return  # already gone
    finally:
        if psutil.pid_exists(int(ended.stdout)):
            os.kill(int(ended.stdout), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_program_starts_with_default_signal_handling(client_of: Any, typing_engine: Any) -> None:
    """Python ignores some signals, and ignored signals are inherited."""
    shown = ["sh", "-c", "grep SigIgn /proc/self/status >&2; exit 1"]
    episode = await run_episode(agent_rollout(shown), TASK, client_of(typing_engine("x")), 60)
    ignored = int(str(episode.error).split()[-1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1))


async def test_a_missing_or_unusable_program_raises_bad_input(
    client_of: Any, typing_engine: Any, tmp_path: Path
) -> None:
    data, nonsense = tmp_path / "data", tmp_path / "nonsense"
    for path in (data, nonsense):
        path.write_text("no program at all")
    nonsense.chmod(0o755)
    for command in ("/no/such/program", "no-such-program", str(data), str(nonsense), f"{data}/program"):
        with pytest.raises(BadInput, match=rf"^rollout\.agent: .*{re.escape(command)}\b"):
            await run_episode(agent_rollout([command]), TASK, client_of(typing_engine("x")), 60)
    with pytest.raises(BadInput, match=r"^rollout\.agent: "):
        agent_rollout([])


async def test_a_program_that_temporarily_cannot_start_fails_its_episode(
    client_of: Any, typing_engine: Any, tmp_path: Path
) -> None:
    busy = tmp_path / "busy"
    shutil.copy2("/bin/sh", busy)
    with busy.open("ab"):  # a file that is open for writing cannot be executed
        episode = await run_episode(agent_rollout([str(busy)]), TASK, client_of(typing_engine("x")), 60)
    assert re.search(naming("agent", "Text file busy"), episode.error or "")


@contextmanager
def descriptors_left(spare: int) -> Iterator[None]:
    """Allow only `spare` more descriptors to be opened."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(map(int, os.listdir("/proc/self/fd")))
    fillers = [os.dup(0)]
    while fillers[-1] <= last:
        fillers.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + spare, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for filler in fillers:
            os.close(filler)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("spare", range(0, 14, 2))
async def test_running_out_of_descriptors_fails_the_episode_and_leaks_none(
    spare: int, client_of: Any, typing_engine: Any, no_request_error: str
) -> None:
    client = client_of(typing_engine("x"))
    await client.endpoint()
    await run_episode(agent_rollout(program("")), TASK, client_of(typing_engine("x")), 60)  # opens what stays open
    before = len(os.listdir("/proc/self/fd"))
    with descriptors_left(spare):
        episode = await run_episode(agent_rollout(program("")), TASK, client, 60)
    await asyncio.sleep(0)  # transports close in the next iteration of the loop
    assert episode.error == no_request_error or "Too many open files" in (episode.error or "")
    assert episode.error != no_request_error or spare > 6
    assert len(os.listdir("/proc/self/fd")) <= before
