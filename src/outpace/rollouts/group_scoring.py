"""Group scoring: turns the graded episodes of a group into training rows, and builds the group's report.

    episodes ─▶ score_group ─▶ ScoredGroup (outcome, reason, rows with advantages) ─▶ build_report ─▶ GroupReport

Pure: no I/O.

- A failed episode is left out; the others of its group are still used.
- A group that carries no learning signal (too few episodes left, all compared rewards equal, nothing left to train on)
  is filtered or failed, with the reason.
- An episode that is masked because it was truncated or is too long still counts toward the baseline of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from outpace.algorithms.advantages import is_uniform
from outpace.algorithms.token_advantages import AdvantageSettings, compared_returns, group_advantages, with_advantages
from outpace.config.algorithm import FilterConfig
from outpace.errors import clip, plural
from outpace.models.chat import as_text
from outpace.monitoring.metric_table import MetricLog, full_name
from outpace.monitoring.metrics import Meter
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.episode import own_rewards, total_return
from outpace.types import (
    OBSERVED,
    Aggregate,
    Episode,
    EpisodeView,
    Failure,
    GroupOrder,
    GroupReport,
    Message,
    Outcome,
    Row,
    Task,
    Trajectory,
)

TRUNCATED_STOPS = ("length", "tokens", "context")
"""Stop reasons of truncated episodes: the token limit of an answer, of the episode, or the model's context."""

MASKED_REASON = "not trained on: truncated (filter.truncated) or too long (filter.longer_than)"
"""Reason recorded for an attempt that is masked within a trained group."""


@dataclass(frozen=True)
class ScoringRules:
    credit: AdvantageSettings
    filter: FilterConfig


@dataclass(frozen=True)
class ScoredGroup:
    outcome: Outcome
    reason: str
    rows: list[Row]


def score_group(episodes: list[Episode], rules: ScoringRules) -> ScoredGroup:
    """Decide whether the group can be trained on, and compute the advantages of its rows."""
    assert rules.filter.min_group is not None, "the config must be resolved"
    succeeded = [episode for episode in episodes if episode.error is None]
    if reason := _too_few_reason(episodes, len(succeeded), rules.filter.min_group):
        return ScoredGroup("failed", reason, [])
    rows = [row_of(kept, index) for index, episode in enumerate(succeeded) for kept in episode.trajectories]
    if not any(row.mask.any() for row in rows):
        return ScoredGroup("failed", "no token was sampled", [])
    if reason := _uniform_reason(rows, succeeded, rules):
        return ScoredGroup("filtered", reason, [])
    trained = [
        row
        for row in _with_advantages(rows, succeeded, rules.credit)
        if np.count_nonzero(row.mask) and _is_trained_on(succeeded[row.episode], rules.filter)
    ]
    if not trained:
        return ScoredGroup("filtered", "every attempt was truncated or is too long to train on", [])
    return ScoredGroup("finished", "", trained)


def version_range(sampled: Iterable[Trajectory | Row]) -> tuple[int, int]:
    """Return the oldest and newest policy version among the sampled tokens."""
    versions = [versions_T for each in sampled if len(versions_T := each.versions[each.mask])]
    if not versions:
        return OBSERVED, OBSERVED
    every_T = versions[0] if len(versions) == 1 else np.concatenate(versions)
    return int(np.minimum.reduce(every_T)), int(np.maximum.reduce(every_T))


def _too_few_reason(episodes: list[Episode], succeeded: int, least: int) -> str:
    """Return why too few episodes are left, with the first episode error. Empty if enough are left."""
    error = next((episode.error for episode in episodes if episode.error), "")
    if succeeded == 0:
        return error or "no attempt was made"
    if succeeded < least:
        because = f": {error}" if error else ""
        return f"{succeeded} of {plural(len(episodes), 'attempt')} succeeded, filter.min_group is {least}{because}"
    return ""


def _uniform_reason(rows: list[Row], succeeded: list[Episode], rules: ScoringRules) -> str:
    """Return why the group is uniform, or an empty string if its compared returns differ."""
    if not rules.filter.uniform:
        return ""
    compared = list(compared_returns(rows, *_rewards_of(succeeded), rules.credit))
    if not all(is_uniform(returns_G, rules.filter.tolerance) for returns_G in compared):
        return ""
    return f"all rewards are {compared[0][0]:g}" if len(compared) == 1 else "all compared rewards are equal"


