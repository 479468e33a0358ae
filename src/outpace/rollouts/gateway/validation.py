"""Validation shared by all APIs. Requests are untrusted: fields that are used are validated, others are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from outpace.rollouts.gateway.protocol import RequestRejected
from outpace.rollouts.tools.functions import json_children

Json = dict[str, Any]
S = TypeVar("S", bound=msgspec.Struct)

MAX_DEPTH = 64
"""Maximum nesting of a request: chat templates and JSON encoders are recursive."""
MAX_SIZE = 1_000_000
"""Maximum number of characters and values in a request. A larger one exceeds any context and is not rendered."""
MAX_SAMPLES = 128
"""Largest `n` of a request, as in OpenAI's API."""

CONSTRAINTS = (
    "logit_bias", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "json_schema", "regex", "ebnf", "output_format", "allowed_token_ids", "bad_words", "guided_decoding", "grammar",
    "structural_tag", "min_tokens", "ignore_eos",
)  # fmt: skip
"""Fields of OpenAI, Anthropic, vLLM and SGLang that restrict which tokens can be sampled."""


def validate_request(body: Json, shape: type[S]) -> S:
    """Validate a request and return the fields that are used."""
    _check_size(body)
    for name in CONSTRAINTS:
        if body.get(name):
            raise constrained(name)
    kind = body["response_format"].get("type", "text") if isinstance(body.get("response_format"), dict) else "text"
    if kind != "text":
        raise constrained("response_format", str(kind))
    for name, instead in {"functions": "tools", "function_call": "tool_choice"}.items():
        if body.get(name):
            raise RequestRejected(f"{name}: is deprecated and not supported; use {instead}", param=name)
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        param = place.rstrip("`") or None
        raise RequestRejected(f"{param}: {message}" if param else message, param=param) from None


def constrained(param: str, value: str = "") -> RequestRejected:
    """Return the error for a field that would constrain sampling."""
    return RequestRejected(
        f"{param}: {value + ' is' if value else ''} refused: constrained sampling changes the probabilities of the "
        "tokens, which would bias every importance weight; ask for the format in the prompt",
        param=param,
    )


def _check_size(body: Json) -> None:
    level: list[Any] = [body]
    size = 0
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in json_children(outer)]
        size += sum(len(value) if isinstance(value, str) else 1 for value in level)
        if size > MAX_SIZE:
            message = f"the request has more than {MAX_SIZE:,} characters, which exceeds any context"
            raise RequestRejected(message, code="context_length_exceeded")
        if not level:
            return
    raise RequestRejected(f"the request is nested deeper than {MAX_DEPTH} levels")


def sample_count(n: int | None) -> int:
    if n is not None and not 1 <= n <= MAX_SAMPLES:
        raise RequestRejected(f"n: must be between 1 and {MAX_SAMPLES}, got {n}", param="n")
    return n or 1


def token_limit(tokens: int | None, param: str = "max_tokens") -> int | None:
    if tokens is not None and tokens < 1:
        raise RequestRejected(f"{param}: must be at least 1, got {tokens}", param=param)
    return tokens


def stop_strings(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if "" in stops:
        raise RequestRejected("stop: must not contain an empty string", param="stop")
    return stops


def forced_functions(wanted: str | None, tools: Sequence[str]) -> list[str]:
    """Return the functions of which the answer must call one: only `wanted`, or all tools if it is None."""
    if not tools:
        raise RequestRejected("tool_choice: the request has no tools to call", param="tool_choice")
    if wanted is None:
        return list(tools)
    if wanted not in tools:
        raise RequestRejected(f"tool_choice: the request has no tool named {wanted!r}", param="tool_choice")
    return [wanted]
