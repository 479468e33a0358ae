"""Load a model whose parameters are sharded over several processes, without a full copy in any of them.

    config ─▶ model on the meta device ─▶ buffers ─▶ adapters ─▶ shard(model) ─▶ empty parameters ─▶ rows of the files

Every process reads its own rows of each tensor directly from the memory-mapped files. Its peak memory is its share of
the parameters plus the largest piece of a tensor that it reads.

Invariants
- Parameters and buffers equal those of `load_model` in float32, including buffers that no file contains and that
  transformers computes, such as the frequencies of rotary embeddings. With adapters, some frozen weights stay in a
  smaller dtype.
- Parameters that are tied in the config are one object before and after `shard`.
- Whether a checkpoint can be loaded here depends on its files alone. `CheckpointMismatch` is raised before `shard` is
  called, so all processes fall back to loading the whole model together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from outpace.errors import BadInput, one_line
from outpace.models.loading import LOADING, resolve_model
from outpace.models.lora import add_adapters, frozen_matrices
from outpace.models.slices import own_rows
from outpace.types import LoraAdapter

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

_FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_RECOMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that old checkpoints contain. transformers computes them instead."""


class CheckpointMismatch(Exception):
    """The tensors in the files differ from the model's in name, shape or type. transformers converts such checkpoints,
    but only as a whole."""


@dataclass(frozen=True)
class _StoredTensor:
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: not floating-point


@dataclass(frozen=True)
class _Source:
    """Where the values of a parameter or buffer are stored. `module` stays valid when adapters wrap it."""

    module: nn.Module
    attribute: str
    name: str  # in the files
    stored: _StoredTensor

    @property
    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.module, self.attribute)
        return found


