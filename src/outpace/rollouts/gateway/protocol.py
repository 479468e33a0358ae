"""API-independent requests and replies of the gateway, and text that can be streamed early.

Sampling settings are pinned: the run always samples with its own settings, because the learner relies on them.
Requests that set these fields are served; the response lists the fields that had no effect.

Streamed text cannot be taken back, so only the prefix that is the same under every possible parse of the finished
answer is streamed. The gateway holds back everything from the first text that is or may become a tool call or
reasoning, an incomplete character, white space that may be trailing, and text that may start a stop string.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from outpace.rollouts.conversation import without_stop
from outpace.types import Answer, Message, ToolCall

if TYPE_CHECKING:
    from outpace.rollouts.client import PolicyClient


log = logging.getLogger(__name__)

PINNED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
FinishReason = Literal["stop", "length", "tool_calls"]


class RequestRejected(Exception):
    """A rejected request; the message is sent to the agent."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True)
class PolicyRequest:
    """Messages to answer, or a plain `prompt` to complete if given."""

    messages: Sequence[Message] = ()
    prompt: str | list[int] | None = None
    n: int = 1  # answers to sample
    tools: Sequence[dict[str, Any]] = ()
    calls: bool = True  # tool calls are allowed
    must_call: Sequence[str] = ()  # the answer must call one of these functions
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stream: bool = False
    usage: bool = False  # a stream ends with token counts
    logprobs: bool = False
    pinned: Sequence[str] = ()
    instructions: str | None = None  # the system message, which later requests do not inherit
    previous: str | None = None  # the response whose conversation `messages` continue
    store: bool = False  # a later request may name the response as its previous one
    echo: Mapping[str, Any] = field(default_factory=dict)  # fields of the request that its response repeats

    def conversation(self) -> list[Message]:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*system, *self.messages]

    def overrides(self, limit: int) -> dict[str, Any]:
        """Return the request's own sampling options; `max_tokens` is capped at `limit`."""
        tokens = {} if self.max_tokens is None else {"max_tokens": min(self.max_tokens, limit)}
        return {**tokens, **({"stop_strings": list(self.stop)} if self.stop else {})}

    def stops(self, client: PolicyClient) -> Sequence[str]:
        """Return the request's stop strings, or the run's if it has none."""
        return self.stop or client.stop_strings


@dataclass(frozen=True)
class GatewayReply:
    """An answer as returned to the agent. `unsent` is the end of its content that has not been streamed."""

    id: str
    content: str
    unsent: str
    reasoning: str
    calls: Sequence[ToolCall]
    finish: FinishReason
    prompt_tokens: int
    tokens: int
    logprobs: Sequence[tuple[str, float]]  # text and logprob of every token, if requested
    pinned: Sequence[str]


def pinned_fields(request: Mapping[str, Any]) -> list[str]:
    """Return the pinned fields in a request, which have no effect; each is logged once."""
    found = [name for name in PINNED if request.get(name) is not None]
    for name in found:
        log_pinned_once(name)
    return found


def extra_fields(pinned: Sequence[str]) -> dict[str, Any]:
    """Return the extra fields of a response, beyond its API."""
    return {"outpace": {"pinned": list(pinned)}} if pinned else {}


@cache
def log_pinned_once(name: str) -> None:
    log.info("agents set %s, which has no effect: the run's own setting is used", name)


def full_text(answer: Answer, request: PolicyRequest, client: PolicyClient) -> str:
    """Return the full text of the answer without the stop string."""
    return without_stop(answer.text, request.stops(client)) if answer.stop == "stop" else answer.text


def make_reply(answer: Answer, request: PolicyRequest, client: PolicyClient) -> GatewayReply:
    """Build the reply to an agent. Tool calls that do not parse stay in the content as the model wrote them. If the
    answer has calls although none are allowed, the content is the whole text."""
    readable = [call for call in answer.calls if not call.problem]
    calls = readable if request.calls and request.prompt is None else []
    logprobs = zip(answer.tokens.tolist(), answer.logprobs.tolist(), strict=True) if request.logprobs else ()
    plain = request.prompt is not None or len(readable) > len(calls)
    finish: FinishReason = "length" if answer.stop != "stop" else "tool_calls" if calls else "stop"
    content = full_text(answer, request, client) if plain else answer.content
    return GatewayReply(
        id=answer.request_id,
        content=content,
        unsent=content,
        reasoning="" if plain else answer.reasoning,
        calls=calls,
        finish=finish,
        prompt_tokens=answer.prompt_tokens,
        tokens=len(answer.tokens),
        logprobs=[(client.chat_format.decode([token]), logprob) for token, logprob in logprobs],
        pinned=request.pinned,
    )


TAGS = (
    "<tool_call", "<tool_use", "<tools", "<function", "<invoke", "<arg_", "<minimax:", "<seed:", "<think", "</think",
    "<|", "<\uff5c", "[TOOL_CALL", "[THINK]", "[/THINK]",
)  # fmt: skip
"""Opening tags of tool calls and reasoning, over all supported model families."""

_UNTAGGED_CALL = re.compile(r"[\[{]")
_INCOMPLETE_CHARACTER = "\ufffd"
_UNCERTAIN_END = re.compile(rf"[\s{_INCOMPLETE_CHARACTER}]+\Z")


def stable_prefix(text: str, stops: Sequence[str] = ()) -> str:
    """Return the prefix of the parsed `text` that will be a prefix of the final content.

    Empty if the text starts with white space, which is stripped from answers with tool calls, or with a bracket, which
    may be an untagged tool call."""
    if not text or text[0].isspace() or _UNTAGGED_CALL.match(text):
        return ""
    return _UNCERTAIN_END.sub("", stable_text_prefix(text, (*TAGS, *stops)))


def stable_text_prefix(text: str, stops: Sequence[str]) -> str:
    """Return the prefix of plain text before the first of `stops`, or before what may be the start of one."""
    whole = text.rstrip(_INCOMPLETE_CHARACTER)  # first, so that a partial stop string is at the end
    return whole[: min((_tag_start(whole, stop) for stop in stops), default=len(whole))]


def starts_in_reasoning(prompt_end: str) -> bool:
    """Return whether an answer to this prompt starts inside a reasoning block."""
    return prompt_end.rstrip().endswith(("<think>", "[THINK]"))


def _tag_start(text: str, tag: str) -> int:
    """Return where `tag` starts in the text, or where a partial tag starts at its end."""
    found = text.find(tag)
    if found >= 0:
        return found
    pieces = (length for length in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:length]))
    return len(text) - next(pieces, 0)
