"""Data and interfaces between the parts of a server engine.

    ServerEngine ── the Engine protocol over one server: admission, requests, health, weight updates
      │
      ├── Server         client of one kind of server: requests, abort, pause, metrics (`server_base`; vLLM, SGLang)
      ├── Transport      transfers a snapshot: `prepare` while the server samples, `swap` while it is paused
      └── ServerProcess  the server process, if this run launched it

A server engine runs in its own process next to its server. It holds no tensors and does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

from outpace.types import Ints, Manifest, Sampling, StopReason, Version

STALE: Final[Version] = -1
"""The version of a server with unknown weights: older than any version a request can require."""

VersionSpan = tuple[Version, int, int]
"""(version, start, end): the version that sampled tokens start (inclusive) to end (exclusive) of a request."""


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
    """Configuration and capabilities that a server reports; None where it does not report."""

    kind: str
    version: str
    model: str  # model name to use in requests
    context: int | None = None
    dtype: str | None = None
    logprobs: str | None = None  # logprobs mode, in the server's own terms
    controls: bool = False  # can be paused and updated
    spans: bool = False  # reports the weight version of each token
    plugin: bool = False  # has outpace's weight-transfer engine
    adapters: bool = False  # can load adapters at runtime
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerRequirements:
    """Requirements of a run on a server."""

    model: str
    dtype: str
    context: int | None  # longest sequence; None: no requirement
    tokenizer: dict[str, list[int]]  # texts and their expected token ids
    transport: Literal["files", "memory", "ipc", "collective"]
    adapters: bool
    temperature: float
    lora_rank: int = 0


@dataclass(frozen=True)
class Pressure:
    """Load that a server reports."""

    running: int
    waiting: int
    cache_used: float  # 0 to 1
    preemptions: int  # since it started
    began: float | None = None  # start time by its own clock; a change means it was restarted


class PreparedWeights(Protocol):
    """Verified weights, stored where the server can load them."""

    version: Version
    nbytes: int  # transferred


@runtime_checkable
class PreparedAdapter(PreparedWeights, Protocol):
    """Prepared weights of an adapter; requests refer to it by name."""

    adapter: str


class Transport(Protocol):
    """Transfers snapshots to one server."""

    needs_pause: bool
    """Whether the server must be paused for `swap`. False for adapters, which are only registered."""

    async def prepare(self, manifest: Manifest) -> PreparedWeights:
        """Verify and stage the weights while the server keeps sampling. Raises `CorruptData` or `UpdateFailed`."""
        ...

    async def swap(self, ready: PreparedWeights) -> None:
        """Make the server load the weights. After any exception the server's weights are unknown."""
        ...

    async def forget(self, version: Version) -> None:
        """Remove what is stored for a version that is no longer used, or was never loaded."""
        ...

    async def close(self, server_stays: bool) -> None:
        """Clean up here and, if `server_stays`, on the server. No other method is called afterwards."""
        ...
