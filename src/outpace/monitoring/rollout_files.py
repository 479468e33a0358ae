"""Recorded rollouts (`rollouts/` in the run directory): prompts, completions, rewards and outcomes.

    rollouts/step-000012.jsonl              groups that step 12 was trained on, up to `run.save_rollouts` of them
    rollouts/filtered/group-000034.jsonl    a group without learning signal; likewise failed/ and dropped/
    rollouts/evals/step-000012.jsonl        attempts in the evaluation of version 12, up to `eval.save_completions`

Each line is one attempt. Workers write the files of training, so that neither text nor tokens pass through the
controller; `outpace.read_rollouts` and `outpace show` read them, even while the run is active. The controller writes
the files of evaluations, with text only (`EpisodeView`).

Invariants
- A file appears complete, by a rename, and never changes afterwards.
- All files together take at most `run.rollouts_mb`, plus up to one group per worker: the oldest are deleted.
- `roll_back(c)` keeps the files of steps up to c and of groups finalized by then.
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

from outpace.config.load import read_resolved
from outpace.errors import BadInput
from outpace.monitoring.line_file import read_lines, write_atomically
from outpace.types import OBSERVED, Bools, EpisodeView, Floats, Ints

logger = logging.getLogger(__name__)

ROLLOUTS_FOLDER = "rollouts"

AttemptOutcome = Literal["trained", "filtered", "failed", "dropped"]
OUTCOMES: tuple[AttemptOutcome, ...] = get_args(AttemptOutcome)
UNTRAINED: tuple[AttemptOutcome, ...] = ("filtered", "failed", "dropped")

EVALS = "evals"
SHARES = {"trained": 0.5, "filtered": 0.125, "failed": 0.125, "dropped": 0.125, EVALS: 0.125}
"""Shares of `run.rollouts_mb`. They are separate so that many filtered groups cannot displace the failed ones."""

_NUMBERED = re.compile(r"(step|group)-(\d+)\.jsonl")


class RecordedTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Consecutive tokens from one source: `assistant`, `prompt`, `tool`, `user`, `observation`, …

    Only sampled turns have logprobs, versions and advantages. A single number stands for a list of equal values."""

    source: str
    text: str
    tokens: list[int]
    sampled: bool = False
    logprobs: list[float | None] = []
    versions: int | list[int] = OBSERVED
    advantages: float | list[float] = 0.0


class RecordedTrajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """One exact token sequence. The array properties have one entry per token."""

    turns: list[RecordedTurn]
    role: str = "policy"
    reward: float | None = None  # of this trajectory; None: the reward of the attempt applies
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
        """Logprobs at sampling time; 0 for tokens the policy did not sample."""
        return self._per_token(lambda turn: [_number(each) for each in turn.logprobs] if turn.sampled else 0.0)

    @property
    def versions(self) -> Ints:
        """Policy versions that sampled the tokens; -1 for tokens the policy did not sample."""
        return self._per_token(lambda turn: turn.versions, np.int32)

    @property
    def advantages(self) -> Floats:
        """Advantages within the group, before normalization over the batch."""
        return self._per_token(lambda turn: turn.advantages)

    def _per_token(self, value: Any, dtype: type = np.float32) -> np.ndarray[Any, Any]:
        parts: list[np.ndarray[Any, Any]] = [
            np.broadcast_to(np.asarray(value(turn), dtype=dtype), len(turn.tokens)) for turn in self.turns
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


class RecordedAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt at a task: a line of a file in `rollouts/`."""

    outcome: AttemptOutcome
    group: int
    attempt: int  # within its group
    task: int  # index of the task
    task_id: str
    epoch: int
    reason: str = ""  # why it was not trained on
    step: int | None = None  # step that trained it, or by which it was finalized without training
    reward: float | None = None  # total; None: not scored
    rewards: dict[str, float] = {}  # by reward function, unweighted
    advantage: float | None = None  # mean over sampled tokens; None: not trained on, or computed by a critic
    oldest: int = OBSERVED  # oldest version among the sampled tokens; -1: nothing was sampled
    newest: int = OBSERVED
    stop: str = "stop"
    trajectories: list[RecordedTrajectory] = []
    task_prompt: str = ""  # set only if the attempt made no request to the policy
    extra: dict[str, Any] = {}  # columns of `log_extra`

    @property
    def prompt(self) -> str:
        """The first prompt, as rendered by the chat template."""
        first = self.trajectories[0].turns[:1] if self.trajectories else []
        return first[0].text if first and not first[0].sampled else self.task_prompt


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON cannot represent infinity; it is written as null


# ------------------------------------------------------------------------------------------------------------ writing


class RolloutWriter:
    """Writes the files of one worker; `writers` is the number of workers. Thread-safe, but blocking: do not call it on
    an event loop."""

    def __init__(self, run: Path, max_bytes: int, writers: int = 1) -> None:
        root = run / ROLLOUTS_FOLDER
        self._steps = _BoundedFolder(root, int(max_bytes * SHARES["trained"]), writers)
        self._untrained = {
            outcome: _BoundedFolder(root / outcome, int(max_bytes * SHARES[outcome]), writers) for outcome in UNTRAINED
        }
        self._evaluations = _BoundedFolder(root / EVALS, int(max_bytes * SHARES[EVALS]), writers)

    def step(self, step: int, attempts: Sequence[RecordedAttempt]) -> None:
        self._steps.write(f"step-{step:06d}.jsonl", attempts)

    def untrained(self, outcome: AttemptOutcome, group: int, attempts: Sequence[RecordedAttempt]) -> None:
        self._untrained[outcome].write(f"group-{group:06d}.jsonl", attempts)

    def evaluation(self, version: int, views: Sequence[EpisodeView]) -> None:
        if views:
            self._evaluations.write(f"step-{version:06d}.jsonl", views)


class _BoundedFolder:
    """A folder of files whose total size is bounded, shared by `writers` processes."""

    def __init__(self, path: Path, limit: int, writers: int) -> None:
        self._path = path
        self._limit = limit
        self._trim_after = limit // (2 * writers)  # bytes written between two trims
        self._added = self._trim_after  # trim at the first write: the existing size is unknown
        self._lock = threading.Lock()

    def write(self, name: str, attempts: Sequence[RecordedAttempt | EpisodeView]) -> None:
        data = json_lines(attempts)
        self._path.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path / name, data, durable=False)
        with self._lock:
            self._added += len(data)
            if self._added >= self._trim_after:
                self._added = 0
                self._trim()

    def _trim(self) -> None:
        """Delete the oldest files until the rest takes at most half of the limit. The newest file is always kept."""
        total = 0
        for index, path in enumerate(reversed(_numbered(self._path))):
            total += _size(path)
            if index and total > self._limit // 2:
                path.unlink(missing_ok=True)


def json_lines(attempts: Sequence[RecordedAttempt | EpisodeView]) -> str:
    return b"".join(msgspec.json.encode(attempt) + b"\n" for attempt in attempts).decode()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another worker has deleted it
        return 0


def roll_back(run: Path, step: int, finalized: Collection[int]) -> None:
    """Delete the files of steps after `step`, of groups not in `finalized`, and temporary files left by a kill."""
    root = run / ROLLOUTS_FOLDER
    for folder in (root, *(root / name for name in (*UNTRAINED, EVALS))):
        for path in folder.glob(".*"):
            path.unlink()
    for path in (*_numbered(root), *_numbered(root / EVALS)):
        if _number_of(path) > step:
            path.unlink()
    for outcome in UNTRAINED:
        for path in _numbered(root / outcome):
            if _number_of(path) not in finalized:
                path.unlink()


# ------------------------------------------------------------------------------------------------------------ reading


def recorded_steps(run: Path) -> list[int]:
    return [_number_of(path) for path in _numbered(run / ROLLOUTS_FOLDER)]


def read_step(run: Path, step: int) -> Iterator[RecordedAttempt]:
    return _read(run / ROLLOUTS_FOLDER / f"step-{step:06d}.jsonl")


def untrained_groups(run: Path) -> dict[int, AttemptOutcome]:
    """Return the outcome of each recorded group that was not trained on, ordered by group number."""
    found = {_number_of(path): outcome for outcome in UNTRAINED for path in _numbered(run / ROLLOUTS_FOLDER / outcome)}
    return dict(sorted(found.items()))


def read_group(run: Path, group: int, outcome: AttemptOutcome) -> Iterator[RecordedAttempt]:
    """Read a group that was not trained on."""
    return _read(run / ROLLOUTS_FOLDER / outcome / f"group-{group:06d}.jsonl")


def steps_of_untrained_groups(run: Path) -> dict[int, int]:
    """Map the number of each group that was not trained on to the step by which it was finalized (batches.jsonl)."""
    return {
        visit["group"]: line["step"]
        for line in read_lines(run / "batches.jsonl")
        for visit in line.get("settled", [])
        if "group" in visit
    }


def _read(path: Path) -> Iterator[RecordedAttempt]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:  # deleted by an active run to stay within its limit
        return
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=RecordedAttempt)
        except msgspec.DecodeError as error:
            logger.warning("%s:%d: skipped a line that is not a recorded attempt: %s", path, number, error)


def _numbered(folder: Path) -> list[Path]:
    """Return the step or group files in a folder, sorted by number."""
    return sorted((path for path in folder.glob("*.jsonl") if _NUMBERED.fullmatch(path.name)), key=_number_of)


def _number_of(path: Path) -> int:
    match = _NUMBERED.fullmatch(path.name)
    assert match is not None
    return int(match[2])


def read_rollouts(
    run: str | Path, *, step: int | None = None, outcome: str | None = None, task: str | int | None = None
) -> Iterator[RecordedAttempt]:
    """Iterate over the recorded attempts of a run: first those of each step in order, then those not trained on.

    `step` selects the attempts that a step was trained on, and those finalized without training by that step.
    `outcome` is `trained`, `filtered`, `failed` or `dropped`. `task` is a task id or index. Raises `BadInput`
    immediately if there is no run, or if it has no record of that step.
    """
    directory = Path(run)
    if not (directory / "config.toml").is_file():
        raise BadInput(f"{directory}: not a run directory, config.toml is missing")
    if outcome is not None and outcome not in OUTCOMES:
        raise BadInput(f"outcome: {outcome!r} is invalid; choose one of {', '.join(OUTCOMES)}")
    finalized = steps_of_untrained_groups(directory)
    if step is not None and step not in recorded_steps(directory) and step not in finalized.values():
        raise BadInput(f"{directory}: step {step} has no recorded rollouts; {describe_recorded_steps(directory)}")
    return _matching(directory, finalized, step, outcome, task)


def describe_recorded_steps(run: Path) -> str:
    """Describe which steps are recorded, or why none is."""
    steps = recorded_steps(run)
    if steps:
        return f"recorded steps: {len(steps)} between {steps[0]} and {steps[-1]}"
    if read_resolved(run).get("run", {}).get("save_rollouts") == 0:
        return "recording of steps is off (run.save_rollouts = 0)"
    return "no steps are recorded yet"


def _matching(
    run: Path, finalized: dict[int, int], step: int | None, outcome: str | None, task: str | int | None
) -> Iterator[RecordedAttempt]:
    for attempt in _all_attempts(run, finalized, step):
        has_task = task is None or task in (attempt.task_id, attempt.task, str(attempt.task))
        if has_task and outcome in (None, attempt.outcome):
            yield attempt


def _all_attempts(run: Path, finalized: dict[int, int], step: int | None) -> Iterator[RecordedAttempt]:
    for recorded in recorded_steps(run) if step is None else [step]:
        yield from read_step(run, recorded)
    for group, outcome in untrained_groups(run).items():
        if step in (None, finalized.get(group)):
            for attempt in read_group(run, group, outcome):
                yield msgspec.structs.replace(attempt, step=finalized.get(group))
