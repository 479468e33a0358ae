"""The modelled engine: sequences share it, and what one of them took can be worked out by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from outpace.simulator.cluster import SimulatedEngine, SimulatedRequest
from outpace.simulator.conductor import VirtualClock
from outpace.simulator.settings import SimulatedEngineSettings

PLAIN = SimulatedEngineSettings(slots=4, step_s=1.0, sequence_s=1.0, prefill_tok_s=10.0, pause_s=3.0)
"""A token takes 1 + n seconds with n running."""


class Bench:
    """An engine and what it has answered, when."""

    def __init__(self, settings: SimulatedEngineSettings = PLAIN) -> None:
        self.clock = VirtualClock()
        self.engine = SimulatedEngine("e0", self.clock, settings, slow=False, done=self._done)
        self.engine.version = 0
        self.answered: dict[SimulatedRequest, float] = {}
        self.mean_versions: dict[SimulatedRequest, float] = {}

    def _done(self, engine: SimulatedEngine, requests: list[SimulatedRequest]) -> None:
        for request in requests:
            assert request not in self.answered
            self.answered[request] = self.clock.now
            self.mean_versions[request] = engine.mean_version(request)

    def ask(self, tokens: float, at: float = 0.0, prefill: float = 0.0) -> SimulatedRequest:
        request = SimulatedRequest(tokens, prefill, min_version=0)
        self.clock.at(at, lambda: self.engine.submit(request))
        return request

    def run(self) -> None:
        while self.clock.advance():
            pass


def test_a_sequence_alone_takes_its_tokens_at_the_rate_of_one() -> None:
    bench = Bench()
    alone = bench.ask(10)
    bench.run()
    assert bench.answered[alone] == pytest.approx(10 * 2)


def test_two_sequences_slow_each_other_down_until_the_shorter_one_ends() -> None:
    bench = Bench()
    short, long = bench.ask(10), bench.ask(30)
    bench.run()
    assert bench.answered[short] == pytest.approx(10 * 3)
    assert bench.answered[long] == pytest.approx(10 * 3 + 20 * 2)


def test_a_late_comer_shares_only_what_is_left() -> None:
    bench = Bench()
    first, second = bench.ask(10), bench.ask(10, at=10.0)
    bench.run()
    assert bench.answered[first] == pytest.approx(10 + 5 * 3), "five tokens alone, five together"
    assert bench.answered[second] == pytest.approx(25 + 5 * 2)


def test_what_finds_no_slot_waits_for_one() -> None:
    bench = Bench(PLAIN.model_copy(update={"slots": 1}))
    first, second = bench.ask(5), bench.ask(5)
    bench.run()
    assert (bench.answered[first], bench.answered[second]) == (pytest.approx(10), pytest.approx(20))


def test_reading_a_prompt_and_swapping_weights_hold_everybody_up() -> None:
    bench = Bench()
    request = bench.ask(10, prefill=40.0)
    bench.clock.at(10.0, lambda: bench.engine.swap(1))
    bench.run()
    assert bench.answered[request] == pytest.approx(4 + 20 + 3)
    assert bench.mean_versions[request] == pytest.approx(0.7), "three of ten tokens came before the swap"
    assert request.oldest == 0


def test_a_withdrawn_request_says_what_it_had_and_speeds_up_the_others() -> None:
    bench = Bench()
    kept, dropped = bench.ask(10), bench.ask(10)
    had: list[float] = []
    bench.clock.at(15.0, lambda: had.append(bench.engine.withdraw(dropped)))
    bench.run()
    assert had == [pytest.approx(5)]
    assert bench.answered == {kept: pytest.approx(15 + 5 * 2)}


def test_an_engine_that_goes_gives_every_request_back_with_what_it_had() -> None:
    bench = Bench(PLAIN.model_copy(update={"slots": 1}))
    running, waiting = bench.ask(10), bench.ask(10)
    lost: list[tuple[SimulatedRequest, float]] = []
    bench.clock.at(6.0, lambda: lost.extend(bench.engine.fail()))
    bench.run()
    assert lost == [(running, pytest.approx(3)), (waiting, 0.0)]
    assert not bench.answered
    assert not bench.engine.load


@given(st.integers(0, 2**31), st.integers(1, 40))
@examples(max_examples=200, deadline=None)
def test_every_request_is_answered_once_and_as_a_step_by_step_model_says(seed: int, count: int) -> None:
    rng = random.Random(seed)
    plan = [(float(rng.randint(1, 30)), rng.uniform(0, 200)) for _ in range(count)]
    bench = Bench(PLAIN.model_copy(update={"slots": rng.randint(1, 6)}))
    requests = [bench.ask(tokens, at) for tokens, at in plan]
    bench.run()
    expected = step_by_step(plan, bench.engine._settings.slots)
    assert [bench.answered[request] for request in requests] == pytest.approx(expected, rel=1e-6)


def step_by_step(plan: list[tuple[float, float]], slots: int) -> list[float]:
    """The same engine, from one event to the next, with every sequence's tokens counted down."""
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
