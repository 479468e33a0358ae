"""vLLM's wire format: request bodies, streamed chunks, weight labels, server info and metrics.

A chunk has the tokens since the last chunk, with the logprob of each. An error may arrive in mid-stream as a chunk of
its own.
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
    content: list[_Entry] | None = None  # of /inference/v1/generate
    token_logprobs: list[float | None] | None = None  # of /v1/completions


class _WeightSpan(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_WeightSpan] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


def piece_of(where: str, payload: bytes, incarnation: str) -> Piece | None:
    """Parse one chunk; None if it carries no output. `incarnation`: of the run whose weight labels are ours."""
    try:
        chunk = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerFaulty(f"{where}: invalid chunk ({error}): {one_line(payload[:200])}") from error
    if chunk.error is not None:
        raise _stream_error(where, chunk.error)
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
    """Spans of weight versions. Tokens with a foreign label (another run, or a restarted server) are STALE."""
    spans: list[Span] = []
    for span in choice.weight_versions or []:
        version = version_of(incarnation, str(span.version))
        spans.append((STALE if version is None else version, span.start, span.end))
    return spans or None


def _stream_error(where: str, error: Any) -> ServerFailed:
    details = error if isinstance(error, dict) else {"message": error}
    code = details.get("code")
    return complaint(where, details.get("message", error), code if isinstance(code, int) else None)
