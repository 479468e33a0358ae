"""LoRA adapters in the learner, compared with peft."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from outpace.checkpoint.journal import read_record
from outpace.errors import BadInput, CorruptData
from outpace.learner import state
from outpace.learner.backend import LearnerSettings
from outpace.learner.core import LearnerCore
from outpace.learner.forward import PackedForward, PaddedForward
from outpace.learner.learner import LearnerHost
from outpace.learner.packing import pack
from outpace.learner.torch_backend import TorchBackend
from outpace.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from outpace.types import LoraAdapter, Row
from outpace.weights.shared_memory import read_snapshot
from support import needs_bfloat16, resolved

MakeLlama = Callable[..., LlamaForCausalLM]
MakeRows = Callable[..., list[Row]]

TARGETS = ["q_proj", "v_proj", "down_proj"]
LORA = {"lora.rank": 4, "lora.alpha": 6.0, "lora.targets": TARGETS, "learner.lr": 1e-2}
FIRST = "model.layers.0.self_attn.q_proj"


def core_of(model: PreTrainedModel, **dotted: Any) -> LearnerCore:
    torch.manual_seed(7)  # of the adapters
    settings = LORA | {key.replace("__", "."): value for key, value in dotted.items()}
    return LearnerCore(model, resolved(settings))


def trained(core: LearnerCore, make_rows: MakeRows, steps: int = 3, first: int = 0) -> LearnerCore:
    for seed in range(first, first + steps):
        core.accumulate(make_rows(5, seed=seed, version=core.version))
        core.step()
    return core


def plain_peft(model: PreTrainedModel, core: LearnerCore, targets: list[str] = TARGETS) -> peft.PeftModel:
    """The same policy built with plain peft."""
    assert core.adapters is not None
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=isinstance(model, GPT2LMHeadModel)
    )
    wrapped = peft.get_peft_model(model, config).eval()
    values = {name: tensor.detach().clone() for name, tensor in core.adapters.tensors().items()}
    assert not peft.set_peft_model_state_dict(wrapped, values).unexpected_keys
    return wrapped


def logp_of(model: Any, row: Row, width: int = 64) -> Tensor:
    """Logprobs of the trained tokens of one right-padded row, through the model's own forward."""
    count = len(row.tokens)
    tokens = torch.zeros(1, width, dtype=torch.long)
    tokens[0, :count] = torch.from_numpy(row.tokens)
    logits = model(input_ids=tokens, attention_mask=(torch.arange(width) < count).long()[None]).logits[0, : count - 1]
    logp = logits.log_softmax(-1).gather(-1, tokens[0, 1:count, None]).squeeze(-1)
    chosen: Tensor = logp[torch.from_numpy(row.mask[1:])]
    return chosen


def column(row: Row, name: str) -> Tensor:
    return torch.from_numpy(getattr(row, name)[row.mask])


def bits_of(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("more", "way"),
    [
        ({}, PackedForward),
        ({"learner__gradient_checkpointing": True}, PackedForward),
        (
            {"lora__targets": [*TARGETS, "lm_head"]},
            PaddedForward,
        ),  # an lm_head with an adapter is not a single linear layer
    ],
)
def test_adapter_gradients_equal_those_of_plain_peft_on_padded_rows(
    make_llama: MakeLlama, make_rows: MakeRows, more: dict[str, Any], way: type
) -> None:
    targets = more.get("lora__targets", TARGETS)
    settings = {"policy_loss__cap": 2.0, "correction__masks": [], **more}
    core = trained(core_of(make_llama(tie_word_embeddings=False), **settings), make_rows)
    model = plain_peft(make_llama(tie_word_embeddings=False), core, targets)
    rows = make_rows(6, seed=9)
    for row in rows:
        logp = logp_of(model, row)
        weight = (logp.detach() - column(row, "logprobs")).exp().clamp(max=2.0)
        (-weight * column(row, "advantages") * logp).sum().backward()  # type: ignore[no-untyped-call]
    core.accumulate(rows)
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert isinstance(core._forward, way)
    assert len(core.parameters) == len(expected) >= 2 * 2 * len(TARGETS)
    for name, parameter in core.parameters.items():
        torch.testing.assert_close(parameter.grad, expected[f"base_model.model.{name}"], rtol=1e-3, atol=1e-4)
    assert not any(p.grad is not None for name, p in core.model.named_parameters() if name not in core.parameters)


