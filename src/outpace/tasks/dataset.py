"""Datasets: tasks from JSONL and parquet files, Hugging Face datasets, or rows in memory.

A row is a mapping with a `prompt` (text or chat messages), an optional `id`, and further columns. `open_dataset` opens
the dataset that a config names. JSONL needs no extra package: one pass records the offset of each line, and a row is
read and parsed on access. Everything else goes through the optional package `datasets`, which memory-maps its tables.

Invariants
- Rows are read on access. Only an 8-byte hash of each id is kept, so memory stays flat.
- Ids are unique. A row without an `id` gets the id `<name>/<row>`.
- Whether a row is held out depends on its id, the share and the seed, not on the order or number of rows.
"""

from __future__ import annotations

import os
import re
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from outpace.errors import BadInput, one_line, plural, with_article
from outpace.protocols import TaskSource
from outpace.tasks.fingerprint import Indices, content_digest, digest_bytes, digest_rows
from outpace.types import Task

DuplicateIds = Literal["error", "number"]


class Rows(Protocol):
    """Sized, indexable rows that are mappings: a list of dicts, a `datasets.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Table(Protocol):
    """Rows stored by column, as in a `datasets.Dataset`: ids can be read without reading whole rows."""

    @property
    def column_names(self) -> list[str]: ...

    def __getitem__(self, column: str, /) -> Iterable[Any]: ...


EMPTY_PROMPT = [{"role": "user", "content": ""}]
"""Prompt of a task whose environment supplies the prompt."""


def sized_rows(dataset: Any, environment: object | None) -> Any:
    """Return the rows of a dataset, None if it has no length. With an environment, rows may lack a prompt."""
    if isinstance(dataset, Mapping):
        raise BadInput(f"eval_dataset: {', '.join(map(str, dataset))}: several datasets are not supported; pass one")
    if not hasattr(dataset, "__len__"):
        return None
    if environment is None or not len(dataset) or "prompt" in dataset[0]:
        return dataset
    return [{"prompt": EMPTY_PROMPT, **row} for row in dataset]


class Dataset:
    """A task source over rows. `name` prefixes generated ids. Errors start with the config key `setting`, name `source`
    and locate a row with `locate`."""

    def __init__(
        self,
        rows: Rows,
        name: str = "data",
        *,
        limit: int | None = None,
        duplicate_ids: DuplicateIds = "error",
        setting: str = "tasks",
        locate: Callable[[int], str] = "row {}".format,
        source: str | None = None,
    ) -> None:
        self._rows = rows
        self._name = name
        self._source = source or name
        self._setting = setting
        self._locate = locate
        self._length = len(rows) if limit is None else min(limit, len(rows))
        if self._length == 0:
            raise BadInput(f"{setting}: {self._source} is empty")
        self._hashes = np.fromiter(map(_hash, self._all_ids()), dtype=np.uint64, count=self._length)
        self._numbered: dict[int, str] = {}
        self._resolve_duplicates(duplicate_ids)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self._length:
            raise IndexError(f"{self._name}: row {index} is out of range ({plural(self._length, 'row')})")
        row = self._row(index)
        columns = {name: value for name, value in row.items() if name not in ("prompt", "id")}
        return Task(self._numbered.get(index) or self._id(row.get("id"), index), row["prompt"], columns)

    def split(self, share: float, seed: int) -> tuple[TaskSource, TaskSource | None]:
        """Return disjoint training and held-out tasks. About `share` of the rows are held out, at least one and not
        all. Nothing is held out if `share` is 0 or there is only one row."""
        draws = _scramble(self._hashes, seed)
        heldout = draws < np.uint64(int(share * 2**64))
        heldout[np.argmin(draws)] = True
        heldout[np.argmax(draws)] = False
        if share == 0 or not heldout.any():
            return self, None
        return TaskSubset(self, np.flatnonzero(~heldout)), TaskSubset(self, np.flatnonzero(heldout))

    def digest(self, indices: Indices) -> bytes:
        """Return a digest of ids and rows. For a table, of ids and column names: its rows are too expensive to read."""
        ids = blake2b(self._hashes[indices].astype("<u8").tobytes(), digest_size=16).digest()
        if isinstance(self._rows, Table):
            return ids + "\n".join(sorted(self._rows.column_names)).encode()
        return ids + (content_digest(self._rows, indices) or digest_rows(self._rows, indices))

    # ------------------------------------------------------------------------------------------------------- rows

    def _row(self, index: int) -> Mapping[str, Any]:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise self._bad_row(index, f"is {with_article(type(row).__name__)}, not an object with a prompt")
        if row.get("prompt") is None:
            raise self._bad_row(index, f"has no prompt; {_columns(row)}")
        problem = _prompt_problem(row["prompt"])
        if problem:
            raise self._bad_row(index, problem)
        return row

    def _bad_row(self, index: int, problem: str) -> BadInput:
        return BadInput(f"{self._setting}: {self._source} {self._locate(index)} {problem}")

    # -------------------------------------------------------------------------------------------------------- ids

    def _id(self, given: Any, index: int) -> str:
        if given is None:
            return f"{self._name}/{index}"
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise self._bad_row(index, f"has an id that is neither text nor an integer: {one_line(repr(given), 60)}")
        return str(given)

    def _all_ids(self) -> Iterator[str]:
        """Yield the ids as given, and check each row. Rows of a table are not checked: that would read all of it."""
        if not isinstance(self._rows, Table):
            for index in range(self._length):
                yield self._id(self._row(index).get("id"), index)
            return
        columns = self._rows.column_names
        if "prompt" not in columns:
            raise BadInput(f"{self._setting}: {self._source} has no prompt column; {_columns(columns)}")
        given = self._rows["id"] if "id" in columns else repeat(None)
        for index, value in zip(range(self._length), given, strict=False):
            yield self._id(value, index)

    def _resolve_duplicates(self, duplicate_ids: DuplicateIds) -> None:
        """Reject or number the rows that repeat the id of an earlier row.

        A numbered copy keeps the hash of the original id, so that copies of a task are always in the same split."""
        first: dict[str, int] = {}
        copies: dict[str, int] = {}
        taken = np.sort(self._hashes)
        for index in _rows_with_repeated_hash(self._hashes):
            name = self._id(self._row(index).get("id"), index)
            if name not in first:
                first[name] = index
                continue
            if duplicate_ids == "error":
                raise self._bad_row(
                    index,
                    f"repeats the id {one_line(name, 60)!r} of {self._locate(first[name])}; "
                    'make ids unique, or set tasks.duplicate_ids = "number"',
                )
            copies[name] = copies.get(name, 1) + 1
            while _contains(taken, _hash(f"{name}#{copies[name]}")):
                copies[name] += 1
            self._numbered[index] = f"{name}#{copies[name]}"


class TaskSubset:
    """A subset of another task source, in the order of `indices`."""

    def __init__(self, source: TaskSource, indices: Indices) -> None:
        self._source = source
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self._indices):
            raise IndexError(f"task {index} is out of range ({plural(len(self._indices), 'task')})")
        return self._source[int(self._indices[index])]

    def digest(self, indices: Indices) -> bytes:
        return content_digest(self._source, self._indices[indices])


class JoinedRows:
    """The concatenated rows of several sources. Each row passes through its source's function when it is read."""

    def __init__(self, parts: Sequence[tuple[Rows, Callable[[Any], Any]]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(rows) for rows, _ in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        part = bisect_right(self._ends, index)
        rows, function = self._parts[part]
        return function(rows[index - self._ends[part] + len(rows)])


def _hash(name: str) -> int:
    """Return a hash that is the same on every machine and in every process, unlike the built-in `hash`."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _scramble(hashes: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return a uniform draw per hash and seed, with the finalizer of splitmix64."""
    draws = hashes ^ np.uint64(_hash(f"holdout/{seed}"))
    draws = (draws ^ (draws >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    draws = (draws ^ (draws >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return draws ^ (draws >> np.uint64(31))


def _rows_with_repeated_hash(hashes: NDArray[np.uint64]) -> list[int]:
    """Return the rows, in order, whose hash occurs more than once."""
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    same = ranked[1:] == ranked[:-1]
    repeated = np.concatenate([same, [False]]) | np.concatenate([[False], same])
    return [int(index) for index in np.sort(order[repeated])]


def _contains(ranked: NDArray[np.uint64], value: int) -> bool:
    position = int(np.searchsorted(ranked, np.uint64(value)))
    return position < len(ranked) and int(ranked[position]) == value


def _prompt_problem(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "has an empty prompt"
    if not isinstance(prompt, list):
        return f"has a prompt of type {type(prompt).__name__}; use text or chat messages"
    if not prompt:
        return "has a prompt with no messages"
    if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in prompt):
        return "has a prompt with messages that are not objects with a role"
    return None


def _columns(names: Iterable[str]) -> str:
    listed = ", ".join(map(str, names))
    return f"it has the columns {one_line(listed, 120)}" if listed else "it has no columns"


def check_rows(given: Any, name: str) -> Rows:
    """Return rows or tasks as they are. Reject anything else, such as the other types of the `datasets` package."""
    kind = type(given).__name__
    if isinstance(given, Mapping):
        keys = one_line(", ".join(map(str, given)), 120)
        first = next(iter(given), "train")
        raise BadInput(
            f"{name}: {with_article(kind)} of {keys} is not a list of rows; pass one split, such as data[{first!r}]"
        )
    try:
        count = len(given)
    except TypeError:
        raise BadInput(
            f"{name}: {with_article(kind)} has no length; pass rows with a length and an index, such as list(rows)"
        ) from None
    try:
        if count:
            given[0]
    except (KeyError, TypeError, IndexError):
        raise BadInput(
            f"{name}: {with_article(kind)} has no row 0; pass a sequence of rows, each a dict with a prompt"
        ) from None
    return cast(Rows, given)


HUB_TIMEOUT_S = 10.0
JSONL_SUFFIXES = (".jsonl", ".ndjson")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
"""`name` or `owner/name`, optionally with `:configuration`."""


def open_dataset(
    path: str,
    *,
    split: str = "train",
    limit: int | None = None,
    duplicate_ids: DuplicateIds = "error",
    setting: str = "tasks.path",
) -> Dataset:
    """Open the dataset at `path`. Every error is a one-line `BadInput` that starts with `setting`."""
    rows = open_rows(path, split=split, limit=limit, setting=setting)
    return Dataset(
        rows,
        Path(path).stem,
        limit=limit,
        duplicate_ids=duplicate_ids,
        setting=setting,
        locate=rows.locate if isinstance(rows, JsonlRows) else "row {}".format,
        source=path,
    )


def open_rows(path: str, *, split: str = "train", limit: int | None = None, setting: str = "tasks.path") -> Rows:
    """Open the rows at `path`, which may have any columns."""
    file = Path(path).expanduser()
    if file.suffix in JSONL_SUFFIXES:
        return JsonlRows(file, limit, setting)
    return _open_table(path, file, split, setting)


class JsonlRows:
    """Rows of a JSONL file, blank lines skipped. Thread-safe: every read uses an explicit offset."""

    def __init__(self, file: Path, limit: int | None = None, setting: str = "tasks.path") -> None:
        self._file = file
        self._setting = setting
        offsets, ends = array("q"), array("q")
        try:
            with file.open("rb") as lines:
                position = _after_byte_order_mark(lines.read(3))
                lines.seek(position)
                for line in lines:
                    if not line.isspace():
                        offsets.append(position)
                        ends.append(position + len(line))
                    position += len(line)
                    if len(offsets) == limit:
                        break
            descriptor = os.open(file, os.O_RDONLY)
        except FileNotFoundError:
            raise BadInput(f"{setting}: there is no file {file}") from None
        except OSError as error:
            raise BadInput(f"{setting}: cannot read {file}: {error.strerror}") from None
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._offsets = np.frombuffer(offsets, dtype=np.int64)
        self._ends = np.frombuffer(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Any:
        start = int(self._offsets[index])
        line = os.pread(self._descriptor, int(self._ends[index]) - start, start)
        try:
            return msgspec.json.decode(line.decode("utf-8"))
        except UnicodeDecodeError:
            problem = "is not UTF-8 text"
        except msgspec.DecodeError as error:
            problem = f"is not valid JSON: {one_line(error)}"
        raise BadInput(f"{self._setting}: {self._file.name} {self.locate(index)} {problem}")

    def digest(self, indices: Indices) -> bytes:
        """Return a digest of the bytes and lengths of these rows."""
        starts, ends = _runs(self._offsets[indices], self._ends[indices])
        run_offsets = np.concatenate([[0], np.cumsum(ends - starts)])  # as if the runs were contiguous

        def read(start: int, end: int) -> bytes:
            parts = []
            for run in range(int(np.searchsorted(run_offsets, start, "right")) - 1, len(starts)):
                if run_offsets[run] >= end:
                    break
                first = int(starts[run]) + max(0, start - int(run_offsets[run]))
                last = int(starts[run]) + min(end, int(run_offsets[run + 1])) - int(run_offsets[run])
                parts.append(os.pread(self._descriptor, last - first, first))
            return b"".join(parts)

        lengths = (self._ends[indices] - self._offsets[indices]).astype("<i8")
        return blake2b(lengths.tobytes() + digest_bytes(int(run_offsets[-1]), read), digest_size=16).digest()

    def locate(self, index: int) -> str:
        """Return the line number of a row, from 1. Rereads the file, because only error messages need it."""
        number, position = 1, 0
        with self._file.open("rb") as lines:
            for line in lines:
                position += len(line)
                if position > self._offsets[index]:
                    break
                number += 1
        return f"line {number}"


def _after_byte_order_mark(head: bytes) -> int:
    return 3 if head == b"\xef\xbb\xbf" else 0


def _runs(starts: Indices, ends: Indices) -> tuple[Indices, Indices]:
    """Merge adjacent byte ranges, so that a whole file becomes one range."""
    first = np.concatenate([[True], starts[1:] != ends[:-1]])
    return starts[first], ends[np.concatenate([first[1:], [True]])]


def _open_table(path: str, file: Path, split: str, setting: str) -> Rows:
    if file.suffix != ".parquet" and file.is_file():
        raise BadInput(f"{setting}: {path} is not a supported file; use .jsonl or .parquet")
    hub = HUB_NAME.fullmatch(path) is not None and not (file.parent != Path() and file.parent.exists())
    if not file.exists() and (file.suffix == ".parquet" or not hub):
        raise BadInput(f"{setting}: there is no file or folder {path}")
    try:
        import datasets
    except ImportError:
        raise BadInput(f"{setting}: {path} needs the datasets package: pip install 'outpace[datasets]'") from None
    datasets.disable_progress_bars()
    try:
        found = _load_table(datasets, path, file, split)
    # The library and the hub raise many exception types, which all mean that the dataset cannot be loaded.
    except Exception as error:
        raise BadInput(f"{setting}: cannot load {path}: {one_line(error)}") from error
    return found


@contextmanager
def _offline_unless_reachable(datasets: Any, name: str) -> Iterator[None]:
    """Contact the hub once, with a short timeout; if it does not answer, use only the cache. Otherwise the library
    would retry for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    before = datasets.config.HF_HUB_OFFLINE
    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        raise  # the hub answered: the dataset does not exist, or access is denied
    except Exception:  # no answer; the exception type depends on the installed HTTP library
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _load_table(datasets: Any, path: str, file: Path, split: str) -> Rows:
    if file.suffix == ".parquet":
        return datasets.load_dataset("parquet", data_files=str(file), split="train")  # type: ignore[no-any-return]
    if not (file / "dataset_dict.json").exists() and not (file / "state.json").exists():
        name, _, configuration = path.partition(":")
        with _offline_unless_reachable(datasets, name) if not file.exists() else nullcontext():
            return datasets.load_dataset(name, configuration or None, split=split)  # type: ignore[no-any-return]
    saved = datasets.load_from_disk(str(file))
    if not isinstance(saved, dict):
        return saved  # type: ignore[no-any-return]
    if split not in saved:
        raise ValueError(f"there is no split {split!r}; use {', '.join(saved)}")
    return saved[split]  # type: ignore[no-any-return]
