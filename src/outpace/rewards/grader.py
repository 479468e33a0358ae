"""The inside of a grader process: `python -m outpace.rewards.grader FD MEMORY_MB`.

Load(reference or code) ─▶ import ─▶ Done          Ask(arguments) ─▶ call, check ─▶ Scores | Refused | Raised

It is a servant (`outpace.runtime.servant_child`) that knows reward functions.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import msgspec

from outpace.errors import RewardFailed
from outpace.rewards.arguments import unpacked
from outpace.rewards.evaluator import call_wired, is_evaluator
from outpace.rewards.outcomes import checked
from outpace.runtime.code import Source
from outpace.runtime.servant_child import Done, Raised, serve
from outpace.runtime.values import sendable

SETTING = "rewards.functions"


class Load(msgspec.Struct, tag="load"):
    """Make a function known: by `reference`, or where that is empty by `code` (see `outpace.runtime.code`)."""

    id: int
    function: str
    reference: str
    code: bytes


class Ask(msgspec.Struct, tag="ask"):
    """Call a function for `count` completions, the first of which is number `first` of its group. `arguments` and
    `by_value` are those of `outpace.rewards.arguments`."""

    id: int
    function: str
    count: int
    arguments: bytes
    by_value: bool
    first: int = 0


class Scores(msgspec.Struct, tag="scores"):
    id: int
    values: list[float | None]


class Refused(msgspec.Struct, tag="refused"):
    """The function returned something unusable; the message names it and the sample."""

    id: int
    message: str


Order = Load | Ask
Answer = Done | Scores | Refused | Raised


def main() -> None:
    serve("grader", Order, partial(_obey, {}))


def _obey(functions: dict[str, Any], order: Order) -> Done | Scores | Refused:
    if isinstance(order, Load):
        functions[order.function] = Source(order.reference, order.code).load(SETTING)
        return Done(order.id)
    returned = _call(order, functions[order.function])
    try:
        return Scores(order.id, checked(order.function, returned, order.count, order.first))
    except RewardFailed as error:
        return Refused(order.id, sendable(str(error)))


def _call(order: Ask, function: Any) -> Any:
    arguments = unpacked(order.arguments, order.by_value, order.count)
    alone = is_evaluator(function)
    returned = call_wired(function, arguments) if alone else function(**arguments)
    returned = _awaited(returned) if inspect.isawaitable(returned) else returned
    return [returned] if alone else returned


def _awaited(returned: Any) -> Any:
    """What a plain function that hands out a coroutine meant to return."""
    import asyncio  # here, because few need it and it is slow to load

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait())


if __name__ == "__main__":
    main()
