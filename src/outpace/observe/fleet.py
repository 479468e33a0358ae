"""What people may say about the engines of a run that is under way, and what they are told of them.

    RUN/fleet.jsonl   one order per line: {"add": "http://host:8000"}, {"add": ""} (start one), {"remove": "engine-1"}
    RUN/fleet.json    the engines as the controller sees them; replaced as a whole

Orders are only ever appended; the run carries out those that were given while it is running.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from outpace.errors import BadInput

ORDERS = "fleet.jsonl"
STATE = "fleet.json"


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the two is given."""

    add: str | None = None
    remove: str | None = None


class Seat(msgspec.Struct, frozen=True):
    """An engine, for people."""

    name: str
    url: str  # of its server; empty: it was started by the run
    serves: bool
    version: int
    leaving: bool = False


def give(run: Path, order: Order) -> None:
    """Tell a run that is under way."""
    if not (run / STATE).is_file():
        raise BadInput(f"no run is under way in {run}")
    with (run / ORDERS).open("ab") as file:
        file.write(msgspec.json.encode(order) + b"\n")


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


class Seats:
    """The file of the engines, for as long as the run lasts. Its methods may be called from any thread."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._over = False
        self._lock = threading.Lock()

    def write(self, seats: list[Seat]) -> None:
        temporary = self._run / f"{STATE}.new"
        with self._lock:
            if not self._over:
                temporary.write_bytes(msgspec.json.format(msgspec.json.encode(seats), indent=1))
                os.replace(temporary, self._run / STATE)

    def clear(self) -> None:
        """The run is over: nobody would hear an order."""
        with self._lock:
            self._over = True
            (self._run / STATE).unlink(missing_ok=True)


def read(run: Path) -> list[dict[str, Any]]:
    try:
        seats: list[dict[str, Any]] = json.loads((run / STATE).read_text())
    except (OSError, ValueError):
        raise BadInput(f"no run is under way in {run}") from None
    return seats
