"""The general path: any transformers causal LM with ordinary attention, through its own forward.

The model gets a `transformers` cache whose layers are views of the slots. Each layer's `update` writes the new keys and
values at every row's position and returns the key window; the mask (four-dimensional) and the positions are passed
explicitly. Architectures that need more (state-space layers, attention biases built from a padding mask) either keep
no plain keys and values, or fail the logit check that every new decoder must pass.

Shapes: B rows, N prefixes, L padded prefix length, V vocabulary, W key window, H key-value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from outpace.engines.embedded.decoder import Decoder, DecoderWeights, SlotCache, check_tensors
from outpace.engines.embedded.shared_prompts import SharedPrompts
from outpace.errors import BadInput


@dataclass
class _ForwardPass:
    """Where the current forward pass writes and how far it reads."""

    rows: Tensor  # the slots of its rows
    window: int
    positions_B: Tensor | None  # position of each row in a step; None for a prefill, which starts at 0


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of the slot cache, with the interface of a `transformers` cache layer."""

    is_sliding = False

    def __init__(self, slots: SlotCache, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.current: _ForwardPass | None = None
        self._slots, self._layer = slots, layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        assert self.current is not None, "set the pass before running the forward"
        rows, window, positions_B = self.current.rows, self.current.window, self.current.positions_B
        keys, values = self._slots.keys[self._layer], self._slots.values[self._layer]
        if positions_B is None:
            keys[:, :, :window].index_copy_(0, rows, key_states)
            values[:, :, :window].index_copy_(0, rows, value_states)
            return key_states, value_states
        keys[rows, :, positions_B] = key_states.squeeze(2)
        values[rows, :, positions_B] = value_states.squeeze(2)
        return keys[: len(rows), :, :window], values[: len(rows), :, :window]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the slots are allocated already."""

    def get_seq_length(self) -> int:
        return 0  # unused: positions are passed explicitly

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # unused: the mask is passed explicitly


class TransformersDecoder(Decoder):
    """`Decoder` for any causal LM whose layers cache plain keys and values."""

    def __init__(self, model: PreTrainedModel, slots: int, context: int, *, deterministic: bool) -> None:
        """Take ownership of `model`. `from_model` copies it instead."""
        super().__init__(slots, context, deterministic=deterministic)
        self._model = model
        self.vocabulary = len(model.get_input_embeddings().get_parameter("weight"))
        shapes = _cache_shapes(model)
        self._allocate(shapes, model.dtype, model.device)
        self._layers = [_SlotLayer(self._cache, layer) for layer in range(len(shapes))]
        self._view = Cache(layers=list(self._layers))

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, slots: int, context: int, *, deterministic: bool
    ) -> TransformersDecoder:
        """Build a decoder with a copy of the model."""
        return cls(copy.deepcopy(model).train(False), slots, context, deterministic=deterministic)

    # ------------------------------------------------------------------------------------------------- weights

    def prepare(self, tensors: Mapping[str, Tensor]) -> DecoderWeights:
        own = dict(self._model.named_parameters())
        check_tensors(tensors, {name: parameter.shape for name, parameter in own.items()})
        return {
            name: tensors[name].detach().to(parameter.device, parameter.dtype, copy=True)
            for name, parameter in own.items()
        }

    def install(self, prepared: DecoderWeights) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.data = prepared[name]

    def sibling(self, prepared: DecoderWeights, slots: int | None = None) -> TransformersDecoder:
        decoder = TransformersDecoder(
            copy.deepcopy(self._model), slots or self.slots, self.context, deterministic=self.deterministic
        )
        decoder.install(prepared)
        return decoder

    # ------------------------------------------------------------------------------------------------- compute

    def _prefill_pass(self, cache: SlotCache, slot_N: Tensor, tokens_N_L: Tensor) -> None:
        length = tokens_N_L.shape[1]
        positions_N_L = torch.arange(length, device=self.device).expand_as(tokens_N_L)
        self._forward(self._model.base_model, _ForwardPass(slot_N, length, None), tokens_N_L, positions_N_L)

    @torch.inference_mode()
    def step(
        self, tokens_B: NDArray[np.int64], positions_B: NDArray[np.int64], prompts: SharedPrompts | None = None
    ) -> Tensor:
        window = self._reserve_window(positions_B)
        position_B = torch.from_numpy(positions_B).to(self.device)
        token_B = torch.from_numpy(tokens_B).to(self.device)
        rows = torch.arange(len(tokens_B), device=self.device)
        current = _ForwardPass(rows, window, position_B)
        output = self._forward(self._model, current, token_B.unsqueeze(1), position_B.unsqueeze(1))
        logits_B_V: Tensor = output.logits[:, -1].float()
        return logits_B_V

    def _forward(self, module: Any, current: _ForwardPass, tokens_B_L: Tensor, positions_B_L: Tensor) -> Any:
        for layer in self._layers:
            layer.current = current
        return module(
            input_ids=tokens_B_L,
            position_ids=positions_B_L,
            attention_mask=self._masks(positions_B_L, current.window),
            past_key_values=self._view,
            use_cache=True,
        )

    def _masks(self, positions_B_L: Tensor, window: int) -> Tensor | dict[str, Tensor]:
        """Return the causal mask, or one mask per layer type for models with several."""
        config = self._model.config.get_text_config()
        key_W = torch.arange(window, device=self.device)
        visible = key_W <= positions_B_L.unsqueeze(-1)
        kinds = set(getattr(config, "layer_types", None) or ())
        sliding_window = getattr(config, "sliding_window", None)
        if sliding_window is None or kinds == {"full_attention"}:
            return {kind: self._additive(visible) for kind in kinds} if len(kinds) > 1 else self._additive(visible)
        near = self._additive(visible & (key_W > positions_B_L.unsqueeze(-1) - sliding_window))
        if len(kinds) > 1:
            return {kind: near if kind == "sliding_attention" else self._additive(visible) for kind in kinds}
        return near

    def _additive(self, visible_B_L_W: Tensor) -> Tensor:
        mask = torch.zeros(visible_B_L_W.shape, dtype=self._model.dtype, device=self.device)
        return mask.masked_fill_(~visible_B_L_W, torch.finfo(self._model.dtype).min).unsqueeze(1)


@torch.inference_mode()
def _cache_shapes(model: PreTrainedModel) -> list[tuple[int, int, int]]:
    """Return (heads, key size, value size) per layer, observed in a forward pass of one token."""
    cache = DynamicCache()
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=cache, use_cache=True)
    shapes = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4:
            raise BadInput(
                f"the embedded engine cannot serve {type(model).__name__}: its cache holds more than keys and values"
            )
        shapes.append((keys.shape[1], keys.shape[3], values.shape[3]))
    if not shapes:
        raise BadInput(f"the embedded engine cannot serve {type(model).__name__}: it caches no keys and values")
    return shapes
