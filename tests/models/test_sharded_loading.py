"""Loading a model in shards, compared with loading it whole."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from learner.ranks import run_ranks, stop_ranks
from learner.worlds import needs_peft
from outpace.errors import BadInput
from outpace.models.loading import decoder_layers, load_model
from outpace.models.lora import LoraAdapters
from outpace.models.sharded_loading import CheckpointMismatch, load_sharded_model
from outpace.types import LoraAdapter

SMALL: dict[str, Any] = {
    "vocab_size": 51,  # not divisible by the ranks
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10_000.0}
RANKS = 2


def llama(**overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SMALL | overrides)))


def save(model: PreTrainedModel, directory: Path, **options: Any) -> str:
    model.save_pretrained(directory, **options)
    return str(directory)


def leave_whole(model: PreTrainedModel) -> None:
    pass


def shard_layers(model: PreTrainedModel) -> None:
    devices = init_device_mesh("cpu", (RANKS,))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=devices)
    fully_shard(model, mesh=devices)


def must_not_be_called(model: PreTrainedModel) -> None:
    raise AssertionError("sharded a model that cannot be loaded")


def assert_same_model(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Compare every tensor, which of them are tied, and logits."""
    for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
        tensors: dict[str, Tensor] = dict(kind(found, remove_duplicate=False))
        others: dict[str, Tensor] = dict(kind(expected, remove_duplicate=False))
        assert tensors.keys() == others.keys()
        for name, other in others.items():
            tensor = tensors[name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert (whole.dtype, whole.device) == (other.dtype, other.device), name
            assert torch.equal(whole, other), name
            same = {twin for twin in others if others[twin] is other}
            assert {twin for twin in tensors if tensors[twin] is tensor} == same, name
    assert found.training == expected.training
    input_ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        logits, wanted = found(input_ids=input_ids).logits, expected(input_ids=input_ids).logits
    torch.testing.assert_close(logits, wanted)


# --------------------------------------------------------------------------------------------------------- with ranks


def load_and_compare(paths: list[str], rank: int) -> list[tuple[int, int]]:
    """Return how many values this rank holds of each model, and how many there are."""
    sizes = []
    for path in paths:
        model = load_sharded_model(path, shard=shard_layers, device="cpu")
        parameters = list(model.parameters())
        assert all(isinstance(parameter, DTensor) for parameter in parameters)
        local = sum(parameter.to_local().numel() for parameter in parameters)  # type: ignore[operator]
        sizes.append((local, sum(parameter.numel() for parameter in parameters)))
        assert_same_model(model, load_model(path, device="cpu"))
    return sizes


def train_sharded(path: str, rank: int) -> dict[str, Tensor]:
    """Return the gradients of a sharded model."""
    model = load_sharded_model(path, shard=shard_layers, device="cpu")
    model(input_ids=torch.arange(7)[None]).logits.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() for name, grad in gradients.items() if isinstance(grad, DTensor)}


@pytest.mark.slow
def test_ranks_load_their_rows_of_any_checkpoint_and_together_hold_the_model(tmp_path: Path) -> None:
    gemma = Gemma3TextConfig(**SMALL, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    paths = [
        "starter",
        save(llama(tie_word_embeddings=True), tmp_path / "tied"),
        save(llama().to(torch.bfloat16), tmp_path / "bfloat16, several files", max_shard_size="4KB"),
        save(llama(rope_parameters=YARN, attention_bias=True), tmp_path / "other rotary embeddings, biases"),
        save(Gemma3ForCausalLM(gemma), tmp_path / "buffers with constants"),
        save(
            GPT2LMHeadModel(GPT2Config(vocab_size=51, n_embd=24, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=1)),
            tmp_path / "gpt2",
        ),
    ]
    assert (tmp_path / "bfloat16, several files" / "model.safetensors.index.json").is_file()
    ranks = run_ranks(partial(load_and_compare, paths), RANKS)
    for (first, whole), (second, _) in zip(*ranks, strict=True):
        assert first + second == whole
        assert first < 0.6 * whole


@pytest.mark.slow
def test_a_model_loaded_in_shards_can_be_trained(tmp_path: Path) -> None:
    path = save(llama(tie_word_embeddings=True), tmp_path)
    whole = load_model(path, device="cpu")
    whole(input_ids=torch.arange(7)[None]).logits.square().mean().backward()
    for gradients in run_ranks(partial(train_sharded, path), RANKS):
        assert gradients.keys() == dict(whole.named_parameters()).keys()
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)


ADAPTER = LoraAdapter(4, 8.0, ["q_proj", "down_proj"])


def load_with_adapters(path: str, rank: int) -> dict[str, Tensor]:
    """Return all tensors of a model with adapters, whole."""
    torch.manual_seed(1)
    model = load_sharded_model(path, shard=shard_layers, device="cpu", adapter=ADAPTER, frozen_dtype=torch.bfloat16)
    assert (
        LoraAdapters(model, ADAPTER).base_checksum
        == LoraAdapters(load_model(path, device="cpu"), ADAPTER).base_checksum
    )
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
@needs_peft
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_are_added_before_a_model_is_sharded(tmp_path: Path, tied: bool) -> None:
    path = save(llama(tie_word_embeddings=tied, attention_bias=True).to(torch.bfloat16), tmp_path)
    torch.manual_seed(1)
    whole = load_model(path, device="cpu")
    LoraAdapters(whole, ADAPTER)
    kept = re.compile(r"_proj(\.base_layer)?\.weight" if tied else r"(_proj(\.base_layer)?|lm_head)\.weight")
    for tensors in run_ranks(partial(load_with_adapters, path), RANKS):
        assert tensors.keys() == whole.state_dict().keys()
        for name, expected in whole.state_dict().items():
            assert torch.equal(tensors[name].float(), expected), name
            assert tensors[name].dtype == (torch.bfloat16 if kept.search(name) else torch.float32), name


