"""An engine that writes prepared texts token by token, policy clients on it, and a gateway in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI

from outpace.models.chat_format import TemplateChatFormat
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.gateway import protocol
from outpace.rollouts.gateway.server import Gateway
from outpace.types import Endpoint, EngineStats, Generation, GroupOrder, Ints, LoadReport, Manifest, Sampling, Version


class TypingEngine:
    """`outpace.protocols.Engine`: request i gets text i; the last text repeats.

    A text is available at once, or with `by_hand` only as far as `write` allows. An exception in place of a text is
    raised."""

    def __init__(self, tokenizer: Any, texts: list[str | Exception], by_hand: bool) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._changed = asyncio.Condition()
        self._written = 0 if by_hand else 1 << 30
        self._streamed = 0
        self._tokens: dict[str, list[int]] = {}  # of requests in flight
        self._aborted: set[str] = set()
        self.samplings: list[Sampling] = []
        self.prompts: list[str] = []
        self.aborted: list[str] = []
        self.started = asyncio.Event()
        self.stopped = asyncio.Event()

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        text = self._texts[min(len(self.prompts), len(self._texts) - 1)]
        self.prompts.append(self._tokenizer.decode(token_ids.tolist()))
        self.samplings.append(sampling)
        self.started.set()
        if isinstance(text, Exception):
            raise text
        tokens = self._tokens[request_id] = self._tokenizer.encode(text, add_special_tokens=False)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._written >= len(tokens) or request_id in self._aborted)
        finally:
            del self._tokens[request_id]
            async with self._changed:
                self._changed.notify_all()
        kept = tokens[: self._written]
        length = np.arange(1, len(kept) + 1)
        stop = "aborted" if request_id in self._aborted else "stop" if len(kept) < sampling.max_tokens else "length"
        return Generation(
            np.array(kept, np.int32),
            (-length / 100).astype(np.float32),
            np.full(len(kept), 3, np.int32),
            stop,  # type: ignore[arg-type]
        )

    async def write(self, tokens: int) -> None:
        """Make this many tokens of every request available."""
        async with self._changed:
            self._written = tokens
            self._changed.notify_all()

    async def write_slowly(self, patience_s: float) -> None:
        """Release one token at a time, each after the previous ones were streamed, and the rest at once when streaming
        stalls for `patience_s`. For one request at a time."""
        await self.started.wait()
        while self._tokens:
            await self.write(self._written + 1)
            try:
                async with asyncio.timeout(patience_s), self._changed:
                    await self._changed.wait_for(lambda: self._streamed >= self._written or not self._tokens)
            except TimeoutError:
                await self.write(1 << 30)
                return

    async def stream_tokens(self, request_id: str, after: int) -> Ints:
        async with self._changed:
            self._streamed = after
            self._changed.notify_all()
            await self._changed.wait_for(
                lambda: request_id not in self._tokens or min(self._written, len(self._tokens[request_id])) > after
            )
        return np.array(self._tokens.get(request_id, [])[after : self._written], np.int32)

    async def abort(self, request_ids: list[str]) -> None:
        async with self._changed:
            self.aborted += request_ids
            self.stopped.set()
            self._aborted.update(request_ids)
            self._changed.notify_all()

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        raise NotImplementedError

    async def release_pinned(self) -> None:
        raise NotImplementedError

    async def stats(self) -> EngineStats:
        raise NotImplementedError


@pytest.fixture
def typing_engine(tokenizer: Any) -> Callable[..., TypingEngine]:
    def make(*texts: str | Exception, by_hand: bool = False, with_tokenizer: Any = None) -> TypingEngine:
        return TypingEngine(with_tokenizer or tokenizer, list(texts), by_hand)

    return make


@pytest.fixture
def policy(tokenizer: Any, make_settings: Callable[..., Any]) -> Callable[..., PolicyClient]:
    """Makes the client of one episode; by default without stop strings and with 2,000 tokens."""

    def make(engine: Any, episode: int = 0, with_tokenizer: Any = None, **changes: Any) -> PolicyClient:
        chosen = with_tokenizer or tokenizer
        settings = make_settings(**{"max_tokens": 2000, "stop_strings": (), **changes})
        chat_format = TemplateChatFormat(chosen, (chosen.eos_token_id,))
        return PolicyClient(engine, chat_format, settings, GroupOrder(7, 0, 0, 0, 8), episode)

    return make


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway("127.0.0.1", 0, "policy-model")
    yield gateway
    await gateway.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def agent_of() -> AsyncIterator[Callable[[Endpoint], AsyncOpenAI]]:
    """Makes the official client for an endpoint, without retries."""
    made: list[AsyncOpenAI] = []

    def make(endpoint: Endpoint) -> AsyncOpenAI:
        made.append(AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0))
        return made[-1]

    yield make
    for client in made:
        await client.close()


@pytest.fixture(autouse=True)
def _log_pinned_again() -> Iterator[None]:
    protocol.log_pinned_once.cache_clear()
    yield
    protocol.log_pinned_once.cache_clear()
