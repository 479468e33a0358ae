"""Orders to add or remove engines of an active run, and the published state of its fleet.

    RUN/fleet.jsonl   one order per line: {"add": "http://host:8000"}, {"add": ""} (start one), {"remove": "engine-1"}
    RUN/fleet.json    {"engines": […], "orders": […]}: the engines as the controller sees them and the outcomes of
                      orders; replaced atomically, removed at the end of the run

Orders are only appended. The run carries out orders written while it is active and ignores older ones. An order is
validated by its sender (`outpace.observe.fleet_orders`) and again by the run.
"""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path
from typing import Literal

import msgspec

from outpace.errors import BadInput
from outpace.observe.runlock import is_held
from outpace.observe.runlog import LOCK

ORDERS = "fleet.jsonl"
STATE = "fleet.json"

KEPT_OUTCOMES = 32
"""Number of newest orders whose outcome stays in fleet.json."""


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An order to change the fleet: either `add` or `remove` is set."""

    add: str | None = None  # URL of a server; empty: start an engine
    remove: str | None = None  # name of an engine
    id: str = ""  # identifies the outcome of this order

    @property
    def wish(self) -> str:
        if self.remove is not None:
            return f"remove {self.remove}"
        return f"add {self.add or 'an engine'}"


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Current state of an order."""

    order: Order
    state: Literal["asked", "joined", "left", "refused"]  # "asked": in progress
    why: str = ""  # reason of a refusal
    engine: str = ""  # the engine that joins or leaves, once it has a name

    @property
    def is_final(self) -> bool:
        return self.state != "asked"


class Seat(msgspec.Struct, frozen=True):
    """Status of an engine."""

    name: str
    url: str  # of its server; empty: started by the run
    serves: bool  # accepts requests
    version: int
    leaving: bool = False


class Fleet(msgspec.Struct, frozen=True):
    """Content of `fleet.json`."""

    engines: list[Seat] = []
    orders: list[Outcome] = []  # oldest first


# ------------------------------------------------------------------------------------------------ sender of orders


def give(run: Path, order: Order) -> Order:
    """Append an order for an active run. Returns the order with its id."""
    if not (run / STATE).is_file():
        raise BadInput(f"no run is active in {run}")
    order = msgspec.structs.replace(order, id=order.id or secrets.token_hex(4))
    with (run / ORDERS).open("ab") as file:
        file.write(msgspec.json.encode(order) + b"\n")
    return order


def read(run: Path) -> Fleet:
    """Read `fleet.json`. Raises BadInput if no run is active, or if it is still starting or already ending."""
    if not is_held(run / LOCK):
        raise BadInput(f"no run is active in {run}")
    try:
        return msgspec.json.decode((run / STATE).read_bytes(), type=Fleet)
    except (OSError, msgspec.DecodeError):
        raise BadInput(f"the run in {run} is starting or ending; try again in a moment") from None


# ------------------------------------------------------------------------------------------------ run


class OrdersRead:
    """Reads each order appended after construction once."""

    def __init__(self, run: Path) -> None:
        self._path = run / ORDERS
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def new(self) -> tuple[list[Order], list[str]]:
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
                orders.append(msgspec.json.decode(line, type=Order))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                unreadable.append(f"{line.decode(errors='replace')[:200]}: {error}")
        return orders, unreadable


class FleetFile:
    """Writes `fleet.json` while the run is active. Thread-safe."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._cleared = False
        self._lock = threading.Lock()

    def write(self, fleet: Fleet) -> None:
        temporary = self._run / f"{STATE}.new"
        with self._lock:
            if not self._cleared:
                temporary.write_bytes(msgspec.json.format(msgspec.json.encode(fleet), indent=1))
                os.replace(temporary, self._run / STATE)

    def clear(self) -> None:
        """Remove the file at the end of the run. Later writes do nothing."""
        with self._lock:
            self._cleared = True
            (self._run / STATE).unlink(missing_ok=True)
