"""Workflows and agent flows of rLLM on a worker: what is recorded, retried, left out and compared."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from outpace.compat import rllm
from outpace.compat.rllm.rollouts import EpisodeRollout
from outpace.config import Config
from outpace.config.rllm_settings import translate
from outpace.engines.fleet import EngineFleet
from outpace.models.chat_format import TemplateChatFormat
from outpace.monitoring.metrics import result
from outpace.rollouts.gateway.server import Gateway
from outpace.rollouts.worker import RewardFunctions, RolloutWorker
from outpace.types import GroupOrder, GroupRecord, GroupReport, Task
from rollouts_support import RecordingJournal

TASK = Task("t0", "hi", {"question": "hi", "answer": "yes"})


@pytest.fixture
def run_group(tokenizer: Any, make_settings: Callable[..., Config]) -> Callable[..., Any]:
    """Runs one group of two episodes with a rollout, and returns its report, its record and the trained texts."""

    async def run(
        engine: Any, rollout: EpisodeRollout, config: dict[str, Any] | None = None
    ) -> tuple[GroupReport, GroupRecord | None, list[str]]:
        retries = translate(config or {}).settings["rollout.retries"]
        journal: Any = RecordingJournal()
        worker = RolloutWorker(
            make_settings(retries=retries),
            EngineFleet({"engine": engine}),
            TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,)),
            [TASK],
            {},
            rollout,
            RewardFunctions([], []),
            journal,
            Gateway("127.0.0.1", 0, "policy"),
        )
        report = await worker.run(GroupOrder(0, task=0, epoch=0, min_version=2, size=2))
        await worker.close()
        record = journal.records[0] if journal.records else None
        rows = [] if record is None else record.rows
        return report, record, [tokenizer.decode(row.tokens[row.mask].tolist()) for row in rows]

    return run


def by_episode(episode: int, turn: int) -> str:
    return ["yes", "no"][episode % 2] + "<|end|>"


class Solve(rllm.Workflow):
    """One answer per turn. `change` is called with the messages after the step was made."""

    def __init__(self, rollout_engine: Any, turns: int = 1, change: Any = None, **kwargs: Any) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.turns, self.change = turns, change

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> rllm.Episode:
        messages = [{"role": "user", "content": task["question"]}]
        trajectory = rllm.Trajectory(name="solver")
        for _ in range(self.turns):
            output = await self.rollout_engine.get_model_response(messages, application_id=uid)
            messages.append({"role": "assistant", "content": output.content})
            trajectory.steps.append(rllm.Step(chat_completions=messages, reward=float("yes" in str(output.content))))
            if self.change is not None:
                self.change(messages)
            messages.append({"role": "user", "content": "again"})
        return rllm.Episode(id=uid, trajectories=[trajectory])


# ------------------------------------------------------------------------------------------------ what is recorded


def test_changes_of_the_callers_messages_do_not_change_a_step() -> None:
    messages = [{"role": "user", "content": "hi"}]
    step = rllm.Step(chat_completions=messages)
    messages.append({"role": "assistant", "content": "later"})
    messages[0]["content"] = "changed"
    assert step.chat_completions == [{"role": "user", "content": "hi"}]
    with pytest.raises(AttributeError):
        step.chat_completions.append({"role": "user", "content": "more"})
    with pytest.raises(TypeError):
        step.chat_completions[0]["content"] = "changed"
    assert deepcopy(step) == step
    assert step.chat_completions + messages[1:] == [{"role": "user", "content": "hi"}, messages[1]]


async def test_messages_that_are_appended_or_changed_after_a_step_leave_its_tokens_as_they_are(
    make_engine: Any, run_group: Any
) -> None:
    def change(messages: list[dict[str, str]]) -> None:
        messages[-1] = {"role": "assistant", "content": "rewritten"}

    engine = make_engine(lambda episode, turn: f"{['yes', 'no'][episode]}{turn}<|end|>")
    _, record, texts = await run_group(engine, EpisodeRollout(Solve, {"turns": 2, "change": change}))
    assert record is not None
    assert sorted(texts) == ["no0<|end|>", "no1<|end|>", "yes0<|end|>", "yes1<|end|>"]
    attempts = {(row.episode, row.attempt) for row in record.rows}
    assert len(attempts) == 2, "the two sequences of a trajectory count as one attempt"


async def test_parallel_requests_get_the_rewards_of_their_own_steps(make_engine: Any, run_group: Any) -> None:
    @rllm.rollout(name="solver-judge")  # type: ignore[untyped-decorator]
    async def flow(task: rllm.Task, config: rllm.AgentConfig) -> rllm.Episode:
        from openai import AsyncOpenAI

        async def answer(question: str, name: str) -> rllm.Trajectory:
            messages: list[Any] = [{"role": "user", "content": question}]
            reply = await client.chat.completions.create(model=config.model, messages=messages)
            content = reply.choices[0].message.content
            chat = [*messages, {"role": "assistant", "content": content}]
            return rllm.Trajectory(name=name, steps=[rllm.Step(chat_completions=chat, action=content)])

        async with AsyncOpenAI(base_url=config.base_url, api_key="EMPTY") as client:
            solvers = await asyncio.gather(answer("same", "solver"), answer("same", "solver"))
            return rllm.Episode(trajectories=[await answer("judge", "judge"), *reversed(solvers)])

    @rllm.evaluator
    def score(task: dict[str, Any], episode: rllm.Episode) -> rllm.EvalOutput:
        assert task["answer"] == "yes"
        for trajectory in episode.trajectories:
            trajectory.reward = float(trajectory.steps[-1].action)
        return rllm.EvalOutput(reward=0.0, is_correct=True, signals=[rllm.Signal("seen", 1.0)])

    engine = make_engine(lambda episode, turn: f"{10 * episode + turn}<|end|>")
    report, record, texts = await run_group(engine, EpisodeRollout(agent_flow=flow, evaluator=score))
    assert record is not None
    assert [f"{row.reward:.0f}<|end|>" for row in record.rows] == texts
    assert [row.role for row in record.rows] == ["judge", "solver", "solver"] * 2
    judges = [float(row.advantages[row.mask][0]) for row in record.rows if row.role == "judge"]
    assert judges == [-5.0, 5.0], "judges are compared with judges"
    assert result(report.measured["episode/seen"]) == 1.0


async def test_a_flow_that_returns_nothing_gets_its_requests_as_steps(make_engine: Any, run_group: Any) -> None:
    @rllm.rollout
    def flow(task: rllm.Task, config: rllm.AgentConfig) -> None:
        from openai import OpenAI

        with OpenAI(base_url=config.base_url, api_key="EMPTY") as client:
            client.chat.completions.create(
                model=config.model, messages=[{"role": "user", "content": str(task.instruction)}]
            )

    @rllm.evaluator
    def score(task: rllm.Task, episode: rllm.Episode) -> bool:
        return bool(episode.trajectories[0].steps[-1].model_response == task.metadata["answer"])

    report, record, _ = await run_group(make_engine(by_episode), EpisodeRollout(agent_flow=flow, evaluator=score))
    assert record is not None
    assert [(row.role, row.reward) for row in record.rows] == [("solver", 1.0), ("solver", 0.0)]
    assert result(report.measured["episode/correct"]) == 0.5


# --------------------------------------------------------------------------------------------------- time and retries


@pytest.mark.parametrize("timeout", [30, 30.0, 0.9, "1e6"])
async def test_a_time_limit_may_be_a_whole_number_a_fraction_or_text(
    make_engine: Any, run_group: Any, timeout: Any
) -> None:
    report, _, texts = await run_group(make_engine(by_episode), EpisodeRollout(Solve, {"timeout": timeout}))
    assert report.outcome == "finished"
    assert texts == ["yes<|end|>", "no<|end|>"]


class Hang(rllm.Workflow):
    """Commits one answer, then waits for one that never comes."""

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
        messages = [{"role": "user", "content": "hi"}]
        output = await self.rollout_engine.get_model_response(messages)
        step = rllm.Step.from_model_output(output, messages)
        step.reward = float(output.content == "yes")
        self.commit("solver", trajectory=rllm.Trajectory(steps=[step]))
        await self.rollout_engine.get_model_response([*messages, {"role": "user", "content": "again"}])


@pytest.mark.parametrize("left_out", [frozenset(), frozenset({"timeout"})])
async def test_what_a_workflow_committed_before_its_time_limit_is_trained_on_unless_it_is_left_out(
    make_engine: Any, run_group: Any, left_out: frozenset[str]
) -> None:
    engine = make_engine(lambda episode, turn: None if turn else by_episode(episode, turn))
    rollout = EpisodeRollout(Hang, {"timeout": 0.2}, left_out=left_out)
    report, _, texts = await run_group(engine, rollout)
    assert texts == ([] if left_out else ["yes<|end|>", "no<|end|>"])
    if left_out:
        assert "mask_timeout" in report.reason
    else:
        assert result(report.measured["episode/terminated_timeout"]) == 1.0


@pytest.fixture
def failing_server() -> Iterator[tuple[str, list[str]]]:
    """URL of a server that answers every path with 503 once, and the paths of all requests."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in seen else 503)
            seen.append(self.path)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
        thread.join()