def load_sharded_model(
    path: str,
    *,
    shard: Callable[[PreTrainedModel], None],
    device: str,
    parameter_device: str | None = None,
    trust_remote_code: bool = False,
    adapter: LoraAdapter | None = None,
    frozen_dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Load the causal LM at `path` in evaluation mode, in float32.

    `shard` gets the model with its parameters on the meta device and replaces the ones to shard with DTensors, as
    `fully_shard` does. Other parameters are loaded whole. `device` holds the buffers and, if `parameter_device` is
    None, the parameters; with a `CPUOffloadPolicy`, `parameter_device` is "cpu".

    With `adapter` the model has adapters, which `LoraAdapters` initializes. Frozen matrices (`frozen_matrices`) that
    the files store in `frozen_dtype` keep it.

    Raises `CheckpointMismatch` if only `load_model` can load this checkpoint."""
    directory = resolve_model(path)
    try:
        with LOADING:
            model = _model_on_meta(directory, trust_remote_code)
        stored = _stored_tensors(directory)
        sources = _sources(model, stored)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise BadInput(f"model.path {path}: {one_line(error)}") from error
    _make_buffers(model)
    if adapter is not None:
        add_adapters(model, adapter)
        _keep_dtype(model, sources, frozen_dtype)
    shard(model)
    _allocate(model, torch.device(device), torch.device(parameter_device or device))
    try:
        _fill(sources)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"model.path {path}: {one_line(error)}") from error
    return model


def _model_on_meta(directory: Path, trust_remote_code: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointMismatch("the checkpoint is quantized")
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = factory.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        ).eval()
    return model


# -------------------------------------------------------------------------------------------------------------- files


def _stored_tensors(directory: Path) -> dict[str, _StoredTensor]:
    """Read the headers of the files."""
    if (directory / WEIGHTS).is_file():
        names = {WEIGHTS}
    elif (directory / WEIGHTS_INDEX).is_file():
        names = set(json.loads((directory / WEIGHTS_INDEX).read_text())["weight_map"].values())
    else:
        raise CheckpointMismatch(f"{directory} has neither {WEIGHTS} nor {WEIGHTS_INDEX}")
    found = {}
    for file in (directory / name for name in sorted(names)):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                piece = tensors.get_slice(name)
                found[name] = _StoredTensor(file, tuple(piece.get_shape()), _FLOATING.get(piece.get_dtype()))
    return found


def _sources(model: PreTrainedModel, stored: dict[str, _StoredTensor]) -> list[_Source]:
    """Return where the values of every parameter and persistent buffer are stored."""
    _check_conversions(model, stored)
    sources, unused = [], set(stored)
    for names, tensor in _distinct(model.state_dict(keep_vars=True).items()):
        present = [name for name in names if name in stored]
        if not present:
            raise CheckpointMismatch(f"the files have no {names[0]}")
        for name in present:
            is_floating = stored[name].dtype is not None
            if stored[name].shape != tuple(tensor.shape) or is_floating != tensor.is_floating_point():
                raise CheckpointMismatch(f"{name} has another shape or type in the files")
        if any(not _same_values(stored, present[0], other) for other in present[1:]):
            raise CheckpointMismatch(f"{' and '.join(present)} are tied in the config and differ in the files")
        parent, _, attribute = names[0].rpartition(".")
        sources.append(_Source(model.get_submodule(parent), attribute, present[0], stored[present[0]]))
        unused.difference_update(present)
    ignored = re.compile("|".join([*_RECOMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]))
    if unknown := sorted(name for name in unused if ignored.search(name) is None):
        raise CheckpointMismatch(f"the model has no {unknown[0]}")
    return sources


def _check_conversions(model: PreTrainedModel, stored: Iterable[str]) -> None:
    """Raise if transformers would rename or compute any tensor of the files. A conversion may keep name and shape."""
    for conversion in get_model_conversion_mapping(model):
        for name in stored:
            renamed, pattern = conversion.rename_source_key(name)
            if pattern is not None and (renamed != name or hasattr(conversion, "operations")):
                raise CheckpointMismatch(f"transformers converts {name}")


def _distinct(named: Iterable[tuple[str, Tensor]]) -> list[tuple[list[str], Tensor]]:
    """Return every tensor once, with all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _same_values(stored: dict[str, _StoredTensor], left: str, right: str) -> bool:
    with (
        safe_open(stored[left].file, framework="pt") as left_file,
        safe_open(stored[right].file, framework="pt") as right_file,
    ):
        return torch.equal(left_file.get_tensor(left), right_file.get_tensor(right))


# ------------------------------------------------------------------------------------------------------------- tensors


def _make_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file contains, on the CPU. Parameters are on the meta device, where initialization
    does nothing."""
    for name, buffer in model.named_non_persistent_buffers():
        _assign(model, name, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()  # type: ignore[no-untyped-call]


def _keep_dtype(model: PreTrainedModel, sources: list[_Source], dtype: torch.dtype) -> None:
    """Keep `dtype` for frozen matrices that are stored in it."""
    frozen = set(map(id, frozen_matrices(model)))
    for source in sources:
        if id(source.tensor) in frozen and source.stored.dtype == dtype:
            source.tensor.data = source.tensor.to(dtype)


def _allocate(model: PreTrainedModel, device: torch.device, parameter_device: torch.device) -> None:
    """Allocate memory for the parameters on the meta device without touching it; move the buffers to `device`."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tied = [names for names, _ in _distinct(model.named_parameters(remove_duplicate=False)) if len(names) > 1]
    model.to_empty(device=parameter_device)
    for name, buffer in buffers.items():
        _assign(model, name, torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device))
    for first, *others in tied:  # `to_empty` replaces plain parameters, one name at a time
        for name in others:
            _assign(model, name, model.get_parameter(first))


def _assign(model: PreTrainedModel, name: str, value: Tensor) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, value)


@torch.no_grad()
def _fill(sources: list[_Source]) -> None:
    for source in sources:
        tensor = source.tensor
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() == 0:
            continue
        with safe_open(source.stored.file, framework="pt") as file:  # closing it unmaps the pages that were read
            if isinstance(tensor, DTensor):
                local.copy_(file.get_slice(source.name)[slice(*own_rows(tensor))])
            else:
                local.copy_(file.get_tensor(source.name))
