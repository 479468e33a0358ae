"""What an SGLang server says of itself, what it does not say and has to be tried, and how busy it is."""

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

OLDEST = (0, 5, 8)
"""The first release with every route that is needed here."""

_ASKED_S = 20.0
_FIRST_S = 120.0  # a first request may compile kernels
_NOISE = 1e-3
_INTERNAL = "auto"  # a setting that the server has resolved and does not tell


async def read_facts(http: Http) -> Facts:
    """`details`: the model's own name or path as `root`, the number of sequences that it decodes together as `slots`,
    whether it streams only what is fresh, and whether it has a tokenizer."""
    said, models = await _settings(http), await _models(http)
    controls = await _controls(http)
    dtype = said.get("dtype")
    return Facts(
        kind="sglang",
        version=str(said["version"]),
        model=str(models[0].get("id")),
        context=models[0].get("max_model_len") or said.get("context_length"),
        dtype=None if dtype in (None, _INTERNAL) else str(dtype),
        logprobs=await _logprobs_mode(http),
        controls=controls,
        spans=True,
        adapters=bool(said.get("enable_lora")),
        details={
            "root": said["model_path"],  # not of /model_info: that is the folder of the last update
            "slots": said.get("max_running_requests"),
            "incremental": bool(said.get("incremental_streaming_output")),
            "tokenizer": not said.get("skip_tokenizer_init"),
            "max_lora_rank": said.get("max_lora_rank"),
            "deterministic": bool(said.get("enable_deterministic_inference")),
        },
    )


async def read_loads(http: Http) -> list[dict[str, Any]]:
    """One for each data-parallel rank."""
    said = await http.get("/v1/loads", deadline_s=_ASKED_S, query={"include": "core,queues"})
    loads = said.get("loads") if isinstance(said, dict) else None
    if not isinstance(loads, list) or not all(
        isinstance(load, dict) and isinstance(load.get("num_running_reqs"), int) for load in loads
    ):
        raise ServerFaulty(f"{http.url}/v1/loads: it does not say how many requests are running")
    return loads


async def read_label(http: Http) -> str | None:
    """That of its weights."""
    said = await http.get("/model_info", deadline_s=_ASKED_S)
    return str(said["weight_version"]) if isinstance(said, dict) and "weight_version" in said else None


def pressure_of(loads: list[dict[str, Any]], retracted_before: int) -> Pressure:
    """Over all ranks: requests in sum, the cache that is fullest. What the server calls retracted is what others call
    preempted, and it tells only those since it last wrote its log: hence `retracted_before`, the sum so far."""
    retracted = sum(int((load.get("queues") or {}).get("retracted", 0)) for load in loads)
    return Pressure(
        running=sum(int(load["num_running_reqs"]) for load in loads),
        waiting=sum(int(load.get("num_waiting_reqs", 0)) for load in loads),
        cache_used=max((float(load.get("token_usage", 0.0)) for load in loads), default=0.0),
        preemptions=retracted_before + retracted,
    )


async def _settings(http: Http) -> dict[str, Any]:
    said = await http.get("/server_info", deadline_s=_ASKED_S)
    if not isinstance(said, dict) or "version" not in said or "model_path" not in said:
        raise ServerFaulty(f"{http.url}/server_info: no version and model in its answer; is this an SGLang server?")
    return said


async def _models(http: Http) -> list[dict[str, Any]]:
    said = await http.get("/v1/models", deadline_s=_ASKED_S)
    models = said.get("data") if isinstance(said, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise ServerFaulty(f"{http.url}/v1/models: it names no model")
    return sorted(models, key=lambda model: model.get("parent") is not None)  # adapters come last


async def _controls(http: Http) -> bool:
    """Whether the key that we have is good for the routes that control it. One that was left paused by whoever updated
    it before would not answer what is asked next, and does not tell: so it is told to go on."""
    try:
        await http.post(CONTINUE, {}, deadline_s=_ASKED_S, repeatable=True)
    except ServerRefused:
        return False
    return True


async def _logprobs_mode(http: Http) -> str | None:
    """`processed`: after temperature; `original`: before. The server is told by its environment
    (SGLANG_RETURN_ORIGINAL_LOGPROB) and does not tell, but halving the temperature doubles the distance between two
    logprobs of one position, or leaves it as it is. None: all tokens are equally likely."""
    at_one, at_half = await _distance(http, 1.0), await _distance(http, 0.5)
    if at_one < _NOISE:
        return None
    return "processed" if at_half > 1.5 * at_one else "original"


async def _distance(http: Http, temperature: float) -> float:
    """From the likeliest first token to the last of the next likely ones, in logprobs."""
    asked = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        "return_logprob": True,
        "top_logprobs_num": 16,
        "stream": False,
    }
    said = await http.post(GENERATE, asked, deadline_s=_FIRST_S, repeatable=True)
    try:
        values = [float(entry[0]) for entry in said["meta_info"]["output_top_logprobs"][0]]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ServerFaulty(f"{http.url}{GENERATE}: it gives no logprobs of the likeliest tokens") from error
    return max(values) - min(values)
