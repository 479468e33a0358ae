"""Data and interfaces between the parts of a server engine.

    ServerEngine ── the Engine protocol over one server: admission, requests, health, weight updates
      │
      ├── Server         client of one kind of server: requests, abort, pause, metrics (vLLM, SGLang)
      ├── Transport      transfers a snapshot: `prepare` while the server samples, then `swap`
      └── ServerProcess  the server process, if this run launched it

A server engine runs in its own process next to its server. It holds no tensors and does not import torch.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
import numpy as np

from outpace.engines.server.http import HttpClient, deadline, status_error
from outpace.errors import ServerFailed, ServerFaulty, ServerRefused, one_line
from outpace.types import Ints, LoadPhases, Manifest, Sampling, StopReason, Version
from outpace.weights.delta import LocalSnapshot

T = TypeVar("T")

STALE: Final[Version] = -1
"""The version of a server with unknown weights: older than any version a request can require."""

VersionSpan = tuple[Version, int, int]
"""(version, start, end): the version that sampled tokens start (inclusive) to end (exclusive) of a request."""

VersionOf = Callable[[str], Version | None]
"""Maps a server's weight label to a version, or to None if the label does not belong to this run."""

QUERY_S = 20.0
"""Timeout of a query."""

NO_LOGPROB = -9999.0
"""Placeholder that servers send for a missing logprob."""

_ROUNDING_TOLERANCE = 1e-3  # half-precision softmax can yield a logprob slightly above 0


@dataclass(frozen=True)
class ServerRequest:
    """One request to a server. `salt` separates the cached prefixes of different weight versions."""

    id: str
    token_ids: Ints
    sampling: Sampling
    salt: str
    adapter: str | None = None  # adapter name; None: the base model


@dataclass(frozen=True)
class Piece:
    """Tokens sampled since the last piece. The last piece has the stop reason and, if the server reports versions, the
    spans of the whole request."""

    tokens: list[int]
    logprobs: list[float]
    stop: StopReason | None = None
    spans: list[VersionSpan] | None = None


@dataclass(frozen=True)
class ServerFacts:
    """Configuration and capabilities reported by a server; None if not reported."""

    kind: str
    version: str
    model: str  # model name to use in requests
    context: int | None = None
    dtype: str | None = None
    logprobs: str | None = None  # logprobs mode, in the server's own terms
    controls: bool = False  # can be paused and updated
    plugin: bool = False  # has outpace's weight-transfer engine
    adapters: bool = False  # can load adapters at runtime
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pressure:
    """Load that a server reports."""

    running: int
    waiting: int
    cache_used: float  # 0 to 1
    preemptions: int  # since it started
    began: float | None = None  # start time by its own clock; a change means it was restarted


@dataclass(frozen=True)
class PreparedWeights:
    """Verified weights, stored where the server can load them."""

    version: Version
    nbytes: int  # transferred
    source: dict[str, Any]  # what the transport tells the server to load
    adapter: str | None = None  # the name of the adapter in requests; None: a whole model


class Transport(Protocol):
    """Transfers snapshots to one server."""

    needs_pause: bool
    """Whether the server must be paused for `swap`. False for adapters, which are only registered, and for a server
    that pauses by itself."""

    async def prepare(self, manifest: Manifest) -> PreparedWeights:
        """Verify and prepare the weights while the server keeps sampling. Raises `CorruptData` or `UpdateFailed`."""
        ...

    async def swap(self, ready: PreparedWeights) -> LoadPhases | None:
        """Make the server load the weights. After any exception the server's weights are unknown.

        Returns the phases if the server paused, labeled the weights and resumed by itself."""
        ...

    async def forget(self, version: Version) -> None:
        """Delete the stored weights of a version that is no longer used or was never loaded."""
        ...

    async def close(self, server_stays: bool) -> None:
        """Clean up here and, if `server_stays`, on the server. No other method is called afterwards."""
        ...


SendWeights = Callable[[Manifest, dict[str, Any]], Awaitable[None]]
"""Makes the learner send a snapshot to the receiver that joins the given process group. Raises `UpdateFailed`."""


@dataclass(frozen=True)
class TransportTarget:
    """The target server of a transport, and the resources it may use."""

    kind: str  # vllm or sglang
    http: HttpClient
    control_s: float  # engine.control_s: time limit of a call that loads weights
    directory: Path  # for files, readable by the server; belongs to this transport
    adapters: bool = False  # lora.rank: snapshots are adapters, not whole models
    copy: LocalSnapshot | None = None  # weights.delta: a local snapshot, updated by deltas
    send: SendWeights | None = None  # collective
    uses_gpu: bool = False
    label: Callable[[Version], str] = str  # label of a version on the server
    recompute: bool = False  # engine.kv: after a swap, running requests recompute their KV cache


