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
from outpace.tasks.dataset import Dataset, Selection
from outpace.tasks.files import JsonlRows, open_dataset

CHAT = [{"role": "user", "content": "hi"}]


def jsonl(folder: Path, *rows: Any, name: str = "train.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def refusal(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(BadInput) as caught:
        call(*arguments, **named)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def ids(source: TaskSource) -> list[str]:
    return [source[index].id for index in range(len(source))]


# -------------------------------------------------------------------------------------------------------------- rows


def test_a_row_becomes_a_task_with_its_free_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "2+2?", "answer": 4, "id": "easy"}, {"prompt": CHAT, "answer": None})
    first, second = (open_dataset(path)[index] for index in (0, 1))
    assert (first.id, first.prompt, first.columns) == ("easy", "2+2?", {"answer": 4})
    assert (second.id, second.prompt, second.columns) == ("train/1", CHAT, {"answer": None})


def test_integer_ids_are_taken_as_text_and_null_ids_as_none(tmp_path: Path) -> None:
    assert ids(open_dataset(jsonl(tmp_path, {"prompt": "a", "id": 7}, {"prompt": "b", "id": None}))) == ["7", "train/1"]


def test_blank_lines_byte_order_mark_and_windows_line_ends_are_no_obstacle(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "\xc3\xa9"}')
    dataset = open_dataset(str(file))
    assert [dataset[index].prompt for index in range(len(dataset))] == ["a", "é"]


def test_only_the_first_rows_are_used_under_a_limit(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"no": "prompt"})
    assert len(open_dataset(path, limit=2)) == 2
    assert len(Dataset([{"prompt": "a"}, {"prompt": "b"}], limit=1)) == 1
    assert len(Dataset([{"prompt": "a"}], limit=5)) == 1


def test_indices_outside_the_dataset_are_refused() -> None:
    dataset = Dataset([{"prompt": "a"}])
    for index in (-1, 1):
        with pytest.raises(IndexError):
            dataset[index]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b'{"prompt": "a"}\n\n{"question": "b", "answer": 1}\n', "line 3 has no prompt; it has question, answer"),
        (b"{}\n", "line 1 has no prompt; it has no columns at all"),
        (b'{"prompt": null}\n', "line 1 has no prompt"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2 is not UTF-8"),
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2 is not valid JSON"),
        (b'["prompt"]\n', "line 1 is a list, not an object"),
        (b'{"prompt": 3}\n', "line 1 has a prompt of type int"),
        (b'{"prompt": "  "}\n', "line 1 has an empty prompt"),
        (b'{"prompt": []}\n', "line 1 has a prompt without messages"),
        (b'{"prompt": ["hi"]}\n', "line 1 has a prompt whose messages"),
        (b'{"prompt": "a", "id": [1]}\n', "line 1 has an id that is neither text nor an integer: [1]"),
        (b'{"prompt": "a", "id": true}\n', "line 1 has an id that is neither"),
        (
            b'{"prompt": "a", "id": "x"}\n{"prompt": "b"}\n{"prompt": "c", "id": "x"}\n',
            "line 3 has the id 'x' of line 1",
        ),
        (b'{"prompt": "a", "id": "train/1"}\n{"prompt": "b"}\n', "line 2 has the id 'train/1' of line 1"),
    ],
)
def test_bad_rows_are_refused_in_one_line_with_their_place(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(content)
    message = refusal(open_dataset, str(file))
    assert message.startswith("tasks.path: ")
    assert file.name in message
    assert said in message


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "./none", "/none/none", "here/none"])
def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    message = refusal(open_dataset, name, setting="tasks.eval_path")
    assert message.startswith("tasks.eval_path: there is no file")
    assert name.removeprefix("./") in message


def test_other_files_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    assert "should end in .jsonl or .parquet" in refusal(open_dataset, str(tmp_path / "a.txt"))
    (tmp_path / "folder.jsonl").mkdir()
    assert "cannot be read" in refusal(open_dataset, str(tmp_path / "folder.jsonl"))


def test_rows_in_memory_are_named_by_number() -> None:
    assert refusal(Dataset, [{"prompt": "a"}, {"q": 1}]) == "tasks: data row 1 has no prompt; it has q"
    assert refusal(Dataset, []) == "tasks: data is empty"


