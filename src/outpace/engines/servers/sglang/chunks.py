"""What SGLang streams, checked and put into our own words.

Invariants
- Tokens and logprobs are read off `output_token_logprobs`, never off `output_ids`: the last chunk of a request that was
  aborted in a queue has only its newest id there.
- A chunk has all that was sampled so far, or only what is fresh, or both in a row when chunks were put together on
  their way: by a flag of the server, by its release, by chance. `completion_tokens` always counts from the beginning,
  so it says how many at the end of the list are fresh.
- A token gets the oldest version that it can have. The label on a chunk is the one in force when the chunk was sent,
  and what it carries may have been sampled before: one step is always under way. So a chunk's tokens get the label of
  the chunk before it, and those of the first one the version in force when the request was sent.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from outpace.engines.servers.pieces import checked_logprobs, complaint
from outpace.engines.servers.spec import Piece, Span
from outpace.errors import ServerFaulty, one_line
from outpace.types import StopReason, Version
from outpace.wording import plural

Entry = tuple[float | None, int, str | None]
"""One token: its logprob, its id, its text."""


class _Ending(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: _Ending | None = None
    weight_version: str | None = None
    output_token_logprobs: list[Entry] = []


class _Complaint(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Chunk(msgspec.Struct):
    meta_info: _Meta | None = None
    error: _Complaint | None = None


_DECODER = msgspec.json.Decoder(_Chunk)


class Reader:
    """The stream of one request. `sent`: the version in force when it was sent; None where nobody knows, and then there
    are no spans. `version_of` says which version a label stands for; None: the label is not one of ours."""

    def __init__(self, where: str, sent: Version | None, version_of: Callable[[str], Version | None]) -> None:
        self.spans: list[Span] = []
        self._where = where
        self._before = sent
        self._version_of = version_of
        self._had = 0

    def piece_of(self, payload: bytes) -> Piece:
        meta = self._meta(payload)
        entries = self._fresh(meta)
        logprobs = checked_logprobs(self._where, (logprob for logprob, _, _ in entries))
        stop = None if meta.finish_reason is None else self._stop(meta.finish_reason)
        self._account(len(entries), meta.weight_version)
        return Piece([token for _, token, _ in entries], logprobs, stop)

    def _meta(self, payload: bytes) -> _Meta:
        try:
            chunk = _DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerFaulty(f"{self._where}: a chunk cannot be read ({error}): {one_line(payload[:200])}") from error
        if chunk.error is not None:
            raise complaint(self._where, chunk.error.message, chunk.error.code)
        if chunk.meta_info is None:
            raise ServerFaulty(f"{self._where}: a chunk has no meta_info: {one_line(payload[:200])}")
        return chunk.meta_info

    def _fresh(self, meta: _Meta) -> list[Entry]:
        """What was not here before: the last ones of a list that begins wherever it likes."""
        entries, fresh = meta.output_token_logprobs, meta.completion_tokens - self._had
        if fresh < 0:
            raise ServerFaulty(
                f"{self._where}: it sent {plural(self._had, 'token')}, and then it counts {meta.completion_tokens}"
            )
        if len(entries) < fresh:
            raise ServerFaulty(f"{self._where}: {plural(fresh, 'token')} came with {len(entries)} logprobs")
        return entries[len(entries) - fresh :]

    def _stop(self, ending: _Ending) -> StopReason:
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

    def _account(self, count: int, label: str | None) -> None:
        start, self._had = self._had, self._had + count
        if self._before is None:
            return
        if count:
            if self.spans and self.spans[-1][0] == self._before:
                start = self.spans.pop()[1]
            self.spans.append((self._before, start, self._had))
        if label is not None:
            self._before = self._labelled(label)

    def _labelled(self, label: str) -> Version:
        """A label of somebody else's on a server that had ours: these are not the weights that we gave it."""
        version = self._version_of(label)
        if version is None:
            raise ServerFaulty(
                f"{self._where}: its weights are labelled {one_line(label)!r}, which this run has not done; it was"
                " restarted, or something else updates it too"
            )
        return version
