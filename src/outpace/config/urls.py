"""MERGED"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}
_LOOPBACK = ("127.0.0.1", "::1", "0.0.0.0", "::", "localhost")


class ServerAddress(NamedTuple):
    """A normalized server address. Equal for all spellings: case, default port, trailing slash, names of localhost."""

    scheme: str
    host: str
    port: int | None
    path: str


def server_address(url: str) -> ServerAddress:
    """Return the normalized address of a URL. Text that is not a URL is equal only to itself."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:  # the port is not a number, or too large
        return ServerAddress("", url, None, "")
    return ServerAddress(parts.scheme, "localhost" if host in _LOOPBACK else host, port, parts.path.rstrip("/"))


def is_server_url(url: str) -> bool:
    """Return whether `url` is a server URL such as `http://host:8000`; port and path are optional."""
    try:
        parts = urlsplit(url)
        return parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
