"""One answer that is made in several parts, because whoever was sampling it went away or was interrupted.

    asked ─▶ partial output ─▶ asked again for the rest: prompt + what there is, fewer tokens ─▶ … ─▶ one answer

Invariants
- A token that was sampled stays, with its logprob and its version, and is sampled by nobody else. Only what lies behind
  a stop string goes: one that begins in one part and ends in another is seen by neither sampler, so it is found here.
- No part asks for more than is left. `ended` says that none is to be asked for.
- No part draws the noise of another: the seed of each comes from the request's and from how many tokens there are.
  Until there is one the request is asked for as it is.
"""

from __future__ import annotations

import msgspec
import numpy as np

from outpace.engines.embedded.stopping import Decode, StopStrings
from outpace.engines.noise import request_seed
from outpace.types import Floats, Generation, Ints, Sampling, StopReason
from outpace.wording import plural


class Continued:
    def __init__(self, token_ids: Ints, sampling: Sampling, decode: Decode | None = None) -> None:
        """Without `decode` stop strings are left to the samplers."""
        self._asked = np.asarray(token_ids, dtype=np.int32)
        self._sampling = sampling
        self._strings = StopStrings(sampling.stop_strings, decode) if decode and sampling.stop_strings else None
        self._spoken = False  # a stop string has been completed
        self._tokens: Ints = np.zeros(0, dtype=np.int32)
        self._logprobs: Floats = np.zeros(0, dtype=np.float32)
        self._versions: Ints = np.zeros(0, dtype=np.int32)

    def __len__(self) -> int:
        """How many tokens of the answer there are."""
        return len(self._tokens)

    def add(self, generation: Generation) -> None:
        """Another part: what became of asking for `prompt` with `sampling`."""
        if not len(generation.tokens) == len(generation.logprobs) == len(generation.versions):
            raise ValueError("a part has one logprob and one version for each of its tokens")
        if len(generation.tokens) and self.ended == "stop":
            raise ValueError("a part behind the end of the answer")
        if len(generation.tokens) > self.left:
            raise ValueError(
                f"a part of {plural(len(generation.tokens), 'token')}, but {self.left} were left to sample"
            )
        kept = self._until_stop_string(generation.tokens)
        self._tokens = np.concatenate([self._tokens, generation.tokens[:kept]], dtype=np.int32)
        self._logprobs = np.concatenate([self._logprobs, generation.logprobs[:kept]], dtype=np.float32)
        self._versions = np.concatenate([self._versions, generation.versions[:kept]], dtype=np.int32)

    @property
    def prompt(self) -> Ints:
        """What the next part goes on from."""
        return np.concatenate([self._asked, self._tokens], dtype=np.int32) if len(self) else self._asked

    @property
    def sampling(self) -> Sampling:
        """How the next part is sampled."""
        if not len(self):
            return self._sampling
        seed = request_seed(self._sampling.seed, len(self), 0, 0)
        return msgspec.structs.replace(self._sampling, max_tokens=self.left, seed=seed)

    @property
    def left(self) -> int:
        """How many tokens may still be sampled."""
        return self._sampling.max_tokens - len(self)

    @property
    def ended(self) -> StopReason | None:
        """Why there is nothing to go on with, although perhaps no part says so: one that was lost has lost its last
        word too. None: there is."""
        if self._spoken or (len(self) and int(self._tokens[-1]) in self._sampling.stop_ids):
            return "stop"
        return "length" if self.left <= 0 else None

    def generation(self, stop: StopReason) -> Generation:
        """The answer as far as it goes."""
        return Generation(self._tokens, self._logprobs, self._versions, stop)

    def _until_stop_string(self, tokens: Ints) -> int:
        """How many of these belong to the answer."""
        if self._strings is None:
            return len(tokens)
        answer: list[int] = self._tokens.tolist()
        for number, token in enumerate(tokens.tolist(), start=1):
            answer.append(token)
            if self._strings.completed_by_last(answer):
                self._spoken = True
                return number
        return len(tokens)
