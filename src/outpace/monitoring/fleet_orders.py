"""Orders to add or remove engines of an active run, and the published state of its fleet.

    RUN/fleet.jsonl   one order per line: {"add": "http://host:8000"}, {"add": ""} (start one), {"remove": "engine-1"}
    RUN/fleet.json    {"engines": […], "orders": […]}: the engines as the controller sees them and the outcomes of
                      orders; replaced atomically, removed at the end of the run

Orders are only appended. The run carries out orders written while it is active and ignores older ones. An order is
validated by its sender (`outpace.commands.fleet`) and again by the run.
"""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Literal

import msgspec

from outpace.errors import BadInput
from outpace.monitoring.line_file import write_atomically
from outpace.monitoring.run_directory import LOCK_FILE, is_lock_held

ORDERS_FILE = "fleet.jsonl"
STATE_FILE = "fleet.json"

KEPT_OUTCOMES = 32
"""Number of newest orders whose outcome stays in fleet.json."""


class FleetOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An order to change the fleet: either `add` or `remove` is set."""

    add: str | None = None  # URL of a server; empty: start an engine
    remove: str | None = None  # name of an engine
    id: str = ""  # identifies the outcome of this order

    @property
    def description(self) -> str:
        if self.remove is not None:
            return f"remove {self.remove}"
        return f"add {self.add or 'an engine'}"


class OrderOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Current state of an order."""

    order: FleetOrder
    state: Literal["asked", "joined", "left", "refused"]  # "asked": in progress
    why: str = ""  # reason of a refusal
    engine: str = ""  # the engine that joins or leaves, once it has a name

    @property
    def is_final(self) -> bool:
        return self.state != "asked"


class EngineStatus(msgspec.Struct, frozen=True):
    """Status of an engine."""

    name: str
    url: str  # of its server; empty: started by the run
    serves: bool  # accepts requests
    version: int
    leaving: bool = False


class FleetState(msgspec.Struct, frozen=True):
    """Content of `fleet.json`."""

    engines: list[EngineStatus] = []
    orders: list[OrderOutcome] = []  # oldest first


# ------------------------------------------------------------------------------------------------ sender of orders


def send_order(run: Path, order: FleetOrder) -> FleetOrder:
    """Append an order for an active run. Returns the order with its id."""
    if not (run / STATE_FILE).is_file():
        raise BadInput(f"no run is active in {run}")
    order = msgspec.structs.replace(order, id=order.id or secrets.token_hex(4))
    with (run / ORDERS_FILE).open("ab") as file:
        file.write(msgspec.json.encode(order) + b"\n")
    return order


def read_state(run: Path) -> FleetState:
    """Read `fleet.json`. Raises BadInput if no run is active, or if it is still starting or already ending."""
    if not is_lock_held(run / LOCK_FILE):
        raise BadInput(f"no run is active in {run}")
    try:
        return msgspec.json.decode((run / STATE_FILE).read_bytes(), type=FleetState)
    except (OSError, msgspec.DecodeError):
        raise BadInput(f"the run in {run} is starting or ending; try again in a moment") from None


# ------------------------------------------------------------------------------------------------ run


class OrderReader:
    """Reads each order appended after construction once."""

    def __init__(self, run: Path) -> None:
        self._path = run / ORDERS_FILE
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def read_new(self) -> tuple[list[FleetOrder], list[str]]:
        """Return the orders appended since the last call, and descriptions of lines that cannot be parsed."""
        if not self._path.exists():
            return [], []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")  # leave a line that is still being written
        self._offset += len(complete) + len(newline)
        orders, unreadable = [], []
        for line in complete.splitlines():
            try:
                orders.append(msgspec.json.decode(line, type=FleetOrder))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                unreadable.append(f"{line.decode(errors='replace')[:200]}: {error}")
        return orders, unreadable


class FleetFile:
    """Writes `fleet.json` while the run is active. Thread-safe."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._cleared = False
        self._lock = threading.Lock()

    def write(self, fleet: FleetState) -> None:
        text = msgspec.json.format(msgspec.json.encode(fleet), indent=1).decode()
        with self._lock:
            if not self._cleared:
                write_atomically(self._run / STATE_FILE, text, durable=False)

    def clear(self) -> None:
        """Remove the file at the end of the run. Later writes do nothing."""
        with self._lock:
            self._cleared = True
            (self._run / STATE_FILE).unlink(missing_ok=True)
