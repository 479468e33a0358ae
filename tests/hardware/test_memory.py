"""Memory estimates compared with measurements on this machine. `tests/learner/test_cuda.py` and
`tests/engines/embedded/test_cuda.py` do the same on a GPU."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from outpace.config.load import dump_settings, load_config
from outpace.config.validation import resolve
from outpace.errors import BadInput
from outpace.hardware.memory import (
    AvailableMemory,
    ModelShape,
    check_memory,
    engine_memory,
    fitting_tokens_per_pass,
    learner_memory,
    parse_gpu_totals,
    with_tokens_per_pass,
)
from outpace.hardware.placement import assign_gpus
from outpace.models.loading import resolve_model
from support import resolved

GB = 10**9
SMOLLM2 = ModelShape(134_515_008, 30, 576, 9, 3, 64, 1536, 49_152, 8192)
"""The shape of SmolLM2-135M."""
LARGE = {"model.dtype": "bfloat16", "engine.slots": 1024, "engine.context": 1024, "learner.tokens_per_pass": 65_536}


def checked(settings: dict[str, Any], memory: float, gpus: int = 1, shape: ModelShape = SMOLLM2) -> list[str]:
    config = resolved(settings)
    names = [str(index) for index in range(gpus)]
    available = AvailableMemory(dict.fromkeys(names, int(memory)), int(memory))
    return check_memory(config, assign_gpus(config, names), shape, available)


def whole_numbers(line: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"(?<![\d.])\d+(?!\d|\.\d)", line)]


def test_the_shape_of_a_model_is_read_from_its_files() -> None:
    shape = ModelShape.read(resolve_model("starter"))
    assert shape is not None
    assert (shape.layers, shape.width, shape.kv_heads, shape.head_size) == (4, 128, 4, 32)
    assert shape.parameters == 272 * 128 + 4 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128) + 128


@pytest.mark.parametrize("sharded", [False, True])
def test_the_same_weights_in_another_format_are_not_counted_again(tmp_path: Path, sharded: bool) -> None:
    starter = resolve_model("starter")
    shutil.copy(starter / "config.json", tmp_path)
    weights = "model-00001-of-00001.safetensors" if sharded else "model.safetensors"
    for name in (weights, "consolidated.safetensors"):
        shutil.copy(starter / "model.safetensors", tmp_path / name)
    if sharded:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": weights, "b": weights}}))
    assert ModelShape.read(tmp_path) == ModelShape.read(starter)


def test_a_model_without_a_shape_in_its_config_is_not_estimated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    assert ModelShape.read(tmp_path) is None


def test_the_memory_estimate_of_the_learner_matches_a_smollm2_measurement_on_an_h200() -> None:
    assert learner_memory(resolved(LARGE), SMOLLM2).most == pytest.approx(62 * GB, rel=0.15)


def test_engine_memory_is_the_kv_cache_and_little_more() -> None:
    keys_and_values = 1024 * 1024 * SMOLLM2.kv_bytes("bfloat16")
    assert keys_and_values < engine_memory(resolved(LARGE), SMOLLM2).most < 1.3 * keys_and_values


def test_gradient_checkpointing_and_adapters_reduce_learner_memory() -> None:
    plain = learner_memory(resolved(LARGE), SMOLLM2)
    assert learner_memory(resolved(LARGE | {"learner.gradient_checkpointing": True}), SMOLLM2).most < plain.most / 5
    assert learner_memory(resolved(LARGE | {"lora.rank": 8}), SMOLLM2).fixed < plain.fixed / 3
    assert learner_memory(resolved(LARGE | {"kl.coefficient": 0.1}), SMOLLM2).fixed > plain.fixed


def test_frozen_weights_take_two_bytes_if_model_and_checkpoint_are_in_bfloat16() -> None:
    def fixed(dtype: str, stored: str, devices: int = 1) -> int:
        settings = {"model.dtype": dtype, "engine.kind": "vllm", "lora.rank": 16, "learner.devices": devices}
        return learner_memory(resolved(settings), replace(QWEN_7B, stored=stored), on_gpu=True).fixed

    halves, floats = fixed("bfloat16", "bfloat16"), fixed("bfloat16", "float32")
    assert floats > 4 * OF_7B
    assert halves < 2.4 * OF_7B
    assert fixed("float32", "bfloat16") > 4 * OF_7B
    assert fixed("bfloat16", "bfloat16", devices=4) < fixed("bfloat16", "float32", devices=4) - OF_7B // 3


def test_the_dtype_of_the_files_is_read(tmp_path: Path) -> None:
    starter = resolve_model("starter")
    shutil.copy(starter / "config.json", tmp_path)
    floats = {name: tensor.float() for name, tensor in load_file(starter / "model.safetensors").items()}
    save_file(floats, tmp_path / "model.safetensors")
    assert_stored(tmp_path, "float32")
    halves = {name: tensor.bfloat16() for name, tensor in load_file(starter / "model.safetensors").items()}
    save_file(halves, tmp_path / "model.safetensors")
    assert_stored(tmp_path, "bfloat16")


def assert_stored(directory: Path, dtype: str) -> None:
    shape = ModelShape.read(directory)
    assert shape is not None
    assert shape.stored == dtype


def test_a_run_that_surely_fits_causes_no_warning() -> None:
    assert checked(LARGE, 140 * GB) == []
    assert checked(LARGE, 70 * GB, gpus=2) == []


def test_a_run_that_may_not_fit_is_warned_with_a_value_that_fits() -> None:
    (line,) = checked(LARGE, 60 * GB)
    assert "learner.tokens_per_pass" in line
    value = whole_numbers(line)[-1]
    assert 1000 < value < 65_536
    assert checked(LARGE | {"learner.tokens_per_pass": value}, 60 * GB) == []
    assert checked(LARGE | {"learner.tokens_per_pass": 2 * value}, 60 * GB) != []


def test_a_shorter_context_is_suggested_when_a_pass_holds_one_sequence() -> None:
    long = {"learner.tokens_per_pass": 1024, "engine.slots": 1, "eval.count": 0}
    (line,) = checked(long, 8 * GB)
    assert "engine.context" in line
    value = whole_numbers(line)[-1]
    assert checked(long | {"engine.context": value}, 8 * GB) == []
    (line,) = checked(long | {"learner.tokens_per_pass": 9000}, 8 * GB)
    assert "learner.tokens_per_pass" in line
    assert "engine.context" in line


def test_slots_that_cannot_fit_are_refused_with_a_number_that_fits() -> None:
    with pytest.raises(BadInput, match=r"^engine\.slots: ") as refused:
        checked(LARGE | {"engine.slots": 100_000}, 80 * GB)
    value = whole_numbers(str(refused.value))[-1]
    checked(LARGE | {"engine.slots": value}, 80 * GB)
    with pytest.raises(BadInput):
        checked(LARGE | {"engine.slots": int(1.1 * value)}, 80 * GB)


def test_a_model_that_cannot_fit_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^model\.path: .*lora\.rank"):
        checked(LARGE | {"engine.slots": 8}, 80 * GB, shape=replace(SMOLLM2, parameters=7 * GB))
    with pytest.raises(BadInput, match=r"^model\.path: (?!.*lora\.rank)"):
        checked(LARGE | {"engine.slots": 8, "lora.rank": 8}, 20 * GB, shape=replace(SMOLLM2, parameters=7 * GB))


# --------------------------------------------------------------------------------------------------- a sharded learner

QWEN_7B = ModelShape(7_615_616_512, 28, 3584, 28, 4, 128, 18_944, 152_064, 32_768, 2)
SHARDED = {"model.dtype": "bfloat16", "engine.kind": "vllm", "engine.slots": 64, "engine.context": 4096}
OF_7B = 7_615_616_512


def sharded(**values: Any) -> int:
    """Memory in any case of one process of a learner of Qwen2.5-7B on GPUs."""
    learner = {f"learner.{key}": value for key, value in values.items()}
    return learner_memory(resolved(SHARDED | learner), QWEN_7B, on_gpu=True).fixed


def test_weights_gradients_and_optimizer_state_are_divided_among_the_processes() -> None:
    two, four, eight = (sharded(devices=count) for count in (2, 4, 8))
    assert two - four == pytest.approx(16 * OF_7B / 4, rel=0.01)
    assert four - eight == pytest.approx(16 * OF_7B / 8, rel=0.01)


def test_without_reshard_every_process_holds_all_layers_in_the_dtype_of_the_model() -> None:
    state = 16 * OF_7B // 8
    assert sharded(devices=8, reshard=False) - state >= 28 * 2 * QWEN_7B.layer
    assert sharded(devices=8) - state < 28 * 2 * QWEN_7B.layer


def test_offload_leaves_only_gathered_weights_on_the_gpu() -> None:
    assert sharded(devices=4) - sharded(devices=4, offload=True) == 4 * OF_7B
    assert sharded(devices=4, offload=True) == sharded(devices=8, offload=True) == sharded(offload=True)


def test_embeddings_and_output_head_are_gathered_whole() -> None:
    tied = replace(QWEN_7B, vocabulary_matrices=1)
    config = resolved(SHARDED | {"learner.devices": 8})
    matrix = QWEN_7B.vocabulary * QWEN_7B.width
    less = learner_memory(config, QWEN_7B, on_gpu=True).fixed - learner_memory(config, tied, on_gpu=True).fixed
    assert less > 4 * matrix


TRACK = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

devices, reshard, halves, (vocabulary, width, layers, heads, kv_heads, wide) = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
mesh = init_device_mesh("cpu", (devices,))
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
    num_key_value_heads=kv_heads, intermediate_size=wide, tie_word_embeddings=False))
parameters = sum(weight.numel() for weight in model.parameters())
dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
for layer in model.model.layers:
    policy = dtypes if halves else MixedPrecisionPolicy()
    fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
fully_shard(model, mesh=mesh, reshard_after_forward=False)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
tracker = FSDPMemTracker(model, optimizer)
tokens = torch.zeros((1, 4), dtype=torch.long)
tracker.track_inputs((tokens,))
with tracker:
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=halves):
            loss = model(tokens).logits.float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        tracker.reset_mod_stats()
(peak,) = tracker.get_tracker_snapshot("peak").values()
print(json.dumps([parameters, peak["Total"]]))
"""
"""Trains a model on one of several ranks that FSDP2 believes to exist, and prints the memory of all its tensors."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "reshard", "dtype"),
    [(4, True, "bfloat16"), (4, False, "bfloat16"), (8, True, "float32")],
)
def test_the_estimate_of_a_sharded_learner_is_close_to_what_fsdp_allocates(
    devices: int, reshard: bool, dtype: str
) -> None:
    model = (8000, 512, 8, 8, 2, 2048)
    vocabulary, width, layers, heads, kv_heads, wide = model
    given = json.dumps([devices, reshard, dtype == "bfloat16", model])
    done = subprocess.run([sys.executable, "-c", TRACK, given], capture_output=True, text=True, check=True)
    parameters, measured = json.loads(done.stdout.splitlines()[-1])
    shape = ModelShape(parameters, layers, width, heads, kv_heads, width // heads, wide, vocabulary, 4096, 2)
    settings = {"model.dtype": dtype, "engine.kind": "vllm", "learner.devices": devices, "learner.reshard": reshard}
    gradient_of_head = 4 * vocabulary * width  # in the estimate of a full pass
    estimate = learner_memory(resolved(settings), shape, on_gpu=True).fixed + gradient_of_head
    assert estimate == pytest.approx(measured, rel=0.05)


def test_a_reference_model_is_sharded_too() -> None:
    def fixed(devices: int, coefficient: float) -> int:
        settings = SHARDED | {"learner.devices": devices, "kl.coefficient": coefficient}
        return learner_memory(resolved(settings), QWEN_7B, on_gpu=True).fixed

    assert fixed(4, 0.1) - fixed(4, 0.0) == OF_7B
    assert fixed(8, 0.1) - fixed(8, 0.0) == OF_7B // 2


def test_a_7b_model_that_does_not_fit_on_one_gpu_fits_on_four() -> None:
    with pytest.raises(BadInput, match=r"^model\.path: .*learner\.devices"):
        checked(SHARDED, 80 * GB, gpus=2, shape=QWEN_7B)
    assert checked(SHARDED | {"learner.devices": 4, "learner.tokens_per_pass": 4096}, 80 * GB, 5, QWEN_7B) == []


def test_gpus_with_the_same_problem_are_reported_in_one_line() -> None:
    (line,) = checked(SHARDED | {"learner.devices": 4, "learner.tokens_per_pass": 65_536}, 80 * GB, 5, QWEN_7B)
    assert "GPUs 0, 1, 2, 3" in line
    assert "learner.tokens_per_pass" in line


def test_offloading_is_refused_if_the_memory_of_the_host_is_too_small() -> None:
    config = resolved(SHARDED | {"learner.offload": True})
    placement = assign_gpus(config, ["0", "1"])
    gpus = {"0": 140 * GB, "1": 140 * GB}
    assert check_memory(config, placement, QWEN_7B, AvailableMemory(gpus, 200 * GB)) == []
    with pytest.raises(BadInput, match=r"^learner\.offload: "):
        check_memory(config, placement, QWEN_7B, AvailableMemory(gpus, 100 * GB))


def test_all_processes_of_a_learner_on_the_cpu_share_the_memory_of_the_machine() -> None:
    on_cpu = {"learner.devices": 4, "engine.slots": 4, "engine.context": 1024, "eval.count": 0, "run.device": "cpu"}
    config = resolved(on_cpu | {"learner.tokens_per_pass": 8192})
    one = learner_memory(config, SMOLLM2)
    engine = engine_memory(config, SMOLLM2)
    assert checked(on_cpu | {"learner.tokens_per_pass": 8192}, 4 * one.most + engine.most + GB) == []
    assert checked(on_cpu | {"learner.tokens_per_pass": 8192}, 3 * one.most + engine.most) != []


def test_passes_of_a_sharded_learner_use_the_memory_that_sharding_frees() -> None:
    def chosen(devices: int) -> int:
        config = resolved(SHARDED | {"learner.devices": devices})
        names = [str(index) for index in range(devices + 1)]
        available = AvailableMemory(dict.fromkeys(names, 140 * GB), 1000 * GB)
        return fitting_tokens_per_pass(config, assign_gpus(config, names), QWEN_7B, available)

    assert chosen(2) < chosen(4) < chosen(8)


def test_the_output_head_is_found_in_the_files_of_a_model(tmp_path: Path) -> None:
    starter = resolve_model("starter")
    shape = ModelShape.read(starter)
    assert shape is not None
    assert shape.vocabulary_matrices == 1, "the starter ties its output head to its embeddings"
    shutil.copy(starter / "config.json", tmp_path)
    tensors = load_file(starter / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    untied = ModelShape.read(tmp_path)
    assert untied is not None
    assert untied.vocabulary_matrices == 2
    assert untied.layer == shape.layer


# ---------------------------------------------------------------------------------------------------------- GPU sizes


def test_a_gpu_of_unknown_size_is_not_checked() -> None:
    config = resolved(LARGE | {"engine.slots": 10**6})
    assert check_memory(config, assign_gpus(config, ["MIG-a"]), SMOLLM2, AvailableMemory({}, GB)) == []


def test_on_a_cpu_all_components_share_the_memory_of_the_machine() -> None:
    assert checked(LARGE, 140 * GB, gpus=0) == []
    with pytest.raises(BadInput):
        checked(LARGE | {"engine.slots": 100_000}, 80 * GB, gpus=0)


def test_gpu_memory_sizes_are_found_by_index_and_by_uuid() -> None:
    listing = "GPU-aa11, 81559\nGPU-bb22, 40960\nodd line\n"
    mib = 1 << 20
    assert parse_gpu_totals(listing, ["0", "1", "5"], in_bus_order=True) == {"0": 81559 * mib, "1": 40960 * mib}
    assert parse_gpu_totals(listing, ["1"], in_bus_order=False) == {"1": 81559 * mib}, (
        "CUDA may number the GPUs differently"
    )
    assert parse_gpu_totals(listing, ["GPU-bb", "MIG-cc"], in_bus_order=False) == {"GPU-bb": 40960 * mib}


MODELS = {
    "starter": (272, 128, 4, 4, 4, 384),
    "moderate": (8192, 512, 8, 8, 4, 1408),
}
TOKENS = 4096

MEASURE = """
import json, sys
import numpy as np, torch
from transformers import LlamaConfig, LlamaForCausalLM
from outpace.learner.core import LearnerCore
from outpace.types import Row
from support import resolved

