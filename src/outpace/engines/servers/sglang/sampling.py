"""MERGED"""

from __future__ import annotations

from typing import Any

from outpace.engines.servers.spec import Ask
from outpace.types import Sampling

GENERATE = "/generate"

_SEED_MASK = 2**31 - 1  # the range that its sampling kernels accept


def body(ask: Ask, rid: str, salt: str, *, seeded: bool) -> dict[str, Any]:
    """Request body for a stream of tokens and logprobs. `rid` is the request id on the server.

    Every sampling parameter is sent, so neither the server's defaults nor the model's generation config apply."""
    return {
        "rid": rid,
        "input_ids": ask.token_ids.tolist(),
        "sampling_params": _sampling(ask.sampling, seeded),
        "return_logprob": True,
        "logprob_start_len": -1,  # no prompt logprobs
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "stream": True,
        "extra_key": salt,
        **({"lora_path": ask.adapter} if ask.adapter else {}),
    }


def _sampling(sampling: Sampling, seeded: bool) -> dict[str, Any]:
    """Sampling parameters. `ignore_eos` would also disable our stop ids, so it is set only if there are none."""
    return {
        "n": 1,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": sampling.stop_strings,
        "stop_token_ids": sampling.stop_ids,
        "ignore_eos": not sampling.stop_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,  # a stop string may be a special token
        "spaces_between_special_tokens": False,
        **({"sampling_seed": sampling.seed & _SEED_MASK} if seeded else {}),
    }
