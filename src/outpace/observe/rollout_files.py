"""`rollouts/` in a run directory: what the policy was shown, what it sampled, and what became of it.

    rollouts/step-000012.jsonl              groups that step 12 was trained on, `run.show_rollouts` of them
    rollouts/filtered/group-000034.jsonl    a group with nothing to learn from; failed/ and dropped/ likewise

One line is one attempt. The workers write these files, so neither text nor tokens pass through the controller.

Invariants
- A file appears whole, by a rename, and is never changed afterwards.
- All of them together take no more than `run.rollouts_mb`, give or take one group per worker: the oldest are deleted.
- `roll_back(c)` leaves what belongs to the steps up to c and to the visits that those have settled.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from outpace.observe.linefile import write_atomically
from outpace.types import OBSERVED, Bools, Floats, Ints

logger = logging.getLogger(__name__)

FOLDER = "rollouts"

AttemptOutcome = Literal["trained", "filtered", "failed", "dropped"]
OUTCOMES: tuple[AttemptOutcome, ...] = get_args(AttemptOutcome)
UNTRAINED: tuple[AttemptOutcome, ...] = ("filtered", "failed", "dropped")

SHARES = {"trained": 0.625, "filtered": 0.125, "failed": 0.125, "dropped": 0.125}
"""Of `run.rollouts_mb`. Each outcome has its own, so that many filtered groups cannot displace the failed ones."""

_NUMBERED = re.compile(r"(step|group)-(\d+)\.jsonl")


class RecordedTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens that follow one another and have one source: `assistant`, `prompt`, `tool`, `user`, `observation`, …

    Only sampled turns have logprobs, versions and advantages. One number stands for a turn of equal ones."""

    source: str
    text: str
    tokens: list[int]
    sampled: bool = False
    logprobs: list[float | None] = []
    versions: int | list[int] = OBSERVED
    advantages: float | list[float] = 0.0


class RecordedTrajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """One exact token sequence. The arrays have one entry per token."""

    turns: list[RecordedTurn]
    role: str = "policy"
    reward: float | None = None  # its own; None: that of the attempt
    turn_rewards: list[float] = []

    @property
    def text(self) -> str:
        return "".join(turn.text for turn in self.turns)

    @property
    def tokens(self) -> Ints:
        return np.array([token for turn in self.turns for token in turn.tokens], dtype=np.int32)

    @property
    def mask(self) -> Bools:
        """True where the policy sampled the token."""
        return self._per_token(lambda turn: turn.sampled, np.bool_)

    @property
    def logprobs(self) -> Floats:
        """Those that the tokens were sampled with; 0 where the policy sampled nothing."""
        return self._per_token(lambda turn: [_number(each) for each in turn.logprobs] if turn.sampled else 0.0)

    @property
    def versions(self) -> Ints:
        """Those that sampled the tokens; -1 where the policy sampled nothing."""
        return self._per_token(lambda turn: turn.versions, np.int32)

    @property
    def advantages(self) -> Floats:
        """Those of the group, before anything is normalised over the batch."""
        return self._per_token(lambda turn: turn.advantages)

    def _per_token(self, value: Any, dtype: type = np.float32) -> np.ndarray[Any, Any]:
        parts: list[np.ndarray[Any, Any]] = [
            np.broadcast_to(np.asarray(value(turn), dtype=dtype), len(turn.tokens)) for turn in self.turns
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


class RecordedAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt at a task: a line of `rollouts/`."""

    outcome: AttemptOutcome
    group: int
    attempt: int  # within its group
    task: int  # index
    task_id: str
    epoch: int
    reason: str = ""  # why it was not trained on
    step: int | None = None  # that it was trained in, or by the end of which it was settled otherwise
    reward: float | None = None  # in all; None: it was not judged
    rewards: dict[str, float] = {}  # by function, unweighted
    advantage: float | None = None  # mean over the sampled tokens; None: not trained on, or a critic makes it
    oldest: int = OBSERVED  # version among the sampled tokens; -1: nothing was sampled
    newest: int = OBSERVED
    stop: str = "stop"
    trajectories: list[RecordedTrajectory] = []
    task_prompt: str = ""  # where the policy was asked nothing

    @property
    def prompt(self) -> str:
        """What the policy was shown first, as rendered by its chat template."""
        first = self.trajectories[0].turns[:1] if self.trajectories else []
        return first[0].text if first and not first[0].sampled else self.task_prompt


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON has no infinities


# ------------------------------------------------------------------------------------------------------------ writing


class RolloutWriter:
    """Writes the files of one worker; `writers` is how many workers there are. Call it from one thread at a time, or
    from several; not on an event loop."""

    def __init__(self, run: Path, max_bytes: int, writers: int = 1) -> None:
        root = run / FOLDER
        self._steps = _BoundedFolder(root, int(max_bytes * SHARES["trained"]), writers)
        self._untrained = {
            outcome: _BoundedFolder(root / outcome, int(max_bytes * SHARES[outcome]), writers) for outcome in UNTRAINED
        }

    def step(self, step: int, attempts: Sequence[RecordedAttempt]) -> None:
        self._steps.write(f"step-{step:06d}.jsonl", attempts)

    def untrained(self, outcome: AttemptOutcome, group: int, attempts: Sequence[RecordedAttempt]) -> None:
        self._untrained[outcome].write(f"group-{group:06d}.jsonl", attempts)


class _BoundedFolder:
    def __init__(self, path: Path, limit: int, writers: int) -> None:
        self._path = path
        self._limit = limit
        self._most_added = limit // (2 * writers)
        self._added = self._most_added  # what is there already is not known
        self._lock = threading.Lock()

    def write(self, name: str, attempts: Sequence[RecordedAttempt]) -> None:
        data = b"".join(msgspec.json.encode(attempt) + b"\n" for attempt in attempts)
        self._path.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path / name, data.decode(), durable=False)
        with self._lock:
            self._added += len(data)
            if self._added >= self._most_added:
                self._added = 0
                self._trim()

    def _trim(self) -> None:
        """Delete the oldest files until the rest takes half of the limit; the newest stays in any case."""
        total = 0
        for index, path in enumerate(reversed(_numbered(self._path))):
            total += _size(path)
            if index and total > self._limit // 2:
                path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another worker has deleted it
        return 0


def roll_back(run: Path, step: int, settled: Collection[int]) -> None:
    """Forget the steps after `step`, the groups that are not among the `settled`, and what a kill left unfinished."""
    root = run / FOLDER
    for folder in (root, *(root / outcome for outcome in UNTRAINED)):
        for path in folder.glob(".*"):
            path.unlink()
    for path in _numbered(root):
        if _number_of(path) > step:
            path.unlink()
    for outcome in UNTRAINED:
        for path in _numbered(root / outcome):
            if _number_of(path) not in settled:
                path.unlink()


# ------------------------------------------------------------------------------------------------------------ reading


def recorded_steps(run: Path) -> list[int]:
    return [_number_of(path) for path in _numbered(run / FOLDER)]


def read_step(run: Path, step: int) -> Iterator[RecordedAttempt]:
    return _read(run / FOLDER / f"step-{step:06d}.jsonl")


def untrained_groups(run: Path) -> dict[int, AttemptOutcome]:
    """What became of each recorded group that was not trained on, by number and in that order."""
    found = {_number_of(path): outcome for outcome in UNTRAINED for path in _numbered(run / FOLDER / outcome)}
    return dict(sorted(found.items()))


def read_group(run: Path, group: int, outcome: AttemptOutcome) -> Iterator[RecordedAttempt]:
    """Of a group that was not trained on."""
    return _read(run / FOLDER / outcome / f"group-{group:06d}.jsonl")


def _read(path: Path) -> Iterator[RecordedAttempt]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:  # a run that is going on has deleted it, to keep to its limit
        return
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=RecordedAttempt)
        except msgspec.DecodeError as error:
            logger.warning("%s:%d: not an attempt, skipped: %s", path, number, error)


def _numbered(folder: Path) -> list[Path]:
    """The files of steps or groups in a folder, by number."""
    return sorted((path for path in folder.glob("*.jsonl") if _NUMBERED.fullmatch(path.name)), key=_number_of)


def _number_of(path: Path) -> int:
    match = _NUMBERED.fullmatch(path.name)
    assert match is not None
    return int(match[2])
