"""Two solvers and a judge in one episode, answered in any order: each token gets the advantage of its own role."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outpace.config import Config
from outpace.engines.fleet import EngineFleet
from outpace.models.chat_format import TemplateChatFormat
from outpace.rollouts.worker import RewardFunctions, RolloutWorker
from outpace.types import Generation, GroupOrder, GroupRecord, Ints, Sampling, Task, Version
from rollouts_support import RecordingJournal

EPISODES = 4


class RandomDelayEngine:
    """Answers each request with its own id, after a random number of event-loop iterations."""

    def __init__(self, tokenizer: Any, chance: random.Random) -> None:
        self._tokenizer, self._chance = tokenizer, chance

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        for _ in range(self._chance.randint(0, 20)):
            await asyncio.sleep(0)
        tokens = np.array(self._tokenizer.encode(f"[{request_id}]", add_special_tokens=False), np.int32)
        logprobs = np.full(len(tokens), -0.5, np.float32)
        return Generation(tokens, logprobs, np.full(len(tokens), min_version, np.int32), "stop")

    async def abort(self, request_ids: list[str]) -> None:
        raise AssertionError("no request is aborted here")


def reward_of(request_id: str) -> float:
    """Reward of an answer: fixed by its id, different for each."""
    return random.Random(request_id).random()


@pytest.fixture
def run_schedule(tokenizer: Any, make_settings: Callable[..., Config]) -> Callable[[int], Any]:
    async def run(schedule: int) -> tuple[GroupRecord, dict[str, tuple[str, int]]]:
        """The journaled group of one random schedule, and the role and episode of each request."""
        chance = random.Random(schedule)
        owners: dict[str, tuple[str, int]] = {}

        async def solve(task: Task, client: Any, wait: int) -> Any:
            for _ in range(wait):
                await asyncio.sleep(0)
            history = [{"role": "user", "content": task.prompt}]
            answer = await client.chat(history, role="solver")
            for _ in range(wait % 3):  # some solvers go on for a few turns
                history = [*history, answer.message, {"role": "user", "content": "more"}]
                answer = await client.chat(history, role="solver")
            client.reward(reward_of(answer.request_id), request=answer)
            return answer

        async def rollout(task: Task, client: Any) -> None:
            solvers = await asyncio.gather(*(solve(task, client, chance.randint(0, 8)) for _ in range(2)))
            question = " or ".join(sorted(answer.text for answer in solvers))
            verdict = await client.chat([{"role": "user", "content": question}], role="judge")
            client.reward(reward_of(verdict.request_id), role="judge")
            for trajectory in client.trajectories():
                text = tokenizer.decode(trajectory.tokens[trajectory.mask].tolist())
                for request_id in client.requests:
                    if f"[{request_id}]" in text:
                        owners[request_id] = trajectory.role, int(request_id.split(".")[1])

        settings = make_settings()
        chat_format = TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,))
        engine: Any = RandomDelayEngine(tokenizer, chance)
        journal: Any = RecordingJournal()
        worker = RolloutWorker(
            settings,
            EngineFleet({"e": engine}),
            chat_format,
            [Task("t", "why?")],
            {},
            rollout,
            RewardFunctions([], []),
            journal,
        )
        report = await worker.run(GroupOrder(schedule, task=0, epoch=0, min_version=3, size=EPISODES))
        assert (report.outcome, report.failed_episodes) == ("finished", 0)
        await worker.close()
        return journal.records[0], owners

    return run


async def test_every_token_gets_the_advantage_of_its_own_role_for_any_schedule(
    tokenizer: Any, run_schedule: Callable[[int], Any]
) -> None:
    for schedule in range(100):
        record, owners = await run_schedule(schedule)
        expected = advantages_by_hand(record, owners, tokenizer)
        seen = 0
        for row, advantage in zip(record.rows, expected, strict=True):
            np.testing.assert_allclose(row.advantages[row.mask], advantage, atol=1e-6)
            seen += int(row.mask.sum())
        sampled = sum(len(tokenizer.encode(f"[{request_id}]", add_special_tokens=False)) for request_id in owners)
        assert seen == sampled, "each token occurs once"


def advantages_by_hand(record: GroupRecord, owners: dict[str, tuple[str, int]], tokenizer: Any) -> list[float]:
    """Reward minus the mean of the role, from the request ids in the answers themselves; the reward of a trajectory is
    that of its last answer."""
    rewards, roles = [], []
    for row in record.rows:
        requests = tokenizer.decode(row.tokens[row.mask].tolist()).strip("[]").split("][")
        assert len({owners[request_id] for request_id in requests}) == 1, (
            "a trajectory belongs to one role and one episode"
        )
        rewards.append(reward_of(requests[-1]))
        roles.append(owners[requests[0]][0])
    assert sorted(roles) == ["judge"] * EPISODES + ["solver"] * (2 * EPISODES)
    means = {
        role: np.mean([reward for reward, of_role in zip(rewards, roles, strict=True) if of_role == role])
        for role in roles
    }
    return [float(reward - means[role]) for reward, role in zip(rewards, roles, strict=True)]


async def test_the_report_shows_the_answers_and_rewards_of_every_role(
    tokenizer: Any, make_engine: Any, make_settings: Callable[..., Config]
) -> None:
    async def debate(task: Task, client: Any) -> None:
        first = await client.chat([{"role": "user", "content": "why?"}], role="solver")
        await client.chat([{"role": "user", "content": first.text}], role="judge")
        client.reward(0.25, role="solver")
        client.reward(0.75, role="judge")

    chat_format, journal = TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,)), RecordingJournal()
    engine: Any = make_engine(["because<|end|>", "right<|end|>"])
    settings = make_settings()
    tasks: Any = [Task("t", "why?")]
    fleet = EngineFleet({"engine-0": engine})
    worker = RolloutWorker(settings, fleet, chat_format, tasks, {}, debate, RewardFunctions([], []), journal)  # type: ignore[arg-type]
    report = await worker.run(GroupOrder(0, task=0, epoch=0, min_version=3, size=1, show=True))
    await worker.close()
    assert report.reward_parts == {"role_judge": 0.75, "role_solver": 0.25, "rollout": 0.0}
    assert (report.views[0].completion, report.views[0].reward) == ("[solver] because\n[judge] right", 0.5)
