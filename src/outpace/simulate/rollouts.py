"""Groups, their episodes and the workers that run them.

    Admit ─▶ group ─▶ its episodes ─▶ turn by turn: a request to the fleet, the environment's answer ─▶ graded ─▶ closed

An engine that goes takes the answers that it was sampling with it: each is asked for again, elsewhere, from the turn's
beginning. A worker that dies does its groups again once it is back: all of them, or (`checkpoint.turns`) what of them
is not recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outpace.pipeline.events import Admit, GroupClosed
from outpace.pipeline.supervisor import GiveUp, Supervisor
from outpace.simulate.clock import Clock
from outpace.simulate.conductor import Tell
from outpace.simulate.draws import Draws
from outpace.simulate.engine import ModelledEngine, Request
from outpace.simulate.fleet import Fleet, GiveUpRun
from outpace.simulate.settings import SimulationSettings
from outpace.types import Outcome, Version

NEVER: Version = 1 << 60


@dataclass(slots=True)
class Cost:
    """What sampling took: tokens that were sampled, and prompt tokens that were read for them."""

    sampled: float = 0.0
    prefilled: float = 0.0

    def add(self, other: Cost) -> None:
        self.sampled += other.sampled
        self.prefilled += other.prefilled


class Episode(Request):
    """Turn by turn the request for its next answer."""

    __slots__ = ("asking", "group", "home", "life", "turn")

    def __init__(self, group: Group, tokens: float) -> None:
        super().__init__(tokens, 0.0, group.admit.min_version)
        self.group = group
        self.turn = 0
        self.asking = False
        self.home: ModelledEngine | None = None  # the engine whose cache holds its beginning
        self.life = -1  # of that engine


@dataclass(slots=True, eq=False)
class Group:
    admit: Admit
    outcome: Outcome
    rng: random.Random
    size: int
    episodes: list[Episode] = field(default_factory=list)  # empty once it is over
    left: int = 0  # episodes that are not over
    useful: Cost = field(default_factory=Cost)
    lost: Cost = field(default_factory=Cost)
    oldest: Version = NEVER
    newest: Version = -1
    versions: float = 0.0  # of all sampled tokens, added up
    attempt: int = 0  # what was planned for an earlier one is void
    over: bool = False

    def end(self) -> None:
        """Episodes and their group know each other: let go of them, lest 100,000 of them wait for the collector."""
        self.over = True
        self.episodes.clear()

    @property
    def trained_tokens(self) -> float:
        """Every row holds the prompt, what was sampled and what the environment said."""
        return self.useful.sampled + self.useful.prefilled


class Rollouts:
    def __init__(self, settings: SimulationSettings, clock: Clock, supervisor: Supervisor, rng: random.Random) -> None:
        self._settings = settings
        self._clock = clock
        self._supervisor = supervisor
        self._rng = rng
        self._draws = Draws(settings.workload, settings.run.seed)
        self._tell: Tell = lambda _: None
        self._down: set[int] = set()  # workers
        self.groups: dict[int, Group] = {}  # running, or closed and not yet forgotten
        self.recorded: dict[int, Group] = {}  # visits that an earlier start of the run was at, and what it had
        self.episodes_running = 0
        self.most_running = 0
        self.deaths = 0
        self._fleet: Fleet
        self._give_up: GiveUpRun

    def connect(self, tell: Tell, fleet: Fleet, give_up: GiveUpRun) -> None:
        self._tell, self._fleet, self._give_up = tell, fleet, give_up
        for worker in range(self._settings.cluster.workers):
            self._plan_death(worker)

    # --------------------------------------------------------------------------------------------- groups come and go

    def start(self, admit: Admit) -> None:
        group = self.groups[admit.group] = self._drawn(admit)
        if admit.recorded and (before := self.recorded.pop(admit.position, None)) is not None:
            self._go_on(group, before)
        self.episodes_running += group.left
        self.most_running = max(self.most_running, self.episodes_running)
        if self._worker(group) not in self._down:
            self._resume(group)

    def _drawn(self, admit: Admit) -> Group:
        rng = self._draws.of_group(admit.group)
        group = Group(admit, self._draws.outcome(rng), rng, self._settings.workload.group_size)
        turns = self._settings.workload.turns
        group.episodes = [Episode(group, self._draws.tokens(rng) / turns) for _ in range(group.size)]
        group.left = group.size
        return group

    def _go_on(self, group: Group, before: Group) -> None:
        """An earlier start of the run was at this visit: its answers count, unless they are older than the stamp."""
        if before.oldest < group.admit.min_version:
            return
        group.useful, group.versions, group.left = before.useful, before.versions, before.left
        group.oldest, group.newest = before.oldest, before.newest
        for episode, earlier in zip(group.episodes, before.episodes, strict=True):
            episode.tokens, episode.turn = earlier.tokens, earlier.turn

    def cancel(self, number: int) -> Group:
        group = self.groups.pop(number)
        self._interrupt(group)
        self.episodes_running -= group.left
        group.end()
        return group

    def _worker(self, group: Group) -> int:
        return group.admit.group % self._settings.cluster.workers

    def _resume(self, group: Group) -> None:
        """Ask for whatever is not there yet."""
        if not group.left:
            self._grade(group)
        for episode in group.episodes:
            if episode.turn < self._settings.workload.turns:
                self._ask(episode)

    def _grade(self, group: Group) -> None:
        self._clock.after(self._settings.workload.grade_s, self._if_still(group, lambda: self._close(group)))

    def _close(self, group: Group) -> None:
        group.end()
        reward = None if group.outcome == "failed" else 0.5
        spread = 0.5 if group.outcome == "finished" else 0.0
        self._tell(GroupClosed(group.admit.group, group.outcome, group.oldest, reward, spread))

    def _if_still(self, group: Group, happening: Callable[[], None]) -> Callable[[], None]:
        attempt = group.attempt

        def if_still() -> None:
            if group.attempt == attempt:
                happening()

        return if_still

    # -------------------------------------------------------------------------------------------------------- episodes

    def _ask(self, episode: Episode) -> None:
        cached = episode.home if episode.home is not None and episode.home.life == episode.life else None
        episode.prefill = self._new_tokens(episode.turn) if cached is not None else self._context(episode)
        episode.asking = True
        self._fleet.submit(episode, cached)

    def _new_tokens(self, turn: int) -> float:
        """What the policy has not read before this turn."""
        return self._settings.workload.turn_tokens if turn else self._settings.workload.prompt_tokens

    def _context(self, episode: Episode) -> float:
        workload = self._settings.workload
        return workload.prompt_tokens + episode.turn * (workload.turn_tokens + episode.tokens)

    def answered(self, episode: Request, engine: ModelledEngine) -> None:
        assert isinstance(episode, Episode)
        group, new = episode.group, self._new_tokens(episode.turn)
        episode.asking, episode.home, episode.life = False, engine, engine.life
        group.oldest, group.newest = min(group.oldest, episode.oldest), max(group.newest, engine.version)
        group.versions += engine.mean_version(episode) * episode.tokens
        group.useful.sampled += episode.tokens
        group.useful.prefilled += new
        group.lost.prefilled += episode.prefill - new
        episode.turn += 1
        if episode.turn < self._settings.workload.turns:
            pause_s = self._draws.turn_s(group.rng)
            self._clock.after(pause_s, self._if_still(group, lambda: self._ask(episode)))
            return
        group.left -= 1
        self.episodes_running -= 1
        if not group.left:
            self._grade(group)

    def lost(self, episode: Request, tokens: float) -> None:
        """Its engine has gone: ask again, elsewhere."""
        assert isinstance(episode, Episode)
        episode.group.lost.add(_cost_of(tokens, episode))
        self._ask(episode)

    # --------------------------------------------------------------------------------------------------------- workers

    def _plan_death(self, worker: int) -> None:
        if (mtbf := self._settings.faults.worker_mtbf_s) is not None:
            self._clock.after(self._rng.expovariate(1 / mtbf), lambda: self._die(worker))

    def _die(self, worker: int) -> None:
        self.deaths += 1
        decision = self._supervisor.died(f"worker {worker}", "worker", self._clock.now)
        if isinstance(decision, GiveUp):
            self._give_up(f"worker {worker} died: {decision.reason}")
            return
        self._down.add(worker)
        for group in self._of(worker):
            self._interrupt(group)
            if not self._settings.checkpoint.turns:
                self._forget_answers(group)
        self._clock.after(decision.pause_s + self._settings.faults.restart_s, lambda: self._revive(worker))

    def _revive(self, worker: int) -> None:
        self._down.remove(worker)
        for group in self._of(worker):
            self._resume(group)
        self._plan_death(worker)

    def _of(self, worker: int) -> list[Group]:
        return [group for group in self.groups.values() if not group.over and self._worker(group) == worker]

    def _interrupt(self, group: Group) -> None:
        """Withdraw what it is waiting for."""
        group.attempt += 1
        for episode in group.episodes:
            if episode.asking:
                episode.asking = False
                group.lost.add(_cost_of(self._fleet.withdraw(episode), episode))

    def _forget_answers(self, group: Group) -> None:
        group.lost.add(group.useful)
        group.useful, group.versions, group.oldest, group.newest = Cost(), 0.0, NEVER, -1
        self.episodes_running += group.size - group.left
        group.left = group.size
        for episode in group.episodes:
            episode.turn, episode.home = 0, None


def _cost_of(tokens: float, episode: Episode) -> Cost:
    """Of an answer that was given up; one that has no token yet has most likely read no prompt either."""
    return Cost(tokens, episode.prefill) if tokens else Cost()
