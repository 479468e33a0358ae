import gc
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import BadInput
from outpace.protocols import TaskSource
from outpace.tasks.dataset import Dataset, JsonlRows, TaskSubset, open_dataset
from support import names

CHAT = [{"role": "user", "content": "hi"}]


def jsonl(folder: Path, *rows: Any, name: str = "train.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def bad_input_message(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(BadInput) as caught:
        call(*arguments, **named)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def ids(source: TaskSource) -> list[str]:
    return [source[index].id for index in range(len(source))]


# -------------------------------------------------------------------------------------------------------------- rows


def test_a_row_becomes_a_task_with_its_other_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "2+2?", "answer": 4, "id": "easy"}, {"prompt": CHAT, "answer": None})
    first, second = (open_dataset(path)[index] for index in (0, 1))
    assert (first.id, first.prompt, first.columns) == ("easy", "2+2?", {"answer": 4})
    assert (second.id, second.prompt, second.columns) == ("train/1", CHAT, {"answer": None})


def test_integer_ids_become_text_and_null_ids_count_as_missing(tmp_path: Path) -> None:
    assert ids(open_dataset(jsonl(tmp_path, {"prompt": "a", "id": 7}, {"prompt": "b", "id": None}))) == ["7", "train/1"]


def test_blank_lines_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "\xc3\xa9"}')
    dataset = open_dataset(str(file))
    assert [dataset[index].prompt for index in range(len(dataset))] == ["a", "é"]


def test_a_limit_uses_only_the_first_rows(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"no": "prompt"})
    assert len(open_dataset(path, limit=2)) == 2
    assert len(Dataset([{"prompt": "a"}, {"prompt": "b"}], limit=1)) == 1
    assert len(Dataset([{"prompt": "a"}], limit=5)) == 1


def test_indices_outside_the_dataset_raise() -> None:
    dataset = Dataset([{"prompt": "a"}])
    for index in (-1, 1):
        with pytest.raises(IndexError):
            dataset[index]


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b'{"prompt": "a"}\n\n{"question": "b", "answer": 1}\n', "3 prompt question answer"),
        (b"{}\n", "1 prompt"),
        (b'{"prompt": null}\n', "1 prompt"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "2 UTF-8"),
        (b'{"prompt": "a"}\n{"prompt": \n', "2 JSON"),
        (b'["prompt"]\n', "1 list"),
        (b'{"prompt": 3}\n', "1 prompt int"),
        (b'{"prompt": "  "}\n', "1 prompt empty"),
        (b'{"prompt": []}\n', "1 prompt messages"),
        (b'{"prompt": ["hi"]}\n', "1 prompt messages role"),
        (b'{"prompt": "a", "id": [1]}\n', "1 id [1]"),
        (b'{"prompt": "a", "id": true}\n', "1 id True"),
        (
            b'{"prompt": "a", "id": "x"}\n{"prompt": "b"}\n{"prompt": "c", "id": "x"}\n',
            "3 id 'x' 1 tasks.duplicate_ids",
        ),
        (b'{"prompt": "a", "id": "train/1"}\n{"prompt": "b"}\n', "2 id 'train/1' 1 tasks.duplicate_ids"),
    ],
)
def test_bad_rows_are_rejected_in_one_line_with_their_line_number(tmp_path: Path, content: bytes, keys: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(content)
    message = bad_input_message(open_dataset, str(file))
    assert message.startswith("tasks.path: ")
    assert file.name in message
    assert names(message.partition(file.name)[2], keys)


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "./none", "/none/none", "here/none"])
def test_a_missing_file_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    message = bad_input_message(open_dataset, name, setting="tasks.eval_path")
    assert message.startswith("tasks.eval_path: ")
    assert names(message, "no file")
    assert name.removeprefix("./") in message


def test_unsupported_files_and_directories_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    assert names(bad_input_message(open_dataset, str(tmp_path / "a.txt")), "tasks.path a.txt .jsonl .parquet")
    (tmp_path / "folder.jsonl").mkdir()
    assert names(bad_input_message(open_dataset, str(tmp_path / "folder.jsonl")), "tasks.path folder.jsonl directory")


def test_bad_rows_in_memory_are_named_by_number() -> None:
    bad_row, nothing = bad_input_message(Dataset, [{"prompt": "a"}, {"q": 1}]), bad_input_message(Dataset, [])
    assert bad_row.startswith("tasks: ")
    assert names(bad_row, "1 prompt q")
    assert nothing.startswith("tasks: ")
    assert names(nothing, "empty")


def test_jsonl_does_not_need_the_datasets_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert len(open_dataset(jsonl(tmp_path, {"prompt": "a"}))) == 1
    (tmp_path / "a.parquet").touch()
    assert "pip install 'outpace[datasets]'" in bad_input_message(open_dataset, str(tmp_path / "a.parquet"))


# --------------------------------------------------------------------------------------------------------------- ids


def test_duplicate_ids_are_numbered_on_request() -> None:
    rows = [{"prompt": "a", "id": name} for name in ("x", "y", "x", "x#2", "x", "y")]
    assert ids(Dataset(rows, duplicate_ids="number")) == ["x", "y", "x#3", "x#2", "x#4", "y#2"]


@given(st.lists(st.sampled_from(["a", "a#2", "a#2#2", "b", "data/1", None]), min_size=1))
def test_numbered_ids_are_unique_for_any_given_ids(names: list[str | None]) -> None:
    given_ids = ids(Dataset([{"prompt": "p", "id": name} for name in names], duplicate_ids="number"))
    assert len(set(given_ids)) == len(names)


