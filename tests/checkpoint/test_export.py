import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from outpace.checkpoint.commit import begin, commit
from outpace.checkpoint.export import export
from outpace.checkpoint.hub import upload
from outpace.errors import BadInput, CorruptData
from support import write_resolved


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The base model of the run; `resolve_model` is stubbed."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float16"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_text("the old weights")
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    loading = ModuleType("outpace.models.loading")
    loading.resolve_model = Path  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outpace.models.loading", loading)
    return folder


@pytest.fixture
def run(tmp_path: Path, source: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_resolved(folder, f'[model]\npath = "{source}"\n')
    for step in (1, 2):
        add_checkpoint(folder, step)
    return folder


def add_checkpoint(run: Path, step: int) -> Path:
    temporary = begin(run / "checkpoints", step)
    save_file({"model.norm.weight": np.full(4, step, np.float32)}, temporary / "model.safetensors")
    save_file({"m": np.zeros(4, np.float32)}, temporary / "optimizer.safetensors")
    return commit(temporary)


def write_evaluations(run: Path, rewards: dict[int, float]) -> None:
    lines = [json.dumps({"step": step, "eval/reward": reward}) for step, reward in rewards.items()]
    (run / "evals.jsonl").write_text("\n".join(lines) + "\n")


def weight_of(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")["model.norm.weight"][0])


def test_an_export_holds_the_newest_weights_and_the_files_of_the_model(run: Path, tmp_path: Path) -> None:
    out = export(run, tmp_path / "deep" / "out")
    assert weight_of(out) == 2
    assert sorted(os.listdir(out)) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((out / "config.json").read_text()) == {"model_type": "llama", "dtype": "float32"}
    assert os.listdir(tmp_path / "deep") == ["out"]


def test_a_single_checkpoint_can_be_exported(run: Path, tmp_path: Path) -> None:
    assert weight_of(export(run / "checkpoints" / "step-000001", tmp_path / "out")) == 1


def test_the_best_checkpoint_can_be_exported(run: Path, tmp_path: Path) -> None:
    add_checkpoint(run, 3)
    write_evaluations(run, {1: 0.5, 2: 0.7, 3: 0.6})
    assert weight_of(export(run, tmp_path / "best", best=True)) == 2
    (run / "checkpoints/step-000002/model.safetensors").write_bytes(b"")
    assert weight_of(export(run, tmp_path / "next", best=True)) == 3


def test_exporting_the_best_checkpoint_requires_an_evaluated_checkpoint(run: Path, tmp_path: Path) -> None:
    write_evaluations(run, {7: 1.0})
    with pytest.raises(BadInput, match=r"\bevaluated\b"):
        export(run, tmp_path / "out", best=True)
    with pytest.raises(BadInput, match=r"^--best: .*step-000001"):
        export(run / "checkpoints" / "step-000001", tmp_path / "out", best=True)


def test_a_damaged_newest_checkpoint_is_skipped(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints/step-000002/model.safetensors").write_bytes(b"")
    assert weight_of(export(run, tmp_path / "out")) == 1
    with pytest.raises(BadInput, match=r"step-000002\b.*model\.safetensors"):
        export(run / "checkpoints" / "step-000002", tmp_path / "other")


def test_the_output_directory_must_be_empty(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export(run, out)
    with pytest.raises(BadInput, match=r"/out\b.*empty"):
        export(run, out)


def test_a_directory_that_is_not_a_run_is_rejected(tmp_path: Path, source: Path) -> None:
    with pytest.raises(BadInput, match=r"/missing\b"):
        export(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(BadInput, match=re.escape(str(source))):
        export(source, tmp_path / "out")
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(BadInput, match="complete"):
        export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_weights_is_rejected(run: Path, tmp_path: Path) -> None:
    temporary = begin(run / "checkpoints", 3)
    (temporary / "core.json").write_text("{}")
    commit(temporary)
    with pytest.raises(BadInput, match=r"step-000003\b.*model\.safetensors"):
        export(run, tmp_path / "out")


def test_weights_that_are_not_safetensors_are_rejected(run: Path, tmp_path: Path) -> None:
    temporary = begin(run / "checkpoints", 3)
    (temporary / "model.safetensors").write_bytes(b"something else")
    commit(temporary)
    with pytest.raises(CorruptData, match=r"model\.safetensors"):
        export(run, tmp_path / "out")


def test_a_failed_export_leaves_nothing_behind(run: Path, source: Path, tmp_path: Path) -> None:
    (source / "config.json").unlink()
    with pytest.raises(BadInput, match=r"config\.json"):
        export(run, tmp_path / "exports" / "out")
    assert os.listdir(tmp_path / "exports") == []


def test_an_upload_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Unreachable:
        def __init__(self, token: str | None) -> None: ...

        def create_repo(self, *arguments: Any, **options: Any) -> None:
            raise OSError("no route\nto the hub")

    monkeypatch.setattr("huggingface_hub.HfApi", Unreachable)
    with pytest.raises(BadInput, match=r"^push_to_hub: .*me/model") as failed:
        upload(tmp_path, "me/model")
    assert "\n" not in str(failed.value)
