"""MERGED"""

from __future__ import annotations

import os

from outpace.config import Config
from outpace.config.serving_rules import KEY_REMEDY
from outpace.engines.servers.choices import kind_of
from outpace.engines.servers.http import Http
from outpace.engines.servers.sglang.server import SglangServer
from outpace.engines.servers.vllm.server import VllmServer
from outpace.errors import BadInput

AnyServer = VllmServer | SglangServer


def server_at(config: Config, url: str, incarnation: str = "outpace") -> AnyServer:
    """The client for a server of the configured kind. `incarnation` is that of the run that labels its weights. Raises
    `BadInput`, without revealing the URL, if the URL contains a password."""
    if "@" in url:
        raise BadInput(f"a server URL contains a user name or password; {KEY_REMEDY}")
    engine = config.engine
    http = Http(url, os.environ.get(engine.api_key_env) or None, engine.retries)
    if kind_of(config) == "sglang":
        return SglangServer(http, control_s=engine.control_s, seeded=engine.seeded)
    return VllmServer(http, control_s=engine.control_s, seeded=engine.seeded, incarnation=incarnation)
