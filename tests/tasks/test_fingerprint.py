"""Task fingerprints: changed tasks are detected between two runs, without false alarms."""

import json
import subprocess
import sys
import time
import tracemalloc
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import BadInput
from outpace.tasks import fingerprint as module
from outpace.tasks.countdown import Countdown
from outpace.tasks.dataset import Dataset, TaskSubset, open_dataset
from outpace.tasks.fingerprint import Fingerprint, difference, fingerprint, sample_indices
from outpace.tasks.registry import ReopenedSource, open_train
from outpace.types import Episode, Task
from support import names, resolved

Row = dict[str, Any]
MANY = 2000  # more than the number of sampled tasks

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6).filter(str.strip)
rows_of = st.lists(st.fixed_dictionaries({"prompt": texts, "answer": st.integers(), "note": texts}), min_size=2)


def as_file(folder: Path, rows: list[Row], name: str = "data.jsonl") -> Dataset:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_dataset(str(path))


def both_fingerprints(folder: Path, rows: list[Row]) -> tuple[Fingerprint, Fingerprint]:
    """Return the fingerprints of the same rows in a file and in memory."""
    return fingerprint(as_file(folder, rows)), fingerprint(Dataset(rows))


def numbered_rows(count: int = MANY) -> list[Row]:
    return [{"prompt": f"what is {number}?", "answer": number} for number in range(count)]


