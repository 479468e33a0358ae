"""Converts what a data producer returned to the tasks of one round.

    rows with a prompt ────────────────────────────▶ Task
    rows with completion_ids, one per attempt ─────▶ Task with episodes, one per row of the same prompt
    Task, or a row with a list of episodes ────────▶ Task with these episodes

Columns of a finished attempt have the names that TRL gives them:

    prompt_ids, prompt_mask                    token ids of the prompt, and which of them are not padding
    completion_ids, completion_mask            token ids of the completion; its mask ends where padding begins
    tool_mask                                  which tokens of the completion the policy sampled; default: all
    logprobs or sampling_per_token_logps       one per token of the completion
    versions                                   policy version, for all tokens or for each; default: the newest
    reward, rewards                            total, and parts by name; without both, the run's functions grade
    prompt, completion, stop                   text or messages, for reward functions and display, and the stop reason
    extra                                      dict of further columns for reward functions, which may differ in a group
    group, id                                  which rows are attempts at the same prompt; default: adjacent rows with
                                               the same prompt_ids

Tokens that `completion_mask` excludes before its last included token are observed, like tool results. Everything
invalid is a `BadInput` that names the round, the row and the column.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from outpace.algorithms.token_advantages import trajectory_problem
from outpace.errors import BadInput, one_line
from outpace.tasks.dataset import Dataset, check_rows
from outpace.tasks.producers import RolloutDataset
from outpace.types import OBSERVED, Episode, Task, Trajectory, Version

log = logging.getLogger(__name__)

SETTING = "tasks.producer"

LOGPROB_COLUMNS = ("logprobs", "sampling_per_token_logps")

ROLLOUT_COLUMNS = {
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", *LOGPROB_COLUMNS, "versions"),
    *("reward", "rewards", "completion", "stop", "group", "extra"),
    # what the learner computes itself
    *("advantages", "old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio", "num_items_in_batch"),
}
"""Columns of finished attempts that do not become columns of the task."""


@dataclass
class _Item:
    """A task of the round: its row, and its finished attempts if there are any."""

    number: int  # of its first row
    row: dict[str, Any]
    episodes: list[Episode] = field(default_factory=list)


LOGPROB_ROUNDING = 1e-3
"""How far a logprob may exceed 0 because of rounding."""


@dataclass(frozen=True)
class _Row:
    round: int
    number: int
    values: Mapping[str, Any]

    def bad(self, problem: str) -> BadInput:
        return BadInput(f"{SETTING}: round {self.round} row {self.number} {problem}")

    def array(self, column: str, kinds: str, length: int | None = None) -> NDArray[Any] | None:
        """Return a column as a one-dimensional array with a dtype of these kinds, or None if it is absent."""
        value = self.values.get(column)
        if value is None:
            return None
        try:
            array = _as_array(value)
        except ValueError:
            raise self.bad(f"has {column} that is not a list of numbers") from None
        if column == "versions" and array.ndim == 0 and length is not None:
            array = np.full(length, array)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
            wanted = {"iu": "integers", "biu": "0 and 1"}.get(kinds, "numbers")
            raise self.bad(f"has {column} of type {array.dtype}, {array.ndim}-dimensional; use a list of {wanted}")
        if length is not None and len(array) != length:
            tokens = "prompt_ids" if column == "prompt_mask" else "completion_ids"
            raise self.bad(f"has {len(array)} {column} for {length} {tokens}")
        return array

    def tokens(self, column: str, mask: NDArray[np.bool_] | None) -> NDArray[np.int32]:
        ids = self.array(column, "iu")
        if ids is None:
            raise self.bad(f"has completion_ids but no {column}")
        kept = ids if mask is None else ids[mask]
        if not len(kept):
            raise self.bad(f"has no {column}" + " that its mask includes" * bool(len(ids)))
        if kept.min() < 0 or kept.max() > np.iinfo(np.int32).max:
            raise self.bad(f"has the token id {kept.min() if kept.min() < 0 else kept.max()} in {column}")
        return kept.astype(np.int32)

    def mask(self, column: str, length: int) -> NDArray[np.bool_] | None:
        mask = self.array(column, "biu", length)
        return None if mask is None else mask != 0

    def number_of(self, column: str, value: Any) -> float:
        plain = _plain(value)
        if not isinstance(plain, Real) or not math.isfinite(plain):
            raise self.bad(f"has a {column} that is not a finite number: {one_line(repr(plain), 60)}")
        return float(plain)


UNKNOWN_PROMPT = "?"
"""Placeholder with which finished attempts without a `prompt` pass the row check. Their task has an empty prompt, which
the worker replaces with the text of `prompt_ids`."""


def tasks_of(dataset: object, round: int, version: Version, graded: bool = True) -> list[Task]:
    """Convert the dataset that `produce` returned to the tasks of a round. `version` is the newest policy version: a
    newer token raises `BadInput`, and tokens without a version get it. Without `graded`, an episode's reward counts
    even if it is 0."""
    items: dict[Hashable, _Item] = {}
    for row in _rows(dataset, round):
        if "episodes" in row.values:
            items[row.number] = _Item(row.number, _task_row(row), _given_episodes(row, version, graded))
        elif row.values.get("completion_ids") is not None:
            item = items.setdefault(_attempt_key(row, items), _Item(row.number, _task_row(row)))
            item.episodes.append(_episode(row, version))
            _check_same_task(row, item)
        else:
            items[row.number] = _Item(row.number, _task_row(row))
    found = list(items.values())
    source = Dataset(
        [
            item.row | {"prompt": UNKNOWN_PROMPT} if item.episodes and not item.row.get("prompt") else item.row
            for item in found
        ],
        name=f"round-{round}",
        duplicate_ids="number",
        setting=SETTING,
        locate=lambda index: f"row {found[index].number}",
        source=f"round {round}",
    )
    return [
        msgspec.structs.replace(source[index], prompt=item.row.get("prompt") or "", episodes=item.episodes)
        for index, item in enumerate(found)
    ]


def _no_data(round: int) -> str:
    return f"{SETTING}: produce returned no data for round {round}; to end the tasks, set producer.max_rollouts"


def _rows(dataset: object, round: int) -> Iterator[_Row]:
    if dataset is None:
        raise BadInput(_no_data(round))
    if isinstance(dataset, Mapping):  # columns
        try:
            dataset = RolloutDataset(dataset)
        except ValueError as error:
            raise BadInput(f"{SETTING}: round {round}: {one_line(error)}") from None
    rows = check_rows(dataset, f"{SETTING}: round {round}")
    if not len(rows):
        raise BadInput(_no_data(round))
    for number in range(len(rows)):
        row = rows[number]
        if isinstance(row, Task):
            row = row.columns | {"id": row.id, "prompt": row.prompt, "episodes": row.episodes}
        if not isinstance(row, Mapping):
            raise _Row(round, number, {}).bad(f"is {one_line(type(row).__name__, 60)}, not a dict or a Task")
        yield _Row(round, number, row)


def _task_row(row: _Row) -> dict[str, Any]:
    """Return id, prompt and columns of the task."""
    finished = row.values.get("completion_ids") is not None
    left_out = {"episodes"} | (ROLLOUT_COLUMNS if finished else set())
    return {str(name): _plain(value) for name, value in row.values.items() if name not in left_out}


def _attempt_key(row: _Row, items: Mapping[Hashable, _Item]) -> Hashable:
    """Return a key that is the same for all rows of a task."""
    for column in ("group", "id"):
        value = _plain(row.values.get(column))
        if value is not None:
            if isinstance(value, Hashable):
                return column, value
            raise row.bad(f"has a {column} that is neither text nor a number")
    prompt = row.tokens("prompt_ids", _prompt_mask(row)).tobytes()
    newest = next(reversed(items), None)
    if isinstance(newest, tuple) and newest[:2] == ("prompt_ids", prompt):
        return newest
    return "prompt_ids", prompt, row.number


def _prompt_mask(row: _Row) -> NDArray[np.bool_] | None:
    ids = row.array("prompt_ids", "iu")
    return None if ids is None else row.mask("prompt_mask", len(ids))


# ---------------------------------------------------------------------------------------------------------- attempts


def _episode(row: _Row, version: Version) -> Episode:
    stop, completion = row.values.get("stop"), _plain(row.values.get("completion"))
    if not isinstance(completion, str | list | None):
        raise row.bad(f"has a completion of type {type(completion).__name__}; use text or chat messages")
    rewards, reward = _rewards(row)
    extra = row.values.get("extra") or {}
    if not isinstance(extra, Mapping):
        raise row.bad(f"has an extra of type {type(extra).__name__}; use a dict of columns")
    return Episode(
        [_trajectory(row, version)],
        completion=completion or "",
        rewards=rewards,
        reward=reward,
        stop="stop" if stop is None else str(stop),
        extra=_plain(extra),
    )


def _trajectory(row: _Row, version: Version) -> Trajectory:
    prompt = row.tokens("prompt_ids", _prompt_mask(row))
    ids = row.array("completion_ids", "iu")
    length = 0 if ids is None else len(ids)
    mask = row.mask("completion_mask", length)
    real = np.ones(length, np.bool_) if mask is None else mask
    end = int(np.flatnonzero(real)[-1]) + 1 if real.any() else 0
    completion = row.tokens("completion_ids", np.arange(length) < end)
    tools = row.mask("tool_mask", length)
    sampled = (real if tools is None else real & tools)[:end]
    if not sampled.any():
        raise row.bad("has a tool_mask without any sampled token")
    observed = np.zeros(len(prompt), np.bool_)
    trajectory = Trajectory(
        tokens=np.concatenate([prompt, completion]),
        mask=np.concatenate([observed, sampled]),
        logprobs=np.concatenate([np.zeros(len(prompt)), np.where(sampled, _logprobs(row, length)[:end], 0.0)]).astype(
            np.float32
        ),
        versions=np.concatenate(
            [np.full(len(prompt), OBSERVED), np.where(sampled, _versions(row, length, version)[:end], OBSERVED)]
        ).astype(np.int32),
    )
    return _checked(row, trajectory, version)


def _logprobs(row: _Row, length: int) -> NDArray[Any]:
    for column in LOGPROB_COLUMNS:
        found = row.array(column, "fiu", length)
        if found is not None and len(found) and found.max() > LOGPROB_ROUNDING:
            raise row.bad(f"has a {column} of {found.max():.3g}; a logprob is not above 0")
        if found is not None:
            return found
    raise row.bad("has completion_ids but no logprobs: pass the logprob of each token when it was sampled")


def _versions(row: _Row, length: int, version: Version) -> NDArray[Any]:
    found = row.array("versions", "iu", length)
    if found is None:
        _say_versions_are_assumed()
        return np.full(length, version)
    return found


@cache
def _say_versions_are_assumed() -> None:
    """Warn once per process."""
    log.warning("finished rollouts have no versions: the version of the policy when they were produced is assumed")


def _rewards(row: _Row) -> tuple[dict[str, float], float]:
    """Return the parts and the total of the rewards."""
    parts = row.values.get("rewards")
    total = row.values.get("reward")
    if parts is not None and not isinstance(parts, Mapping):
        parts, total = None, parts if total is None else total
    named = {str(name): row.number_of("rewards", value) for name, value in (parts or {}).items() if value is not None}
    if total is None:
        return named, sum(named.values())
    reward = row.number_of("reward", total)
    return named or {"rollout": reward}, reward


def _check_same_task(row: _Row, item: _Item) -> None:
    """Raise if the row differs from the first attempt in task columns or in having rewards."""
    same = f"differs from row {item.number} of the same prompt"
    if bool(item.episodes[0].rewards) != bool(item.episodes[-1].rewards):
        raise row.bad(f"{same}: only one of them has a reward")
    own = _task_row(row)
    for column in sorted(own.keys() | item.row.keys()):
        if own.get(column) != item.row.get(column):
            raise row.bad(f"{same} in {column}; give other prompts another group, or leave the column out")


def _given_episodes(row: _Row, version: Version, graded: bool) -> list[Episode]:
    """Return the episodes of a task that has them already."""
    given = row.values["episodes"]
    if not isinstance(given, list | tuple) or not all(isinstance(episode, Episode) for episode in given):
        raise row.bad("has episodes that are not a list of Episode")
    for episode in given:
        if not episode.trajectories and episode.error is None:
            raise row.bad("has episodes without trajectories")
        for values in (episode.rewards, episode.metrics, {"reward": episode.reward}):
            for name, value in values.items():
                row.number_of(name, value)
    return [
        msgspec.structs.replace(
            episode,
            trajectories=[_checked(row, kept, version) for kept in episode.trajectories],
            rewards=episode.rewards or ({} if graded else {"rollout": episode.reward}),
        )
        for episode in given
    ]


def _checked(row: _Row, trajectory: Trajectory, version: Version) -> Trajectory:
    """Check a trajectory and cast its arrays to the dtypes of sampled ones."""
    if problem := trajectory_problem(trajectory):
        raise row.bad(f"cannot be trained on: {problem}")
    newest = int(trajectory.versions[trajectory.mask].max(initial=OBSERVED))
    if newest > version:
        raise row.bad(f"has the version {newest} in versions, newer than the policy, which has version {version}")
    arrays = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32, "turn_rewards": np.float32}
    for name, dtype in arrays.items():
        if not np.can_cast(getattr(trajectory, name).dtype, dtype, "same_kind"):
            raise row.bad(f"has {name} of type {getattr(trajectory, name).dtype}")
    cast = {name: getattr(trajectory, name).astype(dtype, copy=False) for name, dtype in arrays.items()}
    return msgspec.structs.replace(trajectory, **cast)


# ------------------------------------------------------------------------------------------------------------ values


def _as_array(value: Any) -> NDArray[Any]:
    """Return a tensor, array, list or number as an array."""
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()  # NumPy has no bfloat16
    return np.asarray(value)


def _plain(value: Any) -> Any:
    """Convert a value to JSON types: tensors and arrays become lists and numbers."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value