@needs_bfloat16
@pytest.mark.parametrize("tied", [True, False])
def test_frozen_weights_in_bfloat16_train_bit_for_bit_like_the_same_values_in_float32(
    make_llama: MakeLlama, make_rows: MakeRows, tied: bool
) -> None:
    def train(dtype: torch.dtype) -> LearnerCore:
        model = make_llama(tie_word_embeddings=tied, attention_bias=True).bfloat16().to(dtype)
        return trained(core_of(model, model__dtype="bfloat16", kl__coefficient=0.1), make_rows)

    halves, floats = train(torch.bfloat16), train(torch.float32)
    assert bits_of(halves.parameters) == bits_of(floats.parameters)
    assert bits_of(as_bfloat16(halves.weights())) == bits_of(as_bfloat16(floats.weights()))
    assert {p.dtype for p in halves.parameters.values()} == {torch.float32}
    assert {p.grad.dtype for p in halves.parameters.values() if p.grad is not None} == {torch.float32}
    matrices = sum(2 * p.numel() for name, p in halves.model.named_parameters() if "_proj.base_layer" in name)
    assert frozen_bytes(floats) - frozen_bytes(halves) >= matrices


@needs_bfloat16
def test_fused_experts_stay_in_float32(make_rows: MakeRows) -> None:
    config = Qwen3MoeConfig(
        vocab_size=48, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    targets = ["q_proj", "v_proj"]
    core = core_of(Qwen3MoeForCausalLM(config).bfloat16(), model__dtype="bfloat16", lora__targets=targets)
    dtypes = {name: parameter.dtype for name, parameter in core.model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if ".experts." in name} == {torch.float32}
    assert dtypes["model.layers.0.self_attn.q_proj.base_layer.weight"] == torch.bfloat16


@needs_bfloat16
def test_a_model_whose_config_cannot_be_made_smaller_is_padded(make_rows: MakeRows) -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1, state_size=4)).bfloat16()
    core = core_of(model, model__dtype="bfloat16", lora__targets=["in_proj"])
    assert isinstance(core._forward, PaddedForward)
    assert trained(core, make_rows, steps=1).version == 1


def as_bfloat16(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}


def frozen_bytes(core: LearnerCore) -> int:
    return sum(p.nbytes for p in core.model.parameters() if not p.requires_grad)


def test_training_changes_the_adapters_and_nothing_else(make_llama: MakeLlama, make_rows: MakeRows) -> None:
    core = core_of(make_llama(), algorithm__entropy_coefficient=0.1, kl__coefficient=0.1, advantage__name="dr_grpo")
    frozen = {name: p.detach().clone() for name, p in core.model.named_parameters() if name not in core.parameters}
    before = bits_of(core.parameters)
    trained(core, make_rows)
    after = bits_of(core.parameters)
    assert all(after[name] != before[name] for name in after)
    assert all(torch.equal(frozen[name], dict(core.model.named_parameters())[name]) for name in frozen)
    assert {p.dtype for p in core.parameters.values()} == {torch.float32}


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_equal_those_of_peft_and_leave_the_trained_weights_unchanged(
    make_llama: MakeLlama, make_rows: MakeRows, tied: bool
) -> None:
    core = trained(core_of(make_llama(tie_word_embeddings=tied)), make_rows)
    expected = plain_peft(make_llama(tie_word_embeddings=tied), core).merge_and_unload().state_dict()
    before = bits_of(dict(core.model.state_dict()))
    for _ in range(2):  # the second merge reuses the memory
        assert bits_of(core.weights()) == bits_of(expected)
    assert bits_of(dict(core.model.state_dict())) == before
    found = core.weights()
    assert (found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()) == tied


def test_layers_with_transposed_weights_are_merged_correctly(make_rows: MakeRows) -> None:
    def make() -> GPT2LMHeadModel:
        torch.manual_seed(0)
        sizes = {"vocab_size": 48, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=1, bos_token_id=1))

    core = trained(core_of(make(), lora__targets=["c_attn", "c_fc"]), make_rows)
    expected = plain_peft(make(), core, ["c_attn", "c_fc"]).merge_and_unload().state_dict()
    assert bits_of(core.weights()) == bits_of(expected)


