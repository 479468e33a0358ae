"""One generation: its token stream, stop-string detection, and continuation in several parts.

    request ─▶ partial output ─▶ request for the rest: prompt + output so far, fewer tokens ─▶ … ─▶ one generation

Every engine streams tokens through a `TokenStream`: the engine adds tokens as they arrive, readers wait for more.
`ContinuedGeneration` joins the parts of a request whose engine was lost or interrupted. Only the fleet continues
requests: an engine's `generate` is a single attempt, and its stop reason tells whether the output is incomplete.

Invariants of a continued generation
- Sampled tokens are kept, with their logprobs and versions, and never resampled. Only tokens after a stop string are
  dropped: neither engine can see a stop string that begins in one part and ends in the next, so it is detected here.
- No part requests more tokens than are left. `ended` is set when no further part is needed.
- Parts use independent noise: the seed of a part derives from the seed of the request and the number of tokens so far.
  Until there is a token, the request is sent unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import msgspec
import numpy as np

from outpace.errors import ContextFull, RequestFailed, plural
from outpace.runtime.rng import request_seed
from outpace.types import Floats, Generation, Ints, Sampling, StopReason

Decode = Callable[[Sequence[int]], str]
"""Maps token ids to text, keeping special tokens and all spaces."""

_PARTIAL = "\ufffd"  # the replacement character: decoded bytes that are not yet a whole character
_SLACK = 4  # tokens: a character has at most four bytes, and some decoders strip a leading space


class StopStrings:
    """Detects whether the newest token completes one of `strings`. Shared by all requests with the same strings.

    Decoding text at every token would cost more than a decode step of a small model. A token can complete a stop
    string only if its text contains the string's last character, so a set lookup rules out most tokens, and only the
    tail of the output is decoded for the others.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self._last_characters = {string[-1] for string in strings}
        self._ends_in_space = any(character.isspace() for character in self._last_characters)
        self._tail = max(len(string.encode()) for string in strings) + _SLACK
        self._may_complete: dict[int, bool] = {}

    def completed_by_last(self, tokens: Sequence[int]) -> bool:
        newest = tokens[-1]
        possible = self._may_complete.get(newest)
        if possible is None:
            possible = self._may_complete[newest] = self._can_complete(self._decode([newest]))
        if not possible:
            return False
        text = self._decode(tokens[-self._tail :])
        return any(string in text for string in self._strings)

    def _can_complete(self, text: str) -> bool:
        undecided = not text or _PARTIAL in text or self._ends_in_space
        return undecided or any(character in text for character in self._last_characters)


def tokens_to_sample(prompt: Ints, sampling: Sampling, context: int | None) -> int:
    """Return `max_tokens`, limited to the context. Raise `RequestFailed` for a request that can never be served."""
    if len(prompt) == 0:
        raise RequestFailed("the prompt is empty")
    if sampling.max_tokens < 1:
        raise RequestFailed(f"max_tokens is {sampling.max_tokens}, must be at least 1")
    if "" in sampling.stop_strings:
        raise RequestFailed("a stop string is empty")
    if context is None:
        return sampling.max_tokens
    if len(prompt) >= context:
        raise ContextFull(f"the prompt has {plural(len(prompt), 'token')}, the context is {context}")
    return min(sampling.max_tokens, context - len(prompt))


