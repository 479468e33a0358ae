"""The simulated engine: sequences share it, and the duration of each can be computed by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.simulator.driver import VirtualClock
from outpace.simulator.fleet import SimulatedEngine, SimulatedRequest
from outpace.simulator.settings import SimulatedEngineSettings
from support import examples

PLAIN = SimulatedEngineSettings(slots=4, step_s=1.0, sequence_s=1.0, prefill_tok_s=10.0, pause_s=3.0)
"""With n running sequences a token takes 1 + n seconds."""


class EngineHarness:
    """An engine with the completion time of each request."""

    def __init__(self, settings: SimulatedEngineSettings = PLAIN) -> None:
        self.clock = VirtualClock()
        self.engine = SimulatedEngine("e0", self.clock, settings, slow=False, done=self._done)
        self.engine.version = 0
        self.completed_at: dict[SimulatedRequest, float] = {}
        self.mean_versions: dict[SimulatedRequest, float] = {}

    def _done(self, engine: SimulatedEngine, requests: list[SimulatedRequest]) -> None:
        for request in requests:
            assert request not in self.completed_at
            self.completed_at[request] = self.clock.now
            self.mean_versions[request] = engine.mean_version(request)

    def submit(self, tokens: float, at: float = 0.0, prefill: float = 0.0) -> SimulatedRequest:
        request = SimulatedRequest(tokens, prefill, min_version=0)
        self.clock.at(at, lambda: self.engine.submit(request))
        return request

    def run(self) -> None:
        while self.clock.advance():
            pass


def test_a_single_sequence_decodes_at_the_rate_of_one_sequence() -> None:
    harness = EngineHarness()
    alone = harness.submit(10)
    harness.run()
    assert harness.completed_at[alone] == pytest.approx(10 * 2)


def test_two_sequences_slow_each_other_down_until_the_shorter_one_ends() -> None:
    harness = EngineHarness()
    short, long = harness.submit(10), harness.submit(30)
    harness.run()
    assert harness.completed_at[short] == pytest.approx(10 * 3)
    assert harness.completed_at[long] == pytest.approx(10 * 3 + 20 * 2)


def test_a_later_sequence_shares_the_engine_only_while_both_run() -> None:
    harness = EngineHarness()
    first, second = harness.submit(10), harness.submit(10, at=10.0)
    harness.run()
    assert harness.completed_at[first] == pytest.approx(10 + 5 * 3), "five tokens alone, five shared"
    assert harness.completed_at[second] == pytest.approx(25 + 5 * 2)


def test_a_request_without_a_free_slot_waits_for_one() -> None:
    harness = EngineHarness(PLAIN.model_copy(update={"slots": 1}))
    first, second = harness.submit(5), harness.submit(5)
    harness.run()
    assert (harness.completed_at[first], harness.completed_at[second]) == (pytest.approx(10), pytest.approx(20))


def test_prefill_and_weight_swaps_pause_all_sequences() -> None:
    harness = EngineHarness()
    request = harness.submit(10, prefill=40.0)
    harness.clock.at(10.0, lambda: harness.engine.swap(1))
    harness.run()
    assert harness.completed_at[request] == pytest.approx(4 + 20 + 3)
    assert harness.mean_versions[request] == pytest.approx(0.7), "three of ten tokens were sampled before the swap"
    assert request.oldest == 0


def test_withdrawing_a_request_returns_its_tokens_so_far_and_speeds_up_the_others() -> None:
    harness = EngineHarness()
    kept, dropped = harness.submit(10), harness.submit(10)
    had: list[float] = []
    harness.clock.at(15.0, lambda: had.append(harness.engine.withdraw(dropped)))
    harness.run()
    assert had == [pytest.approx(5)]
    assert harness.completed_at == {kept: pytest.approx(15 + 5 * 2)}


def test_a_failing_engine_returns_every_request_with_its_tokens_so_far() -> None:
    harness = EngineHarness(PLAIN.model_copy(update={"slots": 1}))
    running, waiting = harness.submit(10), harness.submit(10)
    lost: list[tuple[SimulatedRequest, float]] = []
    harness.clock.at(6.0, lambda: lost.extend(harness.engine.fail()))
    harness.run()
    assert lost == [(running, pytest.approx(3)), (waiting, 0.0)]
    assert not harness.completed_at
    assert not harness.engine.load


@given(st.integers(0, 2**31), st.integers(1, 40))
@examples(200)
def test_every_request_completes_once_at_the_time_given_by_a_step_by_step_model(seed: int, count: int) -> None:
    rng = random.Random(seed)
    plan = [(float(rng.randint(1, 30)), rng.uniform(0, 200)) for _ in range(count)]
    harness = EngineHarness(PLAIN.model_copy(update={"slots": rng.randint(1, 6)}))
    requests = [harness.submit(tokens, at) for tokens, at in plan]
    harness.run()
    expected = step_by_step(plan, harness.engine._settings.slots)
    assert [harness.completed_at[request] for request in requests] == pytest.approx(expected, rel=1e-6)


def step_by_step(plan: list[tuple[float, float]], slots: int) -> list[float]:
    """The same engine simulated event by event, counting down the remaining tokens of every sequence."""
    arrivals = sorted(range(len(plan)), key=lambda number: plan[number][1])
    left = {number: tokens for number, (tokens, _) in enumerate(plan)}
    ends = [0.0] * len(plan)
    now, running, waiting = 0.0, list[int](), list[int]()
    while arrivals or waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        token_s = 1.0 + len(running)
        next_end = now + min((left[number] for number in running), default=float("inf")) * token_s
        next_arrival = plan[arrivals[0]][1] if arrivals else float("inf")
        moment = min(next_end, next_arrival)
        for number in running:
            left[number] -= (moment - now) / token_s
        now = moment
        if next_arrival < next_end:
            waiting.append(arrivals.pop(0))
        for number in [number for number in running if left[number] < 1e-9]:
            running.remove(number)
            ends[number] = now
    return ends
