"""Both decoder paths compared with the forward pass and `generate` of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from outpace.engines.embedded.decode_batch import DecodeBatch
from outpace.engines.embedded.llama import LlamaDecoder
from outpace.engines.embedded.load_decoder import build_decoder
from outpace.engines.embedded.transformers_decoder import TransformersDecoder
from outpace.errors import BadInput
from outpace.types import Generation, Sampling
from support import needs_bfloat16

CONTEXT = 96
CASES = [
    ("llama", "fast"),
    ("llama", "general"),
    ("llama-untied-biased-llama3-rope", "fast"),
    ("llama-mlp-bias", "auto"),
    ("mistral", "fast"),
    ("mistral-sliding", "general"),
    ("qwen2", "fast"),
    ("qwen2", "general"),
    ("qwen3", "fast"),
    ("gemma2-sliding", "general"),
    ("gpt2", "general"),
    ("gpt-neox", "general"),
]


def serve(batch: DecodeBatch, requests: dict[str, tuple[np.ndarray, Sampling]]) -> dict[str, Generation]:
    for name, (prompt, sampling) in requests.items():
        batch.submit(name, prompt, sampling, 0)
    finished: dict[str, Generation] = {}
    while batch.has_work:
        for done in batch.advance():
            assert isinstance(done.result, Generation)
            finished[done.id] = done.result
    return finished


def batch_of(model: PreTrainedModel, path: str, slots: int = 4, **options: bool) -> DecodeBatch:
    deterministic = options.get("deterministic", False)
    return DecodeBatch(build_decoder(model, slots, None, deterministic=deterministic, path=path), 0, "keep", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "path"), CASES)
@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_greedy_output_matches_transformers_generate(
    family: str, path: str, deterministic: bool, model_of: Callable[..., PreTrainedModel],
    prompts: Callable[..., list[np.ndarray]], forced_logits: Callable[..., torch.Tensor],
) -> None:  # fmt: skip
    model = model_of(family)
    given = prompts(1, 5, 17, 33, 9, 2)
    batch = batch_of(model, path, deterministic=deterministic)
    requests = {str(i): (p, Sampling(max_tokens=12 + 5 * i, seed=i, temperature=0.0)) for i, p in enumerate(given)}
    finished = serve(batch, requests)
    for name, (prompt, sampling) in requests.items():
        mine = finished[name].tokens
        tokens = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0)
        expected = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=sampling.max_tokens, do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].numpy()  # fmt: skip
        if not np.array_equal(mine, expected):
            first = int(np.argmax(mine != expected))
            best = forced_logits(model, prompt, mine)[first].topk(2).values
            assert best[0] - best[1] < 1e-4


@pytest.mark.parametrize(("family", "path"), CASES)
def test_logprobs_match_a_teacher_forced_forward_pass(
    family: str, path: str, model_of: Callable[..., PreTrainedModel], prompts: Callable[..., list[np.ndarray]],
    forced_logprobs: Callable[..., np.ndarray],
) -> None:  # fmt: skip
    model = model_of(family)
    given = prompts(3, 40, 7, 25, 1, 11, seed=1)
    requests = {
        str(i): (p, Sampling(max_tokens=20 + 3 * i, seed=i, temperature=0.6 + 0.2 * i)) for i, p in enumerate(given)
    }
    finished = serve(batch_of(model, path), requests)
    for name, (prompt, sampling) in requests.items():
        generation = finished[name]
        assert len(generation.tokens) == sampling.max_tokens
        expected = forced_logprobs(model, prompt, generation.tokens, sampling.temperature)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


def test_the_fast_path_is_chosen_for_supported_models(model_of: Callable[..., PreTrainedModel]) -> None:
    assert isinstance(build_decoder(model_of("qwen3"), 2, None, deterministic=False, path="auto"), LlamaDecoder)
    assert isinstance(build_decoder(model_of("gpt2"), 2, None, deterministic=False, path="auto"), TransformersDecoder)
    sliding = model_of("mistral-sliding")
    assert isinstance(build_decoder(sliding, 2, None, deterministic=False, path="auto"), TransformersDecoder)
    assert isinstance(build_decoder(sliding, 2, 7, deterministic=False, path="auto"), LlamaDecoder)


def test_the_fast_path_names_the_unsupported_feature_when_it_refuses_a_model(
    model_of: Callable[..., PreTrainedModel],
) -> None:
    with pytest.raises(BadInput, match=r"engine\.decoder.*GPT2LMHeadModel"):
        build_decoder(model_of("gpt2"), 2, None, deterministic=False, path="fast")


def _with_a_buffer(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.1.mlp").register_buffer("gain", torch.ones(1), persistent=False)


def _with_an_untied_head(model: PreTrainedModel) -> None:
    head = torch.nn.Linear(32, 61, bias=False)
    model.set_output_embeddings(head)


def _without_a_key_bias(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.0.self_attn.k_proj").bias = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("family", "change", "tensor"),
    [
        ("llama-mlp-bias", None, "model.layers.0.mlp.down_proj.bias"),
        ("llama", _with_a_buffer, "model.layers.1.mlp.gain"),
        ("llama", _with_an_untied_head, "lm_head.weight"),
        ("qwen2", _without_a_key_bias, "model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_the_fast_path_refuses_a_model_with_tensors_it_does_not_read(
    family: str, change: Callable[[PreTrainedModel], None] | None, tensor: str,
    model_of: Callable[..., PreTrainedModel],
) -> None:  # fmt: skip
    model = model_of(family)
    if change is not None:
        change(model)
    with pytest.raises(BadInput, match=re.escape(tensor)):
        build_decoder(model, 2, None, deterministic=False, path="fast")
    assert isinstance(build_decoder(model, 2, None, deterministic=False, path="auto"), TransformersDecoder)


def test_the_general_path_is_used_when_the_fast_path_computes_different_logits(
    model_of: Callable[..., PreTrainedModel],
) -> None:
    model = model_of("llama")
    for layer in range(3):  # not visible in any tensor name or shape
        model.get_submodule(f"model.layers.{layer}.self_attn").scaling = 0.1  # type: ignore[assignment]
    with pytest.raises(BadInput, match=r"engine\.decoder.*logits"):
        build_decoder(model, 2, None, deterministic=False, path="fast")
    assert isinstance(build_decoder(model, 2, None, deterministic=False, path="auto"), TransformersDecoder)


def test_a_model_that_neither_path_reproduces_is_refused(model_of: Callable[..., PreTrainedModel]) -> None:
    model = model_of("gpt2")
    calls = iter(range(1000))
    model.get_submodule("lm_head").register_forward_hook(lambda _, __, logits: logits * (1 + next(calls)))
    with pytest.raises(BadInput, match=r"GPT2LMHeadModel.*logits"):
        build_decoder(model, 2, None, deterministic=False, path="auto")


def test_a_model_in_training_mode_is_served_without_its_dropout(model_of: Callable[..., PreTrainedModel]) -> None:
    model = model_of("llama").train()
    for layer in range(3):
        model.get_submodule(f"model.layers.{layer}.self_attn").attention_dropout = 0.5  # type: ignore[assignment]
    assert isinstance(build_decoder(model, 2, None, deterministic=False, path="fast"), LlamaDecoder)
    assert model.training


def test_a_model_without_a_kv_cache_is_refused() -> None:
    config = MambaConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(BadInput, match="MambaForCausalLM"):
        build_decoder(MambaForCausalLM(config).eval(), 2, 32, deterministic=False, path="auto")


def test_a_context_longer_than_the_model_supports_is_refused(model_of: Callable[..., PreTrainedModel]) -> None:
    with pytest.raises(BadInput, match=r"engine\.context.*\b96\b"):
        build_decoder(model_of("llama"), 2, 97, deterministic=False, path="auto")


@pytest.mark.parametrize(("family", "path"), [("llama", "fast"), ("gpt2", "general")])
def test_a_decoder_never_shares_memory_with_the_tensors_it_was_given(
    family: str, path: str, model_of: Callable[..., PreTrainedModel]
) -> None:
    model, other = model_of(family), model_of(family, seed=1)
    decoder = build_decoder(model, 2, None, deterministic=False, path=path)  # type: ignore[arg-type]
    newest, positions = np.array([3, 4]), np.array([0, 0])
    before = decoder.step(newest, positions).clone()
    given = {name: tensor.clone() for name, tensor in other.named_parameters()}
    prepared = decoder.prepare(given)
    with torch.no_grad():
        for tensor in (*model.parameters(), *given.values()):
            tensor.zero_()
    assert torch.equal(decoder.step(newest, positions), before)
    decoder.install(prepared)
    tokens = torch.from_numpy(newest).unsqueeze(1)
    with torch.no_grad():
        torch.testing.assert_close(decoder.step(newest, positions), other(tokens).logits[:, -1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("family", "path"), [("llama", "fast"), ("gpt2", "general")])
def test_weights_with_a_missing_or_misshapen_tensor_are_refused(
    family: str, path: str, model_of: Callable[..., PreTrainedModel]
) -> None:
    model = model_of(family)
    decoder = build_decoder(model, 2, None, deterministic=False, path=path)  # type: ignore[arg-type]
    tensors = dict(model.named_parameters())
    name = next(name for name in tensors if "norm" in name or "ln_1" in name)
    with pytest.raises(BadInput, match=re.escape(name)):
        decoder.prepare({key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(BadInput, match=rf"{re.escape(name)}.*\[5\]"):
        decoder.prepare({**tensors, name: torch.zeros(5)})


@needs_bfloat16
def test_bfloat16_decoding_matches_the_bfloat16_model(
    model_of: Callable[..., PreTrainedModel], prompts: Callable[..., list[np.ndarray]]
) -> None:
    model = model_of("llama").to(torch.bfloat16)
    decoder = build_decoder(model, 2, None, deterministic=False, path="fast")
    (prompt,) = prompts(20)
    decoder.prefill([0], [prompt[:-1]])
    logits = decoder.step(prompt[-1:].astype(np.int64), np.array([19]))
    with torch.no_grad():
        expected = model(torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0)).logits[0, -1].float()
    assert logits.dtype == torch.float32
    assert (logits[0] - expected).abs().max() < 0.05 * expected.abs().max()
