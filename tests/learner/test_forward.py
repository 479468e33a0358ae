"""Packed and padded forward passes give the logprobs and gradients of one document at a time.

One test shows that the comparison detects a leak between packed documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outpace.learner import attention
from outpace.learner.attention import bucket_width
from outpace.learner.forward import LEAK_TOLERANCE, ForwardOptions, PackedForward, PaddedForward, choose_forward
from outpace.learner.packing import PackedBatch, pack
from outpace.types import Row

MakeLlama = Callable[..., LlamaForCausalLM]
MakeRows = Callable[..., list[Row]]

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


def one_by_one(model: PreTrainedModel, packed: PackedBatch, temperature: float) -> Tensor:
    """Reference: each document alone through the model's own forward, log-softmax over full logits."""
    contexts = np.split(packed.context_K, packed.cu_context_S1[1:-1])
    logits = [
        model(input_ids=torch.from_numpy(packed.tokens_T[context])[None], use_cache=False).logits[0, -own:]
        for context, own in zip(contexts, np.diff(packed.cu_seqlens_S1), strict=True)
    ]
    log_probs = torch.log_softmax(torch.cat(logits) / temperature, -1)
    return log_probs[torch.from_numpy(packed.sources_N), torch.from_numpy(packed.targets_N)]


def with_gradients(model: PreTrainedModel, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
    return logp.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(model: PreTrainedModel, expected: Any, found: Any) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(found[1][name] / scale, gradient / scale, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": False, "mlp_bias": True, "attention_bias": True},
    ],
    ids=["full", "grouped", "one", "untied"],
)
@pytest.mark.parametrize("forward", [PackedForward, PaddedForward])
def test_packed_and_padded_equal_one_document_at_a_time(
    make_llama: MakeLlama, make_rows: MakeRows, overrides: dict[str, Any], forward: Any
) -> None:
    (packed,) = pack(make_rows(12), 10_000)
    model = make_llama(**overrides)
    expected = with_gradients(model, one_by_one(model, packed, 0.8))
    found = with_gradients(model, forward(model, ForwardOptions(0.8))(packed).logp_N)
    assert_same(model, expected, found)


@pytest.mark.parametrize("min_width", [1, 8, 64])
def test_the_bucket_width_does_not_change_the_result(
    make_llama: MakeLlama, make_rows: MakeRows, min_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MIN_WIDTH", min_width)
    (packed,) = pack(make_rows(12), 10_000)
    model = make_llama()
    expected = with_gradients(model, one_by_one(model, packed, 1.0))
    assert_same(model, expected, with_gradients(model, PackedForward(model, ForwardOptions())(packed).logp_N))


@pytest.mark.parametrize("max_tree", [256, 8], ids=["whole trees", "single segments"])
def test_attempts_with_short_common_parts_are_computed_once_with_the_result_of_separate_rows(
    make_llama: MakeLlama, make_rows: MakeRows, max_tree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MAX_TREE", max_tree)
    noise = np.random.default_rng(0)
    rows = [row for row in make_rows(24) if len(row.tokens) >= 12]
    for index, row in enumerate(rows):
        row.tokens[:10] = 10 * (index % 2) + np.arange(10)
        row.tokens[10:] = noise.integers(0, 2, len(row.tokens) - 10)
    rows += rows[:3]
    model = make_llama()
    (shared,), (apart,) = (pack(rows, 10_000, min_shared=number) for number in (1, None))
    histories = {tuple(row.tokens[: end + 1]) for row in rows for end in range(int(np.flatnonzero(row.mask)[-1]))}
    assert len(shared.tokens_T) == len(histories)
    expected = with_gradients(model, PaddedForward(model, ForwardOptions())(apart).logp_N)
    assert_same(model, expected, with_gradients(model, PackedForward(model, ForwardOptions())(shared).logp_N))


def test_transformers_default_forward_leaks_between_packed_documents_and_fails_the_comparison(
    make_llama: MakeLlama, make_rows: MakeRows
) -> None:
    (packed,) = pack(make_rows(6), 10_000)
    model = make_llama().eval()
    with torch.no_grad():
        expected = one_by_one(model, packed, 1.0)
        leaked_logits = model(  # use_cache defaults to True, which disables the detection of documents
            input_ids=torch.from_numpy(packed.tokens_T)[None],
            position_ids=torch.from_numpy(packed.position_ids_T)[None],
        ).logits[0]
    leaked = torch.log_softmax(leaked_logits, -1)[packed.sources_N, packed.targets_N]
    first = int((packed.sources_N < packed.cu_seqlens_S1[1]).sum())
    torch.testing.assert_close(leaked[:first], expected[:first], rtol=1e-4, atol=1e-4)
    assert (leaked - expected)[first:].abs().max() > 0.1
    with pytest.raises(AssertionError):
        assert_same(model, (expected, {}), (leaked, {}))


def test_a_sliding_window_stays_within_its_document(make_rows: MakeRows) -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5))
    (packed,) = pack(make_rows(8), 10_000)
    expected = with_gradients(model, one_by_one(model, packed, 1.0))
    forward = choose_forward(model, ForwardOptions())
    assert isinstance(forward, PackedForward)
    assert_same(model, expected, with_gradients(model, forward(packed).logp_N))