class Server(ABC):
    """A server at one address. Every method has its own deadline and raises `ServerFailed`.

    `seeded`: send each request's seed. `control_s`: timeout of pause, resume and label calls. `incarnation`: identifies
    this start of the run. Weight labels include it, because every run counts versions from 0."""

    def __init__(
        self, http: HttpClient, *, control_s: float = 120.0, seeded: bool = False, incarnation: str = "outpace"
    ) -> None:
        self.url = http.url
        self.http = http
        self._control_s = control_s
        self._seeded = seeded
        self._label_prefix = f"{incarnation}."
        self._probes = itertools.count(1)

    @abstractmethod
    async def facts(self) -> ServerFacts: ...

    async def tokenized(self, text: str) -> list[int] | None:
        """Token ids by the server's own tokenizer; None if it has no such route."""
        return await self._tokenized({"prompt": text, "add_special_tokens": False})

    @abstractmethod
    def stream(self, request: ServerRequest) -> AsyncGenerator[Piece, None]:
        """Sample tokens. Closing the iterator early ends the request on the server."""

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> bool:
        """Abort requests; each stream gets a last piece. False: not supported, the caller must close the streams."""

    async def probe(self, deadline_s: float) -> None:
        """Sample one token, bypassing our own admission queue."""
        prompt = np.zeros(await self._probe_length(), dtype=np.int32)
        request = ServerRequest(f"probe-{next(self._probes)}", prompt, Sampling(max_tokens=1, seed=0), salt="probe")
        tokens = 0
        async with deadline(self.url, deadline_s), aclosing(self.stream(request)) as pieces:
            async for piece in pieces:
                tokens += len(piece.tokens)
        if not tokens:
            raise ServerFaulty(f"{self.url}: a probe returned no token")

    async def _probe_length(self) -> int:
        return 1

    @abstractmethod
    async def pressure(self) -> Pressure: ...

    @abstractmethod
    async def pause(self) -> None:
        """Pause at a token boundary. Running requests stay in the server."""

    @abstractmethod
    async def resume(self, recompute: bool) -> None:
        """Resume. With `recompute`, running requests recompute their KV cache, or end as interrupted."""

    @abstractmethod
    async def paused(self) -> bool | None:
        """Whether the server is paused; None if it does not report it."""

    def label_of(self, version: Version) -> str:
        return f"{self._label_prefix}{version}"

    @abstractmethod
    async def label(self, version: Version) -> None:
        """Label tokens sampled from now on with this version, if the server reports versions."""

    async def close(self) -> None:
        await self.http.close()

    async def _control(self, route: str, body: Any = None, query: dict[str, str] | None = None) -> None:
        """POST a control call. All of them are idempotent."""
        reply = await self.http.post(route, body, query=query, deadline_s=self._control_s, repeatable=True)
        if isinstance(reply, dict) and reply.get("success") is False:
            raise ServerFaulty(f"{self.url}{route}: {one_line(reply.get('message', 'failed'))}")

    def _version_of(self, label: str) -> Version | None:
        """The version in a label; None if the label does not belong to this run."""
        version = label.removeprefix(self._label_prefix)
        return int(version) if version != label and version.isdecimal() else None

    async def _tokenized(self, body: dict[str, Any]) -> list[int] | None:
        try:
            reply = await self.http.post("/tokenize", body, deadline_s=QUERY_S, repeatable=True)
        except ServerRefused:
            return None
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        return [int(token) for token in tokens] if isinstance(tokens, list) else None


def sampling_parameters(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters with the same name in vLLM and SGLang. All are sent: a missing one would default to the
    server's setting or the model's generation config."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": sampling.stop_strings,
        "stop_token_ids": sampling.stop_ids,
        "skip_special_tokens": False,  # a stop string may be a special token
        "spaces_between_special_tokens": False,
    }


async def read_models(http: HttpClient) -> list[dict[str, Any]]:
    """The models that the server lists, base models first."""
    reply = await http.get("/v1/models", deadline_s=QUERY_S)
    models = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise ServerFaulty(f"{http.url}/v1/models: no model in the response")
    return sorted(models, key=lambda model: model.get("parent") is not None)


def decode_chunk(where: str, decoder: msgspec.json.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerFaulty(f"{where}: invalid chunk ({error}): {one_line(payload[:200])}") from error


def check_logprobs(where: str, values: Iterable[float | None]) -> list[float]:
    """Validate logprobs: finite, present, at most 0."""
    return [_check_logprob(where, value) for value in values]


def _check_logprob(where: str, value: float | None) -> float:
    if value is None or not math.isfinite(value) or not NO_LOGPROB < value <= _ROUNDING_TOLERANCE:
        raise ServerFaulty(f"{where}: invalid token logprob {value}")
    return min(value, 0.0)


def stream_error(where: str, message: object, status: int | None) -> ServerFailed:
    """The error for an error message inside a stream."""
    text = f"{where}: {'' if status is None else f'{status} '}{one_line(message)}"
    return ServerFaulty(text) if status is None else status_error(text, status)
