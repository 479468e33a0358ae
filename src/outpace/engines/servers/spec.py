"""The seams inside this room.

    Door ── the Engine protocol over one server: waits for weights, limits, retries, health, partial output
      │
      ├── Server     one kind of server: how it is asked, aborted, paused, measured (vllm, sglang)
      ├── Transport  how a snapshot reaches it: `prepare` while it samples, `swap` while it holds still
      └── Process    the server itself, where we have started it (launching)

A door lives in a process of its own beside its server, holds no tensors, and loads no torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

from outpace.types import Ints, Manifest, Sampling, StopReason, Version

STALE: Final[Version] = -1
"""Older than anything that can be asked for: what a server has of which nobody knows what weights it holds."""

Span = tuple[Version, int, int]
"""Tokens start (inclusive) to end (exclusive) of one request were sampled by this version."""


@dataclass(frozen=True)
class Ask:
    """One request to a server. `salt` keeps prefixes of one version apart from those of another."""

    id: str
    token_ids: Ints
    sampling: Sampling
    salt: str
    adapter: str | None = None  # the name of the adapter to sample with; None: the model itself


@dataclass(frozen=True)
class Piece:
    """What a server has sampled since the last piece. The last one has the stop reason and, where the server keeps
    account of versions, the spans of the whole request."""

    tokens: list[int]
    logprobs: list[float]
    stop: StopReason | None = None
    spans: list[Span] | None = None


@dataclass(frozen=True)
class Facts:
    """What a server says of itself; None where it does not say."""

    kind: str
    version: str
    model: str  # the name to ask for
    context: int | None = None
    dtype: str | None = None
    logprobs: str | None = None  # how logprobs are reported, in the server's own words
    controls: bool = False  # whether it can be paused and updated
    spans: bool = False  # whether it accounts for versions
    plugin: bool = False  # whether outpace's transfer engine is in it
    adapters: bool = False  # whether adapters can be loaded while it runs
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """What a run needs of a server."""

    model: str
    dtype: str
    context: int | None  # longest sequence; None: whatever it takes
    tokenizer: dict[str, list[int]]  # texts, and the ids that they must become
    transport: Literal["files", "memory", "ipc", "collective"]
    adapters: bool
    temperature: float
    lora_rank: int = 0


@dataclass(frozen=True)
class Pressure:
    """How busy a server says it is."""

    running: int
    waiting: int
    cache_used: float  # 0 to 1
    preemptions: int  # since it started
    began: float | None = None  # when it started, by its own clock: another value is another server


class Server(Protocol):
    """One kind of server at one address. Every method has a deadline of its own and raises a `ServerFailed`."""

    url: str

    async def facts(self) -> Facts: ...

    async def tokenized(self, text: str) -> list[int] | None:
        """The ids that its own tokenizer gives; None where it cannot be asked."""
        ...

    def stream(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Sample. Closing the iterator early ends the request there."""
        ...

    async def abort(self, request_ids: list[str]) -> bool:
        """End these requests: each stream gets its last piece. False: it cannot, and the streams are to be closed."""
        ...

    async def probe(self, deadline_s: float) -> None:
        """One token, really sampled, past every queue of our own."""
        ...

    async def pressure(self) -> Pressure: ...

    async def pause(self) -> None:
        """Hold still at a token boundary; running requests stay."""
        ...

    async def resume(self, recompute: bool) -> None:
        """Go on; with `recompute`, running requests compute their keys and values anew."""
        ...

    async def paused(self) -> bool | None:
        """Whether it holds still; None where it does not say."""
        ...

    async def label(self, version: Version) -> None:
        """From here on tokens are of this version, of this run's: for servers that account for it."""
        ...

    async def close(self) -> None: ...


class Ready(Protocol):
    """Weights that are verified and lie where the server can take them."""

    version: Version
    nbytes: int  # that had to travel


@runtime_checkable
class ReadyAdapter(Ready, Protocol):
    """The same, where they are an adapter: requests name it."""

    adapter: str


class Transport(Protocol):
    """How a snapshot reaches one server."""

    holds_still: bool
    """Whether the server must be paused for `swap`. An adapter is merely registered."""

    async def prepare(self, manifest: Manifest) -> Ready:
        """Verify it and bring it near, while the server goes on sampling. Raises `CorruptData` or `UpdateFailed`."""
        ...

    async def swap(self, ready: Ready) -> None:
        """Make the server take it. Whatever is raised here leaves it in doubt what the server holds."""
        ...

    async def forget(self, version: Version) -> None:
        """Nobody samples by this version any more, or it was not taken: what was kept for it may go."""
        ...

    async def close(self, server_stays: bool) -> None:
        """Leave nothing behind, here or in a server that stays when we go. Nothing else is called any more."""
        ...
