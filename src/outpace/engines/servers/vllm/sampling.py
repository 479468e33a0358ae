"""What vLLM is asked, by each of the two routes that take and give token ids.

Every parameter is sent: the server would take what is missing from the model's generation config. The end-of-sequence
token is one of our stop ids or means nothing, hence `ignore_eos`. Stop ids and the token that completes a stop string
are part of the answer, as they are with the embedded engine.
"""

from __future__ import annotations

from typing import Any

from outpace.engines.servers.spec import Ask
from outpace.types import Sampling

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"

_SEED_MASK = 2**63 - 1  # what the server takes


def body(route: str, ask: Ask, model: str, *, seeded: bool) -> dict[str, Any]:
    """One request for a stream of tokens and their logprobs."""
    how = _sampling(ask.sampling, seeded)
    common = {"model": model, "request_id": ask.id, "cache_salt": ask.salt, "stream": True}
    if route == GENERATE:
        return {**common, "token_ids": ask.token_ids.tolist(), "sampling_params": how}
    del how["detokenize"]  # it always does
    return {**common, "prompt": ask.token_ids.tolist(), **how, "add_special_tokens": False, "return_token_ids": True}


def request_id(route: str, ask_id: str) -> str:
    """The name under which the server knows a request that was sent as `ask_id`."""
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
        "logprobs": 0,  # of the sampled token alone
        "detokenize": bool(sampling.stop_strings),
        "skip_special_tokens": False,  # a stop string may be the text of one
        "spaces_between_special_tokens": False,
    }
