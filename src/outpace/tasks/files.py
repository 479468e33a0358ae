"""MERGED"""

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
        return blake2b(lengths.tobytes() + digest_of_pieces(int(run_offsets[-1]), read), digest_size=16).digest()

    def locate(self, index: int) -> str:
        """Return the line number of a row, from 1. It rereads the file, because only error messages need it."""
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
