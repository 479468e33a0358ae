"""Learner state on disk: safetensors for tensors, JSON for the rest, no pickle.

    copy (on the training thread) ─▶ write (on any other thread) ─▶ directory, created and committed by the caller

Invariants
- A directory is only a valid state with all its files.
- `restore` is exact: training on from it is bit-identical to never having stopped. That includes the random state of
  torch, numpy and Python.
- A copy is never modified between `make` and `release`. Its memory is reused for the next copy, because allocating new
  memory (a page fault per 4 KiB) costs more than copying. There is more than one copy only while several are written.
- Tensors that never change during the run are not copied.

With LoRA only the adapter's weights are saved, in the files of a PEFT folder. A checksum over some values of the base
model is saved with them, to detect a different base model.

Safetensors files are written here, not by the safetensors package: this makes no second copy in memory, releases the
GIL during slow writes, and reports a full disk as `OSError`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from outpace.checkpoint.commit import write_durably
from outpace.errors import CorruptData
from outpace.learner.core import LearnerCore
from outpace.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraAdapters, adapter_config_json, parse_adapter_config
from outpace.runtime import diagnostics, rng
from outpace.types import LoraAdapter, TensorSpec, Version
from outpace.weights.files import safetensors_header, safetensors_order
from outpace.weights.shared_memory import distinct_tensors

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class StateCopy:
    """A copy of the state at one version. `small_files` holds the files without tensors."""

    copied: dict[str, Tensors]
    constant: dict[str, Tensors]
    small_files: dict[str, bytes]

    @property
    def files(self) -> dict[str, Tensors]:
        return self.copied | self.constant


class StateCopies:
    """Makes copies on the training thread and reuses their memory. Other threads may write and release them."""

    def __init__(self) -> None:
        self._free: dict[str, Tensors] | None = None
        self._lock = threading.Lock()

    def reserve(self, changing: dict[str, Tensors]) -> None:
        """Allocate the memory of the first copy in advance, on any thread."""
        memory = allocate(changing)
        for tensors in memory.values():
            torch._foreach_zero_(list(tensors.values()))  # makes the kernel allocate every page now
        with self._lock:
            self._free = memory

    def make(
        self, changing: dict[str, Tensors], constant: dict[str, Tensors], small_files: dict[str, bytes]
    ) -> StateCopy:
        """Copy `changing`; include `constant`, which never changes, without copying."""
        with self._lock:
            free, self._free = self._free, None
        memory = free if free is not None and _layout(free) == _layout(changing) else allocate(changing)
        sources = [tensor.detach() for tensors in changing.values() for tensor in tensors.values()]
        targets = [tensor for tensors in memory.values() for tensor in tensors.values()]
        torch._foreach_copy_(targets, sources, non_blocking=True)
        for device in {tensor.device for tensor in sources if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return StateCopy(memory, constant, small_files)

    def release(self, copy: StateCopy) -> None:
        with self._lock:
            self._free = copy.copied


def _layout(files: Mapping[str, Tensors]) -> list[tuple[str, str, torch.dtype, torch.Size]]:
    return [(file, name, each.dtype, each.shape) for file, tensors in files.items() for name, each in tensors.items()]


def allocate(files: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Return host memory for a copy of these tensors, pinned if they are on a GPU."""
    return {
        file: {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            for name, tensor in tensors.items()
        }
        for file, tensors in files.items()
    }


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. It is synced to disk on return."""
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), 0, tensor.nbytes, crc32=0)
        for name, tensor in tensors.items()
    ]
    with path.open("wb") as file:
        file.write(safetensors_header(specs))
        for spec in safetensors_order(specs):
            file.write(_raw_bytes(tensors[spec.name]))
        file.flush()
        os.fsync(file.fileno())


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CorruptData(f"{path}: {error}") from None


def _raw_bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"
COUNTERS_FILE = "learner.json"
RNG_FILE = "learner_rng.json"

RNG = "rng/cpu"
CUDA_RNG = "rng/cuda"
CRITIC = "critic/"


class Counters(msgspec.Struct, frozen=True):
    version: int
    tokens: int
    bad_steps: int
    engine_kl: float = 0.0
    frozen: int = 0  # `LoraAdapters.frozen_sum` of the base model


# -------------------------------------------------------------------------------------------------------------- saving


def save(core: LearnerCore, directory: str | Path) -> None:
    """Copy and write the state. All files are synced to disk on return."""
    write(copy(core, StateCopies()), Path(directory))


def copy(core: LearnerCore, copies: StateCopies) -> StateCopy:
    """Copy the current state. Weights must not change during this call only."""
    frozen = core.adapters.base_checksum if core.adapters else 0
    counters = Counters(core.version, core.tokens, core.bad_steps, core.engine_kl, frozen)
    small_files = {
        COUNTERS_FILE: msgspec.json.format(msgspec.json.encode(counters)) + b"\n",
        RNG_FILE: rng.capture(),
    }
    if core.adapters is not None:
        small_files[ADAPTER_CONFIG] = adapter_config_json(core.adapters.adapter)
    return copies.make(changing_tensors(core), _constant_tensors(core), small_files)


def write(state: StateCopy, directory: Path) -> None:
    """Write a copied state. On `OSError` the directory is left incomplete and is not a valid state."""
    for name, tensors in state.files.items():
        write_tensors(directory / name, tensors)
        diagnostics.crash_point(f"save.{name.removesuffix('.safetensors')}")
    for name, data in state.small_files.items():
        write_durably(directory / name, data)
    diagnostics.crash_point("save.done")


def changing_tensors(core: LearnerCore) -> dict[str, Tensors]:
    """Return the tensors that a step may change, by file."""
    weights = (
        {MODEL_FILE: distinct_tensors(core.model.state_dict())}
        if core.adapters is None
        else {ADAPTER_WEIGHTS: core.adapters.tensors()}
    )
    optimizer = {OPTIMIZER_FILE: _optimizer_tensors(core) | _critic_tensors(core) | _generators(core)}
    return weights | optimizer | (_reference_file(core) if core.config.kl.sync_every else {})


def _constant_tensors(core: LearnerCore) -> dict[str, Tensors]:
    return {} if core.config.kl.sync_every else _reference_file(core)


def _reference_file(core: LearnerCore) -> dict[str, Tensors]:
    tensors = core.reference.tensors() if core.reference is not None else {}
    return {REFERENCE_FILE: tensors} if tensors else {}


def _optimizer_tensors(core: LearnerCore) -> Tensors:
    state = core.optimizer.state
    return {
        f"{kind}/{name}": value
        for name, parameter in (core.parameters | core.critic_parameters).items()
        for kind, value in state.get(parameter, {}).items()
    }


def _critic_tensors(core: LearnerCore) -> Tensors:
    return {CRITIC + name: parameter.detach() for name, parameter in core.critic_parameters.items()}


def _generators(core: LearnerCore) -> Tensors:
    device = core.model.device
    on_device = {CUDA_RNG: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {RNG: torch.get_rng_state()} | on_device


# ----------------------------------------------------------------------------------------------------------- restoring


def restore(core: LearnerCore, directory: str | Path) -> Version:
    """Restore the state and return its version. Accumulated gradients are dropped."""
    directory = Path(directory)
    weights_file = _weights_file(core, directory)
    weights = load_tensors(weights_file)
    optimizer = load_tensors(directory / OPTIMIZER_FILE)
    counters, random_state = _read_small(directory)
    if core.adapters is not None:
        _check_adapters(core.adapters, directory, counters)
        core.adapters.load(weights)
    else:
        _copy_into_model(core.model, weights, weights_file)
        core.weights_changed()
    diagnostics.crash_point("load.middle")
    if core.reference is not None:
        file = directory / REFERENCE_FILE
        core.reference.load(load_tensors(file) if file.exists() else {})
    generators = {name: optimizer.pop(name) for name in (RNG, CUDA_RNG) if name in optimizer}
    _copy_into_critic(core, optimizer)
    _copy_into_optimizer(core, optimizer)
    core.drop_gradients()
    core.version, core.tokens, core.bad_steps = counters.version, counters.tokens, counters.bad_steps
    core.engine_kl = counters.engine_kl
    _restore_generators(core, generators)
    rng.restore(random_state)
    return core.version


def _weights_file(core: LearnerCore, directory: Path) -> Path:
    """Return the weights file. Raises `CorruptData` if one of saved state and learner uses LoRA and the other does
    not."""
    file = directory / (MODEL_FILE if core.adapters is None else ADAPTER_WEIGHTS)
    if core.adapters is None and (directory / ADAPTER_WEIGHTS).exists():
        raise CorruptData(f"the checkpoint was saved with LoRA; set lora.rank = {_saved_adapter(directory).rank}")
    if core.adapters is not None and (directory / MODEL_FILE).exists():
        raise CorruptData("the checkpoint was saved without LoRA; set lora.rank = 0")
    return file


def _saved_adapter(directory: Path) -> LoraAdapter:
    try:
        return parse_adapter_config((directory / ADAPTER_CONFIG).read_bytes())
    except OSError as error:
        raise CorruptData(f"{directory / ADAPTER_CONFIG}: {error}") from None


def _check_adapters(adapters: LoraAdapters, directory: Path, counters: Counters) -> None:
    own, saved = adapters.adapter, _saved_adapter(directory)
    for key in ("rank", "alpha", "targets"):
        if (value := getattr(saved, key)) != getattr(own, key):
            raise CorruptData(f"the checkpoint was saved with another adapter; set lora.{key} = {value}")
    if counters.frozen != adapters.base_checksum:
        raise CorruptData("the checkpoint's adapter belongs to another base model; do not change model.path")


def _read_small(directory: Path) -> tuple[Counters, bytes]:
    try:
        counters = msgspec.json.decode((directory / COUNTERS_FILE).read_bytes(), type=Counters)
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptData(f"{directory / COUNTERS_FILE}: {error}") from None
    try:
        state = (directory / RNG_FILE).read_bytes()
        msgspec.json.decode(state, type=rng.RngState)
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptData(f"{directory / RNG_FILE}: {error}") from None
    return counters, state


def _restore_generators(core: LearnerCore, states: Tensors) -> None:
    torch.set_rng_state(states[RNG])
    if CUDA_RNG in states and core.model.device.type == "cuda":
        torch.cuda.set_rng_state(states[CUDA_RNG], core.model.device)


def _copy_into_critic(core: LearnerCore, tensors: Tensors) -> None:
    """Restore the critic's weights and remove them from `tensors`."""
    saved = {name: tensors.pop(name) for name in list(tensors) if name.startswith(CRITIC)}
    if saved.keys() != _critic_tensors(core).keys():
        problem = "with a critic; set advantage.name =" if saved else "without a critic; advantage.name cannot be"
        raise CorruptData(f"the checkpoint was saved {problem} gae")
    with torch.no_grad():
        for name, parameter in core.critic_parameters.items():
            parameter.copy_(saved[CRITIC + name])


def _copy_into_model(model: PreTrainedModel, weights: Tensors, file: Path) -> None:
    own = distinct_tensors(model.state_dict())
    if own.keys() != weights.keys() or any(own[name].shape != weights[name].shape for name in own):
        raise CorruptData(f"{file} holds the weights of another model; do not change model.path")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def _copy_into_optimizer(core: LearnerCore, tensors: dict[str, Tensor]) -> None:
    core.optimizer.state.clear()
    for key, value in tensors.items():
        kind, name = key.split("/", 1)
        parameter = (core.parameters | core.critic_parameters)[name]
        core.optimizer.state[parameter][kind] = value.to(parameter.device)