def fetch(url: str) -> None:
    try:
        urllib.request.urlopen(url).close()
    except urllib.error.HTTPError as error:
        error.close()
        raise


class Fetch(Solve):
    """Fetches something after its first answer, without a retry of its own."""

    def __init__(self, rollout_engine: Any, url: str, **kwargs: Any) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.url = url

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> rllm.Episode:
        episode = await super().run(task, uid)
        await self.run_in_executor(fetch, f"{self.url}/{uid}")
        return episode


async def test_an_episode_whose_get_fails_once_is_tried_again_and_only_its_last_attempt_is_trained_on(
    make_engine: Any, run_group: Any, failing_server: tuple[str, list[str]]
) -> None:
    engine = make_engine(lambda episode, turn: f"{['yes', 'no'][episode]}<|end|>" if turn else "first<|end|>")
    rollout = EpisodeRollout(Fetch, {"url": failing_server[0]})
    report, _, texts = await run_group(engine, rollout, {"rllm.workflow.retry_limit": 2})
    assert sorted(failing_server[1]) == ["/t0:0", "/t0:0", "/t0:1", "/t0:1"]
    assert texts == ["yes<|end|>", "no<|end|>"]
    assert report.tokens_sampled == sum(map(len, ["first", "first", "yes", "no"])) + 4
    assert result(report.measured["episode/retries"]) == 2


