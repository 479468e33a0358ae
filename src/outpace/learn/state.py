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

from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace import crash
from outpace.checkpoint.durable import write_bytes
from outpace.errors import CorruptData
from outpace.learn.core import LearnerCore
from outpace.learn.state_copy import Copies, Layout, StateCopy, Tensors, plan
from outpace.learn.tensor_file import load_tensors, write_tensors
from outpace.models.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, describe_adapter, read_adapter
from outpace.models.adapters import Adapters
from outpace.runtime import rng
from outpace.types import Adapter, Version
from outpace.weights.layout import distinct_tensors

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
    frozen: int = 0  # `Adapters.frozen_sum` of the base model


# -------------------------------------------------------------------------------------------------------------- saving


def save(core: LearnerCore, directory: str | Path) -> None:
    """Copy and write the state. All files are synced to disk on return."""
    write(copy(core, Copies()), Path(directory))


def copy(core: LearnerCore, copies: Copies) -> StateCopy:
    """Copy the current state. Weights must not change during this call only."""
    frozen = core.adapters.frozen_sum if core.adapters else 0
    counters = Counters(core.version, core.tokens, core.bad_steps, core.engine_kl, frozen)
    small = {
        COUNTERS_FILE: msgspec.json.format(msgspec.json.encode(counters)) + b"\n",
        RNG_FILE: rng.capture(),
    }
    if core.adapters is not None:
        small[ADAPTER_CONFIG] = describe_adapter(core.adapters.adapter)
    return copies.make(_changing_tensors(core), _constant_tensors(core), small)


def write(state: StateCopy, directory: Path) -> None:
    """Write a copied state. On `OSError` the directory is left incomplete and is not a valid state."""
    for name, tensors in state.files.items():
        write_tensors(directory / name, tensors)
        crash.reached(f"save.{name.removesuffix('.safetensors')}")
    for name, data in state.small.items():
        write_bytes(directory / name, data)
    crash.reached("save.done")


def layout(core: LearnerCore) -> tuple[Layout, bool]:
    """Return the memory layout of a copy of this state, and whether to pin it."""
    return plan(_changing_tensors(core))


def _changing_tensors(core: LearnerCore) -> dict[str, Tensors]:
    weights = (
        {MODEL_FILE: distinct_tensors(core.model.state_dict())}
        if core.adapters is None
        else {ADAPTER_WEIGHTS: core.adapters.tensors()}
    )
    optimizer = {OPTIMIZER_FILE: _optimizer_tensors(core) | _critic_tensors(core) | _generators(core)}
    return weights | optimizer | (_reference_file(core) if core.settings.kl.sync_every else {})


def _constant_tensors(core: LearnerCore) -> dict[str, Tensors]:
    return {} if core.settings.kl.sync_every else _reference_file(core)


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
    crash.reached("load.middle")
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


def _saved_adapter(directory: Path) -> Adapter:
    try:
        return read_adapter((directory / ADAPTER_CONFIG).read_bytes())
    except OSError as error:
        raise CorruptData(f"{directory / ADAPTER_CONFIG}: {error}") from None


def _check_adapters(adapters: Adapters, directory: Path, counters: Counters) -> None:
    own, saved = adapters.adapter, _saved_adapter(directory)
    for key in ("rank", "alpha", "targets"):
        if (value := getattr(saved, key)) != getattr(own, key):
            raise CorruptData(f"the checkpoint was saved with another adapter; set lora.{key} = {value}")
    if counters.frozen != adapters.frozen_sum:
        raise CorruptData("the checkpoint's adapter belongs to another base model; do not change model.path")


def _read_small(directory: Path) -> tuple[Counters, bytes]:
    try:
        counters = msgspec.json.decode((directory / COUNTERS_FILE).read_bytes(), type=Counters)
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptData(f"{directory / COUNTERS_FILE}: {error}") from None
    try:
        state = (directory / RNG_FILE).read_bytes()
        msgspec.json.decode(state, type=rng.State)
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
        problem = (
            "with a critic; set algorithm.advantage =" if saved else "without a critic; algorithm.advantage cannot be"
        )
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