def test_the_first_version_equals_the_base_model(make_llama: MakeLlama) -> None:
    assert bits_of(core_of(make_llama()).weights()) == bits_of(make_llama().state_dict())


# ----------------------------------------------------------------------------------------------------------- reference


def test_the_reference_is_the_model_with_its_adapters_disabled(make_llama: MakeLlama, make_rows: MakeRows) -> None:
    core = trained(core_of(make_llama(), kl__coefficient=0.1), make_rows)
    assert core.reference is not None
    (packed,) = pack(make_rows(4), 4096)
    own = core._forward(packed).logp_N
    reference = core.reference.logp(packed)
    base = PackedForward(make_llama().eval(), core._forward._options)(packed).logp_N  # type: ignore[attr-defined]
    assert torch.equal(reference, base)
    assert not torch.allclose(own, base)
    again = core._forward(packed).logp_N
    assert torch.equal(again, own)
    assert again.requires_grad
    assert core.reference.tensors() == {}, "the reference needs no weights of its own"


def test_a_synced_reference_keeps_the_adapters_of_the_sync_step(
    make_llama: MakeLlama, make_rows: MakeRows, tmp_path: Path
) -> None:
    core = trained(core_of(make_llama(), kl__coefficient=0.1, kl__sync_every=2), make_rows, steps=2)
    (packed,) = pack(make_rows(4), 4096)
    then = core._forward(packed).logp_N.detach()
    trained(core, make_rows, steps=1, first=2)
    assert core.reference is not None
    assert torch.equal(core.reference.logp(packed), then)
    assert not torch.equal(core._forward(packed).logp_N, then)
    state.save(core, tmp_path)
    other = core_of(make_llama(), kl__coefficient=0.1, kl__sync_every=2)
    state.restore(other, tmp_path)
    assert other.reference is not None
    assert torch.equal(other.reference.logp(packed), then)


# --------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("kl", [{}, {"kl__coefficient": 0.1}, {"kl__coefficient": 0.1, "kl__sync_every": 2}])
def test_a_state_holds_only_the_adapters_and_resumes_bitwise_equal(
    make_llama: MakeLlama, make_rows: MakeRows, tmp_path: Path, kl: dict[str, Any]
) -> None:
    core = trained(core_of(make_llama(), **kl), make_rows)
    state.save(core, tmp_path)
    other = trained(core_of(make_llama(), **kl), make_rows, steps=1, first=20)
    assert state.restore(other, tmp_path) == 3
    for each in (core, other):
        trained(each, make_rows, first=3)
    assert bits_of(core.parameters) == bits_of(other.parameters)
    assert not (tmp_path / state.MODEL_FILE).exists()
    assert (tmp_path / state.REFERENCE_FILE).exists() == ("kl__sync_every" in kl)
    everything = sum(p.numel() for p in core.model.parameters()) * 4
    assert (tmp_path / ADAPTER_WEIGHTS).stat().st_size < everything / 4


def test_a_saved_state_is_a_directory_that_peft_loads(
    make_llama: MakeLlama, make_rows: MakeRows, tmp_path: Path
) -> None:
    core = trained(core_of(make_llama()), make_rows)
    state.save(core, tmp_path)
    loaded = peft.PeftModel.from_pretrained(make_llama().eval(), str(tmp_path))
    row = make_rows(1)[0]
    own = core.weights()
    merged = make_llama().eval()
    merged.load_state_dict(own)
    torch.testing.assert_close(logp_of(loaded, row), logp_of(merged, row))