def _with_advantages(rows: list[Row], succeeded: list[Episode], credit: AdvantageSettings) -> list[Row]:
    if credit.estimator.registration.critic:
        return rows  # they need the critic's values: see `outpace.learner.batch_learner`
    return [*map(with_advantages, rows, group_advantages(rows, *_rewards_of(succeeded), credit))]


def _rewards_of(succeeded: list[Episode]) -> tuple[list[float], list[dict[str, float]]]:
    return [episode.reward for episode in succeeded], [episode.rewards for episode in succeeded]


def _is_trained_on(episode: Episode, rules: FilterConfig) -> bool:
    if rules.truncated == "mask" and episode.stop in TRUNCATED_STOPS:
        return False
    return rules.longer_than is None or sampled_tokens(episode) <= rules.longer_than


def sampled_tokens(episode: Episode) -> int:
    return sum(int(trajectory.mask.sum()) for trajectory in episode.trajectories)


def row_of(trajectory: Trajectory, episode: int = 0) -> Row:
    """Convert a trajectory to a training row without advantages."""
    return Row(
        tokens=trajectory.tokens,
        mask=trajectory.mask,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        episode=episode,
        role=trajectory.role,
        reward=None if trajectory.reward is None else float(trajectory.reward),
        turn_rewards=trajectory.turn_rewards.astype(np.float32, copy=False),
        sources=[str(source) for source in trajectory.sources],
        attempt=trajectory.attempt,
    )


EXAMPLE_CHARACTERS = 500
"""Characters of prompt and completion kept in the example of a group that is not trained on."""

SWAPPED = "completions/mixed_versions"
"""Metric: fraction of trajectories whose weights changed between two sampled tokens."""

Decode = Callable[[Sequence[int]], str]


def build_report(
    order: GroupOrder,
    task: Task,
    episodes: list[Episode],
    clients: list[PolicyClient],
    verdict: ScoredGroup,
    seconds: float,
) -> GroupReport:
    """Build the report sent to the controller: metadata and example episodes, but no training rows."""
    succeeded = [episode for episode in episodes if episode.error is None]
    oldest, newest = version_range(kept for episode in succeeded for kept in episode.trajectories)
    parts, decode = [_parts(episode) for episode in succeeded], clients[0].decode
    return GroupReport(
        group=order.group,
        task_id=task.id,
        outcome=verdict.outcome,
        reason=verdict.reason,
        rewards=[total_return(episode) for episode in succeeded],
        reward_parts={name: sum(values) / len(values) for name, values in _by_name(parts).items()},
        parts=parts if order.heldout else [],
        episodes=len(succeeded),
        failed_episodes=len(episodes) - len(succeeded),
        tokens_sampled=count_sampled_tokens(clients),
        oldest=oldest,
        newest=newest,
        truncated=sum(episode.stop in TRUNCATED_STOPS for episode in succeeded),
        seconds=seconds,
        views=_views(order, task, episodes, verdict, newest, decode),
        traceback=next((episode.traceback for episode in episodes if episode.traceback), ""),
        failures=_failures(episodes),
    )


def measure(
    episodes: list[Episode], report: GroupReport, log: MetricLog, is_solved: Callable[[float], bool]
) -> dict[str, Aggregate]:
    """Return the metrics of a group: those in `log`, and those computed from its successful episodes and its report.
    `is_solved` tells whether a return means that the task is solved."""
    meter = Meter()
    meter.collect(log)
    succeeded = [episode for episode in episodes if episode.error is None]
    for episode in succeeded:
        for name, value in episode.metrics.items():
            meter.add(full_name(name), value)
    for function, rewards in _by_name([_parts(episode) for episode in succeeded]).items():
        values = [(reward, 1.0) for reward in rewards]
        meter.add_all(f"reward/{function}", values)
        meter.add_all(f"reward/{function}/std", values)
    one_version = report.oldest == report.newest
    meter.add_all(SWAPPED, [(0.0 if one_version else _swapped_fraction(episode), 1.0) for episode in succeeded])
    if succeeded:
        solved = [is_solved(returned) for returned in report.rewards]
        meter.add("groups/solve_all", all(solved))
        meter.add("groups/solve_none", not any(solved))
    return meter.take()