@pytest.mark.parametrize("retry_limit", [0, 1])
async def test_without_retries_there_is_one_attempt(
    make_engine: Any, run_group: Any, failing_server: tuple[str, list[str]], retry_limit: int
) -> None:
    rollout = EpisodeRollout(Fetch, {"url": failing_server[0]})
    report, _, _ = await run_group(make_engine(by_episode), rollout, {"rllm.workflow.retry_limit": retry_limit})
    assert report.outcome == "failed"
    assert "HTTPError" in report.reason
    assert sorted(failing_server[1]) == ["/t0:0", "/t0:1"]


class Nothing(rllm.Workflow):
    def __init__(self, rollout_engine: Any, returned: Any, **kwargs: Any) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.returned = returned

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any:
        await self.rollout_engine.get_model_response([{"role": "user", "content": "hi"}])
        return self.returned


@pytest.mark.parametrize("returned", [None, rllm.Episode(), rllm.Episode(trajectories=[rllm.Trajectory(name="a")])])
async def test_an_empty_group_fails_and_is_counted(make_engine: Any, run_group: Any, returned: Any) -> None:
    report, record, _ = await run_group(make_engine(by_episode), EpisodeRollout(Nothing, {"returned": returned}))
    assert record is None
    assert report.outcome == "failed"
    assert report.failed_episodes == 2
    assert "no answer" in report.reason
    assert result(report.measured["episode/empty"]) == 2


async def test_a_step_without_a_request_fails_its_episode(make_engine: Any, run_group: Any) -> None:
    invented = rllm.Step(chat_completions=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "?"}])
    returned = rllm.Episode(trajectories=[rllm.Trajectory(steps=[invented])])
    report, record, _ = await run_group(make_engine(by_episode), EpisodeRollout(Nothing, {"returned": returned}))
    assert record is None
    assert invented.id in report.reason
