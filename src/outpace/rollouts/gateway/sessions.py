"""Gateway sessions (one role of one episode behind one URL) and their in-flight requests.

    Exchange: request_sent ─▶ deltas of the text, as far as it is certain ─▶ answer

Invariants
- A session is found by an unguessable id and protected by its own secret, which is compared in constant time.
- A session tracks all tasks started for it. When it closes, they are cancelled and awaited, and nothing here refers to
  the episode any more.
- The final answer is authoritative. Streamed text is a prefix of its content; the stream ends with the rest. If the
  final answer parses differently (reasoning without an opening tag, for example), it continues as plain text.
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
    """The part of an episode's client that the gateway uses.

    `listener` is called with id and prompt tokens when the request is sent. Cancelling a call aborts it on the engine.
    """

    @property
    def engine(self) -> Engine: ...

    @property
    def dialect(self) -> Dialect: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def stop_strings(self) -> Sequence[str]:
        """The run's stop strings, used for requests without their own."""
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
    """The episode ended before the answer was complete."""


class Session:
    """One role of one episode, behind one URL."""

    def __init__(self, client: EpisodeClient, role: str, model: str) -> None:
        self.id = secrets.token_hex(16)
        self._client: EpisodeClient | None = client
        self.role = role
        self.model = model
        self.secret = secrets.token_urlsafe(32)
        self.failure: PartFailed | None = None  # a component failure: retrying the request cannot help
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def client(self) -> EpisodeClient:
        """The episode's client. Raises `EpisodeEnded` after `close`, so that open connections do not keep it alive."""
        if self._client is None:
            raise EpisodeEnded
        return self._client

    def endpoint(self, origin: str) -> Endpoint:
        return Endpoint(f"{origin}/sessions/{self.id}/v1", self.secret, self.model)

    def accepts_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(errors="surrogateescape"), self.secret.encode())

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Start a task that is cancelled when the session closes."""
        if self._client is None:
            raise EpisodeEnded
        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        self._client = None
        await asyncio.gather(*map(ended, self._tasks))


async def ended(task: asyncio.Task[Any]) -> BaseException | None:
    """Cancel a task and wait until it is done. Returns the exception it raised, if any.

    A task is cancelled only once, so that its clean-up is not interrupted."""
    if not task.cancelling():
        task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() else task.exception()


class Sessions:
    """All sessions of a worker, by id and by episode."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_client: dict[EpisodeClient, dict[str, Session]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, client: EpisodeClient, role: str, model: str) -> Session:
        """Return the session of that role, created on first use; it lasts as long as the episode."""
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
        """Close all sessions of an episode. Returns the component failure its requests met, if any."""
        sessions = list(self._by_client.pop(client, {}).values())
        for session in sessions:
            del self._by_id[session.id]
        await asyncio.gather(*(session.close() for session in sessions))
        return next((session.failure for session in sessions if session.failure is not None), None)
