"""What people may say about the engines of a run that is under way, and what they are told of them.

    RUN/fleet.jsonl   one order per line: {"add": "http://host:8000"}, {"add": ""} (start one), {"remove": "engine-1"}
    RUN/fleet.json    {"engines": […], "orders": […]}: the engines as the controller sees them, and what has become of
                      the orders; replaced as a whole, and gone when the run is

Orders are only ever appended; the run carries out those that were given while it is running. Whether an order can be
carried out is looked at before it is given (`outpace.observe.fleet_orders`) and again by the run.
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
"""Of the newest so many orders people can still read what has become of them."""


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Either `add` or `remove` is given."""

    add: str | None = None
    remove: str | None = None
    id: str = ""  # by which whoever gave it finds out what has become of it

    @property
    def wish(self) -> str:
        if self.remove is not None:
            return f"remove {self.remove}"
        return f"add {self.add or 'an engine'}"


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What has become of an order so far."""

    order: Order
    state: Literal["asked", "joined", "left", "refused"]
    why: str = ""  # it was refused
    engine: str = ""  # which one joins or leaves, as soon as it has a name

    @property
    def is_final(self) -> bool:
        return self.state != "asked"


class Seat(msgspec.Struct, frozen=True):
    """An engine, for people."""

    name: str
    url: str  # of its server; empty: it was started by the run
    serves: bool
    version: int
    leaving: bool = False


class Fleet(msgspec.Struct, frozen=True):
    """All of `fleet.json`."""

    engines: list[Seat] = []
    orders: list[Outcome] = []  # the oldest first


# ------------------------------------------------------------------------------------------------ whoever gives orders


def give(run: Path, order: Order) -> Order:
    """Tell a run that is under way. Comes back as it was given, with its id."""
    if not (run / STATE).is_file():
        raise BadInput(f"no run is under way in {run}")
    order = msgspec.structs.replace(order, id=order.id or secrets.token_hex(4))
    with (run / ORDERS).open("ab") as file:
        file.write(msgspec.json.encode(order) + b"\n")
    return order


def read(run: Path) -> Fleet:
    """Refused in one line where nobody would hear an order: there is no run, or none any more, or none yet."""
    if not is_held(run / LOCK):
        raise BadInput(f"no run is under way in {run}")
    try:
        return msgspec.json.decode((run / STATE).read_bytes(), type=Fleet)
    except (OSError, msgspec.DecodeError):
        raise BadInput(f"the run in {run} is still starting, or ending; try again in a moment") from None


# ------------------------------------------------------------------------------------------------------------- the run


class OrdersRead:
    """The orders of a file, each once, from its present end on."""

    def __init__(self, run: Path) -> None:
        self._path = run / ORDERS
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def new(self) -> tuple[list[Order], list[str]]:
        """Those that came since, and what could not be read as one."""
        if not self._path.exists():
            return [], []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")  # a line that is still being written waits
        self._offset += len(whole) + len(newline)
        orders, rubbish = [], []
        for line in whole.splitlines():
            try:
                orders.append(msgspec.json.decode(line, type=Order))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                rubbish.append(f"{line.decode(errors='replace')[:200]}: {error}")
        return orders, rubbish


class FleetFile:
    """`fleet.json`, for as long as the run lasts. Its methods may be called from any thread."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._over = False
        self._lock = threading.Lock()

    def write(self, fleet: Fleet) -> None:
        temporary = self._run / f"{STATE}.new"
        with self._lock:
            if not self._over:
                temporary.write_bytes(msgspec.json.format(msgspec.json.encode(fleet), indent=1))
                os.replace(temporary, self._run / STATE)

    def clear(self) -> None:
        """The run is over: nobody would hear an order."""
        with self._lock:
            self._over = True
            (self._run / STATE).unlink(missing_ok=True)
