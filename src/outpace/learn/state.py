"""A learner's state on disk: safetensors for everything that is a tensor, JSON for the rest, pickle for nothing.

    copy (on the thread that trains) ─▶ write (on any other) ─▶ a directory that somebody else makes and commits

A directory without all files is not a state. What `restore` gives back is exact: training on from it produces the same
bits as never having stopped. That includes what random numbers come next, from torch, numpy and Python.

Where adapters are trained they are all that is kept of the weights, in the files of a PEFT folder. What they stand
beside is the model that the run began with; a few of its values are remembered, to tell it from another.
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
    frozen: int = 0  # `Adapters.frozen_sum` of the model that the adapters belong to


# -------------------------------------------------------------------------------------------------------------- saving


def save(core: LearnerCore, directory: str | Path) -> None:
    """Copy and write in one go; every file is on the disk, not merely in a cache, when this returns."""
    write(copy(core, Copies()), Path(directory))


def copy(core: LearnerCore, copies: Copies) -> StateCopy:
    """The state as it is now. Only for this the weights have to hold still."""
    frozen = core.adapters.frozen_sum if core.adapters else 0
    counters = Counters(core.version, core.tokens, core.bad_steps, core.engine_kl, frozen)
    small = {
        COUNTERS_FILE: msgspec.json.format(msgspec.json.encode(counters)) + b"\n",
        RNG_FILE: rng.capture(),
    }
    if core.adapters is not None:
        small[ADAPTER_CONFIG] = describe_adapter(core.adapters.adapter)
    return copies.make(_changing(core), _lasting(core), small)


def write(state: StateCopy, directory: Path) -> None:
    """Raises `OSError` when the disk does not take it; what is there by then is not a state."""
    for name, tensors in state.files.items():
        write_tensors(directory / name, tensors)
        crash.reached(f"save.{name.removesuffix('.safetensors')}")
    for name, data in state.small.items():
        write_bytes(directory / name, data)
    crash.reached("save.done")


def layout(core: LearnerCore) -> tuple[Layout, bool]:
    """What memory a copy of this state takes."""
    return plan(_changing(core))


def _changing(core: LearnerCore) -> dict[str, Tensors]:
    weights = (
        {MODEL_FILE: distinct_tensors(core.model.state_dict())}
        if core.adapters is None
        else {ADAPTER_WEIGHTS: core.adapters.tensors()}
    )
    optimizer = {OPTIMIZER_FILE: _optimizer_tensors(core) | _critic_tensors(core) | _generators(core)}
    return weights | optimizer | (_reference_file(core) if core.settings.kl.sync_every else {})


def _lasting(core: LearnerCore) -> dict[str, Tensors]:
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
    """Put the state back and say its version; gradients of an open batch are dropped."""
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
    """Raises for a state of the other kind: a model where adapters are trained, or adapters where the model is."""
    file = directory / (MODEL_FILE if core.adapters is None else ADAPTER_WEIGHTS)
    if core.adapters is None and (directory / ADAPTER_WEIGHTS).exists():
        raise CorruptData(f"it was saved with adapters; lora.rank must stay {_saved_adapter(directory).rank}")
    if core.adapters is not None and (directory / MODEL_FILE).exists():
        raise CorruptData("it was saved without adapters; lora.rank must stay 0")
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
            raise CorruptData(f"it was saved with other adapters; lora.{key} must stay {value}")
    if counters.frozen != adapters.frozen_sum:
        raise CorruptData("its adapters belong to another model than is at model.path; both must stay")


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
    """Takes the critic's own weights out of `tensors`."""
    saved = {name: tensors.pop(name) for name in list(tensors) if name.startswith(CRITIC)}
    if saved.keys() != _critic_tensors(core).keys():
        kept = (
            "with a critic; algorithm.advantage must stay"
            if saved
            else "without a critic; algorithm.advantage cannot be"
        )
        raise CorruptData(f"it was saved {kept} gae")
    with torch.no_grad():
        for name, parameter in core.critic_parameters.items():
            parameter.copy_(saved[CRITIC + name])


def _copy_into_model(model: PreTrainedModel, weights: Tensors, file: Path) -> None:
    own = distinct_tensors(model.state_dict())
    if own.keys() != weights.keys() or any(own[name].shape != weights[name].shape for name in own):
        raise CorruptData(f"{file} does not hold the weights of this model; model.path must stay")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def _copy_into_optimizer(core: LearnerCore, tensors: dict[str, Tensor]) -> None:
    core.optimizer.state.clear()
    for key, value in tensors.items():
        kind, name = key.split("/", 1)
        parameter = (core.parameters | core.critic_parameters)[name]
        core.optimizer.state[parameter][kind] = value.to(parameter.device)
