"""What SGLang is sent for one request.

Everything is said: neither the server's preferred parameters nor the model's generation config ever apply.
"""

from __future__ import annotations

from typing import Any

from outpace.engines.servers.spec import Ask
from outpace.types import Sampling

GENERATE = "/generate"

_SEED_MASK = 2**31 - 1  # what its sampling kernels take


def body(ask: Ask, rid: str, salt: str, *, seeded: bool) -> dict[str, Any]:
    """One request for a stream of tokens and their logprobs. `rid`: the name under which the server knows it."""
    return {
        "rid": rid,
        "input_ids": ask.token_ids.tolist(),
        "sampling_params": _sampling(ask.sampling, seeded),
        "return_logprob": True,
        "logprob_start_len": -1,  # none of the prompt
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "stream": True,
        "extra_key": salt,
        **({"lora_path": ask.adapter} if ask.adapter else {}),
    }


def _sampling(sampling: Sampling, seeded: bool) -> dict[str, Any]:
    """`ignore_eos` would switch off our stop ids with the server's own, so it is sent only where there are none."""
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
        "skip_special_tokens": False,  # a stop string may be the text of one
        "spaces_between_special_tokens": False,
        **({"sampling_seed": sampling.seed & _SEED_MASK} if seeded else {}),
    }
