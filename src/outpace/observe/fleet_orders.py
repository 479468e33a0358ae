"""Orders for the engines of a run, from the side of whoever gives them: checked, given, and waited for.

Everything that can be known beforehand is refused here, in one line, before any order is given. The run looks again
when it gets one, because things may have changed by then, and says what has become of it.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outpace.config.serving_rules import KEY_REMEDY
from outpace.config.urls import is_server_url, server_address
from outpace.errors import BadInput
from outpace.observe import fleet
from outpace.observe.fleet import Order, Outcome, Seat
from outpace.observe.runlock import is_held
from outpace.observe.runlog import LOCK

WAIT_S = 10.0
"""How long to wait for what becomes of an order; a server that is started takes longer."""
LOOK_S = 0.2


@dataclass(frozen=True)
class Terms:
    """What the config of a run says of who may join it."""

    kind: str = "embedded"
    urls: tuple[str, ...] = ()
    python: str | None = None
    in_lockstep: bool = False  # deterministic, or all in one process: nobody comes or goes

    @classmethod
    def of(cls, run: Path) -> Terms:
        file = run / "config.toml"
        values = tomllib.loads(file.read_text()) if file.is_file() else {}
        engine, launch, its = (values.get(section, {}) for section in ("engine", "launch", "run"))
        return cls(
            engine.get("kind", "embedded"),
            tuple(engine.get("urls", ())),
            launch.get("python"),
            bool(its.get("deterministic")) or its.get("runtime") == "inline",
        )


def order_all(run: Path, orders: Sequence[Order], say: Callable[[str], None], wait_s: float = WAIT_S) -> list[Outcome]:
    """Check all, give all, and wait a while for what becomes of them; `BadInput` if one cannot be carried out."""
    terms, seats = Terms.of(run), current(run).engines
    for order in orders:
        check(order, terms, seats)
        seats = _after(order, seats)
    given = [fleet.give(run, order) for order in orders]
    deadline = time.monotonic() + wait_s
    outcomes = _outcomes(run, given)
    while not all(outcome.is_final for outcome in outcomes) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        outcomes = _outcomes(run, given)
    for outcome in outcomes:
        if outcome.state != "refused":
            say(told(outcome))
    if refused := [outcome for outcome in outcomes if outcome.state == "refused"]:
        raise BadInput(told(refused[0]))
    return outcomes


def current(run: Path) -> fleet.Fleet:
    """The engines of a run, and its orders; refused where engines do not come and go."""
    try:
        return fleet.read(run)
    except BadInput:
        if is_held(run / LOCK) and Terms.of(run).in_lockstep:
            raise BadInput(
                f"the engines of {run} stay as they are: run.deterministic or run.runtime inline keeps them in lockstep"
            ) from None
        raise


def check(order: Order, terms: Terms, seats: Sequence[Seat]) -> None:
    """Refuse what the run would refuse, or what could never work."""
    if order.remove is not None:
        _check_removal(order.remove, seats)
    elif order.add:
        _check_server(order.add, terms, seats)
    elif terms.kind != "embedded" and terms.urls and not terms.python:
        raise BadInput(
            "--add: this run's servers were there before it (engine.urls), so it has none of its own to start; "
            "start one with `outpace serve`, and add its URL"
        )


def _check_server(url: str, terms: Terms, seats: Sequence[Seat]) -> None:
    if "@" in url:  # and not a word of what is in it
        raise BadInput(f"--add: the address holds a user name or password; {KEY_REMEDY}")
    if not is_server_url(url):
        raise BadInput(f"--add: {url!r} is no server's address; write http://host:port")
    if terms.kind == "embedded":
        raise BadInput(
            "--add: this run's engines are embedded; a server can join a run with engine.kind vllm or sglang "
            '(--add "" starts another embedded one)'
        )
    for seat in seats:
        if seat.url and server_address(seat.url) == server_address(url):
            where = f"is {seat.name} already" if seat.name else "is there twice"
            raise BadInput(f"--add: {url} {where}; a server takes part once")


def _check_removal(name: str, seats: Sequence[Seat]) -> None:
    staying = [seat for seat in seats if not seat.leaving and seat.name]
    if name not in [seat.name for seat in staying]:
        is_leaving = any(seat.name == name for seat in seats)
        names = ", ".join(seat.name for seat in staying)
        raise BadInput(
            f"--remove: {name} leaves already"
            if is_leaving
            else f"--remove: there is no engine {name}; there are {names}"
        )
    if not [seat for seat in staying if seat.serves and seat.name != name]:
        raise BadInput(f"--remove: {name} cannot leave: nobody else serves; add an engine first")


def _after(order: Order, seats: Sequence[Seat]) -> list[Seat]:
    """The engines as they would be, for the check of the next order."""
    if order.add is not None:
        return [*seats, Seat("", order.add, serves=False, version=0)]
    leaves = {"serves": False, "leaving": True}
    return [msgspec.structs.replace(seat, **leaves) if seat.name == order.remove else seat for seat in seats]


def _outcomes(run: Path, given: Sequence[Order]) -> list[Outcome]:
    known = {outcome.order.id: outcome for outcome in fleet.read(run).orders}
    return [known.get(order.id, Outcome(order, "asked")) for order in given]


def told(outcome: Outcome) -> str:
    """One line for people."""
    match outcome.state:
        case "joined":
            return f"{outcome.engine} has joined, and serves"
        case "left":
            return f"{outcome.engine} has left"
        case "refused":
            return f"the fleet stays as it is: {outcome.why}"
        case "asked" if outcome.order.remove is not None:
            return f"{outcome.order.remove} finishes what it has, and leaves then; `outpace fleet` says when"
        case _:
            return f"asked to {outcome.order.wish}; it is under way, `outpace fleet` says when it serves"


def shown(known: fleet.Fleet) -> str:
    """The engines, as JSON."""
    return msgspec.json.format(msgspec.json.encode(known.engines), indent=2).decode()
