"""What vLLM streams, checked and put into our own words.

A chunk has the tokens since the last one, with the logprob of each. An error may come in mid-stream, as a chunk of its
own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from outpace.engines.servers.pieces import checked_logprobs, complaint
from outpace.engines.servers.spec import STALE, Piece, Span
from outpace.engines.servers.vllm.labels import version_of
from outpace.errors import ServerFailed, ServerFaulty, one_line
from outpace.types import StopReason
from outpace.wording import plural

_STOPS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "aborted", "repetition": "stop"}


class _Entry(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None  # of the route that generates
    token_logprobs: list[float | None] | None = None  # of the one that completes


class _Weights(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Weights] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


def piece_of(where: str, payload: bytes, incarnation: str) -> Piece | None:
    """None: the chunk says nothing of the answer. `incarnation`: of the run whose labels mean something."""
    try:
        chunk = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerFaulty(f"{where}: a chunk cannot be read ({error}): {one_line(payload[:200])}") from error
    if chunk.error is not None:
        raise _complaint(where, chunk.error)
    if not chunk.choices:
        return None
    choice = chunk.choices[0]
    tokens = choice.token_ids or []
    return Piece(tokens, _logprobs(where, choice, len(tokens)), _stop(where, choice), _spans(choice, incarnation))


def _logprobs(where: str, choice: _Choice, count: int) -> list[float]:
    found: list[float | None] = []
    if choice.logprobs is not None and choice.logprobs.content is not None:
        found = [entry.logprob for entry in choice.logprobs.content]
    elif choice.logprobs is not None and choice.logprobs.token_logprobs is not None:
        found = choice.logprobs.token_logprobs
    if len(found) != count:
        raise ServerFaulty(f"{where}: {plural(count, 'token')} came with {len(found)} logprobs")
    return checked_logprobs(where, found)


def _stop(where: str, choice: _Choice) -> StopReason | None:
    if choice.finish_reason is None:
        return None
    if choice.finish_reason not in _STOPS:
        raise ServerFaulty(f"{where}: a request ended with finish reason {one_line(choice.finish_reason)!r}")
    return _STOPS[choice.finish_reason]


def _spans(choice: _Choice, incarnation: str) -> list[Span] | None:
    """Tokens under another label are stale: of another run's weights, or of those that the server was restarted
    with."""
    spans: list[Span] = []
    for span in choice.weight_versions or []:
        version = version_of(incarnation, str(span.version))
        spans.append((STALE if version is None else version, span.start, span.end))
    return spans or None


def _complaint(where: str, error: Any) -> ServerFailed:
    said = error if isinstance(error, dict) else {"message": error}
    code = said.get("code")
    return complaint(where, said.get("message", error), code if isinstance(code, int) else None)
