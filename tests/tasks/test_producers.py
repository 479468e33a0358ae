"""Data producers: the classes for users, and what they return as tasks."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outpace
from outpace.errors import BadInput
from outpace.monitoring.callbacks import CallbackRunner
from outpace.tasks.produced import tasks_of
from outpace.tasks.producers import RolloutFunctionProducer
from outpace.tasks.stream import StreamedTasks
from outpace.types import OBSERVED, Episode, GroupReport, Task, Trajectory
from support import examples, naming

# ------------------------------------------------------------------------------------------------------ in background


class Counting(outpace.BaseDataProducer):
    """Returns (round, step, extra) and records the threads it ran on. Waits for `may_run` if that is given."""

    def __init__(self, may_run: threading.Semaphore | None = None, **config: Any) -> None:
        super().__init__(outpace.ProducerConfig(**config))
        self.may_run = may_run
        self.threads: list[str] = []
        self.begun = threading.Semaphore(0)
        self.hooks: list[tuple[Any, ...]] = []

    def produce(self, model: Any, global_step: int, **kwargs: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        self.begun.release()
        if self.may_run is not None:
            assert self.may_run.acquire(timeout=60)
        return kwargs.get("round"), global_step, kwargs.get("extra")

    def on_rollout_begin(self, global_step: int) -> None:
        self.hooks.append((global_step,))

    def on_rollout_end(self, dataset: Any, global_step: int) -> None:
        self.hooks.append((dataset, global_step))


@pytest.mark.parametrize(
    ("config", "steps"),
    [  # the step of the call that submitted each round, if call k is made at step k
        ({}, [0, 0, 1, 2, 3, 4]),
        ({"prefetch_depth": 4}, [0, 0, 0, 0, 0, 1]),
        ({"sync_warmup_rollouts": 2}, [0, 1, 2, 2, 3, 4]),
        ({"sync_warmup_rollouts": 2, "prefetch_depth": 4}, [0, 1, 2, 2, 2, 2]),
    ],
)
def test_rounds_come_in_order_and_are_submitted_as_far_ahead_as_the_settings_say(
    config: dict[str, Any], steps: list[int]
) -> None:
    inner = Counting(**config)
    producer = outpace.AsyncDataProducer(inner, {"extra": "background"})
    given = [producer.produce(None, step, round=step) for step in range(6)]
    producer.shutdown()
    synchronous = config.get("sync_warmup_rollouts", 0) + 1
    assert given == [(round, step, None if round < synchronous else "background") for round, step in enumerate(steps)]
    assert len(set(inner.threads[:synchronous])) == 1
    assert len(set(inner.threads)) == 2


def test_produce_waits_for_a_slow_round() -> None:
    may_run = threading.Semaphore(1)
    producer = outpace.AsyncDataProducer(Counting(may_run))
    producer.produce(None, 0)
    returned: list[Any] = []
    waiting = threading.Thread(target=lambda: returned.append(producer.produce(None, 1)))
    waiting.start()
    assert not returned
    may_run.release(2)
    waiting.join(60)
    assert returned == [(None, 0, None)]
    producer.shutdown()


def test_nothing_is_produced_beyond_the_last_round() -> None:
    inner = Counting(max_rollouts=3, prefetch_depth=4)
    producer = outpace.AsyncDataProducer(inner)
    assert [producer.produce(None, step, round=step)[0] for step in range(3)] == [0, 1, 2]
    producer.shutdown()
    assert len(inner.threads) == 3


def test_a_resumed_producer_continues_with_the_round_it_is_asked_for_without_another_warmup() -> None:
    inner = Counting(sync_warmup_rollouts=2, max_rollouts=7)
    producer = outpace.AsyncDataProducer(inner)
    assert [producer.produce(None, step, round=step)[:2] for step in (5, 6)] == [(5, 5), (6, 5)]
    producer.shutdown()


def test_shutdown_cancels_what_has_not_begun_and_waits_for_what_has() -> None:
    may_run = threading.Semaphore(1)
    inner = Counting(may_run, prefetch_depth=3)
    producer = outpace.AsyncDataProducer(inner)
    producer.produce(None, 0)
    for _ in range(2):
        inner.begun.acquire()  # the first round has ended, the second one is running
    ending = threading.Thread(target=producer.shutdown)
    ending.start()
    may_run.release(9)
    ending.join(60)
    assert not ending.is_alive()
    assert len(inner.threads) == 2
    assert not [thread for thread in threading.enumerate() if thread.name in inner.threads[1:]]
    with pytest.raises(RuntimeError):
        producer.produce(None, 1)


def test_shutdown_does_not_wait_longer_than_it_may_for_a_round_that_hangs() -> None:
    may_run = threading.Semaphore(1)
    producer = outpace.AsyncDataProducer(Counting(may_run))
    producer.produce(None, 0)
    producer.shutdown(timeout_s=0)
    may_run.release(9)


def test_an_error_is_raised_by_the_call_whose_round_failed() -> None:
    class Failing(outpace.BaseDataProducer):
        def produce(self, model: Any, global_step: int, **kwargs: Any) -> Any:
            if kwargs["round"] == 2:
                raise KeyError("round two")
            return kwargs["round"]

    producer = outpace.AsyncDataProducer(Failing(outpace.ProducerConfig(prefetch_depth=4)))
    assert [producer.produce(None, 0, round=number) for number in range(2)] == [0, 1]
    with pytest.raises(KeyError, match="round two"):
        producer.produce(None, 0, round=2)
    producer.shutdown()


def test_coroutines_run_to_their_end_and_hooks_reach_the_inner_producer() -> None:
    class Async(Counting):
        async def produce(self, model: Any, global_step: int, **kwargs: Any) -> Any:  # type: ignore[override]
            await asyncio.sleep(0)
            return kwargs["round"]

    producer = outpace.AsyncDataProducer(inner := Async())
    producer.on_rollout_begin(3)
    assert [producer.produce(None, 0, round=number) for number in range(3)] == [0, 1, 2]
    producer.on_rollout_end("data", 3)
    assert inner.hooks == [(3,), ("data", 3)]
    producer.shutdown()


async def test_a_producer_that_is_a_callback_gets_all_events_but_the_one_that_has_the_name_of_its_hook() -> None:
    class Both(outpace.BaseDataProducer, outpace.DataProducerCallback):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def produce(self, model: Any, global_step: int, **kwargs: Any) -> Any: ...

        def on_rollout_end(self, dataset: Any, global_step: int) -> None:
            self.seen.append(dataset)

        def on_policy_updated(self, version: int) -> None:
            self.seen.append(version)

    producer = Both()
    runner = CallbackRunner([producer])
    runner.post("on_rollout_end", GroupReport(0, "", "finished"))
    runner.post("on_policy_updated", 3)
    runner.post("on_epoch_end", 0)
    await runner.close()
    assert producer.seen == [3]


# ------------------------------------------------------------------------------------------------------------ prompts

PROMPTS = [{"prompt": f"p{number}"} for number in range(7)]


def grpo(rows: Any = PROMPTS, **changes: Any) -> outpace.GRPODataProducer:
    given = {"num_generations": 4, "generation_batch_size": 12, "train_batch_size": 6, "steps_per_generation": 2}
    given |= {"shuffle_dataset": True, "seed": 5} | changes
    return outpace.GRPODataProducer(outpace.ProducerConfig(), rows, **given)


def prompts_of(producer: outpace.GRPODataProducer, *rounds: int) -> list[list[str]]:
    return [[row["prompt"] for row in producer.produce(None, 0, round=number)] for number in rounds]


def test_generation_batches_cover_the_prompts_once_per_epoch_in_an_order_that_the_seed_decides() -> None:
    rounds = prompts_of(grpo(), *range(6))
    assert [len(set(batch)) for batch in rounds] == [3] * 6
    assert all(len({*rounds[first], *rounds[first + 1]}) == 6 for first in (0, 2, 4)), "two rounds make an epoch"
    assert len({tuple(rounds[first] + rounds[first + 1]) for first in (0, 2, 4)}) == 3, "each epoch has its own order"
    assert prompts_of(grpo(), *range(6)) == rounds != prompts_of(grpo(seed=6), *range(6))
    assert prompts_of(grpo(), 4) == [rounds[4]], "a round does not depend on the rounds before it"
    assert [[row["prompt"] for row in batch] for batch in _unnumbered(grpo(), 6)] == rounds
    assert prompts_of(grpo(shuffle_dataset=False), 0, 1, 2) == [
        ["p0", "p1", "p2"],
        ["p3", "p4", "p5"],
        ["p0", "p1", "p2"],
    ]


def _unnumbered(producer: outpace.GRPODataProducer, count: int) -> list[list[Any]]:
    return [producer.produce(None, 0) for _ in range(count)]


def test_generation_batches_that_cannot_be_filled_are_rejected() -> None:
    with pytest.raises(BadInput, match=naming("generation_batch_size", "num_generations")):
        grpo(generation_batch_size=10)
    with pytest.raises(BadInput, match=naming("prompt_dataset", "7 rows")):
        grpo(generation_batch_size=32)


def test_a_trainer_can_be_set() -> None:
    producer = grpo()
    producer.set_trainer("trainer")
    assert producer.trainer == "trainer"


# ------------------------------------------------------------------------------------------------------------ datasets


def test_a_rollout_dataset_slices_samples_and_passes_shared_values_through() -> None:
    torch = pytest.importorskip("torch")
    data = outpace.RolloutDataset(
        {
            "ids": torch.arange(6).reshape(3, 2),
            "scores": np.array([0.5, 1.5, 2.5]),
            "names": ["a", "b", "c"],
            "num_items_in_batch": torch.tensor([7]),
            "zero": torch.tensor(4),
            "rate": 0.1,
            "label": "abc",
        }
    )
    assert len(data) == 3
    row = data[1]
    assert (row["ids"].tolist(), row["scores"], row["names"]) == ([2, 3], 1.5, "b")
    assert (row["num_items_in_batch"].tolist(), row["zero"].item(), row["rate"], row["label"]) == ([7], 4, 0.1, "abc")
    assert data.shared_keys == {"num_items_in_batch", "zero", "rate", "label"}
    batch = outpace.make_rollout_collator(data.shared_keys)([data[0], data[2]])
    assert batch["ids"].tolist() == [[0, 1], [4, 5]]
    assert batch["scores"].tolist() == [0.5, 2.5]
    assert (batch["names"], batch["rate"], batch["zero"].item()) == (["a", "c"], 0.1, 4)


def test_a_rollout_dataset_with_unequal_sizes_is_rejected() -> None:
    with pytest.raises(ValueError, match=naming("names", "scores")):
        outpace.RolloutDataset({"names": ["a"], "scores": [1.0, 2.0]})
    with pytest.raises(ValueError, match="sample"):
        outpace.RolloutDataset({"rate": 0.1})


# --------------------------------------------------------------------------------------------------- rows with prompts


class Indexed:
    """Rows that are no list."""

    def __len__(self) -> int:
        return len(PROMPTS)

    def __getitem__(self, index: int) -> Any:
        return PROMPTS[index]


@pytest.mark.parametrize(
    "dataset",
    [
        PROMPTS,
        Indexed(),
        {"prompt": [row["prompt"] for row in PROMPTS]},
        outpace.RolloutDataset({"prompt": [row["prompt"] for row in PROMPTS]}),
        [Task(f"round-4/{number}", row["prompt"]) for number, row in enumerate(PROMPTS)],
    ],
    ids=["list", "indexed", "columns", "rollout dataset", "tasks"],
)
def test_every_kind_of_dataset_gives_the_same_tasks(dataset: Any) -> None:
    expected = [Task(f"round-4/{number}", row["prompt"]) for number, row in enumerate(PROMPTS)]
    assert tasks_of(dataset, 4, 0) == expected


def test_a_hugging_face_dataset_gives_tasks_too() -> None:
    datasets = pytest.importorskip("datasets")
    assert tasks_of(datasets.Dataset.from_list(PROMPTS), 4, 0) == tasks_of(PROMPTS, 4, 0)


def test_ids_and_other_columns_are_kept_and_ids_are_unique() -> None:
    rows = [{"prompt": "a", "id": "x", "answer": np.float32(0.5)}, {"prompt": [{"role": "user"}], "id": "x"}]
    first, second = tasks_of(rows, 0, 0)
    assert (first.id, first.columns) == ("x", {"answer": 0.5})
    assert (second.id, second.prompt) == ("x#2", [{"role": "user"}])


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (None, ("round 3",)),
        ([], ("round 3",)),
        ((row for row in PROMPTS), ("generator", "length")),
        (7, ("int",)),
        ({"prompt": ["a"], "answer": [1, 2]}, ("prompt", "answer")),
        ([{"prompt": "a"}, {"question": "b"}], ("row 1", "prompt", "question")),
        ([{"prompt": "a"}, "text"], ("row 1", "str")),
    ],
)
def test_what_is_no_dataset_of_prompts_is_rejected_in_one_line(dataset: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=naming("tasks.producer", *words)) as caught:
        tasks_of(dataset, 3, 0)
    assert len(str(caught.value).splitlines()) == 1


# ---------------------------------------------------------------------------------------------------- finished rollouts


def attempt(**changes: Any) -> dict[str, Any]:
    """A finished attempt at the prompt 1 2, with padding on both sides and a tool result."""
    row = {
        "prompt_ids": [0, 1, 2],
        "prompt_mask": [0, 1, 1],
        "completion_ids": [5, 6, 7, 8, 0],
        "completion_mask": [1, 1, 1, 1, 0],
        "tool_mask": [1, 0, 1, 1, 1],
        "logprobs": [-0.5, float("nan"), -0.25, -1.5, float("nan")],
        "versions": [3, 0, 4, 4, 9],
        "reward": 1.0,
    } | changes
    return {column: value for column, value in row.items() if value is not None}


def arrays(trajectory: Trajectory) -> tuple[list[Any], ...]:
    assert [trajectory.tokens.dtype, trajectory.mask.dtype] == [np.int32, np.bool_]
    assert [trajectory.logprobs.dtype, trajectory.versions.dtype] == [np.float32, np.int32]
    return tuple(
        column.tolist() for column in (trajectory.tokens, trajectory.mask, trajectory.logprobs, trajectory.versions)
    )


def test_padding_is_removed_and_tokens_that_were_not_sampled_are_observed() -> None:
    (task,) = tasks_of([attempt(completion="five", stop="length", answer=4)], 0, 4)
    (episode,) = task.episodes
    assert arrays(episode.trajectories[0]) == (
        [1, 2, 5, 6, 7, 8],
        [False, False, True, False, True, True],
        [0.0, 0.0, -0.5, 0.0, -0.25, -1.5],
        [OBSERVED, OBSERVED, 3, OBSERVED, 4, 4],
    )
    assert (episode.reward, episode.rewards, episode.completion, episode.stop) == (
        1.0,
        {"rollout": 1.0},
        "five",
        "length",
    )
    assert (task.id, task.prompt, task.columns) == ("round-0/0", "", {"answer": 4})


def test_padded_tensors_of_a_rollout_dataset_give_the_same_episodes_as_lists() -> None:
    torch = pytest.importorskip("torch")
    rows = [attempt(), attempt(completion_mask=[1, 1, 1, 0, 0], reward=0.0)]
    data = {column: torch.tensor([row[column] for row in rows]) for column in rows[0]}
    data["sampling_per_token_logps"] = data.pop("logprobs").bfloat16()
    data |= {"num_items_in_batch": torch.tensor(8), "advantages": torch.zeros(2)}
    from_tensors = tasks_of(outpace.RolloutDataset(data), 0, 4)
    from_lists = tasks_of(rows, 0, 4)
    assert [len(task.episodes) for task in from_tensors] == [2]
    assert from_tensors[0].columns == {}
    for one, other in zip(from_tensors[0].episodes, from_lists[0].episodes, strict=True):
        assert arrays(one.trajectories[0]) == arrays(other.trajectories[0])
        assert one.rewards == other.rewards


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        ([{}, {}, {"prompt_ids": [0, 9, 9]}, {"prompt_ids": [0, 9, 9]}, {}], [2, 2, 1]),
        ([{"group": 1}, {"group": 2}, {"group": 1}], [2, 1]),
        ([{"id": "a"}, {"id": "b"}, {"id": "b"}, {"id": "a"}], [2, 2]),
        ([{"group": np.int64(1), "id": "a"}, {"group": 2, "id": "a"}], [1, 1]),
    ],
    ids=["adjacent prompts", "group", "id", "group before id"],
)
def test_rows_of_the_same_prompt_become_attempts_of_one_task(rows: list[dict[str, Any]], groups: list[int]) -> None:
    tasks = tasks_of([attempt(**changes) for changes in rows], 2, 4)
    assert [len(task.episodes) for task in tasks] == groups
    assert len({task.id for task in tasks}) == len(tasks)


def test_finished_rollouts_and_prompts_may_be_mixed() -> None:
    tasks = tasks_of([{"prompt": "a"}, attempt(prompt="b"), attempt(prompt="b"), {"prompt": "c"}], 0, 4)
    assert [(task.prompt, len(task.episodes)) for task in tasks] == [("a", 0), ("b", 2), ("c", 0)]


@pytest.mark.parametrize(
    ("changes", "rewards", "reward"),
    [
        ({"reward": None}, {}, 0.0),
        ({"reward": None, "rewards": 0.5}, {"rollout": 0.5}, 0.5),
        ({"reward": None, "rewards": {"a": 1, "b": 0.5, "c": None}}, {"a": 1.0, "b": 0.5}, 1.5),
        ({"reward": 3, "rewards": {"a": 1.0}}, {"a": 1.0}, 3.0),
        ({"reward": np.float32(0.0)}, {"rollout": 0.0}, 0.0),
    ],
)
def test_rewards_are_a_total_parts_or_left_to_the_run(
    changes: dict[str, Any], rewards: dict[str, float], reward: float
) -> None:
    (episode,) = tasks_of([attempt(**changes)], 0, 4)[0].episodes
    assert (episode.rewards, episode.reward) == (rewards, reward)


def test_absent_versions_are_those_of_the_policy_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tasks = [tasks_of([attempt(versions=versions)], 0, 6)[0] for versions in (None, None, 6, np.int64(6))]
    said = [record for record in caplog.records if "versions" in record.message]
    assert len(said) <= 1  # once per process: another test may have been first
    for task in tasks:
        assert task.episodes[0].trajectories[0].versions.tolist() == [OBSERVED, OBSERVED, 6, OBSERVED, 6, 6]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": None}, ("logprobs",)),
        ({"logprobs": [-0.5, 0.0, float("nan"), -1.0, 0.0]}, ("logprob",)),
        ({"logprobs": [-0.5, 0.0, float("-inf"), -1.0, 0.0]}, ("logprob",)),
        ({"logprobs": [-0.5]}, ("logprobs", "1", "5")),
        ({"logprobs": [-0.5, 0.0, 3.0, -1.0, 0.0]}, ("logprobs", "3")),
        ({"group": 0, "answer": 8}, ("row 0", "answer")),
        ({"logprobs": -0.5}, ("logprobs",)),
        ({"logprobs": ["a"] * 5}, ("logprobs",)),
        ({"completion_mask": [1, 1]}, ("completion_mask", "2")),
        ({"completion_mask": [0] * 5}, ("completion_ids", "mask")),
        ({"completion_ids": [], "completion_mask": None}, ("completion_ids",)),
        ({"completion_ids": [5.5, 6.0, 7.0, 8.0, 0.0]}, ("completion_ids", "float64")),
        ({"completion_ids": [[5, 6]]}, ("completion_ids", "2-dimensional")),
        ({"completion_ids": [[5, 6], [7]]}, ("completion_ids",)),
        ({"completion_ids": [5, -100, 7, 8, 0]}, ("completion_ids", "-100")),
        ({"completion_ids": [5, 2**40, 7, 8, 0]}, ("completion_ids", str(2**40))),
        ({"tool_mask": [0] * 5}, ("tool_mask",)),
        ({"prompt_ids": None, "prompt_mask": None}, ("prompt_ids",)),
        ({"prompt_mask": [0, 0, 0]}, ("prompt_ids", "mask")),
        ({"prompt_mask": [1]}, ("prompt_mask",)),
        ({"versions": [3, 0]}, ("versions", "2")),
        ({"versions": [3.5, 0, 4, 4, 4]}, ("versions", "float64")),
        ({"versions": -1}, ("version",)),
        ({"versions": 9}, ("versions", "9", "4")),
        ({"reward": float("nan")}, ("reward", "nan")),
        ({"reward": "high"}, ("reward", "high")),
        ({"rewards": {"a": float("inf")}}, ("rewards", "inf")),
        ({"completion": 7}, ("completion", "int")),
        ({"group": {"a": 1}}, ("group",)),
        ({"group": 0, "reward": None}, ("row 0", "reward")),
        ({"prompt": 3}, ("prompt", "int")),
    ],
)
def test_invalid_finished_rollouts_are_rejected_by_row_and_column(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    first = attempt(group=0)
    with pytest.raises(BadInput, match=naming("tasks.producer", "row 1", *words)) as caught:
        tasks_of([first, attempt(**({"group": 1} | changes))], 0, 4)
    assert len(str(caught.value).splitlines()) == 1


def episode(**changes: Any) -> Episode:
    columns = {
        "tokens": np.array([1, 5, 6], np.int32),
        "mask": np.array([False, True, True]),
        "logprobs": np.array([0.0, -0.5, -0.1], np.float32),
        "versions": np.array([OBSERVED, 2, 3], np.int32),
    }
    return Episode([Trajectory(**(columns | changes))], "hi", {"r": 0.1}, 0.1)


def test_given_episodes_get_the_dtypes_of_sampled_ones_and_need_no_prompt() -> None:
    wide = episode(tokens=np.array([1, 5, 6]), logprobs=np.array([0.0, -0.5, -0.1], np.float64))
    (task,) = tasks_of([Task("t", "", {}, [wide])], 0, 3)
    assert task.prompt == ""
    assert arrays(task.episodes[0].trajectories[0]) == arrays(episode().trajectories[0])
    assert tasks_of([task], 1, 3) == [task]


@pytest.mark.parametrize("as_task", [True, False])
def test_episodes_can_be_given_as_they_are(as_task: bool) -> None:
    given = [episode(), episode()]
    row: Any = (
        Task("t", "hello", {"a": 1}, given) if as_task else {"id": "t", "prompt": "hello", "a": 1, "episodes": given}
    )
    (task,) = tasks_of([row], 0, 3)
    assert (task.id, task.prompt, task.columns) == ("t", "hello", {"a": 1})
    assert task.episodes == given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("text", ("episodes",)),
        ([{"tokens": [1]}], ("episodes", "Episode")),
        ([Episode([])], ("episodes", "trajectories")),
        ([episode(logprobs=np.array([0.0, np.nan, 0.0], np.float32))], ("logprob",)),
        ([episode(versions=np.array([-1, 4, 4], np.int32))], ("versions", "4")),
        ([episode(tokens=np.array([1.0, 2.0, 3.0]))], ("tokens", "float64")),
        ([Episode(episode().trajectories, rewards={"r": float("nan")})], ("r", "nan")),
    ],
)
def test_episodes_that_cannot_be_trained_on_are_rejected(given: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=naming("tasks.producer", "row 0", *words)):
        tasks_of([{"prompt": "a", "episodes": given}], 0, 3)


# ------------------------------------------------------------------------------------------------------------ journal

finite = st.floats(allow_nan=False, allow_infinity=False)
attempts = st.builds(
    lambda length, seed, reward, text: (length, seed, reward, text),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
    finite,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)


@examples(50)
@given(st.lists(attempts, min_size=1, max_size=3))
def test_episodes_are_read_from_the_journal_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, drawn: Any) -> None:
    episodes = []
    for length, seed, reward, text in drawn:
        bits = np.random.default_rng(seed)
        columns = {
            "tokens": bits.integers(0, 2**31 - 1, length, np.int32),
            "mask": bits.random(length) < 0.5,
            "logprobs": -bits.exponential(5, length).astype(np.float32),
            "versions": bits.integers(-1, 99, length, np.int32),
        }
        episodes.append(Episode([Trajectory(**columns, reward=reward)], text, {text: reward}, reward, requests=[text]))
    path = tmp_path_factory.mktemp("journal") / "tasks.jsonl"
    task = Task("t", "p\n", {"answer": 1}, episodes)
    StreamedTasks(path).append(task)
    read = StreamedTasks(path)[0]
    assert [*map(repr, read.episodes)] == [*map(repr, episodes)]
    for one, other in zip(read.episodes, episodes, strict=True):
        for name in ("tokens", "mask", "logprobs", "versions", "turn_rewards"):
            array, expected = (getattr(each.trajectories[0], name) for each in (one, other))
            assert (array.dtype, array.tobytes()) == (expected.dtype, expected.tobytes())


def test_arrays_outside_of_episodes_are_rejected_because_reading_would_change_them(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=naming("t0")):
        StreamedTasks(tmp_path / "tasks.jsonl").append(Task("t0", "p", {"x": np.zeros(2, np.float32)}))


def test_columns_that_differ_between_attempts_are_given_as_extra() -> None:
    rows = [attempt(prompt="b", extra={"score": number}) for number in range(2)]
    (task,) = tasks_of(rows, 0, 4)
    assert [episode.extra for episode in task.episodes] == [{"score": 0}, {"score": 1}]


def test_a_rollout_function_gets_every_prompt_as_often_as_it_is_sampled() -> None:
    args = SimpleNamespace(
        num_generations=2,
        generation_batch_size=4,
        per_device_train_batch_size=4,
        steps_per_generation=1,
        shuffle_dataset=False,
        seed=0,
    )

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        assert trainer.state.global_step == 3
        ids = [[number] for number in range(len(prompts))]
        return {
            "prompt_ids": ids,
            "completion_ids": ids,
            "logprobs": [[-0.5]] * 4,
            "seen": prompts,
            "env_mask": [[1]] * 4,
        }

    rows = [{"prompt": name, "answer": name.upper()} for name in "abc"]
    produced = RolloutFunctionProducer(rollout, args, rows).produce(None, 3, round=0)
    assert [(row["prompt"], row["group"], row["extra"], row["answer"]) for row in produced] == [
        ("a", 0, {"seen": "a"}, "A"),
        ("a", 0, {"seen": "a"}, "A"),
        ("b", 1, {"seen": "b"}, "B"),
        ("b", 1, {"seen": "b"}, "B"),
    ]
    assert produced[3]["tool_mask"] == [1]
    short = RolloutFunctionProducer(lambda *given: {**rollout(*given), "logprobs": []}, args, rows)
    with pytest.raises(BadInput, match=r"rollout_func: .*logprobs"):
        short.produce(None, 3, round=0)
