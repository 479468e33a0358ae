"""A learner's state on disk: safetensors for everything that is a tensor, JSON for the rest, pickle for nothing.

`save` writes into a directory that somebody else makes and commits; a directory without all three files is not a
state. What `restore` gives back is exact: training on from it produces the same bits as never having stopped.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from outpace.errors import CorruptData
from outpace.learn.core import LearnerCore
from outpace.types import Version
from outpace.weights.store import distinct_tensors

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"
COUNTERS_FILE = "learner.json"

RNG = "rng/cpu"
CRITIC = "critic/"


class Counters(msgspec.Struct, frozen=True):
    version: int
    tokens: int
    bad_steps: int
    engine_kl: float = 0.0


def save(core: LearnerCore, directory: str | Path) -> None:
    """Write the state; every file is on the disk, not merely in a cache, when this returns."""
    directory = Path(directory)
    _save_tensors(distinct_tensors(core.model.state_dict()), directory / MODEL_FILE)
    others = _optimizer_tensors(core) | _critic_tensors(core) | {RNG: torch.get_rng_state()}
    _save_tensors(others, directory / OPTIMIZER_FILE)
    if core.reference is not None:
        _save_tensors(distinct_tensors(core.reference.model.state_dict()), directory / REFERENCE_FILE)
    counters = Counters(core.version, core.tokens, core.bad_steps, core.engine_kl)
    _sync_write(directory / COUNTERS_FILE, msgspec.json.format(msgspec.json.encode(counters)) + b"\n")


def restore(core: LearnerCore, directory: str | Path) -> Version:
    """Put the state back and say its version; gradients of an open batch are dropped."""
    directory = Path(directory)
    weights = _load_tensors(directory / MODEL_FILE)
    optimizer = _load_tensors(directory / OPTIMIZER_FILE)
    try:
        counters = msgspec.json.decode((directory / COUNTERS_FILE).read_bytes(), type=Counters)
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptData(f"{directory / COUNTERS_FILE}: {error}") from None
    _copy_into_model(core.model, weights, directory / MODEL_FILE)
    if core.reference is not None:
        if not (directory / REFERENCE_FILE).exists():
            raise CorruptData("it was saved without a reference; kl.coefficient must stay 0")
        _copy_into_model(core.reference.model, _load_tensors(directory / REFERENCE_FILE), directory / REFERENCE_FILE)
    torch.set_rng_state(optimizer.pop(RNG))
    _copy_into_critic(core, optimizer, directory)
    _copy_into_optimizer(core, optimizer)
    core.drop_gradients()
    core.version, core.tokens, core.bad_steps = counters.version, counters.tokens, counters.bad_steps
    core.engine_kl = counters.engine_kl
    return core.version


def _optimizer_tensors(core: LearnerCore) -> dict[str, Tensor]:
    state = core.optimizer.state
    return {
        f"{kind}/{name}": value
        for name, parameter in (core.parameters | core.critic_parameters).items()
        for kind, value in state.get(parameter, {}).items()
    }


def _critic_tensors(core: LearnerCore) -> dict[str, Tensor]:
    return {CRITIC + name: parameter.detach() for name, parameter in core.critic_parameters.items()}


def _copy_into_critic(core: LearnerCore, tensors: dict[str, Tensor], directory: Path) -> None:
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


def _copy_into_model(model: PreTrainedModel, weights: dict[str, Tensor], file: Path) -> None:
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


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    _sync(path)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CorruptData(f"{path}: {error}") from None


def _sync_write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
