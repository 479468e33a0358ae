"""Components of very different speed, and groups without learning signal: bounded lag and queue, no deadlock.

Tested elsewhere: with zero lag a run computes what the plain script computes, bit for bit
(tests/system/test_plain_script.py); the bounds of admission and lag under any schedule
(tests/controller/test_scheduler_properties.py); an idle engine uses no CPU
(tests/engines/embedded/test_engine.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from controller.simulated import PLAIN, Simulation, make_scheduler, steady
from faults.watching import Settings, StartRun, arguments, steps_of
from outpace.controller.events import Admit
from outpace.types import Outcome

LONG = replace(PLAIN, steps=60, tasks=50, max_lag=2, depth=1.0)
MAX_OUTSTANDING = 8  # groups: the open batch and one more batch

SLOW_REWARD = """
import time

def slow(prompts, completions, **columns):
    time.sleep(0.5)
    return [float(len(text)) for text in completions]
"""


def test_with_a_learner_ten_times_slower_lag_and_queue_stay_bounded() -> None:
    trace = Simulation(make_scheduler(LONG), steady(group=1.0, chunk=5.0, step=5.0)).run()
    assert trace.finish == "done"
    assert trace.most_outstanding <= MAX_OUTSTANDING
    assert max(lag for _, lag in trace.lags) <= LONG.max_lag
    assert len(trace.admitted) == LONG.steps * LONG.groups_per_step, "no group is generated that is not trained"


def test_a_learner_ten_times_faster_waits_and_the_reason_names_the_groups() -> None:
    scheduler = make_scheduler(LONG)
    simulation = Simulation(scheduler, steady(group=50.0, chunk=0.1, step=0.1, publish=0.1, load=0.1))
    simulation.run(until=lambda trace: len(trace.batches) == 3 and scheduler.finished == 0)
    reason = scheduler.waiting_reason().partition("; ")[0]
    assert "learner" in reason
    assert "group" in reason
    assert simulation.run().finish == "done"
    events = sum(1 for action in simulation.trace.actions if not isinstance(action, Admit))
    assert events < 12 * LONG.steps, "waiting produces no events"


def test_a_thousand_filtered_groups_exceed_no_bound() -> None:
    def outcome_rule(admit: Admit) -> Outcome:
        return "filtered" if admit.group < 1000 else "finished"

    trace = Simulation(make_scheduler(replace(LONG, steps=3)), steady(), outcome_rule).run()
    assert trace.finish == "done"
    assert trace.most_outstanding <= MAX_OUTSTANDING
    assert sum(outcome == "filtered" for outcome in trace.outcomes.values()) == 1000
    assert [len(batch.groups) for batch in trace.batches] == [4, 4, 4]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_controller_that_waits_for_slow_rewards_uses_hardly_any_cpu(
    start: StartRun, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    run = start(*arguments(settings, run__steps=100_000, rewards__functions=[f"{tmp_path}/slow.py:slow"]))
    run.until(lambda: len(steps_of(tmp_path / "run")) >= 2)
    controller = psutil.Process(run.pid)
    before, steps = controller.cpu_times(), len(steps_of(tmp_path / "run"))
    run.until(lambda: len(steps_of(tmp_path / "run")) >= steps + 4)
    after = controller.cpu_times()
    used = after.user + after.system - before.user - before.system
    assert used < 0.2 * 4 * 0.5, f"{used:.2f} s of CPU for 4 steps of at least half a second"
