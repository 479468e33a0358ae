"""Settings of a data producer, in the config and in a producer object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.config import Config
from outpace.config.load import make_config
from outpace.config.producer import ProducerConfig
from outpace.config.validation import resolve
from outpace.errors import BadInput
from outpace.rollouts.producer_host import make_producer
from outpace.run.plan import UserObjects, make_plan
from outpace.tasks.producers import AsyncDataProducer, BaseDataProducer, GRPODataProducer
from outpace.tasks.registry import open_tasks

NAMED = {"tasks.producer": f"{__file__}:Nothing"}


class Nothing(BaseDataProducer):
    def produce(self, model: Any, global_step: int, **kwargs: Any) -> Any:
        return []


GENERATIONS = GRPODataProducer(
    None,
    [{"prompt": "a"}],
    num_generations=8,
    generation_batch_size=8,
    train_batch_size=8,
    steps_per_generation=1,
    shuffle_dataset=False,
    seed=0,
)


def planned(settings: dict[str, Any], **objects: Any) -> Config:
    return make_plan(make_config({"rewards.functions": ["number"]} | settings), UserObjects(**objects)).config


@pytest.mark.parametrize(
    ("key", "settings", "objects"),
    [
        ("tasks.producer", {**NAMED, "tasks.name": "countdown"}, {}),
        ("tasks.producer", {**NAMED, "tasks.path": "some.jsonl"}, {}),
        ("tasks.producer", NAMED, {"tasks": [{"prompt": "a"}]}),
        ("tasks.producer", NAMED, {"producer": Nothing}),
        ("tasks.producer", {"tasks.producer": "no_such_module:Nothing"}, {}),
        ("producer", {"tasks.name": "countdown"}, {"producer": Nothing()}),
        ("producer", {}, {"producer": 3}),
        ("producer.mini_epochs", {"producer.mini_epochs": 2}, {}),
        ("producer.prefetch_depth", {**NAMED, "producer.prefetch_depth": 2}, {}),
        ("producer.num_iterations", {**NAMED, "producer.num_iterations": 2, "algorithm.epochs_per_batch": 3}, {}),
        ("producer.mini_epochs", {"producer.mini_epochs": 2}, {"producer": Nothing(ProducerConfig(mini_epochs=3))}),
        ("producer.async_prefetch", {**NAMED, "run.deterministic": True, "producer.async_prefetch": True}, {}),
        ("producer.options.when", {**NAMED, "producer.options": {"when": None}}, {}),
        ("producer.options", {**NAMED, "producer.options": {"rows": 3}}, {}),
        ("producer.options", {"producer.options": {"rows": 3}}, {"producer": Nothing()}),
        ("rollout.group_size", {"rollout.group_size": 4}, {"producer": GENERATIONS}),
        ("eval.holdout", {**NAMED, "eval.holdout": 0.3}, {}),
        ("tasks.shuffle", {**NAMED, "tasks.shuffle": False}, {}),
        ("run.epochs", {**NAMED, "run.epochs": 2}, {}),
        ("tasks.limit", {**NAMED, "tasks.limit": 5}, {}),
        ("difficulty.easy_above", {**NAMED, "difficulty.easy_above": 0.9}, {}),
    ],
)
def test_settings_that_contradict_a_producer_are_rejected(
    key: str, settings: dict[str, Any], objects: dict[str, Any]
) -> None:
    with pytest.raises(BadInput, match=rf"^{key}: "):
        planned(settings, **objects)


def test_the_settings_of_a_producer_object_are_those_of_the_run() -> None:
    own = ProducerConfig(mini_epochs=3, num_iterations=2, sync_warmup_rollouts=0)
    config = planned({"producer.max_rollouts": 5}, producer=AsyncDataProducer(Nothing(own)))
    assert (config.producer.mini_epochs, config.producer.max_rollouts) == (3, 5)
    assert config.producer.async_prefetch, "a producer in the background"
    assert config.algorithm.epochs_per_batch == 2


def test_a_run_with_a_producer_needs_no_reward_function() -> None:
    plan = make_plan(make_config(NAMED), UserObjects())
    assert plan.streamed
    assert plan.producer_code is not None


def test_a_run_with_a_producer_says_that_nothing_is_held_out() -> None:
    assert "tasks.eval_path" in make_plan(make_config(NAMED), UserObjects()).eval_warning


def test_the_number_of_iterations_is_that_of_the_optimizer() -> None:
    assert (
        resolve(make_config({**NAMED, "producer.num_iterations": 4}), own_rewards=True).algorithm.epochs_per_batch == 4
    )


def test_settings_for_the_learners_process_are_reported_where_they_do_not_apply() -> None:
    given = make_config({**NAMED, "producer.empty_cache_after_produce": True})
    assert "producer.empty_cache_after_produce" in make_plan(given, UserObjects()).producer_warning
    inline = make_config({**NAMED, "producer.empty_cache_after_produce": True, "run.runtime": "inline"})
    assert make_plan(inline, UserObjects()).producer_warning == ""
    assert make_plan(make_config(NAMED), UserObjects()).producer_warning == ""


def test_a_producer_that_takes_prompts_gets_the_tasks_that_the_config_names(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{number}", "answer": 1}}\n' for number in range(40)))
    options = {"num_generations": 2, "generation_batch_size": 4, "train_batch_size": 4, "steps_per_generation": 1}
    named = {
        "rewards.functions": ["number"],
        "rollout.group_size": 2,
        "tasks.path": str(tmp_path / "rows.jsonl"),
        "tasks.producer": "outpace:GRPODataProducer",
        "producer.options": {**options, "shuffle_dataset": True, "seed": 0},
        "eval.holdout": 0.25,
    }
    plan = make_plan(make_config(named), UserObjects())
    train, heldout = open_tasks(plan.config)
    assert heldout is not None
    assert plan.streamed
    assert plan.heldout == len(heldout)
    producer = make_producer(GRPODataProducer, plan.config)
    rounds = [producer.produce(None, 0, round=number) for number in range(len(train) // 2)]
    given = {task.id for tasks in rounds for task in tasks}
    assert {len(tasks) for tasks in rounds} == {2}
    assert given <= {train[index].id for index in range(len(train))}
    assert len(given) == 2 * len(rounds), "every prompt once in an epoch"
