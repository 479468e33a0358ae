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

from outpace.errors import CorruptData
from outpace.learn.core import LearnerCore
from outpace.types import Version
from outpace.weights.store import distinct_tensors

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
COUNTERS_FILE = "learner.json"

RNG = "rng/cpu"


class Counters(msgspec.Struct, frozen=True):
    version: int
    tokens: int
    bad_steps: int


def save(core: LearnerCore, directory: str | Path) -> None:
    """Write the state; every file is on the disk, not merely in a cache, when this returns."""
    directory = Path(directory)
    _save_tensors(distinct_tensors(core.model.state_dict()), directory / MODEL_FILE)
    _save_tensors(_optimizer_tensors(core) | {RNG: torch.get_rng_state()}, directory / OPTIMIZER_FILE)
    counters = Counters(core.version, core.tokens, core.bad_steps)
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
    _copy_into_model(core, weights, directory)
    torch.set_rng_state(optimizer.pop(RNG))
    _copy_into_optimizer(core, optimizer)
    core.drop_gradients()
    core.version, core.tokens, core.bad_steps = counters.version, counters.tokens, counters.bad_steps
    return core.version


def _optimizer_tensors(core: LearnerCore) -> dict[str, Tensor]:
    state = core.optimizer.state
    return {
        f"{kind}/{name}": value
        for name, parameter in core.parameters.items()
        for kind, value in state.get(parameter, {}).items()
    }


def _copy_into_model(core: LearnerCore, weights: dict[str, Tensor], directory: Path) -> None:
    own = distinct_tensors(core.model.state_dict())
    if own.keys() != weights.keys() or any(own[name].shape != weights[name].shape for name in own):
        raise CorruptData(f"{directory / MODEL_FILE} does not hold the weights of this model")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def _copy_into_optimizer(core: LearnerCore, tensors: dict[str, Tensor]) -> None:
    core.optimizer.state.clear()
    for key, value in tensors.items():
        kind, name = key.split("/", 1)
        parameter = core.parameters[name]
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
