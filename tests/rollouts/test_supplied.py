"""Attempts that come with their task: they are journaled and trained on like those that a worker sampled itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from outpace.checkpoint import journal
from outpace.config import Config
from outpace.config.sections import RewardsConfig
from outpace.engines.fleet import EngineFleet
from outpace.models.chat_format import TemplateChatFormat
from outpace.monitoring.metrics import Meter, record_group
from outpace.rollouts.episode import single_turn
from outpace.rollouts.worker import RewardFunctions, RolloutWorker
from outpace.runtime import wire
from outpace.tasks.produced import tasks_of
from outpace.tasks.stream import StreamedTasks
from outpace.types import Episode, GroupOrder, GroupRecord, GroupReport, Row, Task, Trajectory
from rollouts_support import RecordingJournal
from support import resolved

ANSWERS = ["yes<|end|>", "no<|end|>", "yes<|end|>", "maybe<|end|>"]
GROUP = len(ANSWERS)
TASK = Task("t", "well?", {"answer": "yes"})


def correct(prompts: list[str], completions: list[Any], answer: list[str]) -> list[float]:
    return [float(given == wanted) for given, wanted in zip(completions, answer, strict=True)]


def unexpected(prompts: list[str], completions: list[Any], **columns: Any) -> list[float]:
    raise AssertionError("these attempts have rewards already")


def order(min_version: int, version: int, group: int = 0) -> GroupOrder:
    return GroupOrder(group, task=0, epoch=0, min_version=min_version, size=GROUP, version=version)


@pytest.fixture
def make_worker(tokenizer: Any, make_engine: Any, make_settings: Callable[..., Config]) -> Callable[..., RolloutWorker]:
    def make(tasks: Any, writer: Any, reward: Any = unexpected, **rewards: Any) -> RolloutWorker:
        config = make_settings(max_tokens=8)
        if rewards:
            config = config.model_copy(update={"rewards": RewardsConfig(timeout_s=60.0, **rewards)})
        engine = make_engine(lambda episode, turn: ANSWERS[episode])
        chat_format = TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,))
        functions = RewardFunctions([("correct", reward)], [1.0])
        return RolloutWorker(
            config, EngineFleet({"e": engine}), chat_format, tasks, None, single_turn, functions, writer
        )

    return make


MakeWorker = Callable[..., RolloutWorker]


def as_rows(record: GroupRecord, padding: int = 3) -> list[dict[str, Any]]:
    """The attempts of a group with the names and padding that TRL's generation output has."""
    longest = max(len(row.tokens) for row in record.rows)
    rows = []
    for row, parts in zip(record.rows, record.parts, strict=True):
        start = int(row.mask.argmax())
        after = [0] * (longest - len(row.tokens) + padding)
        rows.append(
            {
                "prompt": TASK.prompt,
                "prompt_ids": [0] * padding + row.tokens[:start].tolist(),
                "prompt_mask": [0] * padding + [1] * start,
                "completion_ids": row.tokens[start:].tolist() + after,
                "completion_mask": [1] * (len(row.tokens) - start) + after,
                "sampling_per_token_logps": row.logprobs[start:].tolist() + after,
                "versions": row.versions[start:].tolist() + after,
                "rewards": parts,
            }
        )
    return rows


def as_episodes(record: GroupRecord) -> list[dict[str, Any]]:
    episodes = [
        Episode(
            [Trajectory(row.tokens, row.mask, row.logprobs, row.versions, sources=row.sources)],
            rewards=record.parts[row.episode],
            reward=record.rewards[row.episode],
        )
        for row in record.rows
    ]
    return [{"prompt": TASK.prompt, "episodes": episodes}]


@pytest.fixture
async def groups(make_worker: MakeWorker, tmp_path: Path, request: pytest.FixtureRequest) -> list[GroupRecord]:
    """A group that a worker sampled in versions 3 to 6, and the same attempts as given by a producer in version 9."""
    writer = journal.JournalWriter(tmp_path / "journal", "w")
    native = await make_worker([TASK], writer, correct).run(order(2, version=3))
    assert native.place is not None
    record = journal.read_record(tmp_path / "journal", native.place)
    stream = StreamedTasks(tmp_path / "tasks.jsonl")
    (task,) = tasks_of(request.param(record), 0, version=9)
    stream.append(task)
    supplied = await make_worker(stream, writer).run(order(8, version=9, group=1))
    writer.close()
    assert supplied.place is not None
    assert (supplied.oldest, supplied.newest) == (native.oldest, native.newest) == (3, 6)
    return [record, journal.read_record(tmp_path / "journal", supplied.place)]


