"""MERGED"""

from __future__ import annotations

from typing import Any

from outpace.engines.servers.http import Http
from outpace.engines.servers.sglang.sampling import GENERATE
from outpace.engines.servers.spec import Facts, Pressure
from outpace.errors import ServerFaulty, ServerRefused

ABORT = "/abort_request"
CONTINUE = "/continue_generation"
FLUSH = "/flush_cache"
LABEL = "/update_weight_version"
PAUSE = "/pause_generation"
TOKENIZE = "/tokenize"

_QUERY_S = 20.0
_FIRST_REQUEST_S = 120.0  # a first request may compile kernels
_MIN_DIFFERENCE = 1e-3
_UNRESOLVED = "auto"  # the server does not report the resolved value


async def read_facts(http: Http) -> Facts:
    """Query the server's info, and resume the server. `details` has the model name or path (`root`), the maximum number
    of concurrent sequences (`slots`), whether it streams only new tokens, and whether it has a tokenizer."""
    reply, models = await _settings(http), await _models(http)
    controls = await _controls(http)
    dtype = reply.get("dtype")
    return Facts(
        kind="sglang",
        version=str(reply["version"]),
        model=str(models[0].get("id")),
        context=models[0].get("max_model_len") or reply.get("context_length"),
        dtype=None if dtype in (None, _UNRESOLVED) else str(dtype),
        logprobs=await _logprobs_mode(http),
        controls=controls,
        spans=True,
        adapters=bool(reply.get("enable_lora")),
        details={
            "root": reply["model_path"],  # not from /model_info: that is the directory of the last update
            "slots": reply.get("max_running_requests"),
            "incremental": bool(reply.get("incremental_streaming_output")),
            "tokenizer": not reply.get("skip_tokenizer_init"),
            "max_lora_rank": reply.get("max_lora_rank"),
            "deterministic": bool(reply.get("enable_deterministic_inference")),
        },
    )


async def read_loads(http: Http) -> list[dict[str, Any]]:
    """The load of each data-parallel rank."""
    reply = await http.get("/v1/loads", deadline_s=_QUERY_S, query={"include": "core,queues"})
    loads = reply.get("loads") if isinstance(reply, dict) else None
    if not isinstance(loads, list) or not all(
        isinstance(load, dict) and isinstance(load.get("num_running_reqs"), int) for load in loads
    ):
        raise ServerFaulty(f"{http.url}/v1/loads: no num_running_reqs in the response")
    return loads


async def read_label(http: Http) -> str | None:
    """The label of the server's weights."""
    reply = await http.get("/model_info", deadline_s=_QUERY_S)
    return str(reply["weight_version"]) if isinstance(reply, dict) and "weight_version" in reply else None


def pressure_of(loads: list[dict[str, Any]], retracted_before: int) -> Pressure:
    """The load over all ranks: the sum of requests, the maximum of KV cache usage. SGLang calls preempted requests
    retracted and reports only those since its last log line, hence `retracted_before`, the sum so far."""
    retracted = sum(int((load.get("queues") or {}).get("retracted", 0)) for load in loads)
    return Pressure(
        running=sum(int(load["num_running_reqs"]) for load in loads),
        waiting=sum(int(load.get("num_waiting_reqs", 0)) for load in loads),
        cache_used=max((float(load.get("token_usage", 0.0)) for load in loads), default=0.0),
        preemptions=retracted_before + retracted,
    )


async def _settings(http: Http) -> dict[str, Any]:
    reply = await http.get("/server_info", deadline_s=_QUERY_S)
    if not isinstance(reply, dict) or "version" not in reply or "model_path" not in reply:
        raise ServerFaulty(f"{http.url}/server_info: no version and model in the response; is this an SGLang server?")
    return reply


async def _models(http: Http) -> list[dict[str, Any]]:
    reply = await http.get("/v1/models", deadline_s=_QUERY_S)
    models = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise ServerFaulty(f"{http.url}/v1/models: no model in the response")
    return sorted(models, key=lambda model: model.get("parent") is not None)  # adapters come last


async def _controls(http: Http) -> bool:
    """Whether our key is valid for the control routes. Tested with resume: a server left paused by an earlier update
    would not answer the following queries, and does not report that it is paused."""
    try:
        await http.post(CONTINUE, {}, deadline_s=_QUERY_S, repeatable=True)
    except ServerRefused:
        return False
    return True


async def _logprobs_mode(http: Http) -> str | None:
    """`processed`: logprobs after temperature; `original`: before. It is set by SGLANG_RETURN_ORIGINAL_LOGPROB in the
    server's environment and not reported, so measure it: halving the temperature doubles the difference of two logprobs
    at one position, or leaves it unchanged. None: all tokens are equally likely."""
    at_one, at_half = await _logprob_range(http, 1.0), await _logprob_range(http, 0.5)
    if at_one < _MIN_DIFFERENCE:
        return None
    return "processed" if at_half > 1.5 * at_one else "original"


async def _logprob_range(http: Http, temperature: float) -> float:
    """Logprob difference between the first and the last of the top 16 candidates for the first token."""
    body = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        "return_logprob": True,
        "top_logprobs_num": 16,
        "stream": False,
    }
    reply = await http.post(GENERATE, body, deadline_s=_FIRST_REQUEST_S, repeatable=True)
    try:
        values = [float(entry[0]) for entry in reply["meta_info"]["output_top_logprobs"][0]]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ServerFaulty(f"{http.url}{GENERATE}: no output_top_logprobs in the response") from error
    return max(values) - min(values)
