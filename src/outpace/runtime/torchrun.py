"""The processes that torchrun starts, on one machine or several, as it describes them in environment variables.

Rank 0 is the controller. Every other process becomes one rank of the learner (`outpace.run.torchrun_rank`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outpace.errors import BadInput

RUN_ID = "TORCHELASTIC_RUN_ID"
"""Only torchrun sets this variable; others, such as RANK, are also set by other launchers."""

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHERS = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE")
_PREFIX = "TORCHELASTIC_"
_SHARED_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torchrun sets it to "False" if the port that it names is for a store that rank 0 has to open."""


@dataclass(frozen=True)
class TorchrunProcess:
    """The place of this process among those that torchrun started."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # processes on this machine
    master: str  # address of the machine of rank 0
    store_port: int  # of torchrun's TCPStore on that machine

    @property
    def several_machines(self) -> bool:
        return self.local_size < self.size


def torchrun_process(environment: Mapping[str, str] = os.environ) -> TorchrunProcess | None:
    """Return this process's place, None if torchrun has not started it, or has started only one."""
    if RUN_ID not in environment or environment.get("WORLD_SIZE") == "1":
        return None
    if environment.get(_SHARED_STORE) == "False":
        raise BadInput(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE: unset it, or use torchrun with --node-rank and --master-addr: the "
            "learner's processes find each other through torchrun's store"
        )
    try:
        rank, local_rank, size, local_size = (int(environment[name]) for name in _VARIABLES[:4])
        return TorchrunProcess(
            rank, size, local_rank, local_size, environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        )
    except (KeyError, ValueError) as error:
        raise BadInput(f"{RUN_ID}: is set, as by torchrun, but not all of {', '.join(_VARIABLES)}: {error}") from None


def resume_command(run: Path) -> str:
    """Return the command that resumes a run in the way this process was started."""
    process = torchrun_process()
    if process is None:
        return f"outpace train --resume {run}"
    return f"torchrun ... -m outpace train --resume {run} ({process.size} processes)"


def refuse_torchrun(what: str) -> None:
    """Raise `BadInput` if torchrun has started several processes: each would do the same work."""
    if torchrun_process() is not None:
        raise BadInput(f"{what}: start this without torchrun; only `outpace train` divides its work among processes")


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of torchrun. With them, torch in a child would mistake the store of its own
    process group for torchrun's."""
    if RUN_ID not in environment:
        return dict(environment)
    return {
        name: value
        for name, value in environment.items()
        if name not in (*_VARIABLES, *_OTHERS) and not name.startswith(_PREFIX)
    }
