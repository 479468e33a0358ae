"""The fast path: Llama-family models with few, fused operations per token.

On small models launching an operation costs more than its arithmetic. So weights are fused, the matrix product adds
the residual, rotary embedding is one complex product, and attention is two batched products over a short key window,
with indices and mask computed once per step, not per layer. On a CPU, rows with the same prompt share its keys and
values (`shared_prompts`). The last layer of a prefill stops at its keys and values.

Weights: query, key and value become one matrix, gate and up another, all stored input-major for `addmm`. Rows of the
query and key weights are reordered so that the two halves of a rotary pair are adjacent: the rotation is then one
complex product, and every dot product is unchanged.

Invariant: a model is served only if `fuse` reads all of its tensors. An unread tensor, for example an unknown bias,
would be a missing term in every logit.

Shapes: B rows, S slots, N prefixes, L padded prefix length, E hidden, F feed-forward, V vocabulary, W key window,
H query heads, K key-value heads, G = H / K query heads per key-value head, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from outpace.engines.embedded.decoder import Decoder, DecoderWeights, SlotCache, check_tensors
from outpace.engines.embedded.row_blocks import RowBlock, split
from outpace.engines.embedded.shared_prompts import PromptAttention, SharedPrompts, attend, log_sum_exp, merge

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
    def from_model(cls, model: PreTrainedModel) -> LlamaShape:
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


def unsupported_reason(model: PreTrainedModel, context: int) -> str | None:
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

    A tied head is not a separate tensor. Rotary buffers are read by `rotation_table`.
    """
    own: dict[str, Tensor] = {}
    own.update(model.named_parameters())
    own.update((name, buffer) for name, buffer in model.named_buffers() if not name.startswith(ROTARY + "."))
    tensors = _ReadTracker({name: tensor.detach().to("meta") for name, tensor in own.items()})
    try:
        for _ in fuse(tensors, replace(LlamaShape.from_model(model), device=torch.device("meta"))):
            pass
    except KeyError as missing:
        return f"it has no tensor {missing.args[0]}"
    unread = sorted(own.keys() - tensors.read)
    return f"it has a tensor {unread[0]}, which the fast path does not support" if unread else None


@dataclass(frozen=True)
class LlamaLayer:
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


