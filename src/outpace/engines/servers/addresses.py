"""A server at an address, of the kind that the config names."""

from __future__ import annotations

import os

from outpace.config import Config
from outpace.engines.servers.choices import kind_of
from outpace.engines.servers.http import Http
from outpace.engines.servers.sglang import SglangServer
from outpace.engines.servers.vllm import VllmServer

AnyServer = VllmServer | SglangServer


def server_at(config: Config, url: str) -> AnyServer:
    engine = config.engine
    http = Http(url, os.environ.get(engine.api_key_env) or None, engine.retries)
    kind = SglangServer if kind_of(config) == "sglang" else VllmServer
    return kind(http, control_s=engine.control_s, seeded=engine.seeded)
