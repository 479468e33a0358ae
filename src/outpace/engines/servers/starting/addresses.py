"""A server at an address, of the kind that the config names."""

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
    """`incarnation`: of the run that its weights are for. Raises `BadInput`, without a word of what is in the address,
    where that has a password."""
    if "@" in url:
        raise BadInput(f"a server's address holds a user name or password; {KEY_REMEDY}")
    engine = config.engine
    http = Http(url, os.environ.get(engine.api_key_env) or None, engine.retries)
    if kind_of(config) == "sglang":
        return SglangServer(http, control_s=engine.control_s, seeded=engine.seeded)
    return VllmServer(http, control_s=engine.control_s, seeded=engine.seeded, incarnation=incarnation)
