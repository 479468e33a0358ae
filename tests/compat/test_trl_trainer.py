"""TRL's trainers: the calls of callbacks are those of the real TRL, and the documented scripts learn."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import outpace
from compat.heldout import EXAMPLES, heldout_reward
from compat.recorded_script import rows
from outpace.compat.trl import GRPOConfig, GRPOTrainer
from outpace.errors import BadInput
from outpace.models.loading import resolve_model
from outpace.rewards.builtin import countdown

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "disable_tqdm": True,
    "outpace": {"run.runtime": "inline"},
}


def run_script(script: Path, *arguments: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(script), *arguments], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "case", ["accumulation", *(pytest.param(case, marks=pytest.mark.nightly) for case in ("iterations", "control"))]
)
def test_callbacks_get_the_calls_that_trl_makes(case: str, tmp_path: Path) -> None:
    recorded = []
    for module in ("trl", "outpace.compat.trl"):
        file = tmp_path / f"{module}.json"
        script = Path(__file__).with_name("recorded_script.py")
        run_script(script, module, str(tmp_path / f"run-{module}"), str(file), case, directory=tmp_path)
        recorded.append(json.loads(file.read_text()))
    theirs, ours = recorded
    assert ours["calls"] == theirs["calls"]
    assert ours["history"] == theirs["history"]


@pytest.mark.nightly
def test_the_documented_script_raises_the_heldout_reward(tmp_path: Path) -> None:
    printed = run_script(EXAMPLES / "trl_grpo.py", directory=tmp_path)
    before, after = map(float, re.findall(r"held-out reward (\S+) -> (\S+)", printed)[0])
    assert after - before >= 0.2


@pytest.mark.nightly
def test_the_documented_asynchronous_script_raises_the_heldout_reward(tmp_path: Path) -> None:
    run_script(EXAMPLES / "trl_async_grpo.py", directory=tmp_path)
    assert heldout_reward(tmp_path / "runs" / "trl-async-grpo" / "trained") - heldout_reward("starter") >= 0.2


class Steps(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(state.global_step)


def noted(completions: list[Any], **kwargs: Any) -> list[float]:
    """Uses what TRL passes to every function."""
    assert {"completion_ids", "log_metric", "log_extra", "trainer_state"} <= set(kwargs)
    kwargs["log_metric"]("progress", kwargs["trainer_state"].global_step / kwargs["trainer_state"].max_steps)
    kwargs["log_extra"]("length", [len(ids) for ids in kwargs["completion_ids"]])
    return [float(len(set(completion))) for completion in completions]


def test_a_model_object_is_trained_and_a_resumed_run_continues(tmp_path: Path) -> None:
    outpace.metric("progress")
    path = resolve_model("starter")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    before = model.get_input_embeddings().weight.detach().clone()

    def trainer(steps: int) -> GRPOTrainer:
        args = GRPOConfig(str(tmp_path / "run"), max_steps=steps, save_steps=1, logging_steps=1, **SMALL)
        return GRPOTrainer(model, noted, args, rows("train", 8), rows("heldout", 2), tokenizer)

    first = trainer(2)
    first.train()
    assert not (model.get_input_embeddings().weight == before).all()
    assert [line["progress"] for line in first.state.log_history if "progress" in line] == [0.0, 0.5]
    again, steps = trainer(4), Steps()
    again.add_callback(steps)
    again.train(resume_from_checkpoint=True)
    assert steps.seen == [3, 4]
    assert [line["step"] for line in again.state.log_history if "loss" in line] == [1, 2, 3, 4]
    again.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    trained = again.model.get_input_embeddings().weight
    assert (saved.get_input_embeddings().weight.to(trained.dtype) == trained).all()
    assert again.evaluate()["eval_reward"] >= 0


def test_a_run_that_ended_early_is_resumed_and_never_replaced(tmp_path: Path) -> None:
    class Interrupts(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            assert objects["processing_class"] is not None
            if state.global_step == 2:
                raise RuntimeError("interrupted")

    def trainer(**options: Any) -> GRPOTrainer:
        args = GRPOConfig(str(tmp_path / "run"), max_steps=3, save_steps=1, **SMALL)
        return GRPOTrainer("starter", countdown, args, rows("train", 8), rows("heldout", 2), **options)

    with pytest.raises(RuntimeError, match="interrupted"):
        trainer(callbacks=[Interrupts()]).train()
    again = trainer()
    with pytest.raises(BadInput, match="step"):
        again.train()
    assert again.train(resume_from_checkpoint=True).global_step == 3
    assert trainer().train().global_step == 3, "a completed run is replaced"


def test_an_exception_of_a_callback_is_raised_by_train(tmp_path: Path) -> None:
    class Failing(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: Any, **kwargs: Any) -> None:
            raise KeyError("mine")

    args = GRPOConfig(str(tmp_path / "run"), max_steps=2, **SMALL)
    with pytest.raises(KeyError, match="mine"):
        GRPOTrainer("starter", countdown, args, rows("train", 8), callbacks=[Failing]).train()


def test_a_rollout_function_gives_the_completions(tmp_path: Path) -> None:
    def shouted(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        answers = trainer.model.generate(prompts)
        return {
            "prompt_ids": [answer.prompt_ids.tolist() for answer in answers],
            "completion_ids": [answer.tokens.tolist() for answer in answers],
            "logprobs": [answer.logprobs.tolist() for answer in answers],
            "number": list(range(len(answers))),
        }

    def numbered(completions: list[Any], number: list[int], **kwargs: Any) -> list[float]:
        return [float(each % 4) for each in number]

    args = GRPOConfig(str(tmp_path / "run"), max_steps=2, logging_steps=1, **SMALL)
    trainer = GRPOTrainer("starter", numbered, args, rows("train", 8), rollout_func=shouted)
    trainer.train()
    assert [line["reward"] for line in trainer.state.log_history if "reward" in line] == [1.5, 1.5]


def test_a_sequence_classifier_is_a_reward(tmp_path: Path) -> None:
    from transformers import AutoConfig, LlamaForSequenceClassification

    path = resolve_model("starter")
    judge = LlamaForSequenceClassification(AutoConfig.from_pretrained(path, num_labels=1))
    judge.config._name_or_path = str(path)
    args = GRPOConfig(str(tmp_path / "run"), max_steps=1, logging_steps=1, **SMALL)
    trainer = GRPOTrainer("starter", [judge, countdown], args, rows("train", 8))
    trainer.train()
    assert trainer.state.log_history[0][f"rewards/{path.name}/std"] > 0


def test_a_lora_config_trains_an_adapter_and_saves_it(tmp_path: Path) -> None:
    from peft import LoraConfig

    args = GRPOConfig(str(tmp_path / "run"), max_steps=1, **SMALL)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = GRPOTrainer("starter", countdown, args, rows("train", 8), peft_config=adapter)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], sorted(saved["target_modules"])) == (4, 8.0, ["q_proj", "v_proj"])
    with pytest.raises(BadInput, match=r"peft_config: .*lora_dropout"):
        GRPOTrainer("starter", countdown, args, rows("train", 8), peft_config=LoraConfig(lora_dropout=0.1))


class Guess:
    """Gives its own prompt, and the reward."""

    def reset(self, **kwargs: Any) -> str:
        self.guesses: list[int] = []
        return "Guess a number between 1 and 3."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: Your guess.
        """
        self.guesses.append(number)
        return "no"

    def get_reward(self) -> float:
        return float(len(self.guesses))


def test_an_environment_may_give_the_prompts_and_the_reward(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path / "run"), max_steps=2, logging_steps=1, **SMALL)
    trainer = GRPOTrainer("starter-agent", args=args, environment_factory=Guess)
    trainer.train()
    assert len([line for line in trainer.state.log_history if "rewards/environment/mean" in line]) == 2


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"quantization_config": object()}, "quantization_config"),
        ({"optimizers": (None, object())}, "optimizers"),
        ({"rollout_worker": object()}, "rollout_worker"),
        ({"eval_dataset": {"a": [], "b": []}}, "eval_dataset"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_by_name(arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(BadInput, match=f"^{key}"):
        GRPOTrainer("starter", countdown, GRPOConfig("runs/x"), rows("train", 8), **arguments)
