"""What a worker tells the controller of a group that it has closed, and people of its episodes."""

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
"""Of prompt and completion each, in the example of a group that cannot be trained on."""

SWAPPED = "episode/swapped"
"""The metric: the share of trajectories in which weights changed between two sampled tokens."""

Decode = Callable[[Sequence[int]], str]


def report_of(
    order: GroupOrder,
    task: Task,
    episodes: list[Episode],
    clients: list[PolicyClient],
    verdict: Verdict,
    seconds: float,
) -> GroupReport:
    survivors = [episode for episode in episodes if episode.error is None]
    oldest, newest = version_range(survivors)
    decode = clients[0].decode
    return GroupReport(
        group=order.group,
        task_id=task.id,
        outcome=verdict.outcome,
        reason=verdict.reason,
        rewards=[whole_return(episode) for episode in survivors],
        reward_parts=_means([{**episode.rewards, **_of_roles(episode)} for episode in survivors]),
        episodes=len(survivors),
        failed_episodes=len(episodes) - len(survivors),
        tokens_sampled=sampled_by(clients),
        oldest=oldest,
        newest=newest,
        truncated=sum(episode.stop in CUT_OFF for episode in survivors),
        seconds=seconds,
        metrics=_means([{**episode.metrics, SWAPPED: _swapped(episode)} for episode in survivors]),
        views=_views(order, task, episodes, verdict, newest, decode),
        traceback=next((episode.traceback for episode in episodes if episode.traceback), ""),
        failures=_failures(episodes),
    )


def _failures(episodes: list[Episode]) -> list[Failure]:
    """Of all episodes, each source and reason once."""
    counts: Counter[tuple[str, str]] = Counter()
    for episode in episodes:
        for failure in episode.failures:
            counts[failure.source, failure.reason] += failure.count
        if episode.error and not any(failure.source.startswith("reward") for failure in episode.failures):
            counts["rollout", episode.error] += 1
    return [Failure(source, reason, count) for (source, reason), count in counts.items()]


def sampled_by(clients: list[PolicyClient]) -> int:
    """The tokens of all answers, whatever a rollout made of them, and of those that were given up."""
    return sum(client.sampled + client.abandoned for client in clients)


def _swapped(episode: Episode) -> float:
    versions = [trajectory.versions[trajectory.mask] for trajectory in episode.trajectories if trajectory.mask.any()]
    return sum(float(v.min() != v.max()) for v in versions) / max(len(versions), 1)


def _of_roles(episode: Episode) -> dict[str, float]:
    """The mean of the rewards that the trajectories of each role have of their own."""
    rewards: dict[str, list[float]] = {}
    for trajectory in episode.trajectories:
        if trajectory.reward is not None:
            rewards.setdefault(f"role_{trajectory.role}", []).append(trajectory.reward)
    return {name: sum(values) / len(values) for name, values in rewards.items()}


def _means(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every value over those that have it."""
    names = sorted({name for values in measured for name in values})
    by_name = {name: [values[name] for values in measured if name in values] for name in names}
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def _views(
    order: GroupOrder, task: Task, episodes: list[Episode], verdict: Verdict, version: int, decode: Decode
) -> list[EpisodeView]:
    """Every episode of a held-out group, where that was ordered; of a group that cannot be trained on, one example."""
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
        completion=_everything(episode, decode) or _readable(episode.completion) or _sampled(episode, decode),
        reward=whole_return(episode),
        stop=episode.stop,
        version=version,
    )


def _everything(episode: Episode, decode: Decode) -> str:
    """All that was said, by role, where the completion is only the last answer of several."""
    whole_talk = isinstance(episode.completion, list) and len(episode.completion) > 1
    return "" if whole_talk or len(episode.requests) < 2 else _sampled(episode, decode, by_role=True)


def _sampled(episode: Episode, decode: Decode, by_role: bool = False) -> str:
    """What follows the prompt in every trajectory."""
    if not by_role:
        return "\n".join(decode(_after_prompt(kept)) for kept in episode.trajectories if kept.mask.any())
    return "\n".join(f"[{kept.role}] {decode(_after_prompt(kept))}" for kept in episode.trajectories if kept.mask.any())


def _after_prompt(trajectory: Trajectory) -> list[int]:
    ids: list[int] = trajectory.tokens[int(trajectory.mask.argmax()) :].tolist()
    return ids


def _readable(completion: str | list[Message]) -> str:
    """A lone answer needs nobody's name before it."""
    if isinstance(completion, list) and len(completion) == 1 and completion[0].get("role") == "assistant":
        return str(completion[0].get("content"))
    return as_text(completion)
