"""Continuous batching over one weight set: requests join and leave the running batch at any token.

`DecodeBatch.advance` is one turn: waiting requests move into free slots, one decode step samples a token for every
running request, finished requests leave. A request whose `min_version` is newer than the batch's version stays in the
queue, and later requests may overtake it.

Equal prompts, such as the attempts of a group, are computed once per version:
- requests that start in the same turn: the first is prefilled and stepped; the others, its followers, are sampled from
  its logits, each with its own noise;
- a request that starts later is stepped from its last prompt token on.
A long prompt that enough requests have when it is computed goes into a slot of the decoder's prompt cache, if there is
one, and all requests with this prompt use that slot. Otherwise they copy the KV cache of a running request.

Invariants
- A token's version is the version of the batch when its logits were computed; weights are swapped between two steps.
- Rows 0 … n-1 are running, followers last, and the rest are free. In deterministic mode a request instead keeps its
  slot and idle slots are stepped too, so no tensor shape depends on other requests.
- KV caches are shared and copied only within a version: `prompt_version` is the version that computed the prompt.
- A slot's KV cache holds the tokens of its sequence that are not in its prompt slot, except the last, which the next
  step feeds. A prompt slot is in use as long as a running request refers to it.
- Each token carries its logprob and its version: `spans` records where in the output each version began.

Not thread-safe: use a batch from one thread only. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from outpace.engines.embedded import row_blocks
from outpace.engines.embedded.decoder import Decoder, DecoderWeights
from outpace.engines.embedded.requests import FinishedRequest, GenerationRequest, check_request
from outpace.engines.embedded.sampling import sample
from outpace.engines.embedded.shared_prompts import MIN_REQUESTS, MIN_SHARED, SharedPrompts
from outpace.engines.generation import Decode, StopStrings, tokens_to_sample
from outpace.errors import RequestFailed
from outpace.runtime.rng import SEED_MASK, uniform_noise
from outpace.types import Generation, Ints, Sampling, Version

KvPolicy = Literal["keep", "recompute"]


class _StepInputs:
    """Inputs of a decode step, one entry per slot: newest token, its position, sampling parameters."""

    def __init__(self, slots: int) -> None:
        self.token = np.zeros(slots, dtype=np.int64)
        self.position = np.zeros(slots, dtype=np.int64)
        self.prompt_slot = np.full(slots, -1, dtype=np.int64)  # slot of the prompt it shares, -1 for none
        self.prompt_length = np.zeros(slots, dtype=np.int64)  # number of tokens in it
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

    def share(self, row: int, prompt_slot: int) -> None:
        """Read all tokens before the newest from a prompt slot; -1: none."""
        self.prompt_slot[row] = prompt_slot
        self.prompt_length[row] = self.position[row] if prompt_slot >= 0 else 0

    def cached(self, rows: Sequence[int] | row_blocks.Indices) -> row_blocks.Indices:
        """Return how many tokens the rows have in their own slots."""
        return self.position[rows] - self.prompt_length[rows]

    def empty(self, row: int) -> None:
        """Make a row idle: token 0 at position 0, no truncation."""
        for array in (self.token, self.position, self.prompt_length, self.index, self.seed, self.top_k):
            array[row] = 0
        self.prompt_slot[row] = -1
        self.temperature[row] = self.top_p[row] = 1

    def move(self, sources: list[int], targets: list[int]) -> None:
        for array in (
            self.token, self.position, self.prompt_slot, self.prompt_length, self.index, self.seed, self.temperature,
            self.top_k, self.top_p,
        ):  # fmt: skip
            array[targets] = array[sources]


class DecodeBatch:
    """The requests of one weight set and their decoder."""

    def __init__(self, decoder: Decoder, version: Version, kv: KvPolicy, decode: Decode | None) -> None:
        self.decoder = decoder
        self.version = version
        self._kv: KvPolicy = kv
        self._shares_prompts = decoder.shares_prompts and kv == "keep"
        self._decode = decode
        self._waiting: deque[GenerationRequest] = deque()
        self._running: list[GenerationRequest | None] = [None] * decoder.slots
        self._rows = _StepInputs(decoder.slots)
        self._scratch = _StepInputs(1)
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        self.tokens = 0
        self.prefill_tokens = 0  # computed
        self.shared_tokens = 0  # prompt tokens taken from another request
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
        prompts = SharedPrompts(state.prompt_slot[:stepped], state.prompt_length[:stepped])
        shared = prompts if (prompts.slot_B >= 0).any() else None
        logits = self.decoder.step(state.token[:stepped], state.position[:stepped], shared)
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
                self._clear(slot)
                continue
            self.tokens += 1
            stop = request.append(token, logprob)
            if stop is not None:
                done.append(FinishedRequest(request.id, request.generation(stop)))
                self._free(slot)
        return done

    def _admit(self) -> dict[int, int]:
        """Move waiting requests into slots. A prompt is computed once, in the slot of the first request that has it.

        Return the followers, which start in the same turn as the first request with their prompt: slot -> its slot."""
        taken = self._take_waiting()
        if self.decoder.attends_in_blocks:
            self._order_by_length()
            self._order_prompts()
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
        to_share = self._prompts_to_share(first, taken)
        source = {}
        for slot, request in zip(slots, (*stepped, *followers), strict=True):
            self._start(slot, request)
            source[slot] = computed.setdefault(request.prompt_bytes, slot)
            if source[slot] != slot:
                self._rows.share(slot, int(self._rows.prompt_slot[source[slot]]))
            elif request.prompt_bytes in to_share:
                self._rows.share(slot, self._free_prompt_slot())
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

    def _prompts_to_share(
        self, first: dict[bytes, GenerationRequest], starting: Sequence[GenerationRequest]
    ) -> set[bytes]:
        """Return the prompts in `first` that are long and that enough requests, starting now or waiting, have."""
        counts = {prompt: 0 for prompt, request in first.items() if len(request.prompt) > MIN_SHARED}
        if not counts or not self._shares_prompts:
            return set()
        for request in itertools.chain(starting, self._waiting):
            if request.prompt_bytes in counts and request.min_version <= self.version:
                counts[request.prompt_bytes] += 1
        return {prompt for prompt, count in counts.items() if count >= MIN_REQUESTS}

    def _free_prompt_slot(self) -> int:
        """Return an unused prompt slot, -1 if there is none."""
        taken = set(self._rows.prompt_slot.tolist())
        return next((slot for slot in range(self.decoder.prompt_slots) if slot not in taken), -1)

    def _start(self, slot: int, request: GenerationRequest) -> None:
        request.prompt_version = self.version
        request.spans.append((0, self.version))
        self._running[slot] = request
        self._rows.fill(slot, request)

    def _copy_prompts(self, sources: dict[int, int], *, without_last: bool) -> None:
        """Copy the KV cache of prompts, with or without the last token, except the part in a prompt slot. `sources`
        maps each slot to the one it copies."""
        last = 0 if without_last else 1
        targets = list(sources)
        lengths = self._rows.cached(targets) + last
        copied = [targets[index] for index in np.flatnonzero(lengths)]
        if copied:
            self.decoder.copy([sources[slot] for slot in copied], copied, lengths[lengths > 0].tolist())
        self.shared_tokens += int(self._rows.position[targets].sum()) + last * len(targets)

    def _follow(self, logits_B_V: Tensor, rows: int, followers: dict[int, int]) -> Tensor:
        """Give followers the logits and the KV cache of the first request of their prompt, which was just stepped."""
        source = np.arange(rows)
        source[list(followers)] = list(followers.values())
        self._copy_prompts(followers, without_last=False)
        return logits_B_V[torch.from_numpy(source).to(logits_B_V.device)]

    def _prefill(self, slots: Sequence[int]) -> None:
        """Compute the KV cache of these slots, or of the prompts that they share: all tokens but the newest."""
        own: dict[int, Ints] = {}
        prompts: dict[int, Ints] = {}
        for slot in slots:
            request, prompt_slot = self._running[slot], int(self._rows.prompt_slot[slot])
            if request is not None and len(prefix := request.sequence()[:-1]):
                if prompt_slot < 0:
                    own[slot] = prefix
                else:
                    prompts[prompt_slot] = prefix
        for prefixes, shared in ((own, False), (prompts, True)):
            if prefixes:
                self.decoder.prefill(list(prefixes), list(prefixes.values()), shared=shared)
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
        moves = row_blocks.moves(rows, self._rows.cached(rows) + 1, self.decoder.context)
        if moves:
            self._move(list(moves), list(moves.values()))

    def _order_prompts(self) -> None:
        """Move long prompts to the first prompt slots and unused slots to the last, if that pays."""
        users = np.flatnonzero(self._rows.prompt_slot >= 0)
        if len(users) == 0:
            return
        slots = self._rows.prompt_slot[users]
        lengths = np.zeros(slots.max() + 1, dtype=np.int64)
        lengths[slots] = self._rows.prompt_length[users]
        moves = row_blocks.moves(np.arange(len(lengths)), lengths, self.decoder.context)
        moves = {source: target for source, target in moves.items() if lengths[source] > 0}
        if moves:
            self.decoder.copy(list(moves), list(moves.values()), lengths[list(moves)].tolist(), shared=True)
            self._rows.prompt_slot[users] = [moves.get(slot, slot) for slot in slots.tolist()]

    def _move(self, sources: list[int], targets: list[int]) -> None:
        """Move running requests to other rows, all at once."""
        self.decoder.copy(sources, targets, self._rows.cached(sources).tolist())
        self._rows.move(sources, targets)
        moved = [self._running[source] for source in sources]
        for source in sources:
            self._running[source] = None
        for source in set(sources).difference(targets):
            self._rows.empty(source)
        for target, request in zip(targets, moved, strict=True):
            self._running[target] = request

    def _free(self, slot: int) -> None:
        self._running[slot] = None
        self._rows.empty(slot)

    def _clear(self, slot: int) -> None:
        """Free a slot whose KV cache, or prompt, may contain values that are not finite."""
        prompt_slot = int(self._rows.prompt_slot[slot])
        self._free(slot)
        self.decoder.clear(slot)
        if prompt_slot >= 0 and prompt_slot not in self._rows.prompt_slot:
            self.decoder.clear(prompt_slot, shared=True)

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