def bits(row: Row) -> list[Any]:
    arrays = (row.tokens, row.mask, row.logprobs, row.versions, row.advantages, row.turn_rewards)
    return [(array.dtype, array.tobytes()) for array in arrays] + [row.episode, row.role, row.reward]


@pytest.mark.parametrize("groups", [as_rows, as_episodes], indirect=True)
async def test_finished_rollouts_with_old_versions_are_journaled_as_the_rows_that_were_sampled(
    groups: list[GroupRecord],
) -> None:
    native, supplied = groups
    assert [*map(bits, supplied.rows)] == [*map(bits, native.rows)]
    assert len({version for row in native.rows for version in row.versions[row.mask].tolist()}) > 1
    assert (supplied.rewards, supplied.parts, supplied.admitted) == (native.rewards, native.parts, 8)


@pytest.mark.parametrize("groups", [as_episodes], indirect=True)
async def test_given_episodes_are_journaled_byte_for_byte(groups: list[GroupRecord]) -> None:
    native, supplied = groups
    assert wire.encode(supplied.rows) == wire.encode(native.rows)


@pytest.mark.parametrize("groups", [as_rows], indirect=True)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"policy_loss.name": "ppo", "policy_loss.old_policy": "interpolated"},
        {"policy_loss.name": "ppo", "policy_loss.old_policy": "recomputed", "correction.weight": "sequence"},
    ],
    ids=str,
)
async def test_finished_rollouts_get_the_corrections_and_gradients_of_sampled_ones(
    groups: list[GroupRecord], settings: dict[str, Any], tokenizer: Any
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from outpace.learner.core import LearnerCore

    def tiny() -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            head_dim=16,
            initializer_range=0.3,
        )
        return LlamaForCausalLM(config)

    results = []
    for record in groups:
        core = LearnerCore(tiny(), resolved(settings))
        core.version = 9
        report = core.accumulate(record.rows)
        gradients = {
            name: parameter.grad.numpy().tobytes()
            for name, parameter in core.parameters.items()
            if parameter.grad is not None
        }
        results.append((report.loss_sum, report.lag_counts, gradients, core.step().metrics))
    native, supplied = results
    assert supplied == native
    _, lags, gradients, metrics = supplied
    assert sorted(lags) == [3, 4, 5, 6]
    assert any(np.frombuffer(each, np.float32).any() for each in gradients.values())
    assert metrics["offpolicy/kl"] > 0.5, "the corrections have something to correct"


# ---------------------------------------------------------------------------------------------------------- the worker


def attempt(tokens: list[int], sampled: int, version: int = 3, **changes: Any) -> Episode:
    mask = np.arange(len(tokens)) >= len(tokens) - sampled
    kept = Trajectory(
        tokens=np.array(tokens, np.int32),
        mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
    )
    return Episode([kept], **changes)


def texts(tokenizer: Any, *answers: str, **changes: Any) -> list[Episode]:
    question = tokenizer.encode("why?", add_special_tokens=False)
    ids = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    return [attempt(question + answer, len(answer), **changes) for answer in ids]


async def run_task(
    make_worker: MakeWorker, task: Task, reward: Any = unexpected, **rewards: Any
) -> tuple[GroupReport, GroupRecord | None]:
    memory = RecordingJournal()
    report = await make_worker([task], memory, reward, **rewards).run(order(8, version=9))
    return report, memory.records[0] if memory.records else None


