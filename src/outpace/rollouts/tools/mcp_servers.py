"""Tools of MCP servers, by the official `mcp` package: commands that speak on their standard streams, and URLs.

    episode ──▶ McpServer.call ──▶ the connection of this worker, shared by all episodes ──▶ server
                     │ gone?                     ▲ a task of its own enters it, keeps it open and leaves it
                     └── the next call opens another

Invariants
- A connection is entered and left in one task, as the package demands; calls come from any task, and run side by side.
- A server that cannot be had at the start is `BadInput`, within a bounded time. One that goes away later is an error of
  the call, which the model hears of, and is looked for again at the next one.
- The tools are those of the start: the policy is shown the same ones in every episode.
- A started command gets the environment of the worker. It and all that it has started have ended when `close` returns.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from outpace.errors import BadInput, one_line
from outpace.models.chat import Schema
from outpace.rollouts.tools.functions import ToolError
from outpace.rollouts.tools.mcp_command import Watch, running
from outpace.rollouts.tools.mcp_results import text_of
from outpace.rollouts.tools.results import told
from outpace.rollouts.tools.toolbox import Offer, by_name, leave_behind
from outpace.runtime.together import together

if TYPE_CHECKING:
    from mcp import Client

CONNECT_S = 20.0
"""How long a server may take to start, to greet and to list its tools."""

CLOSE_S = 10.0
"""How long a server may take to end; the package itself asks, then terminates, then kills, within less."""

GONE = (-32000, -32600)
"""Codes of errors after which another connection is needed: this one is closed, or its session forgotten. Servers use
the first for reasons of their own as well."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class _Gone(Exception):
    """The server cannot be reached, or went away."""


async def open_servers(addresses: Sequence[str], limit_s: float = CONNECT_S) -> list[McpServer]:
    """Connections to all servers, or `BadInput` in one line and none of them. Without addresses nothing is loaded."""
    if not addresses:
        return []
    await asyncio.to_thread(_load_package, addresses)
    servers = [McpServer(address) for address in addresses]
    try:
        await together(*(server.open(limit_s) for server in servers))
        by_name([server.offer for server in servers])
    except BaseException:
        await close_servers(servers)
        raise
    return servers


async def close_servers(servers: Sequence[McpServer]) -> None:
    await asyncio.gather(*(server.close() for server in servers))


class McpServer:
    """One server: a `ToolSource` whose tools are known once it is open."""

    def __init__(self, address: str) -> None:
        """`address` is a URL, or a command line. Must be made where an event loop runs."""
        self._address = address
        self._connection = _Connection(address)
        self._connections = {self._connection}  # those that have not ended
        self._closed = False
        self.tools: dict[str, Schema] = {}

    @property
    def offer(self) -> Offer:
        return Offer(f"tools.mcp: {self._address}", self)

    async def open(self, limit_s: float = CONNECT_S) -> None:
        """Wait for the server and its list of tools."""
        try:
            _, self.tools = await self._connection.ready(limit_s)
        except _Gone as error:
            raise BadInput(f"tools.mcp: {self._address} cannot be reached: {error}") from error

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        connection = self._living()
        try:
            client, _ = await connection.ready(CONNECT_S)
            result = await connection.run(client.call_tool(name, arguments))
        except _Gone as error:
            connection.end()
            raise ToolError(f"{name}: its server cannot be reached: {error}") from error
        except Exception as error:  # a boundary: what a server says, or how it breaks the protocol
            if getattr(error, "code", None) in GONE:
                connection.retire()
            raise ToolError(f"{name}: {told(error)}") from error
        return text_of(result)

    async def close(self) -> None:
        """End all connections, and with them the processes that were started for them."""
        self._closed = True
        for connection in self._connections:
            connection.end()
        await asyncio.gather(*(connection.ended() for connection in self._connections))

    def _living(self) -> _Connection:
        if self._closed:
            raise ToolError(f"{self._address} has been closed")
        if self._connection.over:
            log.warning("the MCP server %s went away; connecting again", self._address)
            self._connections = {one for one in self._connections if not one.left}
            self._connection = _Connection(self._address)
            self._connections.add(self._connection)
        return self._connection


