"""The tasks of the package reasoning-gym, by name: `tasks.name = "reasoning_gym/chain_sum"`.

    index ─▶ generated, again and again ─▶ the first question whose hash is of this split ─▶ Task

Invariants
- No question is in both splits: the split of a question is a hash of its text. Beside that, the generators of the two
  splits never share a seed.
- Task `index` depends on (name, options, split, seed, index) and on nothing else. It is made when it is asked for, and
  nothing is kept of it. A generator with few questions repeats them, under other ids.
- Columns are plain JSON types, with all that the package's own grader needs to judge an answer.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import blake2b
from typing import Any

import msgspec

from outpace.config import Config
from outpace.errors import BadInput, one_line
from outpace.protocols import TaskSource
from outpace.references import nearest
from outpace.tasks.problems import Split, split_by_hash
from outpace.types import Task
from outpace.wording import plural

FAMILY = "reasoning_gym"
SIZE, HELDOUT_SIZE = 5000, 500
HELDOUT_ONE_IN = 4
"""Questions are cheap, and every held-out task costs as many as this on average before one is of its split."""

SPARE = 4
"""How many questions of one generator an index may try. A few generators make all they will ever have at the start."""
GENERATORS = 32
SEEDS_PER_SPLIT = 2**30


def open_reasoning_gym(config: Config) -> tuple[TaskSource, TaskSource]:
    """Training and held-out tasks of the generator that `tasks.name` names after the slash."""
    _, _, name = (config.tasks.name or "").partition("/")
    options = dict(config.tasks.options)
    size, seed = options.pop("size", SIZE), options.pop("seed", config.run.seed)
    for key, value, least in (("size", size, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or value < least:
            raise BadInput(f"tasks.options: {key} should be a whole number, at least {least}, not {one_line(value)}")
    heldout = Generated(name, "heldout", config.eval.seed, HELDOUT_SIZE, options)
    return Generated(name, "train", seed, size, options), heldout


class Generated:
    """The tasks of one split, made on demand. Threads may share it; what the package does is done by one at a time."""

    def __init__(self, name: str, split: Split, seed: int, size: int, options: Mapping[str, Any]) -> None:
        self._arguments = (name, split, seed, size, dict(options))
        self._name, self._split, self._size, self._options = name, split, size, dict(options)
        self._first_seed = _first_seed(name, split, seed)
        self._generators: list[Any] = []
        self._lock = threading.Lock()
        self[0]  # whatever is wrong with the options is found now

    def __len__(self) -> int:
        return self._size

    def __reduce__(self) -> tuple[Any, ...]:
        return Generated, self._arguments

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self._size:
            raise IndexError(f"{self._name} has {plural(self._size, 'task')}; there is no task {index}")
        with self._lock:
            entry = next((one for one in self._tried(index) if self._is_mine(one["question"])), None)
        if entry is None:
            which = "held-out" if self._split == "heldout" else "training"
            raise BadInput(f"tasks.options: {self._name} makes too few different questions to have {which} ones")
        return Task(f"{FAMILY}/{self._name}/{self._split}/{index}", entry["question"], self._columns(entry))

    def _tried(self, index: int) -> Iterator[dict[str, Any]]:
        for number in range(GENERATORS):
            if number == len(self._generators):
                self._generators.append(self._generator(number))
            for attempt in range(SPARE):
                yield self._generators[number][index + attempt * self._size]

    def _generator(self, number: int) -> Any:
        seed = (self._first_seed + number * SPARE * self._size) % SEEDS_PER_SPLIT
        if self._split == "heldout":
            seed += SEEDS_PER_SPLIT
        return make_generator(self._name, seed=seed, size=SPARE * self._size, **self._options)

    def _is_mine(self, question: str) -> bool:
        return split_by_hash(f"{self._name}/{question}", HELDOUT_ONE_IN) == self._split

    def _columns(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {
            "answer": plain(entry["answer"]),
            "metadata": plain(entry["metadata"]),
            "source": self._name,
            "options": self._options,
        }


def _first_seed(name: str, split: Split, seed: int) -> int:
    """Spread out: the generators add index and seed, so that neighbouring seeds would give nearly the same tasks."""
    digest = blake2b(f"{name}/{split}/{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEEDS_PER_SPLIT


# -------------------------------------------------------------------------------------------------------- the package


def make_generator(name: str, **options: Any) -> Any:
    """A data set of the package, configured; whatever it says against that is a one-line `BadInput`."""
    dataset, settings = _known()[_checked_name(name)]
    fields = [field.name for field in dataclasses.fields(settings)]
    unknown = [option for option in options if option not in fields]
    if unknown:
        close = nearest(unknown[0], fields)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(fields)}"
        raise BadInput(f"tasks.options: {name} has no option {unknown[0]}; {hint}")
    try:
        return dataset(config=settings(**options))
    # The boundary to the package, where wrong values raise assertions, type errors and more.
    except Exception as error:
        raise BadInput(f"tasks.options: {name}: {one_line(error) or type(error).__name__}") from error


def _checked_name(name: str) -> str:
    known = _known()
    if name in known:
        return name
    close = nearest(name, known)
    hint = f"did you mean {FAMILY}/{close[0]}?" if close else f"write one as {FAMILY}/chain_sum"
    raise BadInput(f"tasks.name: reasoning-gym has no task {name!r}; {hint}")


@cache
def _known() -> dict[str, tuple[Any, Any]]:
    """Class and settings of every data set, by name; without `composite`, whose parts can be named themselves."""
    try:
        import reasoning_gym  # noqa: F401, importing it registers them
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise BadInput(
            f"tasks.name: {FAMILY}/… needs the package reasoning-gym: pip install 'outpace[reasoning-gym]'"
        ) from None
    return {name: kinds for name, kinds in DATASETS.items() if name != "composite"}


def plain(value: Any) -> Any:
    """The value in JSON types: tuples and arrays become lists, keys text, and what JSON has no notion of its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return plain(value.tolist())
    try:
        return msgspec.to_builtins(value, builtin_types=(bool, int, float, str), enc_hook=str)
    except msgspec.ValidationError:
        return str(value)