def peak():  # not getrusage: its peak is inherited from the process that started this one
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

vocabulary, width, layers, heads, kv_heads, wide, tokens = json.loads(sys.argv[1])
torch.set_num_threads(2)
(torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()  # libraries are loaded
before = peak()
config = LlamaConfig(vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                     num_key_value_heads=kv_heads, intermediate_size=wide, tie_word_embeddings=True)
core = LearnerCore(LlamaForCausalLM(config), resolved({"learner.tokens_per_pass": tokens}))
length = 256
noise = np.random.default_rng(0)
def row():
    mask = np.arange(length) > 16
    ones = np.full(length, -1.0, dtype=np.float32)
    random_tokens = noise.integers(0, vocabulary, length).astype(np.int32)
    return Row(random_tokens, mask, ones, np.zeros(length, dtype=np.int32), ones)
core.accumulate([row() for _ in range(tokens // length)])
core.step()
core.accumulate([row() for _ in range(tokens // length)])
core.step()
print(peak() - before)
"""


@pytest.mark.parametrize(
    "model", [pytest.param("starter", marks=pytest.mark.slow), pytest.param("moderate", marks=pytest.mark.nightly)]
)
def test_the_memory_estimate_of_the_learner_is_close_to_the_measured_peak(model: str) -> None:
    vocabulary, width, layers, heads, kv_heads, wide = MODELS[model]
    size = width // heads
    block = width * size * (2 * heads + 2 * kv_heads) + 3 * width * wide + 2 * width
    parameters = vocabulary * width + layers * block + width
    shape = ModelShape(parameters, layers, width, heads, kv_heads, size, wide, vocabulary, 4096)
    estimate = learner_memory(resolved({"learner.tokens_per_pass": TOKENS}), shape).most
    run = [sys.executable, "-c", MEASURE, json.dumps([*MODELS[model], TOKENS])]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    measured = int(done.stdout)
    assert estimate / 2 < measured < estimate * 1.5


# --------------------------------------------------------------------------------------------- learner.tokens_per_pass


BESIDE_AN_ENGINE = {"model.dtype": "bfloat16", "engine.slots": 256}


def chosen_tokens(settings: dict[str, Any], memory: float, shape: ModelShape = SMOLLM2) -> int:
    config = resolved({**BESIDE_AN_ENGINE, **settings})
    placement = assign_gpus(config, ["0"])
    return fitting_tokens_per_pass(config, placement, shape, AvailableMemory({"0": int(memory)}, int(memory)))


def test_passes_are_as_large_as_memory_allows_up_to_a_limit() -> None:
    small, medium, large = (chosen_tokens({}, gb * GB) for gb in (6, 20, 140))
    assert 1024 <= small < medium < large == 65_536


def test_a_pass_of_the_chosen_size_fits_beside_an_idle_engine() -> None:
    for gb in (8, 12, 16):
        config = resolved({**BESIDE_AN_ENGINE, "learner.tokens_per_pass": chosen_tokens({}, gb * GB)})
        longest = replace(SMOLLM2, context=1024)
        needed = learner_memory(config, longest, on_gpu=True).most + engine_memory(config, longest).fixed
        assert needed <= gb * GB


def test_a_deterministic_run_packs_the_same_passes_on_every_machine() -> None:
    assert chosen_tokens({"run.deterministic": True, "run.device": "cpu"}, 140 * GB) == 16_384


def test_a_resume_on_other_hardware_chooses_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('model.path = "starter"\nrun.device = "cpu"\n')

    def start(memory: float) -> int:
        monkeypatch.setattr("outpace.hardware.memory.available_memory", lambda _: AvailableMemory({}, int(memory)))
        config = with_tokens_per_pass(resolve(load_config(file)), resolve_model("starter"))
        file.write_text(dump_settings(config))  # as in a run directory
        return config.learner.resolved_tokens_per_pass

    assert start(140 * GB) > start(GB)
