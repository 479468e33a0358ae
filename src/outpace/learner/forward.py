"""Forward pass: from a packed batch to the logprobs of its trained tokens, for any causal language model.

Two implementations with the same result:
- packed: no padding, attention per segment, output head applied in slices. For models whose attention uses the
  transformers interface and whose logits are the output head times the last hidden state.
- padded: length-bucketed right-padded batches through the model's own forward. For all other models.

The choice does not depend on the model's name. `choose_forward` runs three short rows, two of which share a prefix,
through both. It selects packed only if the logprobs match, and if changing the first row does not change the logprobs
of the others, so a model that leaks between rows is padded.

On a GPU the layers of a packed model are compiled, once for all layers and all lengths, by `warm_up` or by the first
pass.

Legend: _T tokens of the pass, _N trained tokens, D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from outpace.errors import BadInput, one_line
from outpace.learner.attention import ATTENTION_NAME, PackingUnsupported, bucket_width, plan_attention, uses_flash
from outpace.learner.output_head import logprobs_from_logits, token_logprobs
from outpace.learner.packing import MIN_SHARED, Longs, PackedBatch, pack
from outpace.types import Row

logger = logging.getLogger(__name__)


class ForwardOutputs(NamedTuple):
    """Logprobs, entropies and hidden states (None unless requested) of the trained tokens of a pass."""

    logp_N: Tensor
    entropy_N: Tensor
    hidden_ND: Tensor | None = None


@dataclass(frozen=True)
class ForwardOptions:
    """Options of a forward pass. `entropy_gradient`: entropies carry a gradient. `hidden`: return hidden states.
    `compiled`: compile the model's layers and the output head."""

    temperature: float = 1.0
    dtype: torch.dtype = torch.float32
    entropy_gradient: bool = False
    hidden: bool = False
    compiled: bool = False


class Forward(Protocol):
    min_shared: int | None
    """Argument of `pack`: the shortest common part of rows that is shared; None shares nothing."""

    def __call__(self, packed: PackedBatch) -> ForwardOutputs: ...

    def warm_up(self, tokens: int) -> None:
        """Compile for passes of about this many tokens. Otherwise the first pass does."""
        ...


PROBE_TOLERANCE = 1e-3
"""Packed and padded float32 logprobs differ by about 1e-5 from rounding, by about 1 from a leak."""

LEAK_TOLERANCE = 1e-5
"""Largest change of a row's logprobs when its neighbor changes: rounding only."""

PROBE_LENGTHS = (7, 12, 23)
"""Trained tokens of each row used to compare the forward passes. The last two rows share a prefix of twelve."""

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


class PackedForward:
    def __init__(self, model: PreTrainedModel, options: ForwardOptions) -> None:
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, nn.Linear):
            raise PackingUnsupported("the output head is not a single linear layer")
        layer_types = set(getattr(model.config, "layer_types", None) or ())
        if not layer_types <= _PACKABLE_LAYERS:
            raise PackingUnsupported(f"unsupported layer types: {', '.join(sorted(layer_types - _PACKABLE_LAYERS))}")
        model.set_attn_implementation(ATTENTION_NAME)
        self._decoder: Any = model.base_model
        self._head = head
        self._device = compute_device(model)
        self._options = options
        self._compile_pending = options.compiled
        self.min_shared: int | None = MIN_SHARED if uses_flash(self._device, options.dtype) else 1

    def __call__(self, packed: PackedBatch) -> ForwardOutputs:
        if self._compile_pending:
            self.warm_up(len(packed.tokens_T))
        device, options = self._device, self._options
        with autocast(device, options.dtype):
            hidden_TD = self._decoder(
                input_ids=_on_device(packed.tokens_T, device)[None],
                position_ids=_on_device(packed.position_ids_T, device)[None],
                use_cache=False,  # with a cache, the transformers mask ignores the bounds of rows
                segments=plan_attention(packed, device, options.dtype),
            ).last_hidden_state[0]
        sources, targets, index_N = packed.sources_N, packed.targets_N, None
        if self.min_shared == 1:  # many attempts are identical or begin the same
            sources, targets, index_N = _distinct_predictions(packed, self._head.out_features)
        hidden = hidden_TD.index_select(0, _on_device(sources, device)).to(options.dtype)
        logp, entropy = token_logprobs(
            hidden,
            self._head.weight,
            self._head.bias,
            _on_device(targets, device),
            options.temperature,
            options.entropy_gradient,
            options.compiled,
        )
        if index_N is None:
            return ForwardOutputs(logp, entropy, hidden if options.hidden else None)
        index = _on_device(index_N, device)
        hidden_ND = hidden.index_select(0, index) if options.hidden else None
        return ForwardOutputs(logp.index_select(0, index), entropy.index_select(0, index), hidden_ND)

    @torch.enable_grad()
    def warm_up(self, tokens: int) -> None:
        """Compile the layers. Torch compiles for large and for small passes separately. A model that cannot be compiled
        runs uncompiled; a sharded one fails in its first pass."""
        if not self._options.compiled:
            return
        layers = getattr(self._decoder, "layers", None)
        if self._compile_pending and isinstance(layers, nn.ModuleList):
            for layer in layers:
                if is_sharded(layer):
                    _compile_sharded(layer)
                else:
                    layer.compile(dynamic=True)
        self._compile_pending = False
        if is_sharded(self._decoder):  # a pass needs all ranks
            return
        weights = [weight for weight in (*self._decoder.parameters(), self._head.weight) if weight.requires_grad]
        try:
            vocabulary = int(self._decoder.get_input_embeddings().weight.shape[0])
            logp_N = self(_probe_rows(vocabulary, tokens)).logp_N
            torch.autograd.grad(logp_N, weights, torch.ones_like(logp_N), allow_unused=True)
        except torch.OutOfMemoryError:  # the layers were compiled, and a smaller pass may fit
            raise
        except Exception as error:  # torch.compile fails in many ways, and the layers also work without it
            logger.warning("the layers of this model cannot be compiled and run uncompiled: %s", error)
            for layer in layers or ():
                layer._compiled_call_impl = None
            self._options = replace(self._options, compiled=False)


