"""`outpace fleet`: list, add and remove engines of an active run.

All orders are validated before the first is sent; a bad one is rejected with a one-line error. The run validates each
order again, because the fleet may have changed by then, and publishes the outcome (`outpace.monitoring.fleet_orders`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from pydantic import ValidationError

from outpace.config import Config
from outpace.config.base import first_error
from outpace.config.engines import is_server_url, server_address
from outpace.config.load import CONFIG_FILE, read_resolved
from outpace.config.validation import API_KEY_HINT
from outpace.errors import BadInput
from outpace.monitoring import fleet_orders
from outpace.monitoring.fleet_orders import EngineStatus, FleetOrder, OrderOutcome
from outpace.monitoring.run_directory import LOCK_FILE, is_lock_held

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
    sent = [fleet_orders.send_order(run, order) for order in orders]
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


def current_fleet(run: Path) -> fleet_orders.FleetState:
    """Read the engines and orders of an active run. Raises BadInput if the fleet of the run is fixed."""
    try:
        return fleet_orders.read_state(run)
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
    known = {outcome.order.id: outcome for outcome in fleet_orders.read_state(run).orders}
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


def engines_json(state: fleet_orders.FleetState) -> str:
    """Format the engines as JSON."""
    return msgspec.json.format(msgspec.json.encode(state.engines), indent=2).decode()
