"""Models, tokenizers and registered names of a Python caller, evaluation and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import outpace as api
from outpace.errors import BadInput
from outpace.monitoring.metric_table import DECLARED, find
from outpace.run.objects import WORKER, registered_for
from outpace.runtime.by_value import pickle_objects, unpickle_objects
from support import INLINE, read_lines, resolved

Settings = dict[str, Any]


@pytest.fixture
def loaded(toy_model: Path) -> tuple[Any, Any]:
    from outpace.models.loading import load_model, load_tokenizer

    return load_model(str(toy_model)), load_tokenizer(str(toy_model))


def without_model(settings: Settings) -> Settings:
    inline = {**INLINE, "run.steps": 2}
    return {key: value for key, value in settings.items() if key != "model.path"} | inline


def test_a_model_and_a_tokenizer_in_memory_are_saved_in_the_run_and_used_from_there(
    settings: Settings, loaded: tuple[Any, Any], tmp_path: Path
) -> None:
    config, (model, tokenizer) = without_model(settings), loaded
    trainer = api.Trainer(model, tokenizer=tokenizer, config=config, quiet=True)
    assert trainer.train().steps == 2
    run = Path(settings["run.dir"])
    assert list((run / "model").glob("*.safetensors"))
    resumed = api.Trainer(model, tokenizer=tokenizer, config={**config, "run.steps": 3}, quiet=True)
    assert resumed.train(resume=True).steps == 3
    exported = resumed.export(tmp_path / "exported")
    assert (exported / "tokenizer.json").is_file()


def test_a_refused_plan_keeps_the_model_of_the_run_that_it_would_overwrite(
    settings: Settings, loaded: tuple[Any, Any]
) -> None:
    config, (model, tokenizer) = without_model(settings) | {"run.overwrite": True}, loaded
    api.Trainer(model, tokenizer=tokenizer, config=config, quiet=True).train()
    weights = Path(settings["run.dir"]) / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    with pytest.raises(BadInput, match=r"rewards\.functions"):
        api.Trainer(model, rewards="nosuch", tokenizer=tokenizer, config=config, quiet=True).train()
    assert weights.stat().st_mtime_ns == before
    assert not weights.parent.with_name("model.new").exists()


def test_metrics_and_columns_that_a_reward_reports_are_in_the_run(settings: Settings, own_metrics: None) -> None:
    api.metric("answer/length", rule="max", unit="characters")

    def lengths(completions: list[str], log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
        for text in completions:
            log_metric("answer/length", len(text))
        log_extra("length", [len(text) for text in completions])
        return [len(text) / 8 for text in completions]

    config = {key: value for key, value in settings.items() if key != "rewards.functions"}
    config |= {**INLINE, "run.steps": 2, "run.save_rollouts": 4}
    api.Trainer(rewards=lengths, config=config, quiet=True).train()
    run = Path(settings["run.dir"])
    attempts = list(api.read_rollouts(run, outcome="trained"))
    assert all(attempt.extra == {"length": attempt.rewards["lengths"] * 8} for attempt in attempts)
    for line in read_lines(run / "metrics.jsonl"):
        longest = max(attempt.extra["length"] for attempt in attempts if attempt.step == line["step"])
        assert line["answer/length"] == longest > line["reward/lengths"] * 8
        assert line["reward/lengths/std"] == pytest.approx(line["reward/std"])


def test_workers_get_the_metrics_that_a_script_declares(own_metrics: None) -> None:
    declared = api.metric("answer/length", rule="p90")
    registered = registered_for(resolved({}), WORKER, metrics=True)
    assert registered is not None
    sent = pickle_objects({"registered": registered})
    DECLARED.clear()
    unpickle_objects(sent)["registered"].install()
    assert find("answer/length") == declared


def test_objects_that_cannot_be_trained_are_refused(loaded: tuple[Any, Any]) -> None:
    import peft

    model, tokenizer = loaded
    with pytest.raises(BadInput, match=r"^tokenizer:"):
        api.Trainer(model)
    with pytest.raises(BadInput, match=r"^tokenizer:"):
        api.Trainer("starter", tokenizer=tokenizer)
    with pytest.raises(BadInput, match=r"^model:"):
        api.Trainer(object(), tokenizer=tokenizer)  # type: ignore[arg-type]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(BadInput, match=r"^model: .*lora\.rank"):
        api.Trainer(adapted, tokenizer=tokenizer)


def test_the_config_of_a_trl_trainer_is_refused_with_the_equivalent_settings(tmp_path: Path) -> None:
    class TrainingArguments:
        pass

    from dataclasses import dataclass

    @dataclass
    class GRPOConfig(TrainingArguments):
        output_dir: str | None = None
        num_generations: int = 8
        learning_rate: float = 1e-6

    with pytest.raises(BadInput, match=r"^config: .*\bGRPOConfig\b") as caught:
        api.Trainer(config=GRPOConfig(num_generations=4))  # type: ignore[arg-type]
    assert "rollout.group_size" in str(caught.value)
    assert "learner.lr" not in str(caught.value), "it is at its default"
    with pytest.raises(BadInput, match=r"^config:"):
        api.Trainer(config=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"train_dataset": []}, "train_dataset"),
        ({"reward_funcs": len}, "reward_funcs"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"rewards": 5}, "rewards"),
        ({"tools": 5}, "tools"),
        ({"callbacks": [object()]}, "callbacks"),
        ({"callbacks": [api.Callback]}, "callbacks"),
        ({"callbacks": 5}, "callbacks"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_by_its_name(given: dict[str, Any], key: str) -> None:
    with pytest.raises(BadInput, match=f"^{key}: "):
        api.Trainer(**given)


def test_one_callback_needs_no_list() -> None:
    api.Trainer(callbacks=api.Callback())  # type: ignore[arg-type]


def test_the_real_grpo_config_is_refused_too(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    given = trl.GRPOConfig(output_dir=str(tmp_path), num_generations=4, use_cpu=True, bf16=False)
    with pytest.raises(BadInput, match=r"^config: .*\bGRPOConfig\b.*compat\.trl"):
        api.Trainer(config=given)


@pytest.mark.slow  # half a minute: two evaluations with processes of their own
async def test_evaluate_measures_the_base_model_and_then_the_newest_checkpoint(
    settings: Settings, rewards: Path
) -> None:
    config = {**settings, **INLINE, "run.steps": 2, "eval.count": 4, "eval.holdout": 0.25}
    config |= {"rewards.functions": [f"{rewards}:vowels", f"{rewards}:always"], "rewards.weights": [1.0, 0.5]}
    config |= {"eval.attempts": 2, "eval.k": [2], "eval.solved_at": 0.5}

    async def brief(task: api.Task, client: Any) -> None:
        await client.sample(task.prompt, max_tokens=1)

    trainer = api.Trainer(eval_rollout=brief, config=config, quiet=True)
    before = trainer.evaluate()  # though a loop is running
    assert (before.tokens, before.pass_at[2].mean, len(before.views)) == (8, 1.0, 8)
    assert (before.version, before.count) == (0, 4)
    assert before.stderr is not None
    assert set(before.rewards) == {"vowels", "always"}
    assert before.reward == pytest.approx(before.rewards["vowels"] + 0.5 * before.rewards["always"])
    await trainer.train_async()
    after = trainer.evaluate()
    assert (after.version, after.count) == (2, 4)


def test_export_before_training_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^export:"):
        api.Trainer("starter").export("nowhere")
