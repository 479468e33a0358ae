"""A learner distributed over the processes that torchrun starts, on one or several machines.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m outpace train config.toml      the same command on every machine

Rank 0 is the controller: it starts everything else as usual, including the learner's rank 0. The other processes run
`serve_rank`, connect to the controller and become the learner's other ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from outpace.config import Config
from outpace.config.defaults import with_defaults
from outpace.errors import BadInput
from outpace.hardware.placement import CUDA_VISIBLE_DEVICES, visible_gpus
from outpace.runtime.die_with_parent import die_with_parent
from outpace.runtime.remote import await_start, become_component, connect, decline
from outpace.runtime.torchrun import TorchrunProcess


def with_ranks(config: Config, process: TorchrunProcess) -> Config:
    """Return the config with one learner rank per process of torchrun. Raises `BadInput` for settings that do not work
    with torchrun."""
    learner = config.learner
    if "devices" in learner.model_fields_set and learner.devices != process.size:
        raise BadInput(
            f"learner.devices: is {learner.devices}, but torchrun starts {process.size} processes; leave it out or set "
            f"{process.size}"
        )
    if config.run.dir is None:
        raise BadInput("run.dir: set it; the processes of torchrun find each other there")
    if process.several_machines and config.weights.delta:
        raise BadInput("weights.delta: needs a learner on one machine; leave it out")
    return with_defaults(config, {"learner.devices": process.size})


def serve_rank(config: Config, process: TorchrunProcess) -> NoReturn:
    """Become a learner rank of the run that rank 0 starts. Raises `OutpaceError` if that fails."""
    die_with_parent()
    assert config.run.dir is not None, "with_ranks has checked it"
    host = process.master if process.several_machines else "127.0.0.1"
    connection = connect(Path(config.run.dir), process.rank, host, config.learner.collective_timeout_s)
    start = await_start(connection)
    gpus = start.gpus
    if gpus and process.rank >= process.local_size:  # on another machine than the controller
        visible = visible_gpus(config)
        if process.local_rank >= len(visible):
            error = BadInput(
                f"learner.devices: rank {process.rank} has no GPU: torchrun starts {process.local_size} processes on "
                f"its machine, but {len(visible)} GPUs are visible; lower --nproc-per-node"
            )
            decline(connection, error)
            raise error
        gpus = [visible[process.local_rank]]
    become_component(connection, start, {CUDA_VISIBLE_DEVICES: ",".join(gpus)} if gpus else {})
