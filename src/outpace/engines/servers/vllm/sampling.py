"""MERGED"""

from __future__ import annotations

from typing import Any

from outpace.engines.servers.spec import Ask
from outpace.types import Sampling

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"

_SEED_MASK = 2**63 - 1  # the range that the server accepts


def body(route: str, ask: Ask, model: str, *, seeded: bool) -> dict[str, Any]:
    """Request body for a stream of tokens and logprobs.

    Every sampling parameter is sent: the server would fill missing ones from the model's generation config. The
    end-of-sequence token matters only if it is one of our stop ids, hence `ignore_eos`. As with the embedded engine,
    the output includes the stop token, or the token that completes a stop string."""
    parameters = _sampling(ask.sampling, seeded)
    common = {"model": model, "request_id": ask.id, "cache_salt": ask.salt, "stream": True}
    if route == GENERATE:
        return {**common, "token_ids": ask.token_ids.tolist(), "sampling_params": parameters}
    del parameters["detokenize"]  # this route always detokenizes
    prompt = {"prompt": ask.token_ids.tolist(), **parameters}
    return {**common, **prompt, "add_special_tokens": False, "return_token_ids": True}


def request_id(route: str, ask_id: str) -> str:
    """The server's own id of the request sent as `ask_id`."""
    return f"generate-tokens-{ask_id}" if route == GENERATE else f"cmpl-{ask_id}-0"


def _sampling(sampling: Sampling, seeded: bool) -> dict[str, Any]:
    return {
        "n": 1,
        "max_tokens": sampling.max_tokens,
        "min_tokens": 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": sampling.seed & _SEED_MASK if seeded else None,
        "stop": sampling.stop_strings,
        "stop_token_ids": sampling.stop_ids,
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token only
        "detokenize": bool(sampling.stop_strings),
        "skip_special_tokens": False,  # a stop string may be a special token
        "spaces_between_special_tokens": False,
    }
