"""A request to the policy, whatever protocol it came in, and what a protocol gives back of the answer.

What would shape the distribution is pinned: a run samples by its own settings whatever an agent sends, because the
learner computes with them. A request that sends such a field is served, and told which ones had no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from outpace.rollouts.gateway.sessions import EpisodeClient
from outpace.rollouts.policy.asking import without_stop
from outpace.types import Answer, Message, ToolCall

log = logging.getLogger(__name__)

PINNED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
)
Finish = Literal["stop", "length", "tool_calls"]


class Refused(Exception):
    """A request that is not served; the message is for whoever wrote the agent."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True)
class Wanted:
    """Messages to answer or, where there is one, a plain `prompt` to go on from."""

    messages: Sequence[Message] = ()
    prompt: str | list[int] | None = None
    tools: Sequence[dict[str, Any]] = ()
    calls: bool = True  # an answer may call tools
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stream: bool = False
    usage: bool = False  # a stream ends with the number of tokens
    logprobs: bool = False
    pinned: Sequence[str] = ()

    def overrides(self, limit: int) -> dict[str, Any]:
        """What this request asks for that is not the run's; more tokens than `limit` are not to be had."""
        tokens = {} if self.max_tokens is None else {"max_tokens": min(self.max_tokens, limit)}
        return {**tokens, **({"stop_strings": list(self.stop)} if self.stop else {})}

    def stops(self, client: EpisodeClient) -> Sequence[str]:
        """What ends the answer: the request's own or, where it has none, the run's."""
        return self.stop or client.stop_strings


@dataclass(frozen=True)
class Reply:
    """An answer as the agent gets it."""

    id: str
    content: str
    reasoning: str
    calls: Sequence[ToolCall]
    finish: Finish
    prompt_tokens: int
    tokens: int
    logprobs: Sequence[tuple[str, float]]  # the text of every token, and its logprob; where asked for
    pinned: Sequence[str]


def pinned_in(request: Mapping[str, Any]) -> list[str]:
    """The fields of a request that have no effect; the log hears of each once."""
    found = [name for name in PINNED if request.get(name) is not None]
    for name in found:
        tell_once(name)
    return found


def notes(pinned: Sequence[str]) -> dict[str, Any]:
    """What a response says beyond its protocol."""
    return {"outpace": {"pinned": list(pinned)}} if pinned else {}


@cache
def tell_once(name: str) -> None:
    log.info("agents send %s: the run's own setting is used instead", name)


def written(answer: Answer, wanted: Wanted, client: EpisodeClient) -> str:
    """All that the policy wrote, without the string that ended it."""
    return without_stop(answer.text, wanted.stops(client)) if answer.stop == "stop" else answer.text


def reply_of(answer: Answer, wanted: Wanted, client: EpisodeClient) -> Reply:
    """A call that cannot be read is no call to an agent: it is in the content, as the model wrote it. So is, with all
    the rest of the text, one that was not to be made."""
    readable = [call for call in answer.calls if not call.problem]
    calls = readable if wanted.calls and wanted.prompt is None else []
    logprobs = zip(answer.tokens.tolist(), answer.logprobs.tolist(), strict=True) if wanted.logprobs else ()
    plain = wanted.prompt is not None or len(readable) > len(calls)
    finish: Finish = "length" if answer.stop != "stop" else "tool_calls" if calls else "stop"
    return Reply(
        id=answer.request_id,
        content=written(answer, wanted, client) if plain else answer.content,
        reasoning="" if plain else answer.reasoning,
        calls=calls,
        finish=finish,
        prompt_tokens=answer.prompt_tokens,
        tokens=len(answer.tokens),
        logprobs=[(client.dialect.decode([token]), logprob) for token, logprob in logprobs],
        pinned=wanted.pinned,
    )