class Slow:
    """A source that takes `seconds` per task and fails on the last one."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.reads = 0

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> Task:
        time.sleep(self.seconds)
        self.reads += 1
        if index == MANY - 1:
            raise RuntimeError("this one never works")
        return Task(f"slow/{index}", f"prompt {index}")


# ----------------------------------------------------------------------------------------------------------------- rows


@given(rows=rows_of, data=st.data())
def test_any_change_to_the_rows_is_a_difference_and_an_equal_copy_is_not(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    before = both_fingerprints(folder, rows)
    changed = data.draw(
        st.sampled_from(
            [
                data.draw(st.permutations(rows)),
                [*rows[:-1], {**rows[-1], "prompt": data.draw(texts)}],
                [{**rows[0], "answer": data.draw(st.integers())}, *rows[1:]],
                [{**rows[0], "extra": 1}, *rows[1:]],
                [*rows, rows[0]],
                rows[1:],
                [dict(row) for row in rows],
            ]
        )
    )
    for old, new in zip(before, both_fingerprints(folder, changed), strict=True):
        message = difference(old, new)
        assert (message is None) == (changed == rows), message
        assert message is None or len(message.splitlines()) == 1


@given(rows=rows_of)
def test_the_order_of_columns_does_not_matter(rows: list[Row]) -> None:
    turned = [dict(reversed(row.items())) for row in rows]
    assert difference(fingerprint(Dataset(rows)), fingerprint(Dataset(turned))) is None


@pytest.mark.parametrize("position", [0, 1, 777, MANY - 1])
def test_one_changed_row_of_many_is_detected_at_any_position(tmp_path: Path, position: int) -> None:
    rows = numbered_rows()
    changed = [*rows[:position], {**rows[position], "answer": -1}, *rows[position + 1 :]]
    for old, new in zip(both_fingerprints(tmp_path, rows), both_fingerprints(tmp_path, changed), strict=True):
        assert difference(old, new) is not None


def test_the_difference_names_what_changed() -> None:
    rows = [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "y"}]
    old = fingerprint(Dataset(rows))

    def difference_to(changed: list[Row]) -> str | None:
        return difference(old, fingerprint(Dataset(changed)))

    assert difference_to(rows) is None
    assert names(str(difference_to([*rows, {"prompt": "c"}])), "3 2")
    assert names(str(difference_to([rows[0], {"prompt": "b", "id": "z"}])), "1 'z' 'y'")
    assert names(str(difference_to([rows[0], {"prompt": "c", "id": "y"}])), "1 'y'")
    hidden = numbered_rows()
    hidden[1] = {**hidden[1], "answer": -1}
    assert names(str(difference(fingerprint(Dataset(numbered_rows())), fingerprint(Dataset(hidden)))), "256")


def test_held_out_rows_do_not_affect_the_training_fingerprint(tmp_path: Path) -> None:
    rows = [{**row, "id": f"q{number}"} for number, row in enumerate(numbered_rows(200))]
    train, heldout = as_file(tmp_path, rows).split(0.2, 0)
    assert heldout is not None
    held, trained = (int(source[0].id.removeprefix("q")) for source in (heldout, train))
    for position, same in ((held, True), (trained, False)):
        changed = [*rows[:position], {**rows[position], "answer": -1}, *rows[position + 1 :]]
        again, _ = as_file(tmp_path, changed, "other.jsonl").split(0.2, 0)
        assert (difference(fingerprint(train), fingerprint(again)) is None) == same


def test_another_subset_of_rows_is_a_difference(tmp_path: Path) -> None:
    dataset = as_file(tmp_path, numbered_rows(100))
    ahead, behind = (fingerprint(TaskSubset(dataset, np.arange(*ends))) for ends in ((0, 50), (50, 100)))
    assert difference(ahead, behind) is not None


def test_in_a_very_large_file_a_changed_row_length_in_the_middle_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    monkeypatch.setattr(module, "MAX_BYTES", 64 * 16)
    old = fingerprint(as_file(tmp_path, numbered_rows()))
    longer = numbered_rows()
    longer[1001]["answer"] = 10_000
    assert difference(old, fingerprint(as_file(tmp_path, longer))) is not None
    assert difference(old, fingerprint(as_file(tmp_path, numbered_rows()))) is None


@pytest.mark.timeout(120)
def test_a_large_file_is_fingerprinted_without_loading_it_into_memory(tmp_path: Path) -> None:
    dataset = as_file(tmp_path, [{"prompt": "x" * 200, "n": number} for number in range(100_000)])
    tracemalloc.start()
    fingerprint(dataset)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 12_000_000, "24 MB of rows must be read in small chunks"


# -------------------------------------------------------------------------------------------------------- other sources


def test_generated_tasks_differ_by_seed_and_count() -> None:
    old = fingerprint(Countdown("train", 0, 500))
    assert difference(old, fingerprint(Countdown("train", 0, 500))) is None
    assert "countdown/train/1/0" in str(difference(old, fingerprint(Countdown("train", 1, 500))))
    assert names(str(difference(old, fingerprint(Countdown("train", 0, 501)))), "501 500")


def test_every_task_of_a_list_counts() -> None:
    tasks = [Task(f"t{number}", "p", {"n": number}) for number in range(MANY)]
    changed = [*tasks]
    changed[1] = Task("t1", "another prompt", {"n": 1})
    assert difference(fingerprint(tasks), fingerprint([*tasks])) is None
    assert difference(fingerprint(tasks), fingerprint(changed)) is not None


def test_a_reopened_source_has_the_same_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    config = resolved(
        {"tasks.path": str(tmp_path / "data.jsonl"), "eval.holdout": 0.0, "rewards.functions": ["length"]}
    )
    assert difference(fingerprint(ReopenedSource(open_train, config)), fingerprint(open_train(config))) is None


def test_a_slow_source_is_sampled_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLING_TIMEOUT_S", 0.0)
    slow, fast = Slow(0.001), Slow()
    few = fingerprint(slow)
    assert slow.reads == module.MIN_SAMPLES
    monkeypatch.setattr(module, "SAMPLING_TIMEOUT_S", 60.0)
    many = fingerprint(fast)
    assert fast.reads == module.MAX_SAMPLES
    assert difference(few, many) is None
    assert difference(many, few) is None


def test_a_task_that_fails_to_load_does_not_fail_the_fingerprint() -> None:
    assert difference(fingerprint(Slow()), fingerprint(Slow())) is None


def test_a_bad_row_of_a_table_is_reported_at_the_start() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": " "}])
    with pytest.raises(BadInput, match="empty"):
        fingerprint(Dataset(table))


def test_a_table_differs_by_its_ids_and_by_its_columns() -> None:
    datasets = pytest.importorskip("datasets")

    def table_fingerprint(rows: list[Row]) -> Fingerprint:
        return fingerprint(Dataset(datasets.Dataset.from_list(rows)))

    rows = [{"prompt": "p", "id": str(number), "answer": number} for number in range(MANY)]
    old = table_fingerprint(rows)
    assert difference(old, table_fingerprint(rows)) is None
    assert difference(old, table_fingerprint([rows[0], {**rows[1], "id": "other"}, *rows[2:]])) is not None
    assert difference(old, table_fingerprint([{**row, "more": 1} for row in rows])) is not None


@pytest.mark.parametrize(
    "value", ["\ud800", {1: "a", "b": 2}, np.arange(3), {"x": object()}, b"bytes", float("nan"), {3, 1, 2}]
)
def test_a_column_of_any_type_is_equal_to_itself(value: Any) -> None:
    source = [Task("\ud800", "p", {"value": value})]
    again = [Task("\ud800", "p", {"value": value})]
    assert difference(fingerprint(source), fingerprint(again)) is None
    msgspec.json.encode(fingerprint(source))


PRINT = """
import json, msgspec, sys
from outpace.tasks.dataset import Dataset
from outpace.tasks.fingerprint import fingerprint
rows = [{"prompt": f"p{n}", "columns": {"b": {"x", "y", "z"}, "a": n}} for n in range(50)]
sys.stdout.buffer.write(msgspec.json.encode(fingerprint(Dataset(rows))))
"""


def test_fingerprints_are_equal_across_processes_and_round_trip_as_json() -> None:
    found = []
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))}
        result = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, env=environment, check=True)
        found.append(msgspec.json.decode(result.stdout, type=Fingerprint))
    assert difference(found[0], found[1]) is None
    assert found[0].digest == found[1].digest


@given(count=st.integers(0, 3000), most=st.integers(2, 300))
def test_sample_indices_cover_first_to_last_without_duplicates(count: int, most: int) -> None:
    indices = list(sample_indices(count, most))
    assert len(indices) == len(set(indices)) == min(count, most)
    assert indices == sorted(indices)
    assert not count or (indices[0], indices[-1]) == (0, count - 1)


def test_the_digest_of_tasks_in_memory_does_not_depend_on_episodes_they_do_not_have() -> None:
    lines = b'{"id":"a","prompt":"p","columns":{"x":1}}\n{"id":"b","prompt":"q","columns":{}}\n'
    tasks = [Task("a", "p", {"x": 1}), Task("b", "q")]
    assert fingerprint(tasks).digest == blake2b(lines, digest_size=16).hexdigest()
    assert fingerprint([Task("a", "p", {"x": 1}, [Episode([])]), tasks[1]]).digest != fingerprint(tasks).digest