def layer_weights(prepared: DecoderWeights, layer: int) -> LlamaLayer:
    return LlamaLayer(
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


class LlamaDecoder(Decoder):
    """`Decoder` for the Llama family."""

    def __init__(self, shape: LlamaShape, angles: Tensor, slots: int, context: int, *, deterministic: bool) -> None:
        """Build a decoder without weights: call `install` first, or use `from_model`."""
        super().__init__(slots, context, deterministic=deterministic)
        self.attends_in_blocks = self.shares_prompts = shape.device.type == "cpu" and not deterministic
        self.vocabulary = shape.vocabulary
        self._shape, self._angles = shape, angles
        self._allocate([(shape.kv_heads, shape.head_dim, shape.head_dim)] * shape.layers, shape.dtype, shape.device)
        self._row_heads_S_K = torch.arange(slots * shape.kv_heads, device=shape.device).view(slots, shape.kv_heads)

    @classmethod
    def from_model(cls, model: PreTrainedModel, slots: int, context: int, *, deterministic: bool) -> LlamaDecoder:
        """Build a decoder with a copy of the model's weights; keep no reference to the model."""
        angles = rotation_table(model, context)
        decoder = cls(LlamaShape.from_model(model), angles, slots, context, deterministic=deterministic)
        decoder.install(decoder.prepare(model.state_dict()))
        return decoder

    # ------------------------------------------------------------------------------------------------- weights

    def prepare(self, tensors: Mapping[str, Tensor]) -> DecoderWeights:
        check_tensors(tensors, self._shape.tensors)
        return dict(fuse(tensors, self._shape))

    def install(self, prepared: DecoderWeights) -> None:
        self._embedding_V_E = prepared["embedding"]
        self._norm_E = prepared["norm"]
        self._head_E_V = prepared["embedding"].t() if self._shape.tied else prepared["head"]
        self._layers = [layer_weights(prepared, layer) for layer in range(self._shape.layers)]

    def sibling(self, prepared: DecoderWeights, slots: int | None = None) -> LlamaDecoder:
        decoder = LlamaDecoder(
            self._shape, self._angles, slots or self.slots, self.context, deterministic=self.deterministic
        )
        decoder.install(prepared)
        return decoder

    # ------------------------------------------------------------------------------------------------- compute

    def _prefill_pass(self, cache: SlotCache, slot_N: Tensor, tokens_N_L: Tensor) -> None:
        shape = self._shape
        count, length = tokens_N_L.shape
        angles = self._angles[:length].repeat(count, 1).unsqueeze(1)
        hidden_B_E = F.embedding(tokens_N_L.flatten(), self._embedding_V_E)
        last = shape.layers - 1
        for index, layer in enumerate(self._layers):
            q_B_H_D, k_B_K_D, v_B_K_D = self._project(layer, hidden_B_E, angles)
            k_N_K_L_D = k_B_K_D.view(count, length, shape.kv_heads, shape.head_dim).transpose(1, 2)
            v_N_K_L_D = v_B_K_D.view(count, length, shape.kv_heads, shape.head_dim).transpose(1, 2)
            cache.keys[index][:, :, :length].index_copy_(0, slot_N, k_N_K_L_D)
            cache.values[index][:, :, :length].index_copy_(0, slot_N, v_N_K_L_D)
            if index == last:
                break
            q_N_H_L_D = q_B_H_D.view(count, length, shape.heads, shape.head_dim).transpose(1, 2)
            attended_N_H_L_D = F.scaled_dot_product_attention(
                q_N_H_L_D, k_N_K_L_D, v_N_K_L_D, is_causal=True, enable_gqa=shape.heads != shape.kv_heads
            )
            hidden_B_E = self._finish_layer(layer, hidden_B_E, attended_N_H_L_D.transpose(1, 2))

    @torch.inference_mode()
    def step(
        self, tokens_B: NDArray[np.int64], positions_B: NDArray[np.int64], prompts: SharedPrompts | None = None
    ) -> Tensor:
        shape, cache, device = self._shape, self._cache, self._shape.device
        rows = len(tokens_B)
        heads = rows * shape.kv_heads
        places_B = positions_B if prompts is None else positions_B - prompts.length_B
        blocks = self._blocks(places_B)
        position_B = torch.from_numpy(positions_B).to(device)
        place_B = position_B if prompts is None else torch.from_numpy(places_B).to(device)
        place_BK = (self._row_heads_S_K[:rows] * cache.capacity + place_B.unsqueeze(1)).flatten()
        masks = [self._mask(place_B[block.start : block.end], block.window) for block in blocks]
        shared = None if prompts is None else PromptAttention(prompts, shape.kv_heads, shape.dtype)
        angles = self._angles[position_B].unsqueeze(1)
        hidden_B_E = F.embedding(torch.from_numpy(tokens_B).to(device), self._embedding_V_E)
        for index, layer in enumerate(self._layers):
            keys_SK_T_D, values_SK_T_D = cache.of_layer(index)
            q_B_H_D, k_B_K_D, v_B_K_D = self._project(layer, hidden_B_E, angles)
            keys_SK_T_D.view(-1, shape.head_dim).index_copy_(0, place_BK, k_B_K_D.reshape(heads, shape.head_dim))
            values_SK_T_D.view(-1, shape.head_dim).index_copy_(0, place_BK, v_B_K_D.reshape(heads, shape.head_dim))
            q_BK_G_D = q_B_H_D.reshape(heads, -1, shape.head_dim)
            attended_BK_G_D = self._attend(blocks, masks, q_BK_G_D, index, shared)
            hidden_B_E = self._finish_layer(layer, hidden_B_E, attended_BK_G_D)
        return (self._norm(hidden_B_E, self._norm_E) @ self._head_E_V).float()

    def _blocks(self, positions_B: NDArray[np.int64]) -> list[RowBlock]:
        """Return the blocks of rows that attend together. One block on a GPU, where more kernels do not pay."""
        window = self._reserve_window(positions_B)
        return split(positions_B + 1, window) if self.attends_in_blocks else [RowBlock(0, len(positions_B), window)]

    def _attend(
        self, blocks: list[RowBlock], masks: list[Tensor], q_BK_G_D: Tensor, layer: int, shared: PromptAttention | None
    ) -> Tensor:
        cache = self._cache.of_layer(layer)
        outputs, lses = [], []
        for block, mask_BK_G_W in zip(blocks, masks, strict=True):
            heads = slice(block.start * self._shape.kv_heads, block.end * self._shape.kv_heads)
            keys_BK_W_D, values_BK_W_D = (each[heads, : block.window] for each in cache)
            output_BK_G_D, scores, weights = attend(q_BK_G_D[heads], keys_BK_W_D, values_BK_W_D, mask_BK_G_W)
            outputs.append(output_BK_G_D)
            if shared is not None:
                lses.append(log_sum_exp(scores, weights))
        attended_BK_G_D = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        if shared is None:
            return attended_BK_G_D
        return merge(attended_BK_G_D, torch.cat(lses), *shared(q_BK_G_D, *self._prompt_cache.of_layer(layer)))

    def _mask(self, position_B: Tensor, window: int) -> Tensor:
        """Return the additive mask: 0 up to a row's position, -inf beyond, repeated for its heads."""
        shape = self._shape
        hidden_B_W = torch.arange(window, device=shape.device) > position_B.unsqueeze(1)
        mask_B_W = torch.zeros(hidden_B_W.shape, dtype=shape.dtype, device=shape.device)
        mask_B_W.masked_fill_(hidden_B_W, -torch.inf)
        groups = shape.heads // shape.kv_heads
        mask_B_K_G_W = mask_B_W[:, None, None].expand(-1, shape.kv_heads, groups, -1)
        return mask_B_K_G_W.reshape(-1, groups, window)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._shape.eps)

    def _project(self, layer: LlamaLayer, hidden_B_E: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys, and values."""
        shape = self._shape
        normed_B_E = self._norm(hidden_B_E, layer.attention_norm_E)
        qkv = normed_B_E @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normed_B_E, layer.qkv)
        qkv = qkv.view(len(hidden_B_E), -1, shape.head_dim)
        rotated_heads = shape.heads + shape.kv_heads
        qk, values_B_K_D = qkv[:, :rotated_heads], qkv[:, rotated_heads:]
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q, k = qk[:, : shape.heads], qk[:, shape.heads :]
            qk = torch.cat((self._norm(q, layer.q_norm_D), self._norm(k, layer.k_norm_D)), dim=1)
        pairs = torch.view_as_complex(qk.float().view(len(qk), rotated_heads, -1, 2))
        rotated = torch.view_as_real(pairs * angles).flatten(-2).to(shape.dtype)
        return rotated[:, : shape.heads], rotated[:, shape.heads :], values_B_K_D

    def _finish_layer(self, layer: LlamaLayer, hidden_B_E: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residual, feed-forward, residual."""
        hidden_B_E = torch.addmm(hidden_B_E, attended.reshape(len(hidden_B_E), -1), layer.out)
        if layer.out_bias is not None:
            hidden_B_E = hidden_B_E + layer.out_bias
        gate_B_F, up_B_F = (self._norm(hidden_B_E, layer.mlp_norm_E) @ layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(hidden_B_E, F.silu(gate_B_F) * up_B_F, layer.down)
