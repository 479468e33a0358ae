"""Addresses of servers: whether a text is one, and whether two name the same server."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}
_LOOPBACK = ("127.0.0.1", "::1", "0.0.0.0", "::", "localhost")


class ServerAddress(NamedTuple):
    """Equal for all spellings of one address: case, default port, trailing slash and names of this machine."""

    scheme: str
    host: str
    port: int | None
    path: str


def server_address(url: str) -> ServerAddress:
    """A text that is not a server's address is only equal to itself."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:  # the port is not a number, or too large
        return ServerAddress("", url, None, "")
    return ServerAddress(parts.scheme, "localhost" if host in _LOOPBACK else host, port, parts.path.rstrip("/"))


def is_server_url(url: str) -> bool:
    """`http://host:8000`, with or without a port and a path."""
    try:
        parts = urlsplit(url)
        return parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
