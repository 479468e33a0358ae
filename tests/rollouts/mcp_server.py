"""An MCP server for tests, on its standard streams or on a given port. Its tool names start with `prefix`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.types import BlobResourceContents, CallToolResult, EmbeddedResource, ResourceLink, TextContent

server = MCPServer("tests", log_level="CRITICAL")
met = asyncio.Event()
waiting = 0


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def whoami(variable: str = "") -> str:
    """The number of this process, or a variable of its environment."""
    return os.environ.get(variable, "") if variable else str(os.getpid())


async def meet(count: int) -> str:
    """Wait until `count` calls are waiting."""
    global waiting
    waiting += 1
    if waiting == count:
        met.set()
    await met.wait()
    return "met"


async def hang() -> str:
    """Never come back."""
    await asyncio.sleep(3600)
    return "never"


def breed() -> int:
    """Start a child that leaves the process group, holds every pipe and outlives the server; returns its pid."""
    child = os.fork()
    if child == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    return child


def fail() -> str:
    """Raise."""
    raise ValueError("broken")


def picture() -> Image:
    """Give an image."""
    return Image(data=b"123456", format="png")


def flood() -> str:
    """Ten megabytes."""
    return "z" * 10_000_000


def parts() -> CallToolResult:
    """Several parts of different kinds."""
    blob = BlobResourceContents(uri="file:///x.bin", blob="AAAAAA==")
    link = ResourceLink(name="more", uri="https://example.org/more")
    return CallToolResult(
        content=[TextContent(text="one"), EmbeddedResource(resource=blob), link, TextContent(text="two")]
    )


def main(prefix: str, port: str = "") -> None:
    tools: tuple[Any, ...] = (add, whoami, meet, hang, breed, fail, picture, flood, parts)
    for tool in tools:
        server.tool(name=f"{prefix}{tool.__name__}", structured_output=False)(tool)
    if port:
        server.run("streamable-http", port=int(port))
    else:
        server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