def test_a_model_with_query_and_key_norms_is_packed(make_rows: MakeRows) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL))
    (packed,) = pack(make_rows(8), 10_000)
    expected = with_gradients(model, one_by_one(model, packed, 1.0))
    forward = choose_forward(model, ForwardOptions())
    assert isinstance(forward, PackedForward)
    assert_same(model, expected, with_gradients(model, forward(packed).logp_N))


def make_gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    )


def make_gemma2() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, attn_logit_softcapping=5.0, final_logit_softcapping=3.0))


@pytest.mark.parametrize("make", [make_gpt2, make_gemma2])
def test_other_architectures_match_their_own_forward(make: Callable[[], PreTrainedModel], make_rows: MakeRows) -> None:
    torch.manual_seed(0)
    model = make().eval()
    (packed,) = pack(make_rows(8), 10_000)
    expected = with_gradients(model, one_by_one(model, packed, 1.0))
    forward = choose_forward(model, ForwardOptions())
    assert_same(model, expected, with_gradients(model, forward(packed).logp_N))


def test_a_model_with_logit_softcapping_is_padded() -> None:
    assert isinstance(choose_forward(make_gemma2().eval(), ForwardOptions()), PaddedForward)


def test_a_model_that_leaks_between_rows_is_never_packed(make_llama: MakeLlama) -> None:
    """A layer leaks by far less than the tolerance of the comparison."""
    model = make_llama().eval()
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, out: out + 1e-4 * out.mean())
    assert isinstance(choose_forward(model, ForwardOptions()), PaddedForward)
    assert LEAK_TOLERANCE < 1e-4


def test_bfloat16_autocast_stays_close_to_float32_and_keeps_parameters_in_float32(
    make_llama: MakeLlama, make_rows: MakeRows
) -> None:
    (packed,) = pack(make_rows(8), 10_000)
    model = make_llama(initializer_range=0.1).eval()
    exact = PackedForward(model, ForwardOptions())(packed).logp_N
    rough = PackedForward(model, ForwardOptions(dtype=torch.bfloat16))(packed).logp_N
    rough.sum().backward()  # type: ignore[no-untyped-call]
    difference = (rough - exact).abs().max()
    assert 0 < difference < 0.1
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 129, 1000, 5000])
def test_buckets_waste_at_most_an_eighth_on_long_documents(length: int) -> None:
    width = bucket_width(length)
    assert length <= width <= max(length + 15, length * 9 // 8)


def test_buckets_have_at_most_eight_widths_per_octave() -> None:
    assert len({bucket_width(length) for length in range(1025, 2049)}) == 8
