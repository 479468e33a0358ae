"""The fast path: Llama-family models with few, fused operations per token.

On small models launching an operation costs more than its arithmetic. So weights are fused, the matrix product adds
the residual, rotary embedding is one complex product, and attention is two batched products over a short key window,
with indices and mask computed once per step, not per layer. The last layer of a prefill stops at its keys and values.

Weights: query, key and value become one matrix, gate and up another, all stored input-major for `addmm`. Rows of the
query and key weights are reordered so that the two halves of a rotary pair are adjacent: the rotation is then one
complex product, and every dot product is unchanged.

Invariant: a model is served only if `fuse` reads all of its tensors. A tensor left over (for example an unknown bias)
would be a missing term in every logit.

Shapes: B rows, N prefixes, L padded prefix length, E hidden, F feed-forward, V vocabulary, W key window,
H query heads, K key-value heads, G = H / K query heads per key-value head, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from outpace.engines.embedded.cache import SlotCache
from outpace.engines.embedded.decoder import Prepared, check_tensors, round_up
from outpace.engines.embedded.llama_weights import Layer, LlamaShape, fuse, layer_of, rotation_table
from outpace.types import Ints

PREFILL_TOKENS = 4096
"""Maximum number of tokens, including padding, in one prefill pass."""


class LlamaDecoder:
    """`Decoder` for the Llama family."""

    def __init__(self, shape: LlamaShape, angles: Tensor, slots: int, context: int, *, deterministic: bool) -> None:
        """Build a decoder without weights: call `install` first, or use `from_model`."""
        self.slots, self.context, self.deterministic = slots, context, deterministic
        self.vocabulary = shape.vocabulary
        self._shape, self._angles = shape, angles
        per_layer = (shape.kv_heads, shape.head_dim, shape.head_dim)
        self._cache = SlotCache(
            [per_layer] * shape.layers, slots, context, shape.dtype, shape.device, whole=deterministic
        )
        self._row_heads_S_K = torch.arange(slots * shape.kv_heads, device=shape.device).view(slots, shape.kv_heads)

    @classmethod
    def of(cls, model: PreTrainedModel, slots: int, context: int, *, deterministic: bool) -> LlamaDecoder:
        """Build a decoder with a copy of the model's weights; keep no reference to the model."""
        angles = rotation_table(model, context)
        decoder = cls(LlamaShape.of(model), angles, slots, context, deterministic=deterministic)
        decoder.install(decoder.prepare(model.state_dict()))
        return decoder

    @property
    def device(self) -> torch.device:
        return self._shape.device

    # ------------------------------------------------------------------------------------------------- weights

    def prepare(self, tensors: Mapping[str, Tensor]) -> Prepared:
        check_tensors(tensors, self._shape.tensors)
        return dict(fuse(tensors, self._shape))

    def install(self, prepared: Prepared) -> None:
        self._embedding_V_E = prepared["embedding"]
        self._norm_E = prepared["norm"]
        self._head_E_V = prepared["embedding"].t() if self._shape.tied else prepared["head"]
        self._layers = [layer_of(prepared, layer) for layer in range(self._shape.layers)]

    def sibling(self, prepared: Prepared, slots: int | None = None) -> LlamaDecoder:
        decoder = LlamaDecoder(
            self._shape, self._angles, slots or self.slots, self.context, deterministic=self.deterministic
        )
        decoder.install(prepared)
        return decoder

    # --------------------------------------------------------------------------------------------------- cache

    def copy(self, source: int, target: int, length: int) -> None:
        self._cache.copy(source, target, length)

    def clear(self, slot: int) -> None:
        self._cache.clear(slot)

    # ------------------------------------------------------------------------------------------------- compute

    @torch.inference_mode()
    def prefill(self, slots: Sequence[int], prefixes: Sequence[Ints]) -> None:
        if self.deterministic:
            for slot, prefix in zip(slots, prefixes, strict=True):
                self._prefill_pass([slot], [prefix], min(self.context, round_up(len(prefix))))
            return
        order = sorted(range(len(slots)), key=lambda index: len(prefixes[index]), reverse=True)
        start = 0
        while start < len(order):
            longest = len(prefixes[order[start]])
            chunk = order[start : start + max(1, PREFILL_TOKENS // longest)]
            self._prefill_pass([slots[index] for index in chunk], [prefixes[index] for index in chunk], longest)
            start += len(chunk)

    def _prefill_pass(self, slots: list[int], prefixes: list[Ints], length: int) -> None:
        """Prefill with right padding. It needs no mask: causal attention hides it, and later steps overwrite it."""
        shape, device = self._shape, self._shape.device
        self._cache.reserve(length)
        tokens_N_L = np.zeros((len(slots), length), dtype=np.int64)
        for row, prefix in enumerate(prefixes):
            tokens_N_L[row, : len(prefix)] = prefix
        slot_N = torch.tensor(slots, device=device)
        angles = self._angles[:length].repeat(len(slots), 1).unsqueeze(1)
        hidden_B_E = F.embedding(torch.from_numpy(tokens_N_L).to(device).flatten(), self._embedding_V_E)
        last = shape.layers - 1
        for index, layer in enumerate(self._layers):
            q_B_H_D, k_B_K_D, v_B_K_D = self._project(layer, hidden_B_E, angles)
            k_N_K_L_D = k_B_K_D.view(len(slots), length, shape.kv_heads, shape.head_dim).transpose(1, 2)
            v_N_K_L_D = v_B_K_D.view(len(slots), length, shape.kv_heads, shape.head_dim).transpose(1, 2)
            self._cache.keys[index][:, :, :length].index_copy_(0, slot_N, k_N_K_L_D)
            self._cache.values[index][:, :, :length].index_copy_(0, slot_N, v_N_K_L_D)
            if index == last:
                break
            q_N_H_L_D = q_B_H_D.view(len(slots), length, shape.heads, shape.head_dim).transpose(1, 2)
            attended_N_H_L_D = F.scaled_dot_product_attention(
                q_N_H_L_D, k_N_K_L_D, v_N_K_L_D, is_causal=True, enable_gqa=shape.heads != shape.kv_heads
            )
            hidden_B_E = self._finish_layer(layer, hidden_B_E, attended_N_H_L_D.transpose(1, 2))

    @torch.inference_mode()
    def step(self, tokens_B: NDArray[np.int64], positions_B: NDArray[np.int64]) -> Tensor:
        shape, cache, device = self._shape, self._cache, self._shape.device
        rows = len(tokens_B)
        heads = rows * shape.kv_heads
        needed = int(positions_B.max()) + 1
        window = self.context if self.deterministic else min(self.context, round_up(needed))
        cache.reserve(window)
        position_B = torch.from_numpy(positions_B).to(device)
        place_BK = (self._row_heads_S_K[:rows] * cache.capacity + position_B.unsqueeze(1)).flatten()
        mask_BK_G_W = self._mask(position_B, window)
        angles = self._angles[position_B].unsqueeze(1)
        scale = shape.head_dim**-0.5
        hidden_B_E = F.embedding(torch.from_numpy(tokens_B).to(device), self._embedding_V_E)
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            q_B_H_D, k_B_K_D, v_B_K_D = self._project(layer, hidden_B_E, angles)
            keys.view(-1, shape.head_dim).index_copy_(0, place_BK, k_B_K_D.reshape(heads, shape.head_dim))
            values.view(-1, shape.head_dim).index_copy_(0, place_BK, v_B_K_D.reshape(heads, shape.head_dim))
            keys_BK_W_D = keys.flatten(0, 1)[:heads, :window]
            values_BK_W_D = values.flatten(0, 1)[:heads, :window]
            q_BK_G_D = q_B_H_D.reshape(heads, -1, shape.head_dim)
            scores_BK_G_W = torch.baddbmm(mask_BK_G_W, q_BK_G_D, keys_BK_W_D.transpose(1, 2), alpha=scale)
            weights_BK_G_W = scores_BK_G_W.softmax(-1, dtype=torch.float32).to(shape.dtype)
            hidden_B_E = self._finish_layer(layer, hidden_B_E, torch.bmm(weights_BK_G_W, values_BK_W_D))
        return (self._norm(hidden_B_E, self._norm_E) @ self._head_E_V).float()

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

    def _project(self, layer: Layer, hidden_B_E: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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

    def _finish_layer(self, layer: Layer, hidden_B_E: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residual, feed-forward, residual."""
        hidden_B_E = torch.addmm(hidden_B_E, attended.reshape(len(hidden_B_E), -1), layer.out)
        if layer.out_bias is not None:
            hidden_B_E = hidden_B_E + layer.out_bias
        gate_B_F, up_B_F = (self._norm(hidden_B_E, layer.mlp_norm_E) @ layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(hidden_B_E, F.silu(gate_B_F) * up_B_F, layer.down)
