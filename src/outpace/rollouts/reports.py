"""MERGED"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from outpace.errors import clip
from outpace.models.chat import as_text
from outpace.rollouts.closing import CUT_OFF, Verdict, sampled_tokens, version_range
from outpace.rollouts.episodes import whole_return
from outpace.rollouts.policy.client import PolicyClient
from outpace.types import Episode, EpisodeView, Failure, GroupOrder, GroupReport, Message, Task, Trajectory

EXAMPLE_CHARACTERS = 500
"""Characters of prompt and completion kept in the example of a group that is not trained on."""

SWAPPED = "episode/swapped"
"""Metric: fraction of trajectories whose weights changed between two sampled tokens."""

Decode = Callable[[Sequence[int]], str]


def report_of(
    order: GroupOrder,
    task: Task,
    episodes: list[Episode],
    clients: list[PolicyClient],
    verdict: Verdict,
    seconds: float,
) -> GroupReport:
    """Build the report sent to the controller: metadata and example episodes, but no training rows."""
    survivors = [episode for episode in episodes if episode.error is None]
    oldest, newest = version_range(survivors)
    decode = clients[0].decode
    return GroupReport(
        group=order.group,
        task_id=task.id,
        outcome=verdict.outcome,
        reason=verdict.reason,
        rewards=[whole_return(episode) for episode in survivors],
        reward_parts=_means([{**episode.rewards, **_role_rewards(episode)} for episode in survivors]),
        episodes=len(survivors),
        failed_episodes=len(episodes) - len(survivors),
        tokens_sampled=sampled_by(clients),
        oldest=oldest,
        newest=newest,
        truncated=sum(episode.stop in CUT_OFF for episode in survivors),
        seconds=seconds,
        metrics=_means([{**episode.metrics, SWAPPED: _swapped_fraction(episode)} for episode in survivors]),
        views=_views(order, task, episodes, verdict, newest, decode),
        traceback=next((episode.traceback for episode in episodes if episode.traceback), ""),
        failures=_failures(episodes),
    )


def _failures(episodes: list[Episode]) -> list[Failure]:
    """Count the failures of all episodes by source and reason."""
    counts: Counter[tuple[str, str]] = Counter()
    for episode in episodes:
        for failure in episode.failures:
            counts[failure.source, failure.reason] += failure.count
        if episode.error and not any(failure.source.startswith("reward") for failure in episode.failures):
            counts["rollout", episode.error] += 1
    return [Failure(source, reason, count) for (source, reason), count in counts.items()]


def sampled_by(clients: list[PolicyClient]) -> int:
    """Count all sampled tokens, including those of abandoned answers and answers the rollout did not return."""
    return sum(client.sampled + client.abandoned for client in clients)


def _swapped_fraction(episode: Episode) -> float:
    versions = [trajectory.versions[trajectory.mask] for trajectory in episode.trajectories if trajectory.mask.any()]
    return sum(float(v.min() != v.max()) for v in versions) / max(len(versions), 1)


def _role_rewards(episode: Episode) -> dict[str, float]:
    """Return the mean trajectory reward of each role."""
    rewards: dict[str, list[float]] = {}
    for trajectory in episode.trajectories:
        if trajectory.reward is not None:
            rewards.setdefault(f"role_{trajectory.role}", []).append(trajectory.reward)
    return {name: sum(values) / len(values) for name, values in rewards.items()}


def _means(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each value over the episodes that report it."""
    names = sorted({name for values in measured for name in values})
    by_name = {name: [values[name] for values in measured if name in values] for name in names}
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def _views(
    order: GroupOrder, task: Task, episodes: list[Episode], verdict: Verdict, version: int, decode: Decode
) -> list[EpisodeView]:
    """Return all episodes if the order sets `show`, or one clipped example if the group is not trained on."""
    if order.show:
        return [_view(task, episode, version, decode) for episode in episodes if episode.error is None]
    if order.heldout or verdict.outcome == "finished":
        return []
    example = next((episode for episode in episodes if sampled_tokens(episode)), episodes[0])
    view = _view(task, example, version, decode)
    clipped = {"prompt": clip(view.prompt, EXAMPLE_CHARACTERS), "completion": clip(view.completion, EXAMPLE_CHARACTERS)}
    return [msgspec.structs.replace(view, **clipped)]


def _view(task: Task, episode: Episode, version: int, decode: Decode) -> EpisodeView:
    return EpisodeView(
        task_id=task.id,
        prompt=as_text(task.prompt),
        completion=_full_text(episode, decode) or _readable(episode.completion) or _sampled(episode, decode),
        reward=whole_return(episode),
        stop=episode.stop,
        version=version,
    )


def _full_text(episode: Episode, decode: Decode) -> str:
    """Return the full sampled text by role, if the completion holds only the last of several answers."""
    is_full_conversation = isinstance(episode.completion, list) and len(episode.completion) > 1
    return "" if is_full_conversation or len(episode.requests) < 2 else _sampled(episode, decode, by_role=True)


def _sampled(episode: Episode, decode: Decode, by_role: bool = False) -> str:
    """Return the text after the prompt of every trajectory."""
    if not by_role:
        return "\n".join(decode(_after_prompt(kept)) for kept in episode.trajectories if kept.mask.any())
    return "\n".join(f"[{kept.role}] {decode(_after_prompt(kept))}" for kept in episode.trajectories if kept.mask.any())


def _after_prompt(trajectory: Trajectory) -> list[int]:
    ids: list[int] = trajectory.tokens[int(trajectory.mask.argmax()) :].tolist()
    return ids


def _readable(completion: str | list[Message]) -> str:
    """Return the completion as text, without a role label if it is a single answer."""
    if isinstance(completion, list) and len(completion) == 1 and completion[0].get("role") == "assistant":
        return str(completion[0].get("content"))
    return as_text(completion)