def _failures(episodes: list[Episode]) -> list[Failure]:
    """Count the failures of all episodes by source and reason."""
    counts: Counter[tuple[str, str]] = Counter()
    for episode in episodes:
        for failure in episode.failures:
            counts[failure.source, failure.reason] += failure.count
        if episode.error and not any(failure.source.startswith("reward") for failure in episode.failures):
            counts["rollout", episode.error] += 1
    return [Failure(source, reason, count) for (source, reason), count in counts.items()]


def count_sampled_tokens(clients: list[PolicyClient]) -> int:
    """Count all sampled tokens, including those of abandoned answers and answers the rollout did not return."""
    return sum(client.sampled + client.abandoned for client in clients)


def _swapped_fraction(episode: Episode) -> float:
    sampled = [trajectory.versions[trajectory.mask] for trajectory in episode.trajectories]
    versions = [each for each in sampled if len(each)]
    return sum(np.count_nonzero(v != v[0]) > 0 for v in versions) / max(len(versions), 1)


def _parts(episode: Episode) -> dict[str, float]:
    """Return the rewards by function and by role."""
    return {**episode.rewards, **_role_rewards(episode)}


def _role_rewards(episode: Episode) -> dict[str, float]:
    """Return the mean trajectory reward of each role."""
    rewards: dict[str, list[float]] = {}
    for role, reward in own_rewards(episode):
        rewards.setdefault(f"role_{role}", []).append(reward)
    return {name: sum(values) / len(values) for name, values in rewards.items()}


def _by_name(measured: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return all values by name. Episodes that do not report a name are left out of its list."""
    names = sorted({name for values in measured for name in values})
    return {name: [values[name] for values in measured if name in values] for name in names}


def _views(
    order: GroupOrder, task: Task, episodes: list[Episode], verdict: ScoredGroup, version: int, decode: Decode
) -> list[EpisodeView]:
    """Return all episodes if the order sets `show`, or one clipped example if the group is not trained on."""
    if order.show:
        numbered = [(number, each) for number, each in enumerate(episodes, order.first_attempt) if each.error is None]
        return [_view(task, episode, version, decode, order.heldout_set, number) for number, episode in numbered]
    if order.heldout or verdict.outcome == "finished":
        return []
    example = next((episode for episode in episodes if sampled_tokens(episode)), episodes[0])
    view = _view(task, example, version, decode)
    clipped = {"prompt": clip(view.prompt, EXAMPLE_CHARACTERS), "completion": clip(view.completion, EXAMPLE_CHARACTERS)}
    return [msgspec.structs.replace(view, **clipped)]


def _view(
    task: Task, episode: Episode, version: int, decode: Decode, heldout_set: str = "", attempt: int = 0
) -> EpisodeView:
    return EpisodeView(
        task_id=task.id,
        prompt=as_text(task.prompt),
        completion=_full_text(episode, decode) or _readable(episode.completion) or _sampled(episode, decode),
        reward=total_return(episode),
        stop=episode.stop,
        version=version,
        rewards=episode.rewards,
        heldout_set=heldout_set,
        attempt=attempt,
    )


def _full_text(episode: Episode, decode: Decode) -> str:
    """Return the full sampled text by role, if the completion holds only the last of several answers."""
    is_full_conversation = isinstance(episode.completion, list) and len(episode.completion) > 1
    return "" if is_full_conversation or len(episode.requests) < 2 else _sampled(episode, decode, by_role=True)


def _sampled(episode: Episode, decode: Decode, by_role: bool = False) -> str:
    """Return the text after the prompt of every trajectory."""
    sampled = [kept for kept in episode.trajectories if kept.mask.any()]
    return "\n".join((f"[{kept.role}] " if by_role else "") + decode(after_prompt(kept)) for kept in sampled)


def after_prompt(trajectory: Trajectory) -> list[int]:
    """Return the token ids after the prompt: answers and the observations between them."""
    ids: list[int] = trajectory.tokens[int(trajectory.mask.argmax()) :].tolist() if trajectory.mask.any() else []
    return ids


def _readable(completion: str | list[Message]) -> str:
    """Return the completion as text, without a role label if it is a single answer."""
    if isinstance(completion, list) and len(completion) == 1 and completion[0].get("role") == "assistant":
        return str(completion[0].get("content"))
    return as_text(completion)
