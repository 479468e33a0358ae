"""Entry point of a grader process: `python -m outpace.rewards.grader_process FD PARENT MEMORY_MB`.

Calls are served as in every user-code process (`outpace.runtime.user_code_child`). Keep imports light: they delay the
start of every grader process.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import msgspec

from outpace.errors import RewardFailed
from outpace.monitoring.metric_table import Logged, MetricLog, PlainValue, collecting
from outpace.rewards.functions import (
    Arguments,
    call_evaluator,
    check_scores,
    is_evaluator,
    logging_arguments,
    unpack_arguments,
    with_progress,
)
from outpace.rewards.verl import per_answer
from outpace.runtime.by_value import UserCodeSource
from outpace.runtime.user_code_child import serve_user_code
from outpace.runtime.wire import encodable_text

SETTING = "rewards.functions"


class ScoresRejected(msgspec.Struct, tag="rejected"):
    """The function returned an invalid value; the message names the value and the sample."""

    message: str


class Scored(msgspec.Struct, tag="scored", omit_defaults=True):
    """The scores, and what the function reported."""

    scores: list[float | None]
    logged: list[Logged] = []
    extra: dict[str, list[PlainValue]] = {}
    dropped: int = 0


class Grader(Protocol):
    """The calls that a grader process serves."""

    async def load(self, function: str, reference: str, code: bytes) -> None:
        """Load a function from `reference`, or from `code` if that is empty (see `outpace.runtime.by_value`)."""
        ...

    async def score(
        self, function: str, count: int, arguments: bytes, by_value: bool, first: int
    ) -> Scored | ScoresRejected:
        """Call a function on `count` completions, starting at sample `first` of the group. `arguments` and `by_value`
        come from `pack_arguments`."""
        ...


class GraderServer:
    """Implements `Grader` with blocking methods."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}

    def load(self, function: str, reference: str, code: bytes) -> None:
        self._functions[function] = per_answer(UserCodeSource(reference, code).load(SETTING))

    def score(self, function: str, count: int, arguments: bytes, by_value: bool, first: int) -> Scored | ScoresRejected:
        with collecting(MetricLog(count)) as log:
            returned = _call(self._functions[function], unpack_arguments(arguments, by_value, count))
        try:
            return Scored(check_scores(function, returned, count, first), log.take(), log.extra, log.dropped)
        except RewardFailed as error:
            return ScoresRejected(encodable_text(str(error)))


def _call(function: Any, arguments: Arguments) -> Any:
    single = is_evaluator(function)
    given = with_progress(arguments) | ({} if single else logging_arguments(function))
    returned = call_evaluator(function, given) if single else function(**given)
    returned = _await_result(returned) if inspect.isawaitable(returned) else returned
    return [returned] if single else returned


def _await_result(returned: Any) -> Any:
    """Await the coroutine that a plain function returned."""
    import asyncio  # slow to import and rarely needed

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait())


if __name__ == "__main__":
    serve_user_code("grader", GraderServer(), Grader)
