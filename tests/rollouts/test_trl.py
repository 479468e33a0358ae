"""TRL compatibility: its reward functions and environments in its convention run unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.config.load import make_config
from outpace.engines.fleet import EngineFleet
from outpace.errors import BadInput
from outpace.models.chat_format import TemplateChatFormat
from outpace.rewards.grading import GraderPool, grade
from outpace.rewards.registry import check_rewards, isolated_sources
from outpace.rollouts.build import build_rollout
from outpace.rollouts.worker import RewardFunctions, RolloutWorker
from outpace.run.plan import UserObjects, make_plan
from outpace.types import GroupOrder, Task
from rollouts_support import RecordingJournal

COLUMNS = {"solution": ["$4$", "$4$"]}
THOUGHT = [{"role": "assistant", "content": "<think>two and two</think>\\boxed{4}"}]
GUESS = [{"role": "assistant", "content": "five, I think: \\boxed{5}"}]


class IncrementEnv:
    """As in TRL's documentation: state in attributes, a typed and documented method, a reward that reads the state."""

    def reset(self, **kwargs: Any) -> str | None:
        self.counter = kwargs.get("start", 0)
        return f" The counter is at {self.counter}."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


def reward_func(environments: list[Any], **kwargs: Any) -> list[float]:
    return [environment.counter for environment in environments]


def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


async def test_trl_reward_functions_run_in_grader_processes() -> None:
    from trl.rewards import accuracy_reward, think_format_reward

    functions = check_rewards([accuracy_reward, think_format_reward], columns=COLUMNS)
    pool = GraderPool(isolated_sources(functions))
    try:
        graded = await grade(functions, None, ["2+2?"] * 2, [THOUGHT, GUESS], COLUMNS, 60.0, pool)
    finally:
        await pool.close()
    assert [each.parts for each in graded] == [
        {"accuracy_reward": 1.0, "think_format_reward": 1.0},
        {"accuracy_reward": 0.0, "think_format_reward": 0.0},
    ]


async def test_the_trl_overlong_penalty_gets_the_completion_ids() -> None:
    from trl.rewards import get_soft_overlong_punishment

    functions = check_rewards([get_soft_overlong_punishment(max_completion_len=6, soft_punish_cache=4)], columns=[])
    ids = [[1, 2], [1, 2, 3, 4], [1] * 9]
    graded = await grade(functions, None, ["?"] * 3, [""] * 3, {}, 60.0, None, None, {"completion_ids": ids})
    assert [each.total for each in graded] == [0.0, -0.5, -1.0]


async def test_a_trl_environment_and_a_reward_that_reads_it_produce_a_group(
    tokenizer: Any, make_engine: Any, make_settings: Any
) -> None:
    def scripted_answer(episode: int, turn: int) -> str:
        call = f'<tool_call>{{"name": "increment", "arguments": {{"step": {episode + 1}}}}}</tool_call>'
        return call if turn == 0 else "done"

    built = await build_rollout(make_config({}), {"environment": IncrementEnv})
    journal: Any = RecordingJournal()
    functions = check_rewards([reward_func, length_reward], columns=["start"])
    assert list(isolated_sources(functions)) == ["length_reward"], "environment instances stay in this process"
    worker = RolloutWorker(
        make_settings(),
        EngineFleet({"engine-0": make_engine(scripted_answer)}),
        TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,)),
        [Task("t", [{"role": "user", "content": "Count."}], {"start": 10})],
        {},
        built.rollout,
        RewardFunctions(functions, [1.0, 0.0]),
        journal,
        closers=built.closers,
    )
    report = await worker.run(GroupOrder(0, task=0, epoch=0, min_version=0, size=3))
    await worker.close()
    assert (report.outcome, report.rewards) == ("finished", [11.0, 12.0, 13.0])
    text = tokenizer.decode(journal.records[0].rows[0].tokens.tolist())
    assert "Count. The counter is at 10." in text
    assert "<|tool|>11" in text


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rewards.isolation": "process"}, "rewards.isolation"),
        ({"environment.isolation": "process"}, "environment.isolation"),
        ({"environment.reuse": True}, "environment.reuse"),
    ],
)
def test_a_reward_that_reads_environments_requires_them_in_the_worker_process(
    settings: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.run.plan.resolve_model", Path)
    objects = UserObjects(tasks=[{"prompt": "Count."}], environment=IncrementEnv, rewards=(reward_func,))
    with pytest.raises(BadInput, match=f"^{key}: .*reward_func"):
        make_plan(make_config(settings), objects)
