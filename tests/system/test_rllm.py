"""Scripts of rLLM on outpace: hooks of a backend, validation with its own rollout, and the countdown example."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from outpace.compat import rllm
from outpace.errors import BadInput
from outpace.tasks.countdown import Countdown
from support import naming, read_lines

SCRIPT = Path(__file__).parents[2] / "examples" / "rllm_countdown.py"


def rows(count: int) -> list[dict[str, Any]]:
    return [{"question": Countdown()[index].prompt} for index in range(count)]


class Length(rllm.Workflow):
    """Rewards even lengths, so that groups differ."""

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
        messages = [{"role": "user", "content": task["question"]}]
        output = await self.rollout_engine.get_model_response(messages)
        step = rllm.Step.from_model_output(output, messages)
        step.reward = float(len(str(output.content)) % 2)
        self.commit("solver", trajectory=rllm.Trajectory(steps=[step]))
        raise rllm.TerminationEvent(rllm.TerminationReason.ENV_DONE)


class Validate(Length):
    """Samples without randomness and always gets 1, which shows that validation ran it."""

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
        assert self.rollout_engine.is_validation
        messages = [{"role": "user", "content": task["question"]}]
        output = await self.rollout_engine.get_model_response(messages, temperature=0.0, max_tokens=4)
        step = rllm.Step(chat_completions=messages, model_output=output, reward=1.0)
        self.commit("solver", trajectory=rllm.Trajectory(steps=[step]))


class Follow(rllm.BackendProtocol):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    async def on_train_start(self, state: rllm.TrainerState) -> None:
        self.seen.append(("train", state.total_steps))

    def on_epoch_start(self, state: rllm.TrainerState) -> None:
        self.seen.append(("epoch", state.epoch))

    async def on_batch_start(self, state: rllm.TrainerState) -> None:
        self.seen.append(("batch", state.global_step))

    async def on_batch_end(self, state: rllm.TrainerState) -> None:
        assert state.metrics["step"] == state.global_step
        self.seen.append(("batch end", state.global_step))

    async def on_policy_updated(self, state: rllm.TrainerState) -> None:
        self.seen.append(("policy", state.weight_version))

    async def on_validation_start(self, state: rllm.TrainerState) -> None:
        assert not state.is_training

    async def on_validation_end(self, state: rllm.TrainerState) -> None:
        assert state.is_training
        self.seen.append(("validated", int(state.metrics["eval/reward"])))

    async def on_train_end(self, state: rllm.TrainerState) -> None:
        self.seen.append(("train end", state.global_step))


@pytest.mark.slow
def test_hooks_are_called_in_order_and_validation_has_its_own_rollout(tmp_path: Path) -> None:
    hooks = Follow()
    config = {
        "training.default_local_dir": str(tmp_path / "run"),
        "rllm.rollout.n": 4,
        "data.train_batch_size": 2,
        "rllm.trainer.total_batches": 3,
        "rllm.trainer.test_freq": 0,
    }
    trainer = rllm.AgentTrainer(
        config=config,
        workflow_class=Length,
        workflow_args={"timeout": 30},
        train_dataset=rllm.Dataset(rows(32)),
        val_dataset=rllm.Dataset(rows(4)),
        backend=hooks,
        val_rollout=Validate,
    )
    summary = trainer.train()
    assert summary.steps == 3
    assert [name for name, _ in hooks.seen if name == "validated"] == ["validated"] * 2
    assert all(value == 1 for name, value in hooks.seen if name == "validated")
    rest = [event for event in hooks.seen if event[0] != "validated"]
    assert rest[:2] == [("train", 3), ("epoch", 0)]
    assert rest[-1] == ("train end", 3)
    # Synchronous training: no batch begins before the hook of the version it is sampled with has returned.
    steps = [event for event in rest if event[0] in ("batch", "batch end", "policy")]
    expected = [
        event for step in range(3) for event in (("batch", step), ("batch end", step + 1), ("policy", step + 1))
    ]
    assert steps == expected[:-1], "no rollout uses the weights of the last step"
    assert trainer.train().steps == 3, "a complete run is found again"


def test_arguments_that_cannot_be_honored_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match=naming("store", "traj_grouping_hook")):
        rllm.AgentTrainer({}, Length, rows(1), store=object(), traj_grouping_hook=len, sandbox_backend=None)
    with pytest.raises(BadInput, match=naming("workflow_class", "agent_flow")):
        rllm.AgentTrainer({}, train_dataset=rows(1), agent_flow=len)
    with pytest.raises(BadInput, match=naming("update_policy")):
        type("Own", (rllm.BackendProtocol,), {"update_policy": None})


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_countdown_script_raises_the_held_out_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    namespace = runpy.run_path(str(SCRIPT), run_name="__main__")
    (run,) = (tmp_path / "runs").iterdir()
    rewards = [line["eval/reward"] for line in read_lines(run / "evals.jsonl")]
    assert rewards[-1] - rewards[0] > 0.2
    assert "CountdownWorkflow" in namespace
    turns = [line.get("episode/terminated_max_turns_exceeded") for line in read_lines(run / "metrics.jsonl")]
    assert all(0 < share < 1 for share in turns), "some episodes need, and some do not need, all their turns"
