"""SGLang's wire format: request bodies, streamed chunks, server info and load.

Invariants
- Tokens and logprobs are read from `output_token_logprobs`, never from `output_ids`: the last chunk of a request that
  was aborted in a queue has only its newest id there.
- A chunk has all tokens so far, or only the new ones, or both in a row if chunks were merged in transit; it depends on
  a server flag, on the release and on timing. `completion_tokens` always counts from the beginning, so it tells how
  many entries at the end of the list are new.
- A token gets the oldest version that it can have. The label on a chunk is the one in force when the chunk was sent,
  but its tokens may have been sampled earlier: one step is always in flight. So the tokens of a chunk get the label of
  the previous chunk, and those of the first chunk the version in force when the request was sent.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from outpace.engines.servers.pieces import checked_logprobs, complaint
from outpace.engines.servers.spec import Piece, Span
from outpace.errors import ServerFaulty, one_line
from outpace.types import StopReason, Version
from outpace.wording import plural

LogprobEntry = tuple[float | None, int, str | None]
"""One token: (logprob, id, text)."""


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: _FinishReason | None = None
    weight_version: str | None = None
    output_token_logprobs: list[LogprobEntry] = []


class _StreamError(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Chunk(msgspec.Struct):
    meta_info: _Meta | None = None
    error: _StreamError | None = None


_DECODER = msgspec.json.Decoder(_Chunk)


class Reader:
    """Parses the stream of one request. `sent`: the version when the request was sent; None if unknown, and then there
    are no spans. `version_of` maps a label to its version, or to None if the label is not ours."""

    def __init__(self, where: str, sent: Version | None, version_of: Callable[[str], Version | None]) -> None:
        self.spans: list[Span] = []
        self._where = where
        self._version = sent
        self._version_of = version_of
        self._count = 0

    def piece_of(self, payload: bytes) -> Piece:
        meta = self._meta(payload)
        entries = self._new_entries(meta)
        logprobs = checked_logprobs(self._where, (logprob for logprob, _, _ in entries))
        stop = None if meta.finish_reason is None else self._stop(meta.finish_reason)
        self._record_span(len(entries), meta.weight_version)
        return Piece([token for _, token, _ in entries], logprobs, stop)

    def _meta(self, payload: bytes) -> _Meta:
        try:
            chunk = _DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerFaulty(f"{self._where}: invalid chunk ({error}): {one_line(payload[:200])}") from error
        if chunk.error is not None:
            raise complaint(self._where, chunk.error.message, chunk.error.code)
        if chunk.meta_info is None:
            raise ServerFaulty(f"{self._where}: a chunk has no meta_info: {one_line(payload[:200])}")
        return chunk.meta_info

    def _new_entries(self, meta: _Meta) -> list[LogprobEntry]:
        """The new entries: the last ones of a list that may start at any position."""
        entries, new = meta.output_token_logprobs, meta.completion_tokens - self._count
        if new < 0:
            raise ServerFaulty(
                f"{self._where}: after {plural(self._count, 'token')} the server reports only {meta.completion_tokens}"
            )
        if len(entries) < new:
            raise ServerFaulty(f"{self._where}: {plural(new, 'token')} came with {len(entries)} logprobs")
        return entries[len(entries) - new :]

    def _stop(self, ending: _FinishReason) -> StopReason:
        match ending.type:
            case "stop":
                return "stop"
            case "length":
                return "length"
            case "abort" if ending.status_code is None:
                return "aborted"
            case "abort":
                raise complaint(self._where, ending.message, ending.status_code)
        raise ServerFaulty(f"{self._where}: a request ended with finish reason {one_line(ending.type)!r}")

    def _record_span(self, count: int, label: str | None) -> None:
        start, self._count = self._count, self._count + count
        if self._version is None:
            return
        if count:
            if self.spans and self.spans[-1][0] == self._version:
                start = self.spans.pop()[1]
            self.spans.append((self._version, start, self._count))
        if label is not None:
            self._version = self._version_of_label(label)

    def _version_of_label(self, label: str) -> Version:
        """The version of a label. A foreign label on a server that had ours means that its weights were replaced."""
        version = self._version_of(label)
        if version is None:
            raise ServerFaulty(
                f"{self._where}: the weight label {one_line(label)!r} is not of this run; the server was restarted, or"
                " another run updates it"
            )
        return version
