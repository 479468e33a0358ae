"""Load a model whose parameters are sharded over several processes, without a full copy in any of them.

    config ─▶ model on the meta device ─▶ buffers ─▶ shard(model) ─▶ empty parameters ─▶ own rows of the files

Every process reads the rows of each tensor that it owns, straight from the memory-mapped files. Its peak memory is its
share of the parameters and the largest piece of a tensor that it reads.

Invariants
- Parameters and buffers equal those of `load_model` with the same dtype, also where transformers computes a buffer
  that no file contains, such as the frequencies of rotary embeddings.
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
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from outpace.errors import BadInput, one_line
from outpace.models.loading import LOADING, resolve_model
from outpace.models.slices import own_rows

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

_FLOATING = {"F64", "F32", "F16", "BF16"}
_RECOMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that old checkpoints contain. transformers computes them instead."""


class CheckpointMismatch(Exception):
    """The names, shapes or types of the tensors in the files are not those of the model. transformers converts such
    checkpoints, but only as a whole."""


@dataclass(frozen=True)
class _StoredTensor:
    file: Path
    shape: tuple[int, ...]
    floating: bool


def load_sharded_model(
    path: str,
    *,
    shard: Callable[[PreTrainedModel], None],
    device: str,
    parameter_device: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Load the causal LM at `path` in evaluation mode, with parameters in `dtype`.

    `shard` gets the model with its parameters on the meta device and replaces those to shard by DTensors, as
    `fully_shard` does. Parameters that it leaves alone are loaded whole. `device` is that of the buffers and, if
    `parameter_device` is None, of the parameters; with a `CPUOffloadPolicy`, `parameter_device` is "cpu".

    Raises `CheckpointMismatch` if only `load_model` can load this checkpoint."""
    directory = resolve_model(path)
    try:
        with LOADING:
            model = _model_on_meta(directory, trust_remote_code, dtype)
        stored = _stored_tensors(directory)
        sources = _sources(model, stored)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise BadInput(f"model.path {path}: {one_line(error)}") from error
    _make_buffers(model)
    shard(model)
    _allocate(model, torch.device(device), torch.device(parameter_device or device))
    try:
        _fill(model, sources)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"model.path {path}: {one_line(error)}") from error
    return model


def _model_on_meta(directory: Path, trust_remote_code: bool, dtype: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointMismatch("the checkpoint is quantized")
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = factory.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).eval()
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
                found[name] = _StoredTensor(file, tuple(piece.get_shape()), piece.get_dtype() in _FLOATING)
    return found


def _sources(model: PreTrainedModel, stored: dict[str, _StoredTensor]) -> dict[str, tuple[str, Path]]:
    """Return for the first name of every parameter and persistent buffer its name in the files, and which file."""
    _check_conversions(model, stored)
    sources, unused = {}, set(stored)
    for names, tensor in _distinct(model.state_dict(keep_vars=True).items()):
        present = [name for name in names if name in stored]
        if not present:
            raise CheckpointMismatch(f"the files have no {names[0]}")
        for name in present:
            if stored[name].shape != tuple(tensor.shape) or stored[name].floating != tensor.is_floating_point():
                raise CheckpointMismatch(f"{name} has another shape or type in the files")
        if any(not _same_values(stored, present[0], other) for other in present[1:]):
            raise CheckpointMismatch(f"{' and '.join(present)} are tied in the config and differ in the files")
        sources[names[0]] = present[0], stored[present[0]].file
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


def _allocate(model: PreTrainedModel, device: torch.device, parameter_device: torch.device) -> None:
    """Give every parameter of the meta device memory, without touching it; move the buffers to `device`."""
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
def _fill(model: PreTrainedModel, sources: dict[str, tuple[str, Path]]) -> None:
    for name, (stored_name, file) in sources.items():
        tensor = model.get_parameter_or_buffer(name)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() == 0:
            continue
        with safe_open(file, framework="pt") as tensors:  # per tensor: closing it unmaps the pages that were read
            if isinstance(tensor, DTensor):
                local.copy_(tensors.get_slice(stored_name)[slice(*own_rows(tensor))])
            else:
                local.copy_(tensors.get_tensor(stored_name))
