"""Rollout worker: runs the episodes of a group order, scores the group, writes it to the journal and reports metadata.

    order ─▶ episodes, concurrently ─▶ grade together ─▶ shape rewards ─▶ score group ─▶ journal ─▶ report
    task with episodes ──────────────▶ if they have no rewards ─────────────▶

Invariants
- A finished group is in the journal before its report reaches the controller.
- If the worker or its engine dies, the answers recorded so far stay on disk and are reused when the group runs again.
- The report counts every sampled token, including those of cancelled groups and abandoned answers.
- After `close` returns, no group, evaluation or agent program is running. A thread started for a group may still
  finish, but its result is discarded and never reaches the journal.
- A failed episode does not affect the other episodes of its group. A failed reward function fails its group, and the
  failure is reported as data.
- User code (rollouts, rewards, advantage estimators) runs on the event loop only if it is async.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from outpace.algorithms.token_advantages import advantage_settings
from outpace.checkpoint.journal import JournalWriter
from outpace.checkpoint.turn_log import TurnLog
from outpace.config import Config
from outpace.config.algorithm import configured_advantage
from outpace.config.defaults import evaluation_config
from outpace.engines.fleet import EngineFleet
from outpace.errors import RewardFailed
from outpace.models.chat import as_messages
from outpace.models.chat_format import ChatFormat
from outpace.monitoring.metric_table import MetricLog, collecting, current_log
from outpace.protocols import Reward, Rollout, TaskSource
from outpace.rewards.grading import GradedCompletion, GraderPool, apply_overlong_penalty, grade
from outpace.rewards.registry import ON_REQUEST
from outpace.rollouts import agent_process
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.conversation import RenderedPrompts
from outpace.rollouts.episode import failed_episode, has_reward, run_episode, take_episodes
from outpace.rollouts.gateway.server import Gateway
from outpace.rollouts.group_scoring import (
    ScoredGroup,
    ScoringRules,
    after_prompt,
    build_report,
    count_sampled_tokens,
    measure,
    score_group,
)
from outpace.rollouts.recording import RolloutRecorder, attempt_records
from outpace.rollouts.requests import RecordedTurns
from outpace.runtime import diagnostics, rng
from outpace.runtime.async_tools import gather_or_cancel, is_own_cancellation
from outpace.runtime.references import named_parameters
from outpace.types import (
    Episode,
    Failure,
    FinishedGroup,
    FleetMember,
    GroupOrder,
    GroupRecord,
    GroupReport,
    Ints,
    JournalLocation,
    Task,
    Version,
)

log = logging.getLogger(__name__)

DROPPED = "dropped by pacing.on_stale: the group would have been too stale to train on"

PROBE_PROMPT = "Count from one to ten."
"""Prompt for logprob checks if there is no task yet."""

MAX_LOGGED_REASONS = 20

EPISODE_SECONDS = ("episode/seconds/p50", "episode/seconds/p95", "episode/seconds/max")
"""Metrics: duration of the episodes."""

REUSED = "turns/reused"
"""Metric: number of recorded answers reused from an earlier attempt at the group."""


@dataclass(frozen=True)
class RewardFunctions:
    """Named reward functions and their weights. Empty if the rollout returns the reward itself.

    `pool` holds the processes of functions that do not run in the worker process. The worker closes it."""

    functions: list[tuple[str, Reward]]
    weights: list[float]
    pool: GraderPool | None = None


class RolloutWorker:
    """Implements `outpace.protocols.Worker`."""

    def __init__(
        self,
        config: Config,
        engines: EngineFleet,
        chat_format: ChatFormat,
        train: TaskSource,
        heldout: Mapping[str, TaskSource],
        rollout: Rollout,
        reward_functions: RewardFunctions,
        journal: JournalWriter,
        gateway: Gateway | None = None,
        closers: Sequence[Callable[[], Awaitable[None]]] = (),
        turns: TurnLog | None = None,
        recorder: RolloutRecorder | None = None,
        evaluation_rollout: Rollout | None = None,
    ) -> None:
        """The worker owns and closes `engines`, `gateway`, the reward process pool and everything in
        `closers`. Without `turns`, answers of unfinished groups are not recorded. Without `recorder`, nothing is
        written to rollouts/.

        `heldout` holds the held-out sets by name; the unnamed set is "". `evaluation_rollout` defaults to `rollout`."""
        weights = dict(zip((name for name, _ in reward_functions.functions), reward_functions.weights, strict=True))
        advantage = config.advantage
        credit = advantage_settings(configured_advantage(advantage), advantage.credit, advantage.gamma)
        self._scoring = ScoringRules(replace(credit, weights=weights), config.filter)
        assert config.rollout.max_tokens is not None, "the config must be resolved"
        self._max_tokens = config.rollout.max_tokens
        self._config = config
        self._fleet = engines
        self._chat_format = chat_format
        self._train = train
        self._heldout = heldout
        self._rollout = rollout
        self._evaluation_rollout = evaluation_rollout or rollout
        self._evaluation_config = evaluation_config(config)
        self._rewards = reward_functions
        self._requested_arguments = {
            name for _, function in reward_functions.functions for name in named_parameters(function, ON_REQUEST)
        }
        self._journal = journal
        self._gateway = gateway
        self._closers = closers
        self._turns = turns
        self._recorder = recorder
        self._running: dict[asyncio.Task[GroupReport], tuple[GroupOrder, RecordedTurns]] = {}
        self._dropped: set[int] = set()  # running groups cancelled by the controller
        self._logged: set[str] = set()  # reasons why grading failed

    async def run(self, order: GroupOrder) -> GroupReport:
        diagnostics.crash_point("worker.evaluate" if order.heldout else "worker.run")
        turns = RecordedTurns(None if order.heldout else self._turns, order)
        with collecting() as reported:  # for everything that this task runs
            clients = self._clients(order, turns)
            making = (
                self._evaluate(order, clients) if order.heldout else self._make_group(order, clients, turns, reported)
            )
            work = asyncio.create_task(making)
        self._running[work] = order, turns
        try:
            return await work
        except asyncio.CancelledError as error:
            if is_own_cancellation(error):  # the caller of `run` was cancelled, not only this group
                raise
            tokens = count_sampled_tokens(clients)
            if order.group in self._dropped and not order.heldout:
                await self._record_dropped(order, clients)
            return GroupReport(order.group, "", "failed", "cancelled", tokens_sampled=tokens, cancelled=True)
        finally:
            del self._running[work]
            if not order.heldout:
                self._dropped.discard(order.group)
            for client in clients:  # clients may live until the next garbage collection
                client.environment = None

    async def cancel(self, group: int) -> None:
        for work, (order, turns) in self._running.items():
            if order.group == group and not order.heldout:
                turns.close()  # a dropped group never runs again, so its recorded answers are not needed
                self._dropped.add(group)
                work.cancel()

    async def release(self, segments: list[str]) -> None:
        diagnostics.crash_point("worker.release")
        await asyncio.to_thread(self._journal.release, segments)

    async def record_rollouts(self, step: Version, places: list[JournalLocation]) -> None:
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.record_step, step, places)

    async def fleet(self, members: list[FleetMember]) -> None:
        await self._fleet.update(members)

    async def first_prompts(self, count: int) -> list[Ints]:
        return await asyncio.to_thread(self._render_prompts, count)

    def _render_prompts(self, count: int) -> list[Ints]:
        """Render the first `count` task prompts as chats without tools. A custom rollout may send something else."""
        # A stream may have no tasks yet.
        source = self._train if len(self._train) else next(iter(self._heldout.values()), ())
        given = [source[index].prompt for index in range(min(count, len(source)))]
        prompts = [prompt for prompt in given if prompt] or [PROBE_PROMPT]
        chats = [as_messages(prompt, self._config.model.system_prompt) for prompt in prompts]
        return [np.array(self._chat_format.open(chat), dtype=np.int32) for chat in chats]

    async def rng(self) -> bytes:
        return rng.capture()

    async def set_rng(self, state: bytes) -> None:
        rng.restore(state)

    async def close(self) -> None:
        running = list(self._running)
        for work in running:
            work.cancel()
        await asyncio.gather(*running, return_exceptions=True)  # before closing the journal they write to
        async with AsyncExitStack() as ending:  # closes all of them even if some raise
            ending.push_async_callback(self._fleet.close)
            if self._rewards.pool is not None:
                ending.push_async_callback(self._rewards.pool.close)
            for close in self._closers:
                ending.push_async_callback(close)
            if self._gateway is not None:
                ending.push_async_callback(self._gateway.close)
            ending.push_async_callback(asyncio.to_thread, self._journal.close)
            if self._turns is not None:
                ending.push_async_callback(asyncio.to_thread, self._turns.close)
            ending.push_async_callback(agent_process.wait_until_ended)

    async def _make_group(
        self, order: GroupOrder, clients: list[PolicyClient], turns: RecordedTurns, reported: MetricLog
    ) -> GroupReport:
        started = time.monotonic()
        task = await asyncio.to_thread(self._train.__getitem__, order.task)
        supplied = bool(task.episodes)
        if supplied:
            task, episodes = await asyncio.to_thread(take_episodes, task, order.version, self._chat_format.decode)
            clients = self._clients(msgspec.structs.replace(order, size=len(episodes)), turns)  # they sample nothing
        else:
            await turns.load()
            episodes = await self._episodes(self._rollout, task, clients)
        diagnostics.crash_point("worker.episodes_done")
        if not (supplied and any(map(has_reward, episodes))):
            episodes = await self._rewarded(task, episodes, clients)
        diagnostics.crash_point("worker.graded")
        if turns.reused:
            reported.add(REUSED, turns.reused)

        def finish() -> GroupReport:
            verdict = score_group(episodes, self._scoring)  # may call a custom estimator
            diagnostics.crash_point("worker.closed")
            report = build_report(order, task, episodes, clients, verdict, time.monotonic() - started)
            measured = measure(episodes, report, reported, self._config.eval.is_solved)
            report = msgspec.structs.replace(report, measured=measured, supplied=supplied)
            record = self._record(order, task, episodes, verdict)
            if turns.closed:
                return report  # the group was dropped meanwhile
            return self._store(order, record, verdict, report)

        report = await asyncio.to_thread(finish)
        turns.close()
        return report

    def _store(self, order: GroupOrder, record: GroupRecord, verdict: ScoredGroup, report: GroupReport) -> GroupReport:
        """Write the group to the journal, or to `rollouts/` if it is not trained on. Blocks on the disk."""
        if verdict.outcome == "finished":
            kept = FinishedGroup(order, msgspec.structs.replace(report, views=[]))
            return msgspec.structs.replace(report, place=self._journal.append(kept, record))
        if self._recorder is not None:
            self._recorder.record_untrained(order, record, verdict.outcome, verdict.reason)
        return report

    def _record(self, order: GroupOrder, task: Task, episodes: list[Episode], verdict: ScoredGroup) -> GroupRecord:
        survivors = [episode for episode in episodes if episode.error is None]
        return GroupRecord(
            group=order.group,
            task_id=task.id,
            epoch=order.epoch,
            admitted=order.min_version,
            rows=verdict.rows,
            rewards=[episode.reward for episode in survivors],
            parts=[episode.rewards for episode in survivors],
            attempts=[] if self._recorder is None else attempt_records(task, episodes, verdict.rows),
        )

    async def _record_dropped(self, order: GroupOrder, clients: list[PolicyClient]) -> None:
        """Record what a group had sampled when the controller dropped it."""
        if self._recorder is None:
            return
        task = await asyncio.to_thread(self._train.__getitem__, order.task)
        record = self._record(
            order, task, [failed_episode(client, DROPPED) for client in clients], ScoredGroup("failed", "", [])
        )
        await asyncio.to_thread(self._recorder.record_untrained, order, record, "dropped", DROPPED)

    async def _evaluate(self, order: GroupOrder, clients: list[PolicyClient]) -> GroupReport:
        started = time.monotonic()
        task = await asyncio.to_thread(self._heldout[order.heldout_set].__getitem__, order.task)
        ended = await self._episodes(self._evaluation_rollout, task, clients)
        episodes = await self._graded(task, ended, clients)
        survivors = any(episode.error is None for episode in episodes)
        verdict = ScoredGroup("finished" if survivors else "failed", episodes[0].error or "", [])
        return build_report(order, task, episodes, clients, verdict, time.monotonic() - started)

    def _clients(self, order: GroupOrder, turns: RecordedTurns) -> list[PolicyClient]:
        """Return one client per episode."""
        config = self._evaluation_config if order.heldout else self._config
        first_prompts: RenderedPrompts = {}
        return [
            PolicyClient(self._fleet, self._chat_format, config, order, attempt, first_prompts, self._gateway, turns)
            for attempt in range(order.first_attempt, order.first_attempt + order.size)
        ]

    async def _episodes(self, rollout: Rollout, task: Task, clients: list[PolicyClient]) -> list[Episode]:
        limits = self._config.rollout.timeout_s, self._config.rollout.retries
        return await gather_or_cancel(*(_timed(run_episode(rollout, task, client, *limits)) for client in clients))

    async def _rewarded(self, task: Task, episodes: list[Episode], clients: list[PolicyClient]) -> list[Episode]:
        """Grade the episodes and shape their rewards."""
        graded = await self._graded(task, episodes, clients)
        return [apply_overlong_penalty(episode, self._max_tokens, self._config.rewards) for episode in graded]

    async def _graded(self, task: Task, episodes: list[Episode], clients: list[PolicyClient]) -> list[Episode]:
        """Grade all episodes that did not fail. If a reward function fails, all of them fail with its error."""
        ended = [episode for episode in episodes if episode.error is None]
        if not ended:
            return episodes
        reported = current_log() or MetricLog()
        reported.completions = len(ended)
        try:
            grades = await grade(
                self._rewards.functions,
                self._rewards.weights,
                [task.prompt] * len(ended),
                [episode.completion for episode in ended],
                {name: [value] * len(ended) for name, value in task.columns.items()} | _own_columns(ended),
                self._config.rewards.timeout_s,
                self._rewards.pool,
                (task, ended),
                self._requested_values(episodes, clients),
            )
        except RewardFailed as error:
            self._log_once(task, error)
            trace = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
            source = f"reward {error.function}" if error.function else "rewards"
            failure = Failure(source, error.reason)
            return [
                episode if episode.error else _ungraded(episode, str(error), trace, failure) for episode in episodes
            ]
        extras = ({column: values[index] for column, values in reported.extra.items()} for index in range(len(ended)))
        graded = zip(grades, extras, strict=True)
        return [episode if episode.error else self._with_reward(episode, *next(graded)) for episode in episodes]

    def _log_once(self, task: Task, error: RewardFailed) -> None:
        """Log only the first failure for each reason, with its traceback. The report counts all failures."""
        if error.reason not in self._logged and len(self._logged) < MAX_LOGGED_REASONS:
            self._logged.add(error.reason)
            log.warning("grading task %s failed", task.id, exc_info=True)

    def _requested_values(self, episodes: list[Episode], clients: list[PolicyClient]) -> dict[str, list[Any]]:
        """Return the arguments passed only to reward functions that declare them, for episodes that did not fail."""
        ended = [(episode, client) for episode, client in zip(episodes, clients, strict=True) if episode.error is None]
        given: dict[str, list[Any]] = {}
        if "completion_ids" in self._requested_arguments:
            given["completion_ids"] = [
                after_prompt(episode.trajectories[0]) if episode.trajectories else [] for episode, _ in ended
            ]
        if "environments" in self._requested_arguments:
            given["environments"] = [client.environment for _, client in ended]
        if "trainer_state" in self._requested_arguments:
            given["trainer_state"] = [self._progress(clients[0].min_version)] * len(ended)
        return given

    def _progress(self, version: Version) -> dict[str, float]:
        """Return the fields of `TrainerProgress` at this version."""
        run, batch, tasks = self._config.run, self._config.pacing.groups_per_step, max(1, len(self._train))
        updates = self._config.algorithm.minibatches * self._config.algorithm.epochs_per_batch
        return {
            "global_step": version * updates,
            "max_steps": (run.steps or 0) * updates,
            "epoch": version * batch / tasks,
            "num_train_epochs": run.epochs or math.ceil((run.steps or 0) * batch / tasks),
        }

    def _with_reward(self, episode: Episode, graded: GradedCompletion, extra: dict[str, Any]) -> Episode:
        own = episode.rewards
        if not own and (episode.reward or not self._rewards.functions):
            own = {"rollout": episode.reward}
        if graded.total is None and not own and not has_reward(episode):
            reason = "no reward function applies"
            return _ungraded(episode, reason, "", Failure("rewards", reason))
        total = sum(own.values()) + (graded.total or 0.0)
        rewards, columns = {**own, **graded.parts}, {**episode.extra, **extra}
        return msgspec.structs.replace(episode, reward=total, rewards=rewards, extra=columns)


def _own_columns(episodes: list[Episode]) -> dict[str, list[Any]]:
    """Return the extra columns of the episodes, with None where an episode lacks one."""
    names = {name for episode in episodes for name in episode.extra}
    return {name: [episode.extra.get(name) for episode in episodes] for name in names}


async def _timed(episode: Coroutine[Any, Any, Episode]) -> Episode:
    started = time.monotonic()
    ended = await episode
    if (reported := current_log()) is not None:
        seconds = time.monotonic() - started
        for name in EPISODE_SECONDS:
            reported.add(name, seconds)
    return ended


def _ungraded(episode: Episode, reason: str, trace: str, failure: Failure) -> Episode:
    failures = [*episode.failures, failure]
    return msgspec.structs.replace(episode, error=reason, traceback=trace, stop="error", failures=failures)