def _compile_sharded(layer: nn.Module) -> None:
    """Compile a layer without the hooks of FSDP2, which gather its weights and cannot be compiled.

    In modules that carry FSDP2's mark, torch.compile treats integers such as the head size as dynamic and splits the
    layer into many graphs. The mark is for compiling with the hooks, and nothing else reads it."""
    for module in layer.modules():
        module._is_fsdp_managed_module = False  # type: ignore[assignment]
    layer.forward = torch.compile(layer.forward, dynamic=True)


def _distinct_predictions(packed: PackedBatch, vocabulary: int) -> tuple[Longs, Longs, Longs]:
    """Return sources and targets of the distinct predictions, and the index of each trained token's prediction."""
    if np.any((packed.targets_N < 0) | (packed.targets_N >= vocabulary)):
        raise IndexError(f"a trained token is not in the vocabulary of {vocabulary} tokens")
    keys, index_N = np.unique(packed.sources_N * vocabulary + packed.targets_N, return_inverse=True)
    sources, targets = np.divmod(keys, vocabulary)
    return sources, targets, index_N


class PaddedForward:
    """Runs every segment with its whole context as one padded row. A sharded model runs once per pass, because all
    ranks must run it the same number of times."""

    min_shared: int | None = None

    def __init__(self, model: PreTrainedModel, options: ForwardOptions) -> None:
        self._model: Any = model
        self._options = options

    def warm_up(self, tokens: int) -> None:
        """Nothing is compiled."""

    def __call__(self, packed: PackedBatch) -> ForwardOutputs:
        device, options = compute_device(self._model), self._options
        chosen: list[Tensor] = []
        hidden: list[Tensor] = []
        indices: list[Longs] = []
        for tokens, lengths, at_N, inside_N in _padded_rows(packed, one_bucket=is_sharded(self._model)):
            positions = torch.arange(tokens.shape[1], device=device).expand(tokens.shape)
            with autocast(device, options.dtype):
                output = self._model(
                    input_ids=_on_device(tokens, device),
                    attention_mask=(positions < _on_device(lengths, device)[:, None]).long(),
                    position_ids=positions,
                    use_cache=False,
                    output_hidden_states=options.hidden,
                )
            at = _on_device(at_N, device)
            chosen.append(output.logits.flatten(0, 1).index_select(0, at))
            if options.hidden:
                hidden.append(output.hidden_states[-1].flatten(0, 1).index_select(0, at))
            indices.append(inside_N)
        order = np.concatenate(indices)
        targets_N = _on_device(packed.targets_N[order], device)
        logp, entropy = logprobs_from_logits(
            torch.cat(chosen), targets_N, options.temperature, options.entropy_gradient
        )
        back = _on_device(np.argsort(order), device)
        hidden_ND = torch.cat(hidden).index_select(0, back) if options.hidden else None
        return ForwardOutputs(logp.index_select(0, back), entropy.index_select(0, back), hidden_ND)


def _padded_rows(packed: PackedBatch, one_bucket: bool) -> list[tuple[Longs, Longs, Longs, Longs]]:
    """Return buckets of padded rows, one row per segment. A bucket has tokens, lengths and, for each trained token
    predicted in it, the token's place in the flattened bucket and its index in N."""
    lengths = np.diff(packed.cu_context_S1)
    widths = np.array([bucket_width(int(lengths.max() if one_bucket else length)) for length in lengths])
    segment_N = np.searchsorted(packed.cu_seqlens_S1, packed.sources_N, side="right") - 1
    index_N = packed.sources_N - packed.cu_seqlens_S1[segment_N + 1] + lengths[segment_N]  # in its padded row
    buckets = []
    for width in np.unique(widths):
        members = np.flatnonzero(widths == width)
        ends = packed.cu_context_S1[members + 1]
        places = np.minimum(
            packed.cu_context_S1[members][:, None] + np.arange(lengths[members].max()), ends[:, None] - 1
        )
        inside_N = np.flatnonzero(np.isin(segment_N, members))
        row_N = np.searchsorted(members, segment_N[inside_N])
        tokens = packed.tokens_T[packed.context_K[places]]
        buckets.append((tokens, lengths[members], row_N * tokens.shape[1] + index_N[inside_N], inside_N))
    return buckets


