"""Continuous batching over one weight set: requests join and leave the running batch at any token.

`DecodeBatch.advance` is one turn: waiting requests move into free slots, one decode step samples a token for every
running request, finished requests leave. A request whose `min_version` is newer than the batch's version stays in the
queue, and later requests may overtake it.

Equal prompts, such as the attempts of a group, are computed once per version:
- requests that start in the same turn: the first is prefilled and stepped; the others, its followers, are sampled from
  its logits, each with its own noise, and get a copy of its KV cache;
- a request that starts later gets a copy from one that still runs, and is stepped from its last prompt token on.

Invariants
- A token's version is the version of the batch when its logits were computed; weights are swapped between two steps.
- Rows 0 … n-1 are running and the rest is free, followers last, except in deterministic mode: there a request keeps its
  slot and idle slots are stepped too, so every tensor shape is independent of the other requests.
- KV caches are shared only within a version: `prompt_version` is the version that computed the prompt.
- A slot's KV cache holds all tokens of its sequence except the last, which the next step feeds.
- Each token carries its logprob and its version: `spans` records where in the output each version began.
- The sampled token of a row does not depend on the other rows, bit for bit: `sample` skips an operation only if it
  would change no row.
- The logprob is that of the distribution the token was drawn from: after temperature, then top_k, then top_p,
  renormalized. At temperature 0 the token is the argmax, and its logprob is that of the softmax at temperature 1.

Not thread-safe: use a batch from one thread only. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.engines.embedded import row_blocks
from outpace.engines.embedded.decoder import Decoder, DecoderWeights
from outpace.engines.generation import Decode, StopStrings, tokens_to_sample
from outpace.errors import RequestFailed
from outpace.runtime.rng import SEED_MASK, uniform_noise
from outpace.types import Generation, Ints, Sampling, StopReason, Version


def sample(
    logits_B_V: Tensor,
    temperature_B: NDArray[np.float32],
    top_k_B: NDArray[np.int64],
    top_p_B: NDArray[np.float32],
    uniform_B: NDArray[np.float64],
) -> tuple[Tensor, Tensor]:
    """Return one token per row and its logprob, on the device of the logits."""
    device = logits_B_V.device
    greedy_B = temperature_B == 0
    scaled_B_V = logits_B_V.float()
    if not np.all(greedy_B | (temperature_B == 1)):
        divisor_B = np.where(greedy_B, np.float32(1), temperature_B)
        scaled_B_V = scaled_B_V / torch.from_numpy(divisor_B).to(device).unsqueeze(1)
    truncated_B = ~greedy_B & ((top_k_B > 0) | (top_p_B < 1))
    if truncated_B.any():
        scaled_B_V = _truncate(scaled_B_V, np.where(truncated_B, top_k_B, 0), np.where(truncated_B, top_p_B, 1))
    logprobs_B_V = torch.log_softmax(scaled_B_V, dim=-1)
    if greedy_B.all():
        tokens_B = scaled_B_V.argmax(dim=-1)
    else:
        tokens_B = _draw(logprobs_B_V, torch.from_numpy(uniform_B).to(device))
        if greedy_B.any():
            tokens_B = torch.where(torch.from_numpy(greedy_B).to(device), scaled_B_V.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_B_V.gather(1, tokens_B.unsqueeze(1)).squeeze(1)


def _draw(logprobs_B_V: Tensor, uniform_B: Tensor) -> Tensor:
    """Draw by inverse CDF: the first token whose cumulative mass exceeds uniform * total.

    A uniform below 1 times the total is below the total in float64, so a token with zero mass is never drawn. Only
    non-finite logits can push the index past the end; the caller detects those by their logprob.
    """
    mass_B_V = logprobs_B_V.exp().cumsum(dim=-1, dtype=torch.float64)
    threshold_B_1 = uniform_B.unsqueeze(1) * mass_B_V[:, -1:]
    index_B = torch.searchsorted(mass_B_V, threshold_B_1, right=True).squeeze(1)
    return index_B.clamp_(max=logprobs_B_V.shape[-1] - 1)


def _truncate(scaled_B_V: Tensor, top_k_B: NDArray[np.int64], top_p_B: NDArray[np.float32]) -> Tensor:
    """Set logits cut by top_k, then by top_p over the rest, to -inf. Ties are ranked by token id."""
    vocabulary = scaled_B_V.shape[-1]
    device = scaled_B_V.device
    ranked_B_V, order_B_V = scaled_B_V.sort(dim=-1, descending=True, stable=True)
    limit_B_1 = torch.from_numpy(np.where(top_k_B > 0, top_k_B, vocabulary)).to(device).unsqueeze(1)
    beyond_k_B_V = torch.arange(vocabulary, device=device) >= limit_B_1
    mass_B_V = ranked_B_V.masked_fill(beyond_k_B_V, -torch.inf).softmax(dim=-1, dtype=torch.float64)
    before_B_V = mass_B_V.cumsum(dim=-1) - mass_B_V
    share_B_1 = torch.from_numpy(np.where(top_p_B < 1, top_p_B, np.inf)).to(device).unsqueeze(1)
    cut_ranked_B_V = beyond_k_B_V | (before_B_V >= share_B_1)
    cut_B_V = torch.zeros_like(cut_ranked_B_V).scatter_(1, order_B_V, cut_ranked_B_V)
    return scaled_B_V.masked_fill(cut_B_V, -torch.inf)


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
    prompt_version: Version = -1  # that prefilled the prompt: its cache may be copied under this version only
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


KvPolicy = Literal["keep", "recompute"]


class _StepInputs:
    """Inputs of a decode step, one entry per slot: newest token, its position, sampling parameters."""

    def __init__(self, slots: int) -> None:
        self.token = np.zeros(slots, dtype=np.int64)
        self.position = np.zeros(slots, dtype=np.int64)
        self.index = np.zeros(slots, dtype=np.int64)  # number of tokens sampled
        self.seed = np.zeros(slots, dtype=np.int64)
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.top_p = np.ones(slots, dtype=np.float32)

    def fill(self, row: int, request: GenerationRequest) -> None:
        sampling = request.sampling
        self.token[row] = request.prompt[-1]
        self.position[row] = len(request.prompt) - 1
        self.index[row] = 0
        self.seed[row] = sampling.seed & SEED_MASK
        self.temperature[row], self.top_k[row], self.top_p[row] = sampling.temperature, sampling.top_k, sampling.top_p

    def empty(self, row: int) -> None:
        """Make a row idle: token 0 at position 0, no truncation."""
        for array in (self.token, self.position, self.index, self.seed, self.top_k):
            array[row] = 0
        self.temperature[row] = self.top_p[row] = 1

    def move(self, sources: list[int], targets: list[int]) -> None:
        for array in (
            self.token, self.position, self.index, self.seed, self.temperature, self.top_k, self.top_p,
        ):  # fmt: skip
            array[targets] = array[sources]


class DecodeBatch:
    """The requests of one weight set and their decoder."""

    def __init__(self, decoder: Decoder, version: Version, kv: KvPolicy, decode: Decode | None) -> None:
        self.decoder = decoder
        self.version = version
        self._kv: KvPolicy = kv
        self._decode = decode
        self._waiting: deque[GenerationRequest] = deque()
        self._running: list[GenerationRequest | None] = [None] * decoder.slots
        self._rows = _StepInputs(decoder.slots)
        self._scratch = _StepInputs(1)
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        self.tokens = 0
        self.prefill_tokens = 0  # computed
        self.shared_tokens = 0  # prompt tokens copied from another request
        self.steps = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(request is not None for request in self._running)

    @property
    def has_work(self) -> bool:
        """Whether `advance` would do anything. Requests that wait for newer weights do not count."""
        return any(self._running) or any(request.min_version <= self.version for request in self._waiting)

    # ------------------------------------------------------------------------------------------------ requests

    def active_requests(self) -> dict[str, GenerationRequest]:
        """Return every request that has not ended, by id."""
        return {request.id: request for request in (*self._waiting, *self._running) if request is not None}

    def submit(self, request_id: str, prompt: Ints, sampling: Sampling, min_version: Version) -> None:
        """Queue a request. Raise `RequestFailed`, changing nothing, when it can never be served."""
        limit = tokens_to_sample(prompt, sampling, self.decoder.context)
        check_request(prompt, sampling, self.decoder.vocabulary)
        request = GenerationRequest(
            id=request_id,
            prompt=prompt,
            sampling=sampling,
            min_version=min_version,
            limit=limit,
            stop_ids=frozenset(sampling.stop_ids),
            stop_strings=self._stop_strings_of(sampling.stop_strings),
            prompt_bytes=prompt.tobytes(),
        )
        self._scratch.fill(0, request)  # a value that overflows its array raises here, not during a turn of the batch
        self._waiting.append(request)

    def _stop_strings_of(self, strings: Sequence[str]) -> StopStrings | None:
        if not strings:
            return None
        if self._decode is None:
            raise RequestFailed("stop strings need a tokenizer, but the engine has none")
        key = tuple(strings)
        if key not in self._stop_strings:
            self._stop_strings[key] = StopStrings(key, self._decode)
        return self._stop_strings[key]

    def abort(self, request_ids: set[str]) -> list[FinishedRequest]:
        """End these requests with the tokens sampled so far."""
        return self._end(lambda request: request.id in request_ids, lambda request: request.generation("aborted"))

    def fail_all(self, reason: str) -> list[FinishedRequest]:
        """Fail every request."""
        return self._end(lambda _: True, lambda _: RequestFailed(reason))

    def _end(
        self,
        chosen: Callable[[GenerationRequest], bool],
        result: Callable[[GenerationRequest], Generation | RequestFailed],
    ) -> list[FinishedRequest]:
        done = [FinishedRequest(request.id, result(request)) for request in self._waiting if chosen(request)]
        self._waiting = deque(request for request in self._waiting if not chosen(request))
        for slot, request in enumerate(self._running):
            if request is not None and chosen(request):
                done.append(FinishedRequest(request.id, result(request)))
                self._free(slot)
        return done

    # ------------------------------------------------------------------------------------------------ decoding

    def advance(self) -> list[FinishedRequest]:
        """Admit waiting requests, sample one token for every running request, return those that ended."""
        followers = self._admit()
        running = self.running
        if running == 0:
            return []
        state = self._rows
        rows = stepped = self.decoder.slots
        if not self.decoder.deterministic:
            rows, stepped = running, running - len(followers)
        logits = self.decoder.step(state.token[:stepped], state.position[:stepped])
        if followers:
            logits = self._follow(logits, rows, followers)
        with torch.inference_mode():
            chosen, chosen_logprobs = sample(
                logits,
                state.temperature[:rows],
                state.top_k[:rows],
                state.top_p[:rows],
                uniform_noise(state.seed[:rows], state.index[:rows]),
            )
        token = chosen.cpu().numpy()
        state.token[:rows] = token
        state.position[:rows] += 1
        state.index[:rows] += 1
        self.steps += 1
        return self._record(token.tolist(), chosen_logprobs.cpu().numpy())

    def _record(
        self, tokens: list[int], logprobs: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    ) -> list[FinishedRequest]:
        """Append each running request's token; free the slots of those that end with it."""
        done: list[FinishedRequest] = []
        finite = bool(np.isfinite(logprobs).all())
        for slot, (request, token, logprob) in enumerate(
            zip(self._running, tokens, logprobs.tolist(), strict=False)  # only the first rows were stepped
        ):
            if request is None:
                self._rows.empty(slot)
                continue
            if not finite and not np.isfinite(logprob):
                done.append(
                    FinishedRequest(request.id, RequestFailed(f"logits of version {self.version} are not finite"))
                )
                self._free(slot)
                self.decoder.clear(slot)
                continue
            self.tokens += 1
            stop = request.append(token, logprob)
            if stop is not None:
                done.append(FinishedRequest(request.id, request.generation(stop)))
                self._free(slot)
        return done

    def _admit(self) -> dict[int, int]:
        """Move waiting requests into slots. A prompt is computed once, in the slot of the first request that has it.

        Return the followers: requests that start together with the first one of their prompt, as slot -> its slot."""
        taken = self._take_waiting()
        if self.decoder.attends_in_blocks:
            self._order_by_length()
        if not taken:
            self._make_room(0, 0)
            return {}
        computed = self._computed_prompts()
        first: dict[bytes, GenerationRequest] = {}
        for request in taken:
            if request.prompt_bytes not in computed:
                first.setdefault(request.prompt_bytes, request)
        stepped = [request for request in taken if first.get(request.prompt_bytes, request) is request]
        followers = [request for request in taken if first.get(request.prompt_bytes, request) is not request]
        slots = self._make_room(len(stepped), len(followers))
        computed = self._computed_prompts()  # running requests may have moved
        source = {}
        for slot, request in zip(slots, (*stepped, *followers), strict=True):
            self._start(slot, request)
            source[slot] = computed.setdefault(request.prompt_bytes, slot)
        decoded = slots[: len(stepped)]
        self._prefill([slot for slot in decoded if source[slot] == slot])
        self._copy_prompts({slot: source[slot] for slot in decoded if source[slot] != slot}, without_last=True)
        return {slot: source[slot] for slot in slots[len(stepped) :]}

    def _take_waiting(self) -> list[GenerationRequest]:
        """Remove from the queue as many requests as there are free slots, leaving those that need newer weights."""
        free = self.decoder.slots - self.running
        taken: list[GenerationRequest] = []
        deferred: list[GenerationRequest] = []
        while self._waiting and len(taken) < free:
            request = self._waiting.popleft()
            (taken if request.min_version <= self.version else deferred).append(request)
        self._waiting.extendleft(reversed(deferred))
        return taken

    def _computed_prompts(self) -> dict[bytes, int]:
        """Return the prompts that the current weights computed, with a slot that holds their KV cache."""
        return {
            request.prompt_bytes: slot
            for slot, request in enumerate(self._running)
            if request is not None and request.prompt_version == self.version
        }

    def _start(self, slot: int, request: GenerationRequest) -> None:
        request.prompt_version = self.version
        request.spans.append((0, self.version))
        self._running[slot] = request
        self._rows.fill(slot, request)

    def _copy_prompts(self, sources: dict[int, int], *, without_last: bool) -> None:
        """Copy the KV cache of prompts, with or without the last token. `sources` maps a slot to the one it copies."""
        if not sources:
            return
        lengths = self._rows.position[list(sources)] + (0 if without_last else 1)
        self.decoder.copy(list(sources.values()), list(sources), lengths.tolist())
        self.shared_tokens += int(lengths.sum())

    def _follow(self, logits_B_V: Tensor, rows: int, followers: dict[int, int]) -> Tensor:
        """Give followers the logits and the KV cache of the first request of their prompt, which was just stepped."""
        source = np.arange(rows)
        source[list(followers)] = list(followers.values())
        self._copy_prompts(followers, without_last=False)
        return logits_B_V[torch.from_numpy(source).to(logits_B_V.device)]

    def _prefill(self, slots: Sequence[int]) -> None:
        """Compute the KV cache of these slots: all tokens but the newest."""
        prefixes = {slot: request.sequence()[:-1] for slot in slots if (request := self._running[slot]) is not None}
        prefixes = {slot: prefix for slot, prefix in prefixes.items() if len(prefix)}
        if prefixes:
            self.decoder.prefill(list(prefixes), list(prefixes.values()))
            self.prefill_tokens += sum(len(prefix) for prefix in prefixes.values())

    def _make_room(self, stepped: int, followers: int) -> list[int]:
        """Return slots for new requests: first those that the next step decodes, then those that follow.

        The rows of the step become contiguous: running requests move into the gaps of finished ones."""
        if self.decoder.deterministic:
            return [slot for slot, request in enumerate(self._running) if request is None][: stepped + followers]
        rows = self.running + stepped
        gaps = [slot for slot in range(rows) if self._running[slot] is None]
        movers = [slot for slot in range(rows, self.decoder.slots) if self._running[slot] is not None]
        targets, free = gaps[: len(movers)], gaps[len(movers) :]
        if movers:
            self._move(movers, targets)
        return [*free, *range(rows, rows + followers)]

    def _order_by_length(self) -> None:
        """Move long sequences to the first rows and short ones to the last, if that pays."""
        rows = np.array([row for row, request in enumerate(self._running) if request is not None], dtype=np.int64)
        moves = row_blocks.moves(rows, self._rows.position[rows] + 1, self.decoder.context)
        if moves:
            self._move(list(moves), list(moves.values()))

    def _move(self, sources: list[int], targets: list[int]) -> None:
        """Move running requests to other rows, all at once."""
        self.decoder.copy(sources, targets, self._rows.position[sources].tolist())
        self._rows.move(sources, targets)
        moved = [self._running[source] for source in sources]
        for source in sources:
            self._running[source] = None
        for target, request in zip(targets, moved, strict=True):
            self._running[target] = request

    def _free(self, slot: int) -> None:
        self._running[slot] = None
        self._rows.empty(slot)

    # ------------------------------------------------------------------------------------------------ weights

    def swap(self, prepared: DecoderWeights, version: Version) -> None:
        """Use new weights from the next token on; tokens already sampled stay."""
        self.decoder.install(prepared)
        self.version = version
        for request in self._running:
            if request is not None:
                request.spans.append((len(request.tokens), version))
        if self._kv == "recompute":
            self._prefill([slot for slot, request in enumerate(self._running) if request is not None])
