"""Combinations of engines, servers, transports and adapters that are refused: what cannot work, or would be ignored.

Every rule takes a settled config and, like all rules, yields lines that start with the key to change. What is known
only on the machine (is there a GPU, does the server have the plugin) is refused when things start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outpace.config import Config
from outpace.config.algorithm_rules import Rule
from outpace.config.section import Section
from outpace.config.urls import ServerAddress, is_server_url, server_address
from outpace.wording import plural

LAST_PORT = 65535
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `--max-lora-rank`."""
KEY_REMEDY = "leave that out, and put a key into the environment variable that engine.api_key_env names"


def _urls_are_urls(config: Config) -> Iterator[str]:
    urls = config.engine.urls
    first_at: dict[ServerAddress, int] = {}
    for position, url in enumerate(urls):
        first = first_at.setdefault(server_address(url), position)
        if "@" in url:  # and not a word of what is in it: this line may end up in a log
            yield f"engine.urls: an address holds a user name or password; {KEY_REMEDY}"
        elif not is_server_url(url):
            yield f"engine.urls: {url!r} is no server's address; write http://host:port"
        elif first != position:
            yield f"engine.urls: {urls[first]} and {url} are the same server; name every server once"


def _the_embedded_engine_is_no_server(config: Config) -> Iterator[str]:
    if config.engine.kind != "embedded":
        return
    remedy = 'engine.kind is "embedded"; set it to vllm or sglang, or leave this out'
    if config.engine.urls:
        yield f"engine.urls: {remedy}"
    yield from (f"{key}: nothing is launched, {remedy}" for key in _changed("launch", config.launch))
    for key in _changed("engine", config.engine):
        if key in ("engine.api_key_env", "engine.seeded"):
            yield f"{key}: there is no server to send it to, {remedy}"
    if config.weights.transport != "auto":
        yield f"weights.transport: the embedded engine reads weights from memory, {remedy}"
    if config.weights.dir is not None and not config.weights.delta:
        yield "weights.dir: the embedded engine reads no files but deltas; set weights.delta, or leave this out"


def _servers_are_theirs_or_ours(config: Config) -> Iterator[str]:
    engine = config.engine
    if engine.kind == "embedded":
        return
    if engine.path != "auto":
        yield f"engine.path: is of the embedded engine, and engine.kind is {engine.kind}; leave this out"
    if engine.urls and engine.count != len(engine.urls):
        servers = plural(len(engine.urls), "server")
        yield f"engine.count: engine.urls names {servers}, not {engine.count}; leave this out"
    if engine.urls:
        for key in _changed("launch", config.launch):
            yield f"{key}: the servers of engine.urls are running already; leave out one of the two"
    elif config.launch.port and config.launch.port + (engine.count or 1) - 1 > LAST_PORT:
        yield f"launch.port: {engine.count} servers from {config.launch.port} on go beyond {LAST_PORT}; lower it"


def _servers_are_processes(config: Config) -> Iterator[str]:
    kind = config.engine.kind
    if kind == "embedded":
        return
    if config.run.deterministic:
        yield f'run.deterministic: {kind} is not repeatable token by token; use engine.kind = "embedded"'
    if config.run.runtime == "inline":
        yield f'run.runtime: {kind} needs processes of its own; use "local", or engine.kind = "embedded"'


def _weights_can_travel(config: Config) -> Iterator[str]:
    transport = config.weights.transport
    if transport == "ipc" and (config.run.device == "cpu" or config.run.deterministic):
        yield 'weights.transport: "ipc" shares the memory of a GPU, and run.device is cpu; use "memory"'
    if config.engine.kind == "sglang" and transport not in ("auto", "files"):
        yield f'weights.transport: sglang takes weights as files, not by "{transport}"; leave this out'
    if transport == "ipc" and config.weights.delta:
        yield 'weights.delta: by "ipc" weights do not travel at all; leave one of the two out'
    if config.lora.rank == 0:
        return
    if config.engine.kind == "vllm" and transport not in ("auto", "files"):
        yield f'weights.transport: adapters reach vllm as files, not by "{transport}"; leave this out'
    if config.weights.delta:
        yield "weights.delta: adapters are small, and all of their values change; leave this out, or set lora.rank to 0"


def _adapters_are_wanted(config: Config) -> Iterator[str]:
    lora = config.lora
    if lora.rank == 0 and "lora.targets" in _changed("lora", lora):
        yield "lora.targets: lora.rank is 0, so the model itself is trained; set a rank, or leave this out"
    if lora.rank > 0 and not lora.targets:
        yield "lora.targets: names no module, so nothing would be trained; name some, or leave this out"
    if config.engine.kind == "vllm" and lora.rank > VLLM_LORA_RANKS[-1]:
        yield f"lora.rank: vLLM serves adapters of rank {VLLM_LORA_RANKS[-1]} at most, not {lora.rank}; lower it"
    for target in lora.targets:
        if lora.targets.count(target) > 1:
            yield f"lora.targets: {target} is there twice; once is enough"


def _changed(name: str, section: Section) -> Iterator[str]:
    """Keys whose values are not the defaults. (Of a config that was resolved and read again, every key is set.)"""
    defaults: Any = type(section)()
    return (f"{name}.{key}" for key, value in section if value != getattr(defaults, key))


SERVING_RULES: tuple[Rule, ...] = (
    _urls_are_urls,
    _the_embedded_engine_is_no_server,
    _servers_are_theirs_or_ours,
    _servers_are_processes,
    _weights_can_travel,
    _adapters_are_wanted,
)
