"""Tasks of the package reasoning-gym, by name: `tasks.name = "reasoning_gym/chain_sum"`.

    index ─▶ generate candidate questions ─▶ the first one whose hash is in this split ─▶ Task

Invariants
- No question is in both splits: the split of a question is a hash of its text. In addition, the generators of the two
  splits never share a seed.
- Task `index` depends only on (name, options, split, seed, index). It is generated on access and not stored. A
  generator with few questions repeats them under other ids.
- Columns are plain JSON types and contain all that the package's own grader needs.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec

from outpace.config import Config
from outpace.errors import BadInput, one_line, plural
from outpace.protocols import TaskSource
from outpace.runtime.references import closest_names
from outpace.tasks.generated import Split, split_by_hash, stable_hash
from outpace.types import Task

PREFIX = "reasoning_gym"
SIZE, HELDOUT_SIZE = 5000, 500
HELDOUT_ONE_IN = 4
"""One question in this many is held out. Finding one takes as many generated questions on average, which are cheap."""

CANDIDATES_PER_GENERATOR = 4
"""Questions that each index tries per generator. Kept small: some generators create all their questions up front."""
MAX_GENERATORS = 32
SEEDS_PER_SPLIT = 2**30


def open_reasoning_gym(config: Config) -> tuple[TaskSource, TaskSource]:
    """Return the training and held-out tasks of the generator named after the slash in `tasks.name`."""
    _, _, name = (config.tasks.name or "").partition("/")
    options = dict(config.tasks.options)
    size, seed = options.pop("size", SIZE), options.pop("seed", config.run.seed)
    for key, value, least in (("size", size, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or value < least:
            raise BadInput(f"tasks.options: {key} should be an integer of at least {least}, not {one_line(value)}")
    heldout = ReasoningGymTasks(name, "heldout", config.eval.seed, HELDOUT_SIZE, options)
    return ReasoningGymTasks(name, "train", seed, size, options), heldout


class ReasoningGymTasks:
    """The tasks of one split, generated on access. Thread-safe: a lock serializes calls into the package."""

    def __init__(self, name: str, split: Split, seed: int, size: int, options: Mapping[str, Any]) -> None:
        self._arguments = (name, split, seed, size, dict(options))
        self._name, self._split, self._size, self._options = name, split, size, dict(options)
        # Hashed: generators add index and seed, so neighboring seeds would give nearly the same tasks.
        self._first_seed = stable_hash(f"{name}/{split}/{seed}") % SEEDS_PER_SPLIT
        self._generators: list[Any] = []
        self._lock = threading.Lock()
        self[0]  # report invalid options now

    def __len__(self) -> int:
        return self._size

    def __reduce__(self) -> tuple[Any, ...]:
        return ReasoningGymTasks, self._arguments

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self._size:
            raise IndexError(f"{self._name}: task {index} is out of range ({plural(self._size, 'task')})")
        with self._lock:
            entry = next((each for each in self._candidates(index) if self._in_split(each["question"])), None)
        if entry is None:
            which = "held-out" if self._split == "heldout" else "training"
            raise BadInput(f"tasks.options: {self._name} has too few questions for {which} tasks; change them")
        return Task(f"{PREFIX}/{self._name}/{self._split}/{index}", entry["question"], self._columns(entry))

    def _candidates(self, index: int) -> Iterator[dict[str, Any]]:
        for number in range(MAX_GENERATORS):
            if number == len(self._generators):
                self._generators.append(self._generator(number))
            for attempt in range(CANDIDATES_PER_GENERATOR):
                yield self._generators[number][index + attempt * self._size]

    def _generator(self, number: int) -> Any:
        seed = (self._first_seed + number * CANDIDATES_PER_GENERATOR * self._size) % SEEDS_PER_SPLIT
        if self._split == "heldout":
            seed += SEEDS_PER_SPLIT
        return make_generator(self._name, seed=seed, size=CANDIDATES_PER_GENERATOR * self._size, **self._options)

    def _in_split(self, question: str) -> bool:
        return split_by_hash(f"{self._name}/{question}", HELDOUT_ONE_IN) == self._split

    def _columns(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {
            "answer": to_json_types(entry["answer"]),
            "metadata": to_json_types(entry["metadata"]),
            "source": self._name,
            "options": self._options,
        }


# -------------------------------------------------------------------------------------------------- reasoning-gym API


def make_generator(name: str, **options: Any) -> Any:
    """Return a configured dataset of the package. Any error becomes a one-line `BadInput`."""
    dataset, settings = _known()[_checked_name(name)]
    fields = [field.name for field in dataclasses.fields(settings)]
    unknown = [option for option in options if option not in fields]
    if unknown:
        close = closest_names(unknown[0], fields)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(fields)}"
        raise BadInput(f"tasks.options: {name} has no option {unknown[0]}; {hint}")
    try:
        return dataset(config=settings(**options))
    # The package raises assertions, type errors and others for invalid values.
    except Exception as error:
        raise BadInput(f"tasks.options: {name}: {one_line(error) or type(error).__name__}") from error


def _checked_name(name: str) -> str:
    known = _known()
    if name in known:
        return name
    close = closest_names(name, known)
    hint = f"did you mean {PREFIX}/{close[0]}?" if close else f"name one, such as {PREFIX}/chain_sum"
    raise BadInput(f"tasks.name: reasoning-gym has no task {name!r}; {hint}")


@cache
def _known() -> dict[str, tuple[Any, Any]]:
    """Return class and settings class of every dataset, by name. `composite` is excluded: name its members directly."""
    try:
        import reasoning_gym  # noqa: F401, registers the datasets
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise BadInput(
            f"tasks.name: {PREFIX}/… needs the package reasoning-gym: pip install 'outpace[reasoning-gym]'"
        ) from None
    return {name: kinds for name, kinds in DATASETS.items() if name != "composite"}


def to_json_types(value: Any) -> Any:
    """Convert a value to JSON types: tuples and arrays become lists, keys and all other values become text."""
    if isinstance(value, Mapping):
        return {str(key): to_json_types(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_types(each) for each in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return to_json_types(value.tolist())
    try:
        return msgspec.to_builtins(value, builtin_types=(bool, int, float, str), enc_hook=str)
    except msgspec.ValidationError:
        return str(value)
