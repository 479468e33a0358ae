"""Continuation: one generation sampled in several parts, after its engine was lost or interrupted.

    request ─▶ partial output ─▶ request for the rest: prompt + output so far, fewer tokens ─▶ … ─▶ one generation

Invariants
- A sampled token stays, with its logprob and version, and is never sampled again. Only tokens after a stop string are
  dropped: neither engine can see a stop string that begins in one part and ends in the next, so it is found here.
- No part requests more tokens than are left. `ended` is set when no further part is needed.
- Parts use independent noise: the seed of a part derives from the seed of the request and the number of tokens so far.
  Until there is a token, the request is sent unchanged.
"""

from __future__ import annotations

import msgspec
import numpy as np

from outpace.engines.embedded.stopping import Decode, StopStrings
from outpace.engines.noise import request_seed
from outpace.types import Floats, Generation, Ints, Sampling, StopReason
from outpace.wording import plural


class Continued:
    """A request, the output so far, and the prompt and sampling parameters of the next part."""

    def __init__(self, token_ids: Ints, sampling: Sampling, decode: Decode | None = None) -> None:
        """Without `decode`, stop strings are found by the engines only."""
        self._token_ids = np.asarray(token_ids, dtype=np.int32)
        self._sampling = sampling
        self._strings = StopStrings(sampling.stop_strings, decode) if decode and sampling.stop_strings else None
        self._stop_string_found = False
        self._tokens: Ints = np.zeros(0, dtype=np.int32)
        self._logprobs: Floats = np.zeros(0, dtype=np.float32)
        self._versions: Ints = np.zeros(0, dtype=np.int32)

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
        """Why the generation is complete, or None. Needed because a lost part has no stop reason of its own."""
        if self._stop_string_found or (len(self) and int(self._tokens[-1]) in self._sampling.stop_ids):
            return "stop"
        return "length" if self.left <= 0 else None

    def generation(self, stop: StopReason) -> Generation:
        """Return the tokens so far as a generation."""
        return Generation(self._tokens, self._logprobs, self._versions, stop)

    def _until_stop_string(self, tokens: Ints) -> int:
        """Return how many of these tokens belong to the generation, up to and including a stop string."""
        if self._strings is None:
            return len(tokens)
        answer: list[int] = self._tokens.tolist()
        for number, token in enumerate(tokens.tolist(), start=1):
            answer.append(token)
            if self._strings.completed_by_last(answer):
                self._stop_string_found = True
                return number
        return len(tokens)