class TokenStream:
    """The tokens of one request as they arrive. Event loop only."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)
        self._wake_readers()

    def end(self) -> None:
        """End the stream. Waiting readers get the tokens they have not seen."""
        self._ended = True
        self._wake_readers()

    async def read(self, after: int) -> Ints:
        """Return the tokens beyond the first `after`, waiting until there is at least one; empty at the end."""
        while len(self.tokens) <= after and not self._ended:
            await self._changed.wait()
        return np.array(self.tokens[after:], dtype=np.int32)

    def _wake_readers(self) -> None:
        self._changed.set()
        self._changed.clear()


S = TypeVar("S", bound=TokenStream)


class OpenStreams(Generic[S]):
    """The streams of all requests in flight, by request id."""

    def __init__(self) -> None:
        self._by_id: dict[str, S] = {}

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._by_id.values()))

    @contextmanager
    def open(self, request_id: str, stream: S) -> Iterator[S]:
        """Make a request readable until the block ends. Raises `RequestFailed` if its id is in flight."""
        if request_id in self._by_id:
            raise RequestFailed(f"request {request_id} is already in flight")
        self._by_id[request_id] = stream
        try:
            yield stream
        finally:
            del self._by_id[request_id]
            stream.end()

    def of(self, request_ids: Iterable[str]) -> list[S]:
        """Return the streams of those requests that are in flight."""
        return [self._by_id[request_id] for request_id in request_ids if request_id in self._by_id]

    async def read(self, request_id: str, after: int) -> Ints:
        """Read the stream of a request; empty if it is not in flight."""
        stream = self._by_id.get(request_id)
        return np.zeros(0, dtype=np.int32) if stream is None else await stream.read(after)


_NO_INTS, _NO_FLOATS = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)


class ContinuedGeneration:
    """A request, the output so far, and the prompt and sampling parameters of the next part."""

    def __init__(self, token_ids: Ints, sampling: Sampling, decode: Decode | None = None) -> None:
        """Without `decode`, only the engines detect stop strings."""
        self._token_ids = token_ids
        self._sampling = sampling
        self._decode = decode
        self._stop_string_found = False
        self._tokens: Ints = _NO_INTS
        self._logprobs: Floats = _NO_FLOATS
        self._versions: Ints = _NO_INTS

    def __len__(self) -> int:
        """Return the number of tokens so far."""
        return len(self._tokens)

    def add(self, generation: Generation) -> None:
        """Append a part: the result of a request with `prompt` and `sampling`."""
        if not len(generation.tokens) == len(generation.logprobs) == len(generation.versions):
            raise ValueError("a part needs one logprob and one version per token")
        if len(generation.tokens) and self.ended == "stop":
            raise ValueError("got a part after the end of the generation")
        if len(generation.tokens) > self.left:
            raise ValueError(
                f"got a part of {plural(len(generation.tokens), 'token')}, but only {self.left} were left to sample"
            )
        kept = self._until_stop_string(generation.tokens)
        self._tokens = np.concatenate([self._tokens, generation.tokens[:kept]], dtype=np.int32)
        self._logprobs = np.concatenate([self._logprobs, generation.logprobs[:kept]], dtype=np.float32)
        self._versions = np.concatenate([self._versions, generation.versions[:kept]], dtype=np.int32)

    @property
    def prompt(self) -> Ints:
        """Prompt of the next part."""
        return np.concatenate([self._token_ids, self._tokens], dtype=np.int32) if len(self) else self._token_ids

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters of the next part."""
        if not len(self):
            return self._sampling
        seed = request_seed(self._sampling.seed, len(self), 0, 0)
        return msgspec.structs.replace(self._sampling, max_tokens=self.left, seed=seed)

    @property
    def left(self) -> int:
        """Number of tokens that may still be sampled."""
        return self._sampling.max_tokens - len(self)

    @property
    def ended(self) -> StopReason | None:
        """Why the generation is complete, or None. Needed for lost parts, whose stop reason does not say so."""
        if self._stop_string_found or (len(self) and int(self._tokens[-1]) in self._sampling.stop_ids):
            return "stop"
        return "length" if self.left <= 0 else None

    def generation(self, stop: StopReason) -> Generation:
        """Return the tokens so far as a generation."""
        return Generation(self._tokens, self._logprobs, self._versions, stop)

    def _until_stop_string(self, tokens: Ints) -> int:
        """Return how many of these tokens belong to the generation, up to and including a stop string."""
        if self._decode is None or not self._sampling.stop_strings:
            return len(tokens)
        strings = StopStrings(self._sampling.stop_strings, self._decode)
        answer: list[int] = self._tokens.tolist()
        for number, token in enumerate(tokens.tolist(), start=1):
            answer.append(token)
            if strings.completed_by_last(answer):
                self._stop_string_found = True
                return number
        return len(tokens)
