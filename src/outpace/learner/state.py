"""Learner state on disk: safetensors for tensors, JSON for the rest, no pickle.

    copy (on the training thread) ─▶ write (on any other thread) ─▶ directory, created and committed by the caller

Invariants
- A directory is a valid state only if all its files are present.
- `restore` is exact: training that continues from it is bit-identical to training without a stop. That includes the
  random state of torch, numpy and Python.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from outpace.checkpoint.commit import write_durably
from outpace.errors import CorruptData
from outpace.learner.core import LearnerCore
from outpace.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraAdapters, adapter_config_json, parse_adapter_config
from outpace.models.slices import TensorSlice, like_sharded, slice_of
from outpace.runtime import diagnostics, rng
from outpace.types import LoraAdapter, TensorSpec, Version
from outpace.weights.files import safetensors_header, safetensors_order
from outpace.weights.shared_memory import distinct_tensors

Tensors = dict[str, Tensor]
Slices = dict[str, TensorSlice]


@dataclass(frozen=True)
class StateCopy:
    """A copy of the state at one version; of this rank's part, if the model is sharded. `small_files` holds the files
    without tensors. `first`: this rank also writes what is not sharded. `several_machines`: ranks on several machines
    write the same files."""

    copied: dict[str, Slices]
    constant: dict[str, Slices]
    small_files: dict[str, bytes]
    first: bool = True
    several_machines: bool = False

    @property
    def files(self) -> dict[str, Slices]:
        return self.copied | self.constant


class StateCopies:
    """Makes copies on the training thread and reuses their memory. Other threads may write and release them."""

    def __init__(self) -> None:
        self._free: dict[str, Slices] | None = None
        self._lock = threading.Lock()

    def reserve(self, changing: dict[str, Tensors]) -> None:
        """Allocate the memory of the first copy in advance, on any thread."""
        memory = allocate(_slices(changing))
        for slices in memory.values():
            torch._foreach_zero_([each.local for each in slices.values()])  # makes the kernel allocate every page now
        with self._lock:
            self._free = memory

    def make(
        self,
        changing: dict[str, Tensors],
        constant: dict[str, Tensors],
        small_files: dict[str, bytes],
        first: bool = True,
        several_machines: bool = False,
    ) -> StateCopy:
        """Copy `changing`; include `constant`, which never changes, without copying."""
        with self._lock:
            free, self._free = self._free, None
        own = _slices(changing)
        memory = free if free is not None and _layout(free) == _layout(own) else allocate(own)
        sources = [each.local for slices in own.values() for each in slices.values()]
        targets = [each.local for slices in memory.values() for each in slices.values()]
        torch._foreach_copy_(targets, sources, non_blocking=True)
        for device in {tensor.device for tensor in sources if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return StateCopy(memory, _slices(constant), small_files, first, several_machines)

    def release(self, copy: StateCopy) -> None:
        with self._lock:
            self._free = copy.copied


def _slices(files: Mapping[str, Tensors]) -> dict[str, Slices]:
    return {file: {name: slice_of(tensor) for name, tensor in tensors.items()} for file, tensors in files.items()}


def _layout(files: Mapping[str, Slices]) -> list[tuple[str, str, torch.dtype, torch.Size]]:
    return [
        (file, name, each.local.dtype, each.local.shape)
        for file, slices in files.items()
        for name, each in slices.items()
    ]


def allocate(files: Mapping[str, Slices]) -> dict[str, Slices]:
    """Return host memory for a copy of these tensors, pinned if they are on a GPU."""
    return {
        file: {name: replace(each, local=_host_memory(each.local)) for name, each in slices.items()}
        for file, slices in files.items()
    }


def _host_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. It is synced to disk on return."""
    write_slices(path, {name: slice_of(tensor) for name, tensor in tensors.items()})