def test_jsonl_needs_no_datasets_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert len(open_dataset(jsonl(tmp_path, {"prompt": "a"}))) == 1
    (tmp_path / "a.parquet").touch()
    assert "pip install 'outpace[datasets]'" in refusal(open_dataset, str(tmp_path / "a.parquet"))


# --------------------------------------------------------------------------------------------------------------- ids


def test_duplicate_ids_are_numbered_on_request() -> None:
    rows = [{"prompt": "a", "id": name} for name in ("x", "y", "x", "x#2", "x", "y")]
    assert ids(Dataset(rows, duplicate_ids="number")) == ["x", "y", "x#3", "x#2", "x#4", "y#2"]


@given(st.lists(st.sampled_from(["a", "a#2", "a#2#2", "b", "data/1", None]), min_size=1))
def test_numbered_ids_are_unique_whatever_is_given(names: list[str | None]) -> None:
    given_ids = ids(Dataset([{"prompt": "p", "id": name} for name in names], duplicate_ids="number"))
    assert len(set(given_ids)) == len(names)


# ------------------------------------------------------------------------------------------------------------- split


@given(st.sets(st.text(min_size=1), min_size=2, max_size=60), st.floats(0.01, 0.99), st.integers(0, 5))
def test_a_split_is_disjoint_complete_and_never_one_sided(names: set[str], share: float, seed: int) -> None:
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


def test_copies_of_a_problem_stay_on_one_side() -> None:
    rows = [{"prompt": "p", "id": str(number % 50)} for number in range(100)]
    train, heldout = Dataset(rows, duplicate_ids="number").split(0.3, 0)
    assert heldout is not None
    assert {name.split("#")[0] for name in ids(train)}.isdisjoint(name.split("#")[0] for name in ids(heldout))


def test_nothing_is_held_out_of_one_row_or_at_share_zero() -> None:
    assert Dataset([{"prompt": "a"}]).split(0.5, 0)[1] is None
    assert Dataset([{"prompt": "a"}, {"prompt": "b"}]).split(0, 0)[1] is None


def test_a_selection_refuses_indices_outside_it() -> None:
    train, _ = Dataset([{"prompt": "a"}, {"prompt": "b"}]).split(0.5, 0)
    assert isinstance(train, Selection)
    for index in (-1, 1):
        with pytest.raises(IndexError):
            train[index]


# -------------------------------------------------------------------------------------------------------------- size


def test_memory_per_row_does_not_depend_on_how_long_rows_are(tmp_path: Path) -> None:
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


def test_a_row_is_parsed_only_when_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "lazy.jsonl"
    file.write_text('{"prompt": "a"}\nnot json\n')
    rows = JsonlRows(file)
    assert len(rows) == 2
    assert rows[0] == {"prompt": "a"}
    assert "line 2" in refusal(rows.__getitem__, 1)


# ------------------------------------------------------------------------------------------------- hugging face tables


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return package


def test_parquet_and_saved_folders_read_like_jsonl(tmp_path: Path, datasets: Any) -> None:
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
    assert "it has no split 'train', only test" in refusal(open_dataset, str(tmp_path / "splits"))


def test_a_table_is_checked_without_reading_its_rows(tmp_path: Path, datasets: Any) -> None:
    table = datasets.Dataset.from_list([{"question": "a", "answer": 1}])
    assert refusal(Dataset, table) == "tasks: data has no prompt column; it has question, answer"
    twice = datasets.Dataset.from_list([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}])
    assert "row 1 has the id 'x' of row 0" in refusal(Dataset, twice)


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, datasets: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_network(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", no_network)
    offline = datasets.config.HF_HUB_OFFLINE
    assert refusal(open_dataset, "nobody/nothing").startswith("tasks.path: nobody/nothing cannot be loaded: ")
    assert "Retrying" not in capfd.readouterr().err
    assert datasets.config.HF_HUB_OFFLINE is offline


def test_a_damaged_parquet_file_is_refused(tmp_path: Path, datasets: Any) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    assert "cannot be loaded" in refusal(open_dataset, str(tmp_path / "a.parquet"))