# ------------------------------------------------------------------------------------------------------------- split


@given(st.sets(st.text(min_size=1), min_size=2, max_size=60), st.floats(0.01, 0.99), st.integers(0, 5))
def test_a_split_is_disjoint_and_complete_with_no_empty_side(names: set[str], share: float, seed: int) -> None:
    dataset = Dataset([{"prompt": "p", "id": name} for name in sorted(names)])
    train, heldout = dataset.split(share, seed)
    assert heldout is not None
    assert len(train) > 0
    assert len(heldout) > 0
    assert sorted(ids(train) + ids(heldout)) == sorted(names)


def test_a_split_holds_out_about_its_share_and_depends_on_the_seed() -> None:
    dataset = Dataset([{"prompt": "p"}] * 4000)
    heldouts = [set(ids(dataset.split(0.1, seed)[1] or dataset)) for seed in (0, 0, 1)]
    assert 300 < len(heldouts[0]) < 500
    assert heldouts[0] == heldouts[1] != heldouts[2]


def test_a_split_does_not_depend_on_the_order_of_rows() -> None:
    rows = [{"prompt": "p", "id": str(number)} for number in range(200)]
    forward, backward = (set(ids(Dataset(each).split(0.2, 3)[1] or Dataset(each))) for each in (rows, rows[::-1]))
    assert forward == backward


def test_duplicates_of_a_problem_stay_on_one_side_of_the_split() -> None:
    rows = [{"prompt": "p", "id": str(number % 50)} for number in range(100)]
    train, heldout = Dataset(rows, duplicate_ids="number").split(0.3, 0)
    assert heldout is not None
    assert {name.split("#")[0] for name in ids(train)}.isdisjoint(name.split("#")[0] for name in ids(heldout))


def test_nothing_is_held_out_of_a_single_row_or_at_share_zero() -> None:
    assert Dataset([{"prompt": "a"}]).split(0.5, 0)[1] is None
    assert Dataset([{"prompt": "a"}, {"prompt": "b"}]).split(0, 0)[1] is None


def test_indices_outside_a_subset_raise() -> None:
    train, _ = Dataset([{"prompt": "a"}, {"prompt": "b"}]).split(0.5, 0)
    assert isinstance(train, TaskSubset)
    for index in (-1, 1):
        with pytest.raises(IndexError):
            train[index]


# -------------------------------------------------------------------------------------------------------------- size


def test_memory_per_row_does_not_depend_on_row_length(tmp_path: Path) -> None:
    count = 20_000
    file = tmp_path / "big.jsonl"
    with file.open("w") as out:
        out.writelines(f'{{"prompt": "{"x" * 400} {number}", "id": "{number}"}}\n' for number in range(count))
    tracemalloc.start()
    dataset = open_dataset(str(file))
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset) == count
    assert held < 40 * count
    assert dataset[count - 1].id == str(count - 1)


def test_rows_are_parsed_lazily(tmp_path: Path) -> None:
    file = tmp_path / "lazy.jsonl"
    file.write_text('{"prompt": "a"}\nnot json\n')
    rows = JsonlRows(file)
    assert len(rows) == 2
    assert rows[0] == {"prompt": "a"}
    assert "line 2" in bad_input_message(rows.__getitem__, 1)


# ------------------------------------------------------------------------------------------------- hugging face tables


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return package


def test_parquet_files_and_saved_datasets_read_like_jsonl(tmp_path: Path, datasets: Any) -> None:
    rows = [{"prompt": CHAT, "answer": 1, "id": "x"}, {"prompt": CHAT, "answer": 2, "id": "y"}]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "splits")
    expected = Dataset(rows)
    for opened in (
        open_dataset(str(tmp_path / "a.parquet")),
        open_dataset(str(tmp_path / "saved")),
        open_dataset(str(tmp_path / "splits"), split="test"),
        Dataset(table),
    ):
        assert [opened[index] for index in range(2)] == [expected[index] for index in range(2)]
    assert names(bad_input_message(open_dataset, str(tmp_path / "splits")), "'train' test")


def test_a_table_is_checked_without_reading_its_rows(tmp_path: Path, datasets: Any) -> None:
    table = datasets.Dataset.from_list([{"question": "a", "answer": 1}])
    message = bad_input_message(Dataset, table)
    assert message.startswith("tasks: ")
    assert names(message, "prompt question answer")
    twice = datasets.Dataset.from_list([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}])
    assert names(bad_input_message(Dataset, twice), "1 'x' 0 tasks.duplicate_ids")


def test_an_unreachable_hub_is_not_retried(
    monkeypatch: pytest.MonkeyPatch, datasets: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_network(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", no_network)
    offline = datasets.config.HF_HUB_OFFLINE
    message = bad_input_message(open_dataset, "missing/nothing")
    assert message.startswith("tasks.path: ")
    assert names(message, "missing/nothing")
    assert "Retrying" not in capfd.readouterr().err
    assert datasets.config.HF_HUB_OFFLINE is offline


def test_a_damaged_parquet_file_is_rejected(tmp_path: Path, datasets: Any) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    message = bad_input_message(open_dataset, str(tmp_path / "a.parquet"))
    assert message.startswith("tasks.path: ")
    assert names(message, "a.parquet")
