"""The simulated cluster: groups, their episodes, the workers that run them, a fleet of engines and a learner.

    Admit ─▶ group ─▶ episodes ─▶ per turn: a request to the fleet, then the environment ─▶ scoring ─▶ GroupClosed

When an engine fails, its in-flight completions are lost; each is requested again from another engine, from the start of
the turn. A worker that fails redoes its groups after its restart: completely, or only the turns that are not recorded
(`checkpoint.turns`). The random draws of a group depend only on the seed and the group number, never on timing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outpace.controller import events as ev
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.supervisor import GiveUp, RestartPolicy
from outpace.simulator.driver import LearnerWork, SendEvent, VirtualClock
from outpace.simulator.fleet import EndRun, SimulatedEngine, SimulatedFleet, SimulatedRequest
from outpace.simulator.settings import SimulationSettings, WorkloadSettings
from outpace.types import Outcome, Version

LengthSampler = Callable[[random.Random], float]


def length_sampler(workload: WorkloadSettings) -> LengthSampler:
    """Return a sampler of episode lengths in tokens, before truncation."""
    mean = workload.mean_tokens
    match workload.lengths:
        case "fixed":
            return lambda _: mean
        case "list":
            return lambda rng: rng.choice(workload.length_list)
        case "pareto":
            least = mean * (workload.tail - 1) / workload.tail
            return lambda rng: least * rng.paretovariate(workload.tail)
        case _:
            return lambda rng: rng.lognormvariate(_log_mean(mean, workload.sigma), workload.sigma)


def _log_mean(mean: float, sigma: float) -> float:
    return math.log(mean) - sigma * sigma / 2


class WorkloadSampler:
    """Random draws of the workload. Lengths, outcome and latencies of a group depend only on the seed and the group
    number, never on timing: two simulations of one workload differ only in their schedule."""

    def __init__(self, workload: WorkloadSettings, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        self._length = length_sampler(workload)

    def of_group(self, group: int) -> random.Random:
        """Return the random generator of a group. All its draws come from it, in a fixed order."""
        return random.Random(self._seed * 1_000_003 + group)

    def outcome(self, rng: random.Random) -> Outcome:
        draw = rng.random()
        if draw < self._workload.filtered:
            return "filtered"
        return "failed" if draw < self._workload.filtered + self._workload.failed else "finished"

    def tokens(self, rng: random.Random) -> float:
        """Draw the sampled tokens of one episode over all turns, at least one per turn."""
        tokens = min(self._length(rng), float(self._workload.max_tokens))
        return max(tokens, float(self._workload.turns))

    def turn_s(self, rng: random.Random) -> float:
        """Draw the environment latency of one turn, in seconds."""
        if not self._workload.turn_s:
            return 0.0
        return rng.lognormvariate(
            _log_mean(self._workload.turn_s, self._workload.turn_sigma), self._workload.turn_sigma
        )


NEVER: Version = 1 << 60


@dataclass(slots=True)
class SamplingCost:
    """Cost of sampling: sampled tokens, and prompt tokens prefilled for them."""

    sampled: float = 0.0
    prefilled: float = 0.0

    def add(self, other: SamplingCost) -> None:
        self.sampled += other.sampled
        self.prefilled += other.prefilled


class SimulatedEpisode(SimulatedRequest):
    """One episode. It is also the request for its current turn."""

    __slots__ = ("asking", "cached_life", "cached_on", "group", "turn")

    def __init__(self, group: SimulatedGroup, tokens: float) -> None:
        super().__init__(tokens, 0.0, group.admit.min_version)
        self.group = group
        self.turn = 0
        self.asking = False  # whether its request is in flight
        self.cached_on: SimulatedEngine | None = None  # the engine that has its prefix in the KV cache
        self.cached_life = -1  # life of that engine at that time


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """One group in the simulation."""

    admit: ev.Admit
    outcome: Outcome
    rng: random.Random
    size: int
    episodes: list[SimulatedEpisode] = field(default_factory=list)  # empty once the group is over
    left: int = 0  # unfinished episodes
    useful: SamplingCost = field(default_factory=SamplingCost)
    lost: SamplingCost = field(default_factory=SamplingCost)
    oldest: Version = NEVER
    newest: Version = -1
    versions: float = 0.0  # sum of the versions of all sampled tokens
    attempt: int = 0  # incremented on interruption; calls scheduled for an earlier attempt are ignored
    over: bool = False

    def end(self) -> None:
        """Break the reference cycle between group and episodes, so that they do not wait for the garbage collector."""
        self.over = True
        self.episodes.clear()

    @property
    def trained_tokens(self) -> float:
        """Tokens of the training rows: prompt, sampled tokens and environment tokens."""
        return self.useful.sampled + self.useful.prefilled


class SimulatedCluster:
    """The simulated cluster: workers with their groups, a fleet of engines, and a learner.

    `cancelled` is called with every group that the scheduler cancels, `give_up` with the reason when a component
    exceeds its restart limit, which ends the run."""

    def __init__(
        self,
        settings: SimulationSettings,
        core: SchedulerSettings,
        clock: VirtualClock,
        supervisor: RestartPolicy,
        rng: random.Random,
        served: Version,
        give_up: EndRun,
        cancelled: Callable[[SimulatedGroup], None],
    ) -> None:
        self._settings = settings
        self._core = core
        self._clock = clock
        self._supervisor = supervisor
        self._rng = rng
        self._served = served
        self._give_up = give_up
        self._cancelled = cancelled
        self._send_event: SendEvent = lambda _: None
        self._draws = WorkloadSampler(settings.workload, settings.run.seed)
        self._down: set[int] = set()  # workers that are down
        self.fleet = SimulatedFleet(settings, clock, supervisor, rng, self, give_up)
        self.groups: dict[int, SimulatedGroup] = {}  # running, or finished and not yet trained on
        self.recorded: dict[int, SimulatedGroup] = {}  # by visit: unfinished groups of an earlier start of the run
        self.episodes_running = 0
        self.most_running = 0
        self.worker_deaths = 0
        self.learner_busy_s = 0.0

    def connect(self, send_event: SendEvent) -> None:
        self._send_event = send_event
        self.fleet.connect(send_event)
        for worker in range(self._settings.cluster.workers):
            self._schedule_failure(worker)
        self.fleet.start(engine_count(self._settings), self._served)

    def engines(self) -> dict[str, Version]:
        return {name: engine.version for name, engine in self.fleet.engines.items()}

    def load(self, engine: str, version: Version) -> None:
        self.fleet.load(engine, version)

    # -------------------------------------------------------------------------------------------------------- learner

    def learner_seconds(self, work: LearnerWork) -> float:
        seconds = self._learner_seconds(work)
        self.learner_busy_s += seconds
        return seconds

    def _learner_seconds(self, work: LearnerWork) -> float:
        learner, devices = self._settings.learner, self._settings.cluster.training
        match work:
            case ev.TrainChunk():
                assert devices is not None
                tokens = sum(self.groups[group].trained_tokens for group in work.groups)
                return tokens * learner.token_s / devices
            case ev.CloseBatch(version):
                saved = self._core.is_checkpointed(version + 1)
                return learner.step_s + (learner.checkpoint_s if saved else 0.0)
            case _:
                return learner.publish_s

    def fit(self, version: Version) -> tuple[float, float]:
        return 1.0, 0.0

    def evaluation_seconds(self, version: Version) -> float:
        raise NotImplementedError("the simulated cluster does not support evaluation")

    # -------------------------------------------------------------------------------------------------------- groups

    def start(self, admit: ev.Admit) -> None:
        group = self.groups[admit.group] = self._draw(admit)
        if admit.recorded and (before := self.recorded.pop(admit.position, None)) is not None:
            self._continue(group, before)
        self.episodes_running += group.left
        self.most_running = max(self.most_running, self.episodes_running)
        if self._worker(group) not in self._down:
            self._resume(group)

    def _draw(self, admit: ev.Admit) -> SimulatedGroup:
        rng = self._draws.of_group(admit.group)
        group = SimulatedGroup(admit, self._draws.outcome(rng), rng, self._settings.workload.group_size)
        turns = self._settings.workload.turns
        group.episodes = [SimulatedEpisode(group, self._draws.tokens(rng) / turns) for _ in range(group.size)]
        group.left = group.size
        return group

    def _continue(self, group: SimulatedGroup, before: SimulatedGroup) -> None:
        """Take over the turns that an earlier start of the run recorded, unless they are older than `min_version`."""
        if before.oldest < group.admit.min_version:
            return
        group.useful, group.versions, group.left = before.useful, before.versions, before.left
        group.oldest, group.newest = before.oldest, before.newest
        for episode, earlier in zip(group.episodes, before.episodes, strict=True):
            episode.tokens, episode.turn = earlier.tokens, earlier.turn

    def cancel(self, number: int) -> None:
        group = self.groups.pop(number)
        self._interrupt(group)
        self.episodes_running -= group.left
        group.end()
        self._cancelled(group)

    def _worker(self, group: SimulatedGroup) -> int:
        return group.admit.group % self._settings.cluster.workers

    def _resume(self, group: SimulatedGroup) -> None:
        """Request the missing turns of the group."""
        if not group.left:
            self._score(group)
        for episode in group.episodes:
            if episode.turn < self._settings.workload.turns:
                self._request(episode)

    def _score(self, group: SimulatedGroup) -> None:
        self._clock.after(self._settings.workload.grade_s, self._if_current(group, lambda: self._close(group)))

    def _close(self, group: SimulatedGroup) -> None:
        group.end()
        reward = None if group.outcome == "failed" else 0.5
        reward_std = 0.5 if group.outcome == "finished" else 0.0
        self._send_event(ev.GroupClosed(group.admit.group, group.outcome, group.oldest, reward, reward_std))

    def _if_current(self, group: SimulatedGroup, call: Callable[[], None]) -> Callable[[], None]:
        attempt = group.attempt

        def if_current() -> None:
            if group.attempt == attempt:
                call()

        return if_current

    # -------------------------------------------------------------------------------------------------------- episodes

    def _request(self, episode: SimulatedEpisode) -> None:
        engine = episode.cached_on
        cached = engine if engine is not None and engine.life == episode.cached_life else None
        episode.prefill = self._new_tokens(episode.turn) if cached is not None else self._context(episode)
        episode.asking = True
        self.fleet.submit(episode, cached)

    def _new_tokens(self, turn: int) -> float:
        """Return the number of tokens that are new to the policy at this turn."""
        return self._settings.workload.turn_tokens if turn else self._settings.workload.prompt_tokens

    def _context(self, episode: SimulatedEpisode) -> float:
        workload = self._settings.workload
        return workload.prompt_tokens + episode.turn * (workload.turn_tokens + episode.tokens)

    def answered(self, episode: SimulatedRequest, engine: SimulatedEngine) -> None:
        assert isinstance(episode, SimulatedEpisode)
        group, new = episode.group, self._new_tokens(episode.turn)
        episode.asking, episode.cached_on, episode.cached_life = False, engine, engine.life
        group.oldest, group.newest = min(group.oldest, episode.oldest), max(group.newest, engine.version)
        group.versions += engine.mean_version(episode) * episode.tokens
        group.useful.sampled += episode.tokens
        group.useful.prefilled += new
        group.lost.prefilled += episode.prefill - new
        episode.turn += 1
        if episode.turn < self._settings.workload.turns:
            pause_s = self._draws.turn_s(group.rng)
            self._clock.after(pause_s, self._if_current(group, lambda: self._request(episode)))
            return
        group.left -= 1
        self.episodes_running -= 1
        if not group.left:
            self._score(group)

    def lost(self, episode: SimulatedRequest, tokens: float) -> None:
        """The engine failed: request the turn again from another engine."""
        assert isinstance(episode, SimulatedEpisode)
        episode.group.lost.add(_cost_of(tokens, episode))
        self._request(episode)

    # --------------------------------------------------------------------------------------------------------- workers

    def _schedule_failure(self, worker: int) -> None:
        if (mtbf := self._settings.faults.worker_mtbf_s) is not None:
            self._clock.after(self._rng.expovariate(1 / mtbf), lambda: self._fail(worker))

    def _fail(self, worker: int) -> None:
        self.worker_deaths += 1
        pause_s = self._supervisor.died(f"worker {worker}", self._clock.now)
        if isinstance(pause_s, GiveUp):
            self._give_up(f"worker {worker} died: {pause_s.reason}")
            return
        self._down.add(worker)
        for group in self._groups_of(worker):
            self._interrupt(group)
            if not self._settings.checkpoint.turns:
                self._discard_turns(group)
        self._clock.after(pause_s + self._settings.faults.restart_s, lambda: self._restart(worker))

    def _restart(self, worker: int) -> None:
        self._down.remove(worker)
        for group in self._groups_of(worker):
            self._resume(group)
        self._schedule_failure(worker)

    def _groups_of(self, worker: int) -> list[SimulatedGroup]:
        return [group for group in self.groups.values() if not group.over and self._worker(group) == worker]

    def _interrupt(self, group: SimulatedGroup) -> None:
        """Cancel its in-flight requests and scheduled calls."""
        group.attempt += 1
        for episode in group.episodes:
            if episode.asking:
                episode.asking = False
                group.lost.add(_cost_of(self.fleet.withdraw(episode), episode))

    def _discard_turns(self, group: SimulatedGroup) -> None:
        group.lost.add(group.useful)
        group.useful, group.versions, group.oldest, group.newest = SamplingCost(), 0.0, NEVER, -1
        self.episodes_running += group.size - group.left
        group.left = group.size
        for episode in group.episodes:
            episode.turn, episode.cached_on = 0, None


def _cost_of(tokens: float, episode: SimulatedEpisode) -> SamplingCost:
    """Return the cost of a cancelled request. Without any token, the prompt was most likely not prefilled either."""
    return SamplingCost(tokens, episode.prefill) if tokens else SamplingCost()


def engine_count(settings: SimulationSettings) -> int:
    """Return the number of engines that fit on the generation devices."""
    assert settings.cluster.training is not None
    return (settings.cluster.devices - settings.cluster.training) // settings.cluster.per_engine
