"""Datasets by name and split in a directory: parquet files, listed in `registry.json`.

    registry.json              {"version": 2, "datasets": {name: {"metadata": {…}, "splits": {split: {"path": …, …}}}}}
    NAME/SPLIT.parquet         the rows
    NAME/SPLIT_verl.parquet    the same rows in the columns of verl's datasets, as `extra_info`

Files are complete before the registry names them. Needs `pip install "outpace[datasets]"`.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.errors import BadInput, one_line

REGISTRY_FILE = "registry.json"

Row = dict[str, Any]


class StoredDataset(Sequence[Row]):
    """Rows, with the name and split that they are stored under."""

    def __init__(
        self, data: list[Row], name: str | None = None, split: str | None = None, path: Path | None = None
    ) -> None:
        self.data, self.name, self.split, self._path = data, name, split, path

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def get_data(self) -> list[Row]:
        return self.data

    def repeat(self, n: int) -> StoredDataset:
        return StoredDataset([dict(row) for row in self.data for _ in range(n)], self.name, self.split)

    def shuffle(self, seed: int | None = None) -> StoredDataset:
        return StoredDataset(random.Random(seed).sample(self.data, len(self.data)), self.name, self.split)

    def select(self, indices: Iterable[int]) -> StoredDataset:
        return StoredDataset([self.data[index] for index in indices], self.name, self.split)

    def get_data_path(self) -> str | None:
        return None if self._path is None else str(self._path)

    def get_verl_data_path(self) -> str | None:
        return None if self._path is None else str(verl_file(self._path))

    @classmethod
    def load_data(cls, path: str) -> StoredDataset:
        return cls(read_parquet(Path(path)), path=Path(path))


class DatasetStore:
    def __init__(self, directory: Callable[[], Path]) -> None:
        """`directory` is called at every use, because it may depend on the environment."""
        self._directory = directory

    def register_dataset(
        self,
        name: str,
        data: Iterable[Mapping[str, Any]],
        split: str = "default",
        source: str = "",
        description: str = "",
        category: str = "",
    ) -> StoredDataset:
        """Save the rows, replacing the previous rows of the split."""
        rows = [dict(row) for row in data]
        if not rows:
            raise BadInput(f"dataset {name}: the split {split} has no rows")
        for part in (name, split):
            if Path(part).name != part:
                raise BadInput(f"dataset {one_line(name, 60)}, split {one_line(split, 60)}: not a valid file name")
        file = self._directory() / name / f"{split}.parquet"
        write_parquet(file, rows)
        write_parquet(verl_file(file), map(_verl_row, rows))
        datasets = self._datasets()
        entry = datasets.setdefault(name, {"metadata": {}, "splits": {}})
        given = {"source": source, "description": description, "category": category}
        entry["metadata"] |= {key: text for key, text in given.items() if text}
        path = file.relative_to(self._directory()).as_posix()
        entry["splits"][split] = {"path": path, "num_examples": len(rows), "fields": list(rows[0])}
        self._write(datasets)
        return StoredDataset(rows, name, split, file)

    def load_dataset(self, name: str, split: str = "default") -> StoredDataset | None:
        """Return a split, or None if it is not registered."""
        found = self._datasets().get(name, {}).get("splits", {}).get(split)
        if found is None:
            return None
        file = self._directory() / found["path"]
        return StoredDataset(read_parquet(file), name, split, file)

    def get_dataset_names(self) -> list[str]:
        return list(self._datasets())

    def get_dataset_splits(self, name: str) -> list[str]:
        return list(self._datasets().get(name, {}).get("splits", {}))

    def get_dataset_info(self, name: str) -> dict[str, Any] | None:
        """Return `metadata` and `splits`, or None if there is no such dataset."""
        return self._datasets().get(name)

    def dataset_exists(self, name: str, split: str | None = None) -> bool:
        splits = self.get_dataset_splits(name)
        return bool(splits) and (split is None or split in splits)

    def remove_dataset_split(self, name: str, split: str) -> bool:
        """Remove a split and its files. Returns whether it existed."""
        datasets = self._datasets()
        removed = datasets.get(name, {}).get("splits", {}).pop(split, None)
        if removed is None:
            return False
        if not datasets[name]["splits"]:
            del datasets[name]
        self._write(datasets)
        file = self._directory() / removed["path"]
        file.unlink(missing_ok=True)
        verl_file(file).unlink(missing_ok=True)
        return True

    def remove_dataset(self, name: str) -> bool:
        removed = [self.remove_dataset_split(name, split) for split in self.get_dataset_splits(name)]
        return any(removed)

    def _datasets(self) -> dict[str, Any]:
        file = self._directory() / REGISTRY_FILE
        try:
            content = json.loads(file.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise BadInput(f"{file}: not valid JSON: {one_line(error)}") from None
        return dict(content["datasets"])

    def _write(self, datasets: dict[str, Any]) -> None:
        _replace(self._directory() / REGISTRY_FILE, json.dumps({"version": 2, "datasets": datasets}, indent=2).encode())


def verl_file(file: Path) -> Path:
    return file.with_name(f"{file.stem}_verl.parquet")


def _verl_row(row: Row) -> Row:
    prompt = [{"role": "user", "content": "placeholder"}]
    return {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": None}, "extra_info": row}


def write_parquet(file: Path, rows: Iterable[Row]) -> None:
    import pyarrow
    import pyarrow.parquet

    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    _replace(file, buffer.getvalue().to_pybytes())


def read_parquet(file: Path) -> list[Row]:
    import pyarrow.parquet

    rows: list[Row] = pyarrow.parquet.read_table(file).to_pylist()
    return rows


def _replace(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "wb") as new:
        new.write(content)
    os.replace(name, file)
