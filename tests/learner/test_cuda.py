"""The learner on a GPU: equality with the CPU, saved state, memory estimates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.presets import AGGREGATIONS, STREAMED
from outpace.checkpoint.journal import read_record
from outpace.hardware.memory import ModelShape, learner_memory
from outpace.learner import state
from outpace.learner.backend import LearnerSettings
from outpace.learner.core import LearnerCore
from outpace.learner.forward import ForwardOptions, PackedForward, PaddedForward
from outpace.learner.learner import LearnerHost
from outpace.learner.packing import pack
from outpace.learner.state import StateCopies
from outpace.learner.torch_backend import TorchBackend
from outpace.types import Row
from outpace.weights.shared_memory import SnapshotWriter, read_snapshot
from support import resolved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch.compile warns about its own code
]

MakeLlama = Callable[..., LlamaForCausalLM]
MakeRows = Callable[..., list[Row]]


def core_on_gpu(model: LlamaForCausalLM, dtype: str) -> LearnerCore:
    return LearnerCore(model.cuda(), resolved({"learner.lr": 1e-3, "model.dtype": dtype}))


def test_packed_equals_padded_on_a_gpu(make_llama: MakeLlama, make_rows: MakeRows) -> None:
    (packed,) = pack(make_rows(12), 10_000)
    model = make_llama().cuda().eval()
    results = []
    for forward in (PaddedForward, PackedForward):
        model.zero_grad()
        logp = forward(model, ForwardOptions())(packed).logp_N
        logp.sum().backward()
        results.append((logp.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-4)
    for expected, found in zip(results[0][1], results[1][1], strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(found / scale, expected / scale, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_learner_is_packed_and_agrees_with_the_cpu(
    make_llama: MakeLlama, make_rows: MakeRows, dtype: str
) -> None:
    rows = make_rows(12)
    cpu = LearnerCore(make_llama(initializer_range=0.1), resolved({"learner.lr": 1e-3}))
    gpu = core_on_gpu(make_llama(initializer_range=0.1), dtype)
    assert isinstance(gpu._forward, PackedForward)
    for core in (cpu, gpu):
        core.accumulate(rows)
    expected, found = cpu.step(), gpu.step()
    tolerance = 1e-3 if dtype == "float32" else 0.1
    assert found.loss == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)


def test_weights_and_state_round_trip_from_the_gpu(make_llama: MakeLlama, make_rows: MakeRows, tmp_path: Path) -> None:
    core = core_on_gpu(make_llama(), "bfloat16")
    core.accumulate(make_rows(4))
    core.step()
    manifest = SnapshotWriter(tmp_path, "a", torch.bfloat16).publish(1, core.model.state_dict(), [])
    for name, tensor in read_snapshot(manifest).items():
        assert torch.equal(tensor, core.parameters[name].detach().bfloat16().cpu())
    state.save(core, tmp_path)
    other = core_on_gpu(make_llama(seed=1), "bfloat16")
    assert state.restore(other, tmp_path) == 1
    for name, parameter in core.parameters.items():
        assert torch.equal(parameter, other.parameters[name])
    reports = []
    for learner in (core, other):
        learner.accumulate(make_rows(4))
        reports.append(learner.step())
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-6)


def test_a_saved_state_includes_the_gpu_rng_state(make_llama: MakeLlama, tmp_path: Path) -> None:
    core = core_on_gpu(make_llama(), "float32")
    state.save(core, tmp_path)
    expected = torch.rand(8, device="cuda")
    torch.rand(3, device="cuda")
    state.restore(core, tmp_path)
    assert torch.equal(torch.rand(8, device="cuda"), expected)


def test_a_state_copy_on_the_gpu_completes_before_training_continues(
    make_llama: MakeLlama, make_rows: MakeRows, tmp_path: Path
) -> None:
    core = core_on_gpu(make_llama(), "float32")
    core.accumulate(make_rows(4))
    core.step()
    before = {name: parameter.detach().clone() for name, parameter in core.parameters.items()}
    copied = state.copy(core, StateCopies())
    core.accumulate(make_rows(4))
    core.step()
    state.write(copied, tmp_path)
    state.restore(core, tmp_path)
    for name, parameter in core.parameters.items():
        assert torch.equal(parameter, before[name])


def test_the_learner_does_not_use_cudnn_attention(make_llama: MakeLlama, tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    settings = LearnerSettings(
        config=resolved({}),
        device="cuda",
        read_group=partial(read_record, tmp_path),
        snapshots=tmp_path / "weights",
        incarnation="i",
    )
    LearnerHost(settings, partial(TorchBackend, model=make_llama().cuda()))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


SMOLLM2 = ModelShape(134_515_008, 30, 576, 9, 3, 64, 1536, 49_152, 8192)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tokens", [4096, 16_384])
def test_the_memory_estimate_for_the_learner_is_close_to_the_measured_peak_on_a_gpu(
    checkpointing: bool, tokens: int
) -> None:
    config = resolved(
        {
            "model.dtype": "bfloat16",
            "learner.tokens_per_pass": tokens,
            "learner.gradient_checkpointing": checkpointing,
            "engine.context": 1024,
        }
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    shape = LlamaConfig(
        vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, tie_word_embeddings=True,
    )  # fmt: skip
    core = LearnerCore(LlamaForCausalLM(shape).cuda(), config)
    mask, ones = np.arange(513) > 100, np.full(513, -1.0, dtype=np.float32)
    noise = np.random.default_rng(0)
    rows = [
        Row(noise.integers(0, 49_152, 513).astype(np.int32), mask, ones, np.zeros(513, dtype=np.int32), ones)
        for _ in range(tokens // 512)
    ]
    for _ in range(2):
        core.accumulate(rows)
        core.step()
    measured = torch.cuda.max_memory_allocated() - before
    estimate = learner_memory(config, SMOLLM2, on_gpu=True).most
    print(f"checkpointing {checkpointing}, {tokens} tokens: estimated {estimate:,}, measured {measured:,}")
    assert 0.6 * estimate < measured < 1.25 * estimate


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", STREAMED)
def test_shared_prefixes_and_compiled_layers_give_the_gradient_of_padded_rows(
    make_llama: MakeLlama, make_rows: MakeRows, preset: str, aggregation: str, dtype: str
) -> None:
    settings = STREAMED[preset] | {"policy_loss.aggregation": aggregation}
    expected = gradient(make_llama(), make_rows(12), dtype, settings, padded=True)
    found = gradient(make_llama(), make_rows(12), dtype, settings, padded=False)
    assert relative_error(found, expected) < (1e-6 if dtype == "float64" else 1e-4)


@pytest.mark.parametrize("heads", [{}, {"num_key_value_heads": 4}, {"head_dim": 16}])
def test_bfloat16_gradients_of_flash_attention_are_as_exact_as_those_of_padded_rows(
    make_llama: MakeLlama, make_rows: MakeRows, heads: dict[str, int]
) -> None:
    rows = [row for seed in range(8) for row in make_rows(24, seed=seed)]
    exact = gradient(make_llama(initializer_range=0.1, **heads), rows, "float64", {}, padded=True)
    padded, packed = (
        relative_error(gradient(make_llama(initializer_range=0.1, **heads), rows, "bfloat16", {}, each), exact)
        for each in (True, False)
    )
    assert packed <= 1.2 * padded


def gradient(
    model: LlamaForCausalLM, rows: list[Row], dtype: str, settings: dict[str, Any], padded: bool
) -> torch.Tensor:
    """Return the gradient that the update gets, divided by the number of tokens."""
    fixed = {"learner.lr": 1e-3, "learner.max_grad_norm": 1e9, "learner.compile": not padded}
    core = LearnerCore(model.cuda(), resolved(fixed | settings), getattr(torch, dtype))
    if padded:
        core.compute_model.set_attn_implementation("sdpa")
        options = ForwardOptions(1.0, core.dtype, entropy_gradient="algorithm.entropy_coefficient" in settings)
        core._forward = PaddedForward(core.compute_model, options)
    core.accumulate(rows)
    return torch.cat([p.grad.flatten().double() for p in core.parameters.values() if p.grad is not None])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
