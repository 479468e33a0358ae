"""Entry point of a grader process: `python -m outpace.rewards.grader FD MEMORY_MB`.

    LoadReward(reference or code) ─▶ import ─▶ Done
    ScoreRequest(arguments)       ─▶ call, check ─▶ ScoreReply | ScoresRejected | Raised

The request loop is that of every user-code process (`outpace.runtime.user_code_child`). Keep imports light: they delay
the start of every grader process.
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
    """Load a function from `reference`, or from `code` if that is empty (see `outpace.runtime.by_value`)."""

    id: int
    function: str
    reference: str
    code: bytes


class Ask(msgspec.Struct, tag="ask"):
    """Call a function on `count` completions, starting at sample `first` of the group. `arguments` and `by_value` come
    from `pack_arguments`."""

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
    """The function returned an invalid value; the message names the value and the sample."""

    id: int
    message: str


Order = Load | Ask
Answer = Done | Scores | Refused | Raised


def main() -> None:
    serve("grader", Order, partial(_handle, {}))


def _handle(functions: dict[str, Any], request: Order) -> Done | Scores | Refused:
    if isinstance(request, Load):
        functions[request.function] = Source(request.reference, request.code).load(SETTING)
        return Done(request.id)
    returned = _call(request, functions[request.function])
    try:
        return Scores(request.id, checked(request.function, returned, request.count, request.first))
    except RewardFailed as error:
        return Refused(request.id, sendable(str(error)))


def _call(request: Ask, function: Any) -> Any:
    arguments = unpacked(request.arguments, request.by_value, request.count)
    single = is_evaluator(function)
    returned = call_wired(function, arguments) if single else function(**arguments)
    returned = _await_result(returned) if inspect.isawaitable(returned) else returned
    return [returned] if single else returned


def _await_result(returned: Any) -> Any:
    """Await the coroutine that a plain function returned."""
    import asyncio  # slow to import and rarely needed

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait())


if __name__ == "__main__":
    main()
