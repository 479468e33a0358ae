"""MERGED"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from outpace.engines.servers.http import Http
from outpace.engines.servers.spec import Facts, Pressure
from outpace.engines.servers.vllm.sampling import COMPLETIONS, GENERATE
from outpace.errors import ServerFaulty, ServerRefused

ABORT = "/abort_requests"
LABEL = "/update_weight_version"
PAUSE = "/pause"
LOAD_ADAPTER = "/v1/load_lora_adapter"

_QUERY_S = 20.0
_INFO_S = 60.0  # the first call inspects the whole machine
_START_TIME = "process_start_time_seconds"
_ROUTES = (GENERATE, COMPLETIONS, ABORT, LABEL, PAUSE, LOAD_ADAPTER)


async def read_facts(http: Http) -> Facts:
    """Query the server's info. `details` has its `routes`, the model name or path (`root`), whether it has `dev_mode`,
    the maximum number of concurrent sequences (`slots`), its `device` and `max_lora_rank`."""
    version, models, routes, config = await _query_all(http)
    own = models[0]
    model_config = _section(config, "model_config")
    dtype = model_config.get("dtype")
    return Facts(
        kind="vllm",
        version=version,
        model=str(own.get("id")),
        context=model_config.get("max_model_len") or own.get("max_model_len"),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        logprobs=model_config.get("logprobs_mode"),
        controls=PAUSE in routes,
        spans=LABEL in routes and GENERATE in routes,
        plugin=_section(config, "weight_transfer_config").get("backend") == "outpace",
        adapters=LOAD_ADAPTER in routes and bool(_section(config, "lora_config")),
        details={
            "routes": sorted(routes),
            "root": model_config.get("model") or own.get("root"),
            "dev_mode": config is not None,
            "slots": _section(config, "scheduler_config").get("max_num_seqs"),
            "device": _section(config, "device_config").get("device"),
            "max_lora_rank": _section(config, "lora_config").get("max_lora_rank"),
        },
    )


async def _query_all(http: Http) -> tuple[str, list[dict[str, Any]], set[str], dict[str, Any] | None]:
    """Send all queries concurrently, since each may be slow. The first failure cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            version, models = group.create_task(_version(http)), group.create_task(_models(http))
            routes, config = group.create_task(_routes(http)), group.create_task(_config(http))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return version.result(), models.result(), routes.result(), config.result()


async def read_pressure(http: Http) -> Pressure:
    """Read the load over all engines of the server: the sum of requests, the maximum of KV cache usage."""
    found: dict[str, list[float]] = {}
    for line in (await http.text("/metrics", deadline_s=_QUERY_S)).splitlines():
        if line.startswith(("vllm:", _START_TIME)):
            name = line.partition("{")[0].partition(" ")[0]
            found.setdefault(name, []).append(_number(http.url, line.rpartition(" ")[2]))
    if "vllm:num_requests_running" not in found:
        raise ServerFaulty(f"{http.url}/metrics: no vllm:num_requests_running")
    used = found.get("vllm:kv_cache_usage_perc") or found.get("vllm:gpu_cache_usage_perc") or [0.0]
    return Pressure(
        running=int(sum(found["vllm:num_requests_running"])),
        waiting=int(sum(found.get("vllm:num_requests_waiting", []))),
        cache_used=max(used),
        preemptions=int(sum(found.get("vllm:num_preemptions_total", []))),
        began=max(found.get(_START_TIME) or found.get("vllm:num_preemptions_created") or [], default=None),
    )


async def _version(http: Http) -> str:
    reply = await http.get("/version", deadline_s=_QUERY_S)
    if not isinstance(reply, dict) or not isinstance(reply.get("version"), str):
        raise ServerFaulty(f"{http.url}/version: no version in the response; is this a vLLM server?")
    return str(reply["version"])


async def _models(http: Http) -> list[dict[str, Any]]:
    reply = await http.get("/v1/models", deadline_s=_QUERY_S)
    models = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise ServerFaulty(f"{http.url}/v1/models: no model in the response")
    return sorted(models, key=lambda model: model.get("parent") is not None)  # adapters come last


async def _routes(http: Http) -> set[str]:
    """The routes we use that the server has. If its OpenAPI listing is disabled, probe each with a wrong method: an
    existing route replies 405."""
    try:
        reply = await http.get("/openapi.json", deadline_s=_INFO_S)
        return {route for route in _ROUTES if route in _section(reply, "paths")}
    except ServerRefused:
        return {route for route in _ROUTES if await _exists(http, route)}


async def _exists(http: Http, route: str) -> bool:
    try:
        await http.text(route, deadline_s=_QUERY_S)
    except ServerRefused as refusal:
        return refusal.status == 405
    return True


async def _config(http: Http) -> dict[str, Any] | None:
    """The server's configuration; None if it is not in dev mode."""
    try:
        reply = await http.get("/server_info", deadline_s=_INFO_S, query={"config_format": "json"})
    except ServerRefused:
        return None
    return _section(reply, "vllm_config")


def _section(content: Any, name: str) -> dict[str, Any]:
    found = content.get(name) if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def _number(url: str, text: str) -> float:
    """Parse a metric. A gauge that was never set may be NaN, which is rejected."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ServerFaulty(f"{url}/metrics: {text!r} is not a number")
    return number
