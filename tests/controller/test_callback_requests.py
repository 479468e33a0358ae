"""Runs in which callbacks confirm every step, and request checkpoints and evaluations: the scheduler in simulation."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given

from controller.simulated import Simulation, Trace, erratic, fit_of, make_scheduler, random_outcomes
from controller.test_scheduler_properties import any_settings, examples, seeds
from outpace.controller import events as ev
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.recovery import decode_state
from outpace.simulator.driver import SimulationObserver


class SlowCallbacks(SimulationObserver):
    """Confirms each step and checkpoint after a while, and requests a checkpoint or an evaluation now and then."""

    def __init__(self, simulation: Simulation, seed: int, requests: bool) -> None:
        self.simulation = simulation
        self.requests = requests
        self.open: list[tuple[str, int]] = []
        self.first_chunks: list[int] = []
        self.requested: dict[str, list[int]] = {"checkpoint": [], "evaluation": []}
        self._rng = random.Random(seed)

    def on_event(self, event: ev.Event) -> None:
        match event:
            case ev.Confirmed(kind, version):
                self.open.remove((kind, version))
            case ev.EvaluationDone(version):
                self.open.remove(("evaluation", version))
            case _:
                pass

    def on_action(self, action: ev.Action) -> None:
        match action:
            case ev.WriteRecord(version, trained=True):
                self.open.append(("step", version))
                self._after(lambda: self._confirm(version))
            case ev.PolicyUpdated(version):
                self.open.append(("policy", version))
                self._after(lambda: self.simulation.send_event(ev.Confirmed("policy", version)))
            case ev.Admit():
                assert all(kind != "policy" for kind, _ in self.open), (
                    "a group starts before on_policy_updated returned"
                )
            case ev.Checkpoint(version):
                self.open.append(("checkpoint", version))
                self._after(lambda: self.simulation.send_event(ev.Confirmed("checkpoint", version)))
            case ev.Evaluate(version):
                self.open.append(("evaluation", version))
            case ev.TrainChunk(version) if version not in self.first_chunks:
                self.first_chunks.append(version)
                assert not self.open, f"batch {version} is trained before the callbacks of {self.open} have returned"
            case _:
                pass

    def _confirm(self, version: int) -> None:
        if self.requests and self._rng.random() < 0.4:
            self.requested["checkpoint"].append(version)
            self.simulation.send_event(ev.Requested("checkpoint"))
        if self.requests and self._rng.random() < 0.4:
            self.requested["evaluation"].append(version)
            self.simulation.send_event(ev.Requested("evaluation"))
        self.simulation.send_event(ev.Confirmed("step", version))

    def _after(self, call: object) -> None:
        self.simulation.clock.after(self._rng.expovariate(1.0), call)  # type: ignore[arg-type]


def simulate(settings: SchedulerSettings, seed: int, requests: bool) -> tuple[Trace, SlowCallbacks]:
    simulation = Simulation(
        make_scheduler(replace(settings, confirm=True)),
        erratic(seed),
        random_outcomes(seed, filtered=0.25, failed=0.1),
        engines=1 + seed % 3,
        seed=seed,
        fit=fit_of(seed),
    )
    callbacks = SlowCallbacks(simulation, seed, requests)
    simulation.observe(callbacks)
    return simulation.run(), callbacks


@given(any_settings(), seeds)
@examples(100)
def test_no_batch_is_trained_before_the_callbacks_of_the_step_before_it_have_returned(
    settings: SchedulerSettings, seed: int
) -> None:
    trace, callbacks = simulate(settings, seed, requests=False)
    assert trace.finish == "done"
    assert callbacks.first_chunks == [batch.version for batch in trace.batches]


@given(any_settings(deterministic=False), seeds)
@examples(100)
def test_a_requested_checkpoint_or_evaluation_is_of_the_step_that_the_callback_saw(
    settings: SchedulerSettings, seed: int
) -> None:
    trace, callbacks = simulate(settings, seed, requests=True)
    assert trace.finish == "done"
    assert set(callbacks.requested["checkpoint"]) <= {action.version for action in trace.checkpoints}
    if settings.eval_enabled:
        assert set(callbacks.requested["evaluation"]) <= {action.version for action in trace.of(ev.Evaluate)}


@given(any_settings(deterministic=True), seeds)
@examples(50)
def test_a_checkpoint_requested_in_a_deterministic_run_has_nothing_outstanding(
    settings: SchedulerSettings, seed: int
) -> None:
    trace, _ = simulate(replace(settings, reroll=None), seed, requests=True)
    assert trace.finish == "done"
    last = trace.batches[-1].version + 1 if trace.batches else 0
    for checkpoint in trace.checkpoints:
        state = decode_state(checkpoint.state)
        assert checkpoint.version == last or not state.ledger.open, "a visit is open that a resume would repeat later"
