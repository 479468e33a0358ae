"""Who may talk to which episode.

Invariants
- A session is found by an unguessable id and opened by a secret of its own, which is compared in constant time.
- A session knows every piece of work that was started for it. When it closes, all of that is cancelled and has ended,
  and nothing here refers to the episode any more.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from outpace.errors import PartFailed
from outpace.models.dialect import Dialect
from outpace.protocols import Engine
from outpace.types import Answer, Endpoint, Ints, Message

T = TypeVar("T")
Listener = Callable[[str, Ints], None]


class EpisodeClient(Protocol):
    """What the gateway needs of an episode's client. A `listener` hears the id and the prompt of the request when it is
    sent; whoever cancels a call has it aborted on the engine too."""

    @property
    def engine(self) -> Engine: ...

    @property
    def dialect(self) -> Dialect: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def stop_strings(self) -> Sequence[str]:
        """Those of the run, for requests that bring none."""
        ...

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] = (),
        role: str = "policy",
        listener: Listener | None = None,
        **overrides: Any,
    ) -> Answer: ...

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        role: str = "policy",
        listener: Listener | None = None,
        **overrides: Any,
    ) -> Answer: ...


class EpisodeEnded(Exception):
    """The episode ended before the answer was there."""


class Session:
    """One role of one episode, behind one URL."""

    def __init__(self, client: EpisodeClient, role: str, model: str) -> None:
        self.id = secrets.token_hex(16)
        self._client: EpisodeClient | None = client
        self.role = role
        self.model = model
        self.secret = secrets.token_urlsafe(32)
        self.serious: PartFailed | None = None  # what no other attempt could do better
        self._work: set[asyncio.Task[Any]] = set()

    @property
    def client(self) -> EpisodeClient:
        """Raises `EpisodeEnded` after the end: a connection that stays open must not keep the episode alive."""
        if self._client is None:
            raise EpisodeEnded
        return self._client

    def endpoint(self, origin: str) -> Endpoint:
        return Endpoint(f"{origin}/sessions/{self.id}/v1", self.secret, self.model)

    def is_opened_by(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(errors="surrogateescape"), self.secret.encode())

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Work that ends with the session at the latest."""
        if self._client is None:
            raise EpisodeEnded
        task = asyncio.create_task(work())
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def close(self) -> None:
        self._client = None
        await asyncio.gather(*map(ended, self._work))


async def ended(task: asyncio.Task[Any]) -> BaseException | None:
    """Nobody waits for it any more: cancel it and see it end. Returns what it raised, if it did.

    Cancelled once only: one that is cleaning up after itself is not disturbed."""
    if not task.cancelling():
        task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() else task.exception()


class Sessions:
    """All sessions of a worker, by their id and by the episode they belong to."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_client: dict[EpisodeClient, dict[str, Session]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, client: EpisodeClient, role: str, model: str) -> Session:
        """The session of that role; there is one for as long as the episode lasts."""
        roles = self._by_client.setdefault(client, {})
        if role not in roles:
            roles[role] = Session(client, role, model)
            self._by_id[roles[role].id] = roles[role]
        return roles[role]

    def find(self, session_id: str) -> Session | None:
        return self._by_id.get(session_id)

    def clients(self) -> list[EpisodeClient]:
        return list(self._by_client)

    async def close(self, client: EpisodeClient) -> PartFailed | None:
        """End all sessions of an episode; says what went wrong that no other attempt could do better, if anything."""
        ended = list(self._by_client.pop(client, {}).values())
        for session in ended:
            del self._by_id[session.id]
        await asyncio.gather(*(session.close() for session in ended))
        return next((session.serious for session in ended if session.serious is not None), None)