def peak_of_loading(small: str, large: str, adapter: LoraAdapter | None, rank: int) -> tuple[int, int, int]:
    """Return the bytes that loading added to the peak of this process, those of its shard, and those that remain."""
    load = partial(load_sharded_model, shard=shard_layers, device="cpu", adapter=adapter, frozen_dtype=torch.bfloat16)
    load(small)  # imports and caches
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    model = load(large)
    peak = _resident("VmHWM") - before
    return peak, sum(each.to_local().nbytes for each in model.parameters()), _resident("VmRSS") - before  # type: ignore[operator]


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux, to reset the peak memory")
@pytest.mark.parametrize("adapter", [None, pytest.param(ADAPTER, marks=needs_peft)])
def test_no_rank_holds_more_than_its_share_and_the_largest_piece(tmp_path: Path, adapter: LoraAdapter | None) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 128}
    model = llama(vocab_size=30_000, tie_word_embeddings=True, **sizes).to(torch.bfloat16)
    embeddings = model.get_input_embeddings().weight.numel()  # type: ignore[union-attr, operator]
    whole = 4 * model.num_parameters() if adapter is None else 2 * (model.num_parameters() + embeddings)
    piece = model.get_input_embeddings().weight.nbytes // RANKS  # type: ignore[union-attr, operator]
    small, large = save(llama(), tmp_path / "small"), save(model, tmp_path / "large")
    stop_ranks()  # the memory of new processes is measured
    for peak, share, remains in run_ranks(partial(peak_of_loading, small, large, adapter), RANKS):
        print(f"whole {whole / 1e6:.0f} MB, share {share / 1e6:.0f}, largest piece {piece / 1e6:.0f}, ", end="")
        print(f"peak {peak / 1e6:.0f}, remains {remains / 1e6:.0f}")
        assert share < 0.51 * whole
        assert peak < share + piece + 0.1 * whole


# ------------------------------------------------------------------------------------------------------ in one process


def test_parameters_that_are_not_sharded_are_loaded_whole(tmp_path: Path) -> None:
    for number, tied in enumerate((True, False)):
        path = save(llama(tie_word_embeddings=tied).to(torch.bfloat16), tmp_path / str(number))
        assert_same_model(load_sharded_model(path, shard=leave_whole, device="cpu"), load_model(path, device="cpu"))


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    path, state = save(llama(), tmp_path), torch.get_rng_state()
    load_sharded_model(path, shard=leave_whole, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tied_tensor_that_is_stored_under_both_names_is_loaded(tmp_path: Path) -> None:
    path = save(llama(tie_word_embeddings=True), tmp_path)
    change(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert_same_model(load_sharded_model(path, shard=leave_whole, device="cpu"), load_model(path, device="cpu"))


def test_buffers_that_are_computed_now_may_be_in_the_files(tmp_path: Path) -> None:
    path = save(llama(), tmp_path)
    change(tmp_path, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})
    assert_same_model(load_sharded_model(path, shard=leave_whole, device="cpu"), load_model(path, device="cpu"))


def change(directory: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = directory / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def renamed(name: str) -> str:
    return name.replace("model.layers", "decoder.blocks")


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda tensors: {renamed(name): tensor for name, tensor in tensors.items()}, "layers.0"),
        (lambda tensors: tensors | {"model.norm.scale": torch.ones(3)}, "model.norm.scale"),
        (lambda tensors: tensors | {"model.norm.weight": torch.ones(3)}, "model.norm.weight"),
        (lambda tensors: tensors | {"model.norm.weight": torch.ones(24).int()}, "model.norm.weight"),
        (lambda tensors: tensors | {"lm_head.weight": torch.ones(51, 24)}, "lm_head.weight"),
    ],
    ids=["other names", "an extra tensor", "another shape", "integers", "tied tensors that differ"],
)
def test_files_that_do_not_fit_the_model_are_refused_before_it_is_sharded(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], name: str
) -> None:
    path = save(llama(tie_word_embeddings=True), tmp_path)
    change(tmp_path, edit)
    with pytest.raises(CheckpointMismatch, match=name):
        load_sharded_model(path, shard=must_not_be_called, device="cpu")


def test_checkpoints_that_transformers_converts_are_refused(tmp_path: Path) -> None:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    path = save(MixtralForCausalLM(MixtralConfig(**SMALL, **experts)), tmp_path)
    with pytest.raises(CheckpointMismatch):
        load_sharded_model(path, shard=must_not_be_called, device="cpu")


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    path, config = save(llama(), tmp_path), tmp_path / "config.json"
    quantization = {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantization))
    with pytest.raises(CheckpointMismatch):
        load_sharded_model(path, shard=must_not_be_called, device="cpu")


def test_a_truncated_file_is_bad_input(tmp_path: Path) -> None:
    path, file = save(llama(), tmp_path), tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"model\.path"):
        load_sharded_model(path, shard=must_not_be_called, device="cpu")


def test_a_path_without_a_model_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"model\.path"):
        load_sharded_model(str(tmp_path), shard=must_not_be_called, device="cpu")