@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        ({}, {"lora__rank": 0, "lora__alpha": None, "lora__targets": None}, r"lora\.rank\b.*\b4\b"),
        ({"lora__rank": 0, "lora__alpha": None, "lora__targets": None}, {}, r"lora\.rank\b.*\b0\b"),
        ({}, {"lora__rank": 8}, r"lora\.rank\b.*\b4\b"),
        ({}, {"lora__alpha": 8.0}, r"lora\.alpha\b.*\b6\.0\b"),
        ({}, {"lora__targets": ["q_proj"]}, r"lora\.targets\b"),
    ],
)
def test_a_state_with_other_adapter_settings_is_rejected(
    make_llama: MakeLlama, tmp_path: Path, saved: dict[str, Any], resumed: dict[str, Any], message: str
) -> None:
    def core_with(settings: dict[str, Any]) -> LearnerCore:
        dotted = LORA | {key.replace("__", "."): value for key, value in settings.items()}
        chosen = {key: value for key, value in dotted.items() if value is not None}
        return LearnerCore(make_llama(), resolved(chosen))

    state.save(core_with(saved), tmp_path)
    with pytest.raises(CorruptData, match=message) as caught:
        state.restore(core_with(resumed), tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_adapters_of_another_model_are_rejected(make_llama: MakeLlama, tmp_path: Path) -> None:
    state.save(core_of(make_llama()), tmp_path)
    with pytest.raises(CorruptData, match=r"model\.path"):
        state.restore(core_of(make_llama(seed=3)), tmp_path)


@pytest.mark.parametrize("name", [ADAPTER_WEIGHTS, ADAPTER_CONFIG])
def test_a_damaged_or_missing_adapter_file_is_reported(make_llama: MakeLlama, tmp_path: Path, name: str) -> None:
    core = core_of(make_llama())
    state.save(core, tmp_path)
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(CorruptData, match=name):
        state.restore(core, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CorruptData, match=name):
        state.restore(core, tmp_path)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_prj"], r"\bq_prj\b.*down_proj, gate_proj, k_proj, lm_head"),
        (["embed_tokens"], r"\bembed_tokens\b.*down_proj"),
        (["q_proj", "lm_head"], r"\blm_head\b.*embeddings"),
    ],
)
def test_modules_that_cannot_have_an_adapter_are_rejected(
    make_llama: MakeLlama, targets: list[str], message: str
) -> None:
    with pytest.raises(BadInput, match=rf"^lora\.targets: .*{message}"):
        core_of(make_llama(), lora__targets=targets)


# --------------------------------------------------------------------------------------------------------- publishing


@pytest.fixture
async def make_learner(
    make_llama: MakeLlama, tmp_path: Path
) -> AsyncIterator[Callable[..., LearnerHost[TorchBackend]]]:
    learners: list[LearnerHost[TorchBackend]] = []

    def make(**dotted: Any) -> LearnerHost[TorchBackend]:
        config = resolved(LORA | {key.replace("__", "."): value for key, value in dotted.items()})
        folder = tmp_path / f"weights{len(learners)}"
        settings = LearnerSettings(
            config=config, read_group=partial(read_record, tmp_path), snapshots=folder, incarnation="a", threads=1
        )
        learners.append(LearnerHost(settings, partial(TorchBackend, model=make_llama())))
        return learners[-1]

    yield make
    for learner in learners:
        await learner.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_vllm_server_receives_the_adapters_under_peft_names(
    make_learner: Callable[..., LearnerHost[TorchBackend]], make_rows: MakeRows, tmp_path: Path, dtype: str
) -> None:
    learner = make_learner(engine__kind="vllm", model__dtype=dtype)
    trained(learner.backend, make_rows)
    manifest = await learner.publish([])
    assert manifest.adapter == LoraAdapter(4, 6.0, TARGETS)
    found = read_snapshot(manifest)
    assert f"base_model.model.{FIRST}.lora_A.weight" in found
    assert {tensor.dtype for tensor in found.values()} == {getattr(torch, dtype)}
    model = plain_peft(make_learner().backend.model.__class__(learner.backend.model.config), learner.backend)
    model.save_pretrained(tmp_path / "theirs")
    from safetensors.torch import load_file

    theirs = load_file(tmp_path / "theirs" / ADAPTER_WEIGHTS)
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[name], theirs[name].to(getattr(torch, dtype))) for name in theirs)


async def test_the_embedded_engine_receives_the_merged_model(
    make_learner: Callable[..., LearnerHost[TorchBackend]], make_llama: MakeLlama, make_rows: MakeRows
) -> None:
    learner = make_learner(engine__kind="embedded")
    before = copy.deepcopy(make_llama().state_dict())
    trained(learner.backend, make_rows)
    manifest = await learner.publish([])
    found = read_snapshot(manifest)
    assert manifest.adapter is None
    assert found.keys() == before.keys() - {"lm_head.weight"}, "tied weights are published once"
    changed = {name for name in found if not torch.equal(found[name], before[name])}
    assert changed == {name for name in found if name.split(".")[-2] in TARGETS}
