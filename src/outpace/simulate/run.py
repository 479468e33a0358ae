"""One simulated run, over as many starts as its faults require.

As in a real run, a learner failure ends the current start. After the restart time, the next start resumes from the
latest checkpoint, with the finished groups from the journal and the recorded turns of unfinished groups.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from outpace.pipeline.core import Core, CoreSettings
from outpace.pipeline.supervisor import SuperviseSettings, Supervisor
from outpace.simulate.account import Account, Figures, Reading, figures
from outpace.simulate.clock import Clock
from outpace.simulate.conductor import Conductor, Observer
from outpace.simulate.parts import ModelledParts, engines_of
from outpace.simulate.settings import SimulationSettings
from outpace.simulate.survival import Inheritance, Journal
from outpace.tasks.order import Order
from outpace.types import Version

MAX_FUTILE_STARTS = 20
"""End the run after this many learner failures without a checkpoint in between: it would never finish."""

CHECK_EVERY = 256
"""Events between two progress checks."""

Progress = Callable[[Version, float], None]
"""Called with completed steps and simulated seconds."""
Watch = Callable[[Core, ModelledParts], Sequence[Observer]]
"""Returns additional observers for one start of the run."""


class Run:
    """One simulated run. `run()` returns its result; `ended` says why it ended."""

    def __init__(
        self,
        settings: SimulationSettings,
        make_observers: Watch = lambda *_: (),
        progress: Progress = lambda *_: None,
        core: CoreSettings | None = None,
    ) -> None:
        self._settings = settings
        self._core_settings = core or core_settings(settings)
        self._order = Order(self._core_settings.tasks, settings.run.seed, shuffle=True)
        self._make_observers = make_observers
        self._progress = progress
        self._rng = random.Random(settings.run.seed)
        self._past = Reading(0.0, 0.0, 0.0, 0.0, 0.0)
        self._deaths = {"engine": 0, "worker": 0, "learner": 0, "taken away": 0}
        self._restarts = 0
        self._most_running = 0
        self._given_up = ""
        self._events_seen = 0
        self._parts: ModelledParts
        self.clock = Clock()
        self.journal = Journal()
        self.account = Account(max(1, settings.run.steps // 4), self._read)
        self.ended = ""

    def run(self) -> Figures | None:
        """Run to the end. Returns None if the run ended before anything was measured."""
        began = time.process_time()
        start_state = Inheritance(Core(self._core_settings, self._order))
        futile, checkpoint = 0, None
        while not self.ended:
            self.ended = self._start(start_state)
            self._finish_start()
            if not self.ended:
                futile = futile + 1 if self.journal.checkpoint is checkpoint else 0
                checkpoint = self.journal.checkpoint
                if futile >= MAX_FUTILE_STARTS:
                    self.ended = f"the learner died {futile} times without a checkpoint in between"
                start_state = self._next_start()
        return figures(
            self.account,
            self._settings,
            engines=engines_of(self._settings),
            running_most=self._most_running,
            deaths=self._deaths,
            restarts=self._restarts,
            ended=self.ended,
            simulated_s=self.clock.now,
            cpu_s=time.process_time() - began,
        )

    def _next_start(self) -> Inheritance:
        """Resume after a learner failure and the restart time."""
        self.clock = Clock(self.clock.now + self._settings.faults.restart_s)
        start_state = self.journal.go_on(self._core_settings, self._order, self._settings.checkpoint.turns)
        kept = {id(group) for group in start_state.begun.values()}
        self.account.abandoned(group for group in self.journal.groups.values() if id(group) not in kept)
        return start_state

    def _start(self, start_state: Inheritance) -> str:
        """Run one start. Returns why the run ended, or "" if the learner failed."""
        core = start_state.core
        supervise = self._settings.supervise
        supervisor = Supervisor(SuperviseSettings(supervise.restarts, supervise.window_s))
        self._parts = parts = ModelledParts(
            self._settings, core.settings, self.clock, supervisor, self._rng, core.version, self._give_up,
            self.account.given_up,
        )  # fmt: skip
        parts.rollouts.groups |= start_state.finished
        parts.rollouts.recorded |= start_state.begun
        self.account.groups = self.journal.groups = parts.rollouts.groups
        observers = (self.journal, self.account, *self._make_observers(core, parts))
        self._conductor = conductor = Conductor(core, self.clock, parts, observers)
        self._schedule_learner_failure()
        finish = conductor.run(until=lambda: self._is_stalled(core))
        self._restarts += supervisor.restarts
        return finish or self._given_up

    def _is_stalled(self, core: Core) -> bool:
        """Return whether no step has completed for `run.stall_s`. Checked only once per CHECK_EVERY events."""
        self._events_seen += 1
        if self._events_seen % CHECK_EVERY:
            return False
        self._progress(core.version, self.clock.now)
        since = self.account.ended.moment if self.account.ended else 0.0
        if self.clock.now - since <= self._settings.run.stall_s:
            return False
        self._given_up = f"no step completed for {self._settings.run.stall_s:g} s: {core.waiting_reason()}"
        return True

    def _schedule_learner_failure(self) -> None:
        if (mtbf := self._settings.faults.learner_mtbf_s) is not None:
            self.clock.after(self._rng.expovariate(1 / mtbf), self._learner_failed)

    def _learner_failed(self) -> None:
        self._deaths["learner"] += 1
        self._conductor.end()

    def _give_up(self, reason: str) -> None:
        self._given_up = reason
        self._conductor.end()

    # --------------------------------------------------------------------------------------------------------- totals

    def _finish_start(self) -> None:
        """Add the totals of this start to those of the run."""
        parts = self._parts
        self._past = self._read()
        self._deaths["engine"] += parts.fleet.deaths
        self._deaths["worker"] += parts.rollouts.deaths
        self._deaths["taken away"] += parts.fleet.gone
        self._most_running = max(self._most_running, parts.rollouts.most_running)

    def _read(self) -> Reading:
        past, fleet = self._past, self._parts.fleet
        for engine in fleet.engines.values():
            engine.count_up()
        engines = fleet.engines.values()
        return Reading(
            moment=self.clock.now,
            engine_busy_s=past.engine_busy_s + sum(engine.busy_s for engine in engines),
            engine_up_s=past.engine_up_s + fleet.present_s(),
            slot_s=past.slot_s + sum(engine.slot_s for engine in engines),
            learner_busy_s=past.learner_busy_s + self._parts.learner_busy_s,
        )


def core_settings(settings: SimulationSettings) -> CoreSettings:
    """Return the scheduler settings of a simulation."""
    pacing, slots = settings.pacing, settings.engine.slots * engines_of(settings)
    return CoreSettings(
        groups_per_step=pacing.groups_per_step,
        group_size=settings.workload.group_size,
        max_lag=pacing.max_lag,
        depth=pacing.depth,
        chunk_groups=pacing.chunk_groups,
        max_running=pacing.max_running or 2 * slots,
        on_stale=pacing.on_stale,
        warmup_steps=pacing.warmup_steps,
        publish_every=settings.weights.every,
        update=settings.weights.update,
        deterministic=settings.run.deterministic,
        steps=settings.run.steps,
        epochs=None,
        tasks=settings.workload.tasks,
        eval_every=0,
        eval_enabled=False,
        checkpoint_every=settings.checkpoint.every,
    )
