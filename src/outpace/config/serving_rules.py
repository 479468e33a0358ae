"""MERGED"""

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
"""Values that vLLM accepts for `--max-lora-rank`."""
KEY_REMEDY = "remove it, and put the key into the environment variable named by engine.api_key_env"


def _check_urls(config: Config) -> Iterator[str]:
    urls = config.engine.urls
    first_at: dict[ServerAddress, int] = {}
    for position, url in enumerate(urls):
        first = first_at.setdefault(server_address(url), position)
        if "@" in url:  # do not repeat the URL: this line may end up in a log
            yield f"engine.urls: a URL contains a user name or password; {KEY_REMEDY}"
        elif not is_server_url(url):
            yield f"engine.urls: {url!r} is not a server URL; write http://host:port"
        elif first != position:
            yield f"engine.urls: {urls[first]} and {url} are the same server; list each server once"


def _check_embedded(config: Config) -> Iterator[str]:
    if config.engine.kind != "embedded":
        return
    remedy = 'engine.kind is "embedded"; set it to vllm or sglang, or leave this out'
    if config.engine.urls:
        yield f"engine.urls: {remedy}"
    yield from (f"{key}: no server is started, because {remedy}" for key in _changed("launch", config.launch))
    for key in _changed("engine", config.engine):
        if key in ("engine.api_key_env", "engine.seeded"):
            yield f"{key}: only servers use it, and {remedy}"
    if config.weights.transport != "auto":
        yield f"weights.transport: the embedded engine always reads weights from memory, and {remedy}"
    if config.weights.dir is not None and not config.weights.delta:
        yield "weights.dir: the embedded engine reads only delta files; set weights.delta, or leave this out"


def _check_server_source(config: Config) -> Iterator[str]:
    engine = config.engine
    if engine.kind == "embedded":
        return
    if engine.path != "auto":
        yield f"engine.path: only the embedded engine uses it, and engine.kind is {engine.kind}; leave this out"
    if engine.urls and engine.count != len(engine.urls):
        servers = plural(len(engine.urls), "server")
        yield f"engine.count: is {engine.count}, but engine.urls lists {servers}; leave this out"
    if engine.urls:
        for key in _changed("launch", config.launch):
            yield f"{key}: engine.urls lists running servers, so none is started; remove one of the two"
    elif config.launch.port and config.launch.port + (engine.count or 1) - 1 > LAST_PORT:
        yield f"launch.port: {engine.count} servers starting at {config.launch.port} exceed port {LAST_PORT}; lower it"


def _check_server_mode(config: Config) -> Iterator[str]:
    kind = config.engine.kind
    if kind == "embedded":
        return
    if config.run.deterministic:
        yield f'run.deterministic: {kind} is not deterministic; use engine.kind = "embedded"'
    if config.run.runtime == "inline":
        yield f'run.runtime: {kind} runs in separate processes; use "local", or engine.kind = "embedded"'


def _check_transport(config: Config) -> Iterator[str]:
    transport = config.weights.transport
    if transport == "ipc" and (config.run.device == "cpu" or config.run.deterministic):
        yield 'weights.transport: "ipc" shares GPU memory, but run.device is cpu; use "memory"'
    if config.engine.kind == "sglang" and transport not in ("auto", "files"):
        yield f'weights.transport: sglang supports only "files", not "{transport}"; leave this out'
    if transport == "ipc" and config.weights.delta:
        yield 'weights.delta: "ipc" shares weights without a copy, so there is no delta; remove one of the two'
    if config.lora.rank == 0:
        return
    if config.engine.kind == "vllm" and transport not in ("auto", "files"):
        yield f'weights.transport: vllm loads adapters from files, not by "{transport}"; leave this out'
    if config.weights.delta:
        yield "weights.delta: adapters are small and change completely; leave this out, or set lora.rank to 0"


def _check_lora(config: Config) -> Iterator[str]:
    lora = config.lora
    if lora.rank == 0 and "lora.targets" in _changed("lora", lora):
        yield "lora.targets: lora.rank is 0, so the full model is trained; set a rank, or leave this out"
    if lora.rank > 0 and not lora.targets:
        yield "lora.targets: is empty, so no module would be trained; name some, or leave this out"
    if config.engine.kind == "vllm" and lora.rank > VLLM_LORA_RANKS[-1]:
        yield f"lora.rank: vLLM supports at most rank {VLLM_LORA_RANKS[-1]}, not {lora.rank}; lower it"
    for target in lora.targets:
        if lora.targets.count(target) > 1:
            yield f"lora.targets: {target} is listed twice; remove one"


def _changed(name: str, section: Section) -> Iterator[str]:
    """Return the keys that differ from their defaults. A config saved by a run sets every key, so compare values."""
    defaults: Any = type(section)()
    return (f"{name}.{key}" for key, value in section if value != getattr(defaults, key))


SERVING_RULES: tuple[Rule, ...] = (
    _check_urls,
    _check_embedded,
    _check_server_source,
    _check_server_mode,
    _check_transport,
    _check_lora,
)