class ShardedForward:
    """A forward pass of a sharded model. `root` runs a function while the parameters outside of the layers are
    gathered; the layers gather their own."""

    def __init__(self, inner: Forward, root: Any) -> None:
        self.inner = inner
        self.root = root
        self.min_shared = inner.min_shared

    def __call__(self, packed: PackedBatch) -> ForwardOutputs:
        try:
            outputs: ForwardOutputs = self.root(partial(self.inner, packed))
        except torch._dynamo.exc.TorchDynamoException as error:
            raise BadInput(f"learner.compile: a layer cannot be compiled; set false: {one_line(error)}") from error
        return outputs

    def warm_up(self, tokens: int) -> None:
        """Nothing: a pass needs all ranks, and layers are compiled by the first one."""


def compute_device(model: PreTrainedModel) -> torch.device:
    """Return the device of the forward pass. Sharded weights may be in host memory between passes."""
    mesh = getattr(next(model.parameters()), "device_mesh", None)
    return model.device if mesh is None else torch.device(mesh.device_type)


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters of the model are sharded over several processes."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _on_device(values: np.ndarray[Any, np.dtype[Any]], device: torch.device) -> Tensor:
    """Copy to the device. Copies to a GPU are asynchronous, from pinned memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Run matrix products in `dtype`. Activations between layers stay float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype == torch.bfloat16)


def choose_forward(
    model: PreTrainedModel, options: ForwardOptions, probe: Callable[[], PreTrainedModel] | None = None
) -> Forward:
    """Return the packed forward if it reproduces this model's logprobs, else the padded one. `probe` returns a
    float32 model of the same kind for the comparison, by default the model itself."""
    probed, own_attention = model, model.config._attn_implementation
    try:
        probed = model if probe is None else probe()
        _verify_packing(probed)
        return PackedForward(model, options)
    except (PackingUnsupported, ValueError, TypeError) as error:  # raised by transformers for unsupported arguments
        logger.info("packing disabled for this model, rows are padded: %s", error)
        for each in (model, probed):
            each.set_attn_implementation(own_attention)
        return PaddedForward(model, options)


def matching_forward(
    chosen: Forward, model: PreTrainedModel, options: ForwardOptions, root: Any | None = None
) -> Forward:
    """Return a forward for `model` of the same kind (packed or padded) as `chosen`, with other options. `root`: the
    root of a sharded model; None: the root of `chosen`."""
    if isinstance(chosen, ShardedForward):
        return ShardedForward(matching_forward(chosen.inner, model, options), root or chosen.root)
    return PackedForward(model, options) if isinstance(chosen, PackedForward) else PaddedForward(model, options)


@torch.no_grad()
def _verify_packing(model: PreTrainedModel) -> None:
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    rows = _probe_rows(vocabulary, sum(PROBE_LENGTHS))
    plain = ForwardOptions(dtype=model.dtype)
    expected_N = PaddedForward(model, plain)(rows).logp_N
    packed = PackedForward(model, plain)
    found_N = packed(rows).logp_N
    error = float((found_N - expected_N).abs().max())
    if not error <= PROBE_TOLERANCE:
        raise PackingUnsupported(f"packed and padded logprobs differ by {error:.2g}")
    other_tokens_T = rows.tokens_T.copy()
    other_tokens_T[: PROBE_LENGTHS[0]] = (other_tokens_T[: PROBE_LENGTHS[0]] + 1) % vocabulary
    changed_N = packed(replace(rows, tokens_T=other_tokens_T)).logp_N
    leak = float((changed_N - found_N)[PROBE_LENGTHS[0] :].abs().max())
    if not leak <= LEAK_TOLERANCE:
        raise PackingUnsupported(f"a row's logprobs change by {leak:.2g} with its neighbor's tokens")


def _probe_rows(vocabulary: int, tokens: int) -> PackedBatch:
    """Return about `tokens` tokens in rows of different lengths with a prediction at every position. Two of every three
    rows have a common prefix."""
    generator = np.random.default_rng(0)
    first, second, third = PROBE_LENGTHS
    rows: list[Row] = []
    for _ in range(max(1, tokens // sum(PROBE_LENGTHS))):
        drawn = generator.integers(0, vocabulary, sum(PROBE_LENGTHS) + 1).astype(np.int32)
        shared = drawn[first : first + second]
        other = np.append(shared, (drawn[first + second] + 1) % vocabulary).astype(np.int32)
        longer = drawn[first : first + third + 1]
        rows += [_predicted_row(part) for part in (drawn[: first + 1], other, longer)]
    (packed,) = pack(rows, len(rows) * sum(PROBE_LENGTHS))
    return packed


def _predicted_row(tokens: np.ndarray[Any, np.dtype[np.int32]]) -> Row:
    zeros = np.zeros(len(tokens), dtype=np.float32)
    return Row(tokens, np.arange(len(tokens)) > 0, zeros, zeros.astype(np.int32), zeros)
