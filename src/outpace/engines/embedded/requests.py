"""A request in the batch, from its prompt to its generation."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from outpace.engines.generation import StopStrings
from outpace.errors import RequestFailed
from outpace.types import Generation, Ints, Sampling, StopReason, Version


@dataclass(eq=False)
class GenerationRequest:
    """A request and the tokens sampled so far. `spans` are (first output index, version), oldest first."""

    id: str
    prompt: Ints
    sampling: Sampling
    min_version: Version
    limit: int
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None
    prompt_bytes: bytes  # equal for equal prompts
    prompt_version: Version = -1  # that prefilled the prompt: its KV cache may be copied only under this version
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, Version]] = field(default_factory=list)

    def sequence(self) -> Ints:
        """Return prompt and output so far."""
        return np.concatenate((self.prompt, np.array(self.tokens, dtype=np.int32)))

    def append(self, token: int, logprob: float) -> StopReason | None:
        """Add a sampled token. Return the stop reason if the request ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            return "stop"
        if self.stop_strings is not None and self.stop_strings.completed_by_last(self.tokens):
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def generation(self, stop: StopReason) -> Generation:
        versions = np.empty(len(self.tokens), dtype=np.int32)
        for start, version in self.spans:
            versions[start:] = version
        return Generation(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=versions,
            stop=stop,
        )


@dataclass(frozen=True)
class FinishedRequest:
    """A request that ended: its generation or its error."""

    id: str
    result: Generation | RequestFailed


def check_request(prompt: Ints, sampling: Sampling, vocabulary: int) -> None:
    """Raise `RequestFailed` for input that would fail later or break the whole batch."""
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocabulary:
        raise RequestFailed(f"the prompt contains a token id outside the vocabulary of {vocabulary}")
    if not 0 <= sampling.temperature < float("inf"):
        raise RequestFailed(f"temperature is {sampling.temperature}, must be finite and not negative")
    if not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise RequestFailed(f"top_p is {sampling.top_p}, top_k is {sampling.top_k}: need 0 < top_p <= 1, top_k >= 0")