async def test_nothing_is_sampled_and_the_report_says_so(make_worker: MakeWorker, tokenizer: Any) -> None:
    good, bad = texts(tokenizer, "yes", "no")
    episodes = [msgspec.structs.replace(good, reward=1.0), bad]
    report, record = await run_task(make_worker, Task("t", "why?", {}, episodes))
    assert (report.outcome, report.supplied, report.tokens_sampled, report.episodes) == ("finished", True, 0, 2)
    assert (report.oldest, report.newest, report.reward_parts) == (3, 3, {"rollout": 0.5})
    assert record is not None
    assert record.rewards == [1.0, 0.0]
    meter = Meter()
    record_group(meter, report)
    metrics = meter.flush()
    assert metrics["throughput/sampled_tokens"] == 0
    assert metrics.get("completions/mean_length", 0) == 0


async def test_parts_of_a_reward_without_a_total_are_added_up(make_worker: MakeWorker, tokenizer: Any) -> None:
    first, second = texts(tokenizer, "yes", "no")
    episodes = [
        msgspec.structs.replace(first, rewards={"a": 1.0, "b": 0.5}),
        msgspec.structs.replace(second, rewards={"a": 0.0}),
    ]
    _, record = await run_task(make_worker, Task("t", "why?", {}, episodes))
    assert record is not None
    assert record.rewards == [1.5, 0.0]


@pytest.mark.parametrize(
    ("prompt", "prompts", "completions"),
    [
        ("", "why?", ["yes", "no"]),
        ("because?", "because?", ["yes", "no"]),
        (
            [{"role": "user", "content": "hm"}],
            [{"role": "user", "content": "hm"}],
            [[{"role": "assistant", "content": text}] for text in ("yes", "no")],
        ),
    ],
    ids=["unknown", "text", "messages"],
)
async def test_attempts_without_rewards_are_graded_by_the_run_as_text(
    make_worker: MakeWorker, tokenizer: Any, prompt: Any, prompts: Any, completions: Any
) -> None:
    seen: list[Any] = []

    def grade(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        seen.append((prompts, completions, completion_ids))
        return [1.0, 0.0]

    task = Task("t", prompt, {}, texts(tokenizer, "yes<|end|>", "no<|end|>"))
    report, record = await run_task(make_worker, task, grade, overlong_buffer=8, overlong_penalty=0.8)
    assert report.outcome == "finished"
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in ("yes<|end|>", "no<|end|>")]
    assert seen == [([prompts] * 2, completions, ids)]
    assert record is not None
    assert record.rewards == pytest.approx([1.0 - 0.4, -0.3]), "rewards of the run are shaped by the run"
    assert record.parts[0].keys() == {"correct", "overlong"}


async def test_the_completion_of_several_turns_is_the_last_answer(make_worker: MakeWorker, tokenizer: Any) -> None:
    seen: list[Any] = []

    def grade(completions: list[Any], **columns: Any) -> list[float]:
        seen.extend(completions)
        return [1.0, 0.0]

    parts = [tokenizer.encode(text, add_special_tokens=False) for text in ("why?", "look", "found", "yes")]
    kept = attempt([token for part in parts for token in part], 0).trajectories[0]
    mask = np.concatenate(
        [np.full(len(part), sampled) for part, sampled in zip(parts, (False, True, False, True), strict=True)]
    )
    kept = msgspec.structs.replace(kept, mask=mask, versions=np.where(mask, 3, -1).astype(np.int32))
    await run_task(make_worker, Task("t", "why?", {}, [Episode([kept]), *texts(tokenizer, "no")]), grade)
    assert seen == ["yes", "no"]


async def test_versions_that_a_resumed_run_has_not_reached_count_as_its_own(
    make_worker: MakeWorker, tokenizer: Any
) -> None:
    task = Task("t", "why?", {}, [*texts(tokenizer, "yes", version=12, reward=1.0), *texts(tokenizer, "no", version=4)])
    report, record = await run_task(make_worker, task)
    assert (report.oldest, report.newest) == (4, 9)
    assert record is not None
    assert [sorted(set(row.versions.tolist())) for row in record.rows] == [[-1, 9], [-1, 4]]


async def test_too_few_attempts_fail_the_group_with_the_setting_to_change(
    make_worker: MakeWorker, tokenizer: Any
) -> None:
    report, _ = await run_task(make_worker, Task("t", "why?", {}, texts(tokenizer, "yes", reward=1.0)))
    assert report.outcome == "failed"
    assert "filter.min_group" in report.reason
