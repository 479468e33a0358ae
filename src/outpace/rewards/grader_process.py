"""Entry point of a grader process: `python -m outpace.rewards.grader_process FD MEMORY_MB`.

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
from outpace.rewards.functions import call_evaluator, check_scores, is_evaluator, unpack_arguments
from outpace.runtime.by_value import UserCodeSource, encodable_text
from outpace.runtime.user_code_child import DoneReply, RaisedReply, serve_user_code

SETTING = "rewards.functions"


class LoadReward(msgspec.Struct, tag="load"):
    """Load a function from `reference`, or from `code` if that is empty (see `outpace.runtime.by_value`)."""

    id: int
    function: str
    reference: str
    code: bytes


class ScoreRequest(msgspec.Struct, tag="ask"):
    """Call a function on `count` completions, starting at sample `first` of the group. `arguments` and `by_value` come
    from `pack_arguments`."""

    id: int
    function: str
    count: int
    arguments: bytes
    by_value: bool
    first: int = 0


class ScoreReply(msgspec.Struct, tag="scores"):
    id: int
    values: list[float | None]


class ScoresRejected(msgspec.Struct, tag="refused"):
    """The function returned an invalid value; the message names the value and the sample."""

    id: int
    message: str


GraderRequest = LoadReward | ScoreRequest
GraderReply = DoneReply | ScoreReply | ScoresRejected | RaisedReply


def main() -> None:
    serve_user_code("grader", GraderRequest, partial(_handle, {}))


def _handle(functions: dict[str, Any], request: GraderRequest) -> DoneReply | ScoreReply | ScoresRejected:
    if isinstance(request, LoadReward):
        functions[request.function] = UserCodeSource(request.reference, request.code).load(SETTING)
        return DoneReply(request.id)
    returned = _call(request, functions[request.function])
    try:
        return ScoreReply(request.id, check_scores(request.function, returned, request.count, request.first))
    except RewardFailed as error:
        return ScoresRejected(request.id, encodable_text(str(error)))


def _call(request: ScoreRequest, function: Any) -> Any:
    arguments = unpack_arguments(request.arguments, request.by_value, request.count)
    single = is_evaluator(function)
    returned = call_evaluator(function, arguments) if single else function(**arguments)
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
