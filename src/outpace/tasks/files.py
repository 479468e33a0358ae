"""Opening the datasets that a config names: JSONL and parquet files, Hugging Face folders and hub names.

JSONL needs no further package: one pass notes where each line begins, and a row is read and parsed when it is asked
for. Everything else goes through the optional `datasets`, which maps its tables from disk.
"""

from __future__ import annotations

import os
import re
import weakref
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outpace.errors import BadInput, one_line
from outpace.tasks.dataset import Dataset, DuplicateIds, Rows
from outpace.tasks.fingerprint import Indices, digest_of_pieces

HUB_TIMEOUT_S = 10.0
JSONL = (".jsonl", ".ndjson")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
"""`name`, `owner/name`, either with `:configuration`."""


def open_dataset(
    path: str,
    *,
    split: str = "train",
    limit: int | None = None,
    duplicate_ids: DuplicateIds = "error",
    setting: str = "tasks.path",
) -> Dataset:
    """The dataset at `path`; every problem with it is a one-line `BadInput` that starts with `setting`."""
    file = Path(path).expanduser()
    if file.suffix in JSONL:
        lines = JsonlRows(file, limit, setting)
        return Dataset(
            lines,
            file.stem,
            limit=limit,
            duplicate_ids=duplicate_ids,
            setting=setting,
            locate=lines.locate,
            source=path,
        )
    rows = _open_table(path, file, split, setting)
    return Dataset(rows, file.stem, limit=limit, duplicate_ids=duplicate_ids, setting=setting, source=path)


class JsonlRows:
    """One JSON value per line, blank lines left out. Reads by position, so threads may share it."""

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
            raise BadInput(f"{setting}: {file} cannot be read: {error.strerror}") from None
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
        """Of the bytes of these rows and of the length of each."""
        starts, ends = _runs(self._offsets[indices], self._ends[indices])
        places = np.concatenate([[0], np.cumsum(ends - starts)])  # of the runs, as if nothing lay between them

        def read(start: int, end: int) -> bytes:
            parts = []
            for run in range(int(np.searchsorted(places, start, "right")) - 1, len(starts)):
                if places[run] >= end:
                    break
                first = int(starts[run]) + max(0, start - int(places[run]))
                last = int(starts[run]) + min(end, int(places[run + 1])) - int(places[run])
                parts.append(os.pread(self._descriptor, last - first, first))
            return b"".join(parts)

        lengths = (self._ends[indices] - self._offsets[indices]).astype("<i8")
        return blake2b(lengths.tobytes() + digest_of_pieces(int(places[-1]), read), digest_size=16).digest()

    def locate(self, index: int) -> str:
        """The line's number as editors count. Found by counting, since only error messages need it."""
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
    """The same places with neighbours joined, so that a whole file is one."""
    first = np.concatenate([[True], starts[1:] != ends[:-1]])
    return starts[first], ends[np.concatenate([first[1:], [True]])]


def _open_table(path: str, file: Path, split: str, setting: str) -> Rows:
    if file.suffix != ".parquet" and file.is_file():
        raise BadInput(f"{setting}: {path} should end in .jsonl or .parquet")
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
    # A boundary: the library and the hub raise dozens of kinds, all of which mean that this dataset cannot be had.
    except Exception as error:
        raise BadInput(f"{setting}: {path} cannot be loaded: {one_line(error)}") from error
    return found


@contextmanager
def _offline_unless_reachable(datasets: Any, name: str) -> Iterator[None]:
    """Ask the hub once, briefly; without an answer use the cache alone. The library would retry for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    before = datasets.config.HF_HUB_OFFLINE
    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        raise  # the hub has answered: there is no such dataset, or it may not be read
    except Exception:  # no answer, in whatever way the HTTP library of the day says so
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
        raise ValueError(f"it has no split {split!r}, only {', '.join(saved)}")
    return saved[split]  # type: ignore[no-any-return]
