"""MERGED"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.engines.embedded.decoder import Prepared

ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
ROTARY = "model.rotary_emb"


@dataclass(frozen=True)
class LlamaShape:
    """The architecture: everything the decoder needs besides the weights."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    head_norm: bool  # Qwen3 normalizes queries and keys per head
    tied: bool
    tensors: Mapping[str, torch.Size]  # every tensor that a weight set must contain
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: PreTrainedModel) -> LlamaShape:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            vocabulary=config.vocab_size,
            eps=config.rms_norm_eps,
            head_norm="model.layers.0.self_attn.q_norm.weight" in model.state_dict(),
            tied=bool(config.tie_word_embeddings),
            tensors={name: parameter.shape for name, parameter in model.named_parameters()},
            dtype=model.dtype,
            device=model.device,
        )


def unsupported(model: PreTrainedModel, context: int) -> str | None:
    """Return why the fast path cannot serve this model, or None."""
    config = model.config
    name = type(model).__name__
    if name not in ARCHITECTURES:
        return f"{name} is not one of {', '.join(sorted(ARCHITECTURES))}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        return "its rotary frequencies depend on the sequence length"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"]):
        window = getattr(config, "sliding_window", None)
        if window is not None and window < context:
            return f"its attention window of {window} is shorter than the context of {context}"
    return _unread_tensor(model)


class _ReadTracker(dict[str, Tensor]):
    """Tensors by name; records the names that were read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        self.read.add(name)
        return tensor


def _unread_tensor(model: PreTrainedModel) -> str | None:
    """Return a message about a tensor that `fuse` would not read, or that is missing. Runs on meta tensors.

    A tied head is not a tensor of its own. Rotary buffers are read by `rotation_table`.
    """
    own: dict[str, Tensor] = {}
    own.update(model.named_parameters())
    own.update((name, buffer) for name, buffer in model.named_buffers() if not name.startswith(ROTARY + "."))
    tensors = _ReadTracker({name: tensor.detach().to("meta") for name, tensor in own.items()})
    try:
        for _ in fuse(tensors, replace(LlamaShape.of(model), device=torch.device("meta"))):
            pass
    except KeyError as missing:
        return f"it has no tensor {missing.args[0]}"
    unread = sorted(own.keys() - tensors.read)
    return f"it has a tensor {unread[0]}, which the fast path does not support" if unread else None


@dataclass(frozen=True)
class Layer:
    """Fused weights of one layer; matrices are input-major."""

    attention_norm_E: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm_E: Tensor
    gate_up: Tensor
    down: Tensor


def rotation_table(model: PreTrainedModel, context: int) -> Tensor:
    """Return the complex rotary factor per position and pair, from the model's own frequencies."""
    rotary = model.get_submodule(ROTARY)
    frequencies = rotary.get_buffer("inv_freq").float()
    positions = torch.arange(context, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    scaling = torch.full_like(angles, float(getattr(rotary, "attention_scaling", 1.0)))
    return torch.polar(scaling, angles)


def fuse(tensors: Mapping[str, Tensor], shape: LlamaShape) -> Iterator[tuple[str, Tensor]]:
    """Yield the fused tensors under this module's names; each is a fresh copy."""

    def take(name: str) -> Tensor:
        return tensors[name].detach()

    def own(tensor: Tensor) -> Tensor:
        return tensor.to(device=shape.device, dtype=shape.dtype, copy=True).contiguous()

    def paired(tensor: Tensor) -> Tensor:
        """Reorder head rows so that the halves (i, i + D/2) of a rotary pair are adjacent."""
        return tensor.view(-1, 2, shape.head_dim // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    yield "embedding", own(take("model.embed_tokens.weight"))
    yield "norm", own(take("model.norm.weight"))
    if not shape.tied:
        yield "head", own(take("lm_head.weight").t())
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        q, k, v = (take(f"{attention}{part}_proj.weight") for part in "qkv")
        yield f"{layer}.qkv", own(torch.cat((paired(q), paired(k), v)).t())
        if f"{attention}q_proj.bias" in tensors:
            q, k, v = (take(f"{attention}{part}_proj.bias") for part in "qkv")
            yield f"{layer}.qkv_bias", own(torch.cat((paired(q), paired(k), v)))
        if shape.head_norm:
            yield f"{layer}.q_norm", own(paired(take(attention + "q_norm.weight")))
            yield f"{layer}.k_norm", own(paired(take(attention + "k_norm.weight")))
        yield f"{layer}.out", own(take(attention + "o_proj.weight").t())
        if f"{attention}o_proj.bias" in tensors:
            yield f"{layer}.out_bias", own(take(attention + "o_proj.bias"))
        yield f"{layer}.attention_norm", own(take(prefix + "input_layernorm.weight"))
        yield f"{layer}.mlp_norm", own(take(prefix + "post_attention_layernorm.weight"))
        gate, up = take(prefix + "mlp.gate_proj.weight"), take(prefix + "mlp.up_proj.weight")
        yield f"{layer}.gate_up", own(torch.cat((gate, up)).t())
        yield f"{layer}.down", own(take(prefix + "mlp.down_proj.weight").t())


def layer_of(prepared: Prepared, layer: int) -> Layer:
    return Layer(
        attention_norm_E=prepared[f"{layer}.attention_norm"],
        qkv=prepared[f"{layer}.qkv"],
        qkv_bias=prepared.get(f"{layer}.qkv_bias"),
        q_norm_D=prepared.get(f"{layer}.q_norm"),
        k_norm_D=prepared.get(f"{layer}.k_norm"),
        out=prepared[f"{layer}.out"],
        out_bias=prepared.get(f"{layer}.out_bias"),
        mlp_norm_E=prepared[f"{layer}.mlp_norm"],
        gate_up=prepared[f"{layer}.gate_up"],
        down=prepared[f"{layer}.down"],
    )
