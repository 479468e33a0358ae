"""Orders to add or remove engines of an active run, and the published state of its fleet.

    RUN/fleet.jsonl   one order per line: {"add": "http://host:8000"}, {"add": ""} (start one), {"remove": "engine-1"}
    RUN/fleet.json    {"engines": […], "orders": […]}: the engines as the controller sees them and the outcomes of
                      orders; replaced atomically, removed at the end of the run

Orders are only appended. The run carries out orders written while it is active and ignores older ones. All
orders of one `outpace fleet` command are validated before the first is sent; the run validates each again, because the
fleet may have changed by then.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from pydantic import ValidationError

from outpace.config import Config
from outpace.config.base import first_error
from outpace.config.engines import is_server_url, server_address
from outpace.config.load import CONFIG_FILE, read_resolved
from outpace.config.validation import API_KEY_HINT
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


WAIT_S = 10.0
"""How long to wait for the outcome of an order. Starting a server takes longer."""
POLL_S = 0.2


def send_orders(
    run: Path, orders: Sequence[FleetOrder], report: Callable[[str], None], wait_s: float = WAIT_S
) -> list[OrderOutcome]:
    """Validate and send orders, then wait up to `wait_s` for their outcomes. Raises `BadInput` if one is invalid or is
    refused by the run."""
    config, engines = _config(run), current_fleet(run).engines
    for order in orders:
        check_order(order, config, engines)
        engines = _apply_order(order, engines)
    sent = [send_order(run, order) for order in orders]
    deadline = time.monotonic() + wait_s
    outcomes = _outcomes(run, sent)
    while not all(outcome.is_final for outcome in outcomes) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        outcomes = _outcomes(run, sent)
    for outcome in outcomes:
        if outcome.state != "refused":
            report(describe_outcome(outcome))
    if refused := [outcome for outcome in outcomes if outcome.state == "refused"]:
        raise BadInput(describe_outcome(refused[0]))
    return outcomes


def current_fleet(run: Path) -> FleetState:
    """Read the engines and orders of an active run. Raises BadInput if the fleet of the run is fixed."""
    try:
        return read_state(run)
    except BadInput:
        settings = _config(run).run
        if is_lock_held(run / LOCK_FILE) and (settings.deterministic or settings.runtime == "inline"):
            raise BadInput(
                f"{run}: engines cannot join or leave a run with run.deterministic = true or run.runtime = inline"
            ) from None
        raise


def _config(run: Path) -> Config:
    """Return the settings of the run. A run that is starting may not have written them yet."""
    if not (run / CONFIG_FILE).is_file():
        return Config()
    try:
        return Config.model_validate(read_resolved(run))
    except ValidationError as error:
        raise BadInput(f"{run}: started by another version of outpace: {first_error(error)}") from None


def check_order(order: FleetOrder, config: Config, engines: Sequence[EngineStatus]) -> None:
    """Raise BadInput for an order that the run would refuse or that can never succeed."""
    if order.remove is not None:
        _check_removal(order.remove, engines)
    elif order.add:
        _check_server(order.add, config, engines)
    elif config.engine.urls:
        raise BadInput(
            "--add: this run uses existing servers (engine.urls) and cannot start one itself; "
            "start a server with `outpace serve` and add its URL"
        )


def _check_server(url: str, config: Config, engines: Sequence[EngineStatus]) -> None:
    if "@" in url:  # do not repeat the URL: it contains a secret
        raise BadInput(f"--add: the URL contains a user name or password; {API_KEY_HINT}")
    if not is_server_url(url):
        raise BadInput(f"--add: {url!r} is not a server URL; use http://host:port")
    if config.engine.kind == "embedded":
        raise BadInput(
            "--add: this run uses embedded engines; a server can only join a run with engine.kind vllm or sglang "
            '(--add "" starts another embedded engine)'
        )
    for engine in engines:
        if engine.url and server_address(engine.url) == server_address(url):
            duplicate = f"is already in the fleet as {engine.name}" if engine.name else "is given twice"
            raise BadInput(f"--add: {url} {duplicate}; add each server once")


def _check_removal(name: str, engines: Sequence[EngineStatus]) -> None:
    staying = [engine for engine in engines if not engine.leaving and engine.name]
    if name not in [engine.name for engine in staying]:
        is_leaving = any(engine.name == name for engine in engines)
        names = ", ".join(engine.name for engine in staying)
        raise BadInput(
            f"--remove: {name} is already leaving"
            if is_leaving
            else f"--remove: there is no engine {name}; choose one of {names}"
        )
    if not [engine for engine in staying if engine.serves and engine.name != name]:
        raise BadInput(f"--remove: {name} cannot leave: no other engine is serving; add an engine first")


def _apply_order(order: FleetOrder, engines: Sequence[EngineStatus]) -> list[EngineStatus]:
    """Return the fleet after `order`, to validate the next one against."""
    if order.add is not None:
        return [*engines, EngineStatus("", order.add, serves=False, version=0)]
    leaves = {"serves": False, "leaving": True}
    return [msgspec.structs.replace(engine, **leaves) if engine.name == order.remove else engine for engine in engines]


def _outcomes(run: Path, sent: Sequence[FleetOrder]) -> list[OrderOutcome]:
    known = {outcome.order.id: outcome for outcome in read_state(run).orders}
    return [known.get(order.id, OrderOutcome(order, "asked")) for order in sent]


def describe_outcome(outcome: OrderOutcome) -> str:
    """Describe the outcome of an order in one line."""
    match outcome.state:
        case "joined":
            return f"{outcome.engine} has joined and is serving"
        case "left":
            return f"{outcome.engine} has left"
        case "refused":
            return f"order refused, the fleet is unchanged: {outcome.why}"
        case "asked" if outcome.order.remove is not None:
            return f"{outcome.order.remove} leaves after finishing its requests; check progress with `outpace fleet`"
        case _:
            return f"order to {outcome.order.description} is in progress; check progress with `outpace fleet`"


def engines_json(state: FleetState) -> str:
    """Format the engines as JSON."""
    return msgspec.json.format(msgspec.json.encode(state.engines), indent=2).decode()
