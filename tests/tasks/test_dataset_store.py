"""Datasets by name and split in a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.compat.rllm import DatasetRegistry
from outpace.errors import BadInput
from outpace.tasks.dataset_store import DatasetStore, read_parquet
from support import naming

ROWS = [{"question": "9 5=4", "nums": [9, 5], "target": 4}, {"question": "8 1=9", "nums": [8, 1], "target": 9}]


def test_splits_are_found_again_in_another_process_with_a_verl_file_beside(tmp_path: Path) -> None:
    DatasetStore(lambda: tmp_path).register_dataset("countdown", ROWS, "train", source="made up")
    DatasetStore(lambda: tmp_path).register_dataset("countdown", ROWS[:1], "test")
    store = DatasetStore(lambda: tmp_path)
    assert store.get_dataset_splits("countdown") == ["train", "test"]
    info = store.get_dataset_info("countdown")
    assert info is not None
    assert info["metadata"] == {"source": "made up"}
    loaded = store.load_dataset("countdown", "train")
    assert loaded is not None
    assert loaded.get_data() == ROWS
    assert len(loaded.repeat(2)) == 4
    assert loaded.select([1])[0] == ROWS[1]
    assert sorted(row["target"] for row in loaded.shuffle(seed=1)) == [4, 9]
    verl = loaded.get_verl_data_path()
    assert verl is not None
    assert [row["extra_info"] for row in read_parquet(Path(verl))] == ROWS
    assert store.remove_dataset_split("countdown", "train")
    assert store.load_dataset("countdown", "train") is None
    assert not Path(verl).exists()
    assert store.remove_dataset("countdown")
    assert store.get_dataset_names() == []


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    store = DatasetStore(lambda: tmp_path)
    with pytest.raises(BadInput, match=naming("train")):
        store.register_dataset("countdown", [], "train")
    with pytest.raises(BadInput, match=naming("../countdown")):
        store.register_dataset("../countdown", ROWS)
    (tmp_path / "registry.json").write_text("{")
    with pytest.raises(BadInput, match=naming("registry.json")):
        store.get_dataset_names()


def test_the_registry_of_rllm_is_where_rllm_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path))
    DatasetRegistry.register_dataset("countdown", ROWS, "train")
    assert (tmp_path / "datasets" / "countdown" / "train.parquet").is_file()
    assert (tmp_path / "datasets" / "countdown" / "train_verl.parquet").is_file()