def write_slices(
    path: Path, slices: Mapping[str, TensorSlice], first: bool = True, several_machines: bool = False
) -> None:
    """Write this process's part of a new safetensors file, synced to disk on return. All ranks may write at the same
    time; the `first` also writes the header and what is not sharded.

    `several_machines`: open with O_DSYNC, so that an NFS client writes exactly the given bytes. Otherwise it may write
    whole pages and overwrite the rows of ranks on other machines with zeros."""
    specs = [
        TensorSpec(name, str(each.local.dtype).removeprefix("torch."), list(each.shape), 0, _bytes_of(each), crc32=0)
        for name, each in slices.items()
    ]
    header = safetensors_header(specs)
    synced = os.O_DSYNC if several_machines else 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | synced, 0o644)
    try:
        if first:
            _write_at(descriptor, memoryview(header), 0)
            if path.is_file():  # cut off the end of an earlier, longer file
                os.ftruncate(descriptor, len(header) + sum(spec.nbytes for spec in specs))
        position = len(header)
        for spec in safetensors_order(specs):
            part = slices[spec.name]
            if part.is_sharded or first:
                _write_at(descriptor, _raw_bytes(part.local), position + part.start * part.local.element_size())
            position += spec.nbytes
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(part: TensorSlice) -> int:
    return part.shape.numel() * part.local.element_size()


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count


def load_tensors(path: Path, like: Callable[[str], Tensor | None] = lambda name: None) -> dict[str, Tensor]:
    """Load a safetensors file. Where `like` returns a sharded tensor of the same shape for a name, only this rank's
    rows are loaded."""
    try:
        with safe_open(path, "pt") as file:
            return {name: _load_tensor(file, name, like(name)) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (OSError, SafetensorError) as error:
        raise CorruptData(f"{path}: {error}") from None


def _load_tensor(file: Any, name: str, like: Tensor | None) -> Tensor:
    if not isinstance(like, DTensor):
        return file.get_tensor(name)  # type: ignore[no-any-return]
    rows = file.get_slice(name)
    if list(like.shape) != rows.get_shape():
        return file.get_tensor(name)  # type: ignore[no-any-return]
    return like_sharded(like, lambda first, end: rows[first:end])


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
    frozen: int = 0  # `LoraAdapters.base_checksum`


# -------------------------------------------------------------------------------------------------------------- saving


def save(core: LearnerCore, directory: str | Path) -> None:
    """Copy and write the state. All files are synced to disk on return."""
    write(copy(core, StateCopies()), Path(directory))


def copy(core: LearnerCore, copies: StateCopies) -> StateCopy:
    """Copy the current state. Weights must not change until this call returns."""
    frozen = core.adapters.base_checksum if core.adapters else 0
    counters = Counters(core.version, core.tokens, core.bad_steps, core.engine_kl, frozen)
    small_files = {
        COUNTERS_FILE: msgspec.json.format(msgspec.json.encode(counters)) + b"\n",
        RNG_FILE: rng.capture(),
    }
    if core.adapters is not None:
        small_files[ADAPTER_CONFIG] = adapter_config_json(core.adapters.adapter)
    first = core.ranks is None or core.ranks.is_first
    several = core.ranks is not None and core.ranks.several_machines
    return copies.make(changing_tensors(core), _constant_tensors(core), small_files, first, several)


def write(state: StateCopy, directory: Path) -> None:
    """Write a copied state. On `OSError` the directory is left incomplete and is not a valid state."""
    for name, slices in state.files.items():
        write_slices(directory / name, slices, state.first, state.several_machines)
        diagnostics.crash_point(f"save.{name.removesuffix('.safetensors')}")
    for name, data in state.small_files.items() if state.first else ():
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
    on_device = {CUDA_RNG: torch.cuda.get_rng_state(core.device)} if core.device.type == "cuda" else {}
    return {RNG: torch.get_rng_state()} | on_device


# ----------------------------------------------------------------------------------------------------------- restoring


def restore(core: LearnerCore, directory: str | Path) -> Version:
    """Restore the state and return its version. Accumulated gradients are dropped."""
    directory = Path(directory)
    weights_file = _weights_file(core, directory)
    own = core.model.state_dict() if core.adapters is None else core.adapters.tensors()
    weights = load_tensors(weights_file, own.get)
    parameters = core.parameters | core.critic_parameters
    optimizer = load_tensors(directory / OPTIMIZER_FILE, lambda name: parameters.get(name.partition("/")[2]))
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
        core.reference.load(load_tensors(file, core.reference.tensors().get) if file.exists() else {})
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
    """Return the weights file. Raises `CorruptData` if only one of the saved state and the learner uses LoRA."""
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
    if CUDA_RNG in states and core.device.type == "cuda":
        torch.cuda.set_rng_state(states[CUDA_RNG], core.device)


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