class _Connection:
    """One session with a server, in a task that owns it."""

    def __init__(self, address: str) -> None:
        self._wanted_no_more = asyncio.Event()
        self._retired = False
        self._under_way = 0
        self._watch = Watch(self.end)
        self._ready: asyncio.Future[tuple[Client, dict[str, Schema]]] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(address))

    @property
    def over(self) -> bool:
        return self.left or self._retired or self._wanted_no_more.is_set()

    @property
    def left(self) -> bool:
        return self._owner.done()

    async def ready(self, limit_s: float) -> tuple[Client, dict[str, Schema]]:
        """The client and the tools; raises `_Gone` when there is no server, or none that answers in time."""
        either: set[asyncio.Future[Any]] = {self._ready, self._owner}
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done() and not self._ready.cancelled():
            return self._ready.result()
        self._owner.cancel()
        raise _Gone(f"the connection was closed{self._said}" if self.over else f"no answer within {limit_s:g} s")

    @property
    def _said(self) -> str:
        """The last words of a command, to stand behind how it ended."""
        return f", and said: {one_line(self._watch.last_line)}" if self._watch.last_line else ""

    async def run(self, request: Awaitable[T]) -> T:
        """What the server answers. A request that the end of the connection has forgotten ends as well."""
        work = asyncio.ensure_future(request)
        either: set[asyncio.Future[Any]] = {work, self._owner}
        self._under_way += 1
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.cancelled():
                raise _Gone("the connection was closed")
            return work.result()
        finally:
            self._under_way -= 1
            if not work.done():
                leave_behind(work)
            if self._retired:
                self.retire()

    def retire(self) -> None:
        """Take no more requests, and end with the last that is under way: the error of one may not be that of all."""
        self._retired = True
        if not self._under_way:
            self.end()

    def end(self) -> None:
        self._wanted_no_more.set()
        if not self._ready.done():
            self._owner.cancel()

    async def ended(self) -> None:
        await asyncio.wait({self._owner}, timeout=CLOSE_S)
        self._owner.cancel()
        await asyncio.wait({self._owner}, timeout=CLOSE_S)

    async def _own(self, address: str) -> None:
        try:
            async with _client(address, self._watch) as client:
                self._ready.set_result((client, await _tools_of(client)))
                await self._wanted_no_more.wait()
        except Exception as error:  # a boundary: how a server starts, breaks off or ends is not ours
            log.debug("the connection to %s ended", address, exc_info=True)
            if not self._ready.done():
                self._ready.set_exception(_Gone(told(_innermost(error)) + self._said))
        finally:
            if not self._ready.cancel() and not self._ready.cancelled():
                self._ready.exception()  # looked at: nobody may be waiting for it


def _load_package(addresses: Sequence[str]) -> None:
    """Import what is needed, and read the addresses, before anything is started."""
    try:
        from mcp import Client  # noqa: F401
    except ImportError:
        raise BadInput("tools.mcp: the mcp package, version 2, is needed: pip install 'outpace[mcp]'") from None
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # else a line for every request
    for address in addresses:
        if not _is_url(address):
            _command(address)


def _is_url(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def _command(address: str) -> list[str]:
    try:
        words = shlex.split(address)
    except ValueError as error:
        raise BadInput(f"tools.mcp: {address!r} is no command line: {error}") from None
    if not words:
        raise BadInput("tools.mcp: an address is empty; give a URL or a command line")
    return words


def _client(address: str, watch: Watch) -> Client:
    from mcp import Client

    return Client(address) if _is_url(address) else Client(running(_command(address), watch))


async def _tools_of(client: Client) -> dict[str, Schema]:
    tools, cursor = {}, None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            shown = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            tools[tool.name] = {"type": "function", "function": shown}
        cursor = page.next_cursor
        if cursor is None:
            return tools


def _innermost(error: BaseException) -> BaseException:
    """What went wrong, out of the groups that task groups raise."""
    return _innermost(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
