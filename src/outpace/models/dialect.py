"""How a model family writes a chat: from messages to token ids, on from what was sampled, and back to a message.

Two implementations: `TemplateDialect` works with the chat template of any tokenizer, `outpace.models.renderer` with the
families that the package `renderers` knows by heart.

Invariants
- What the policy sampled is never rendered again: `extend` gives only the ids that follow it, or None where the dialect
  would show the past in another way. Then whoever asked has to begin a new sequence.
- Parsing never changes a token. What cannot be read as a call stays in the content, and is a call with a problem too,
  so that somebody can tell the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outpace.errors import one_line
from outpace.models.chat import STAND_IN, Bridge, Schema, bridge, render
from outpace.types import Ints, Message, ToolCall

SHAPE = 'a tool call is an object like {"name": "...", "arguments": {...}}'

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THOUGHT = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
_OPENED = re.compile(r"<think>\s*\Z")
OPENING_TAIL = 16
"""So many of the last ids of a prompt are looked at for a thought that it opens."""


@dataclass(frozen=True)
class Parsed:
    """What an answer says, as a whole and in parts. The ids of its calls are given by whoever knows the request."""

    text: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Said:
    """A conversation up to an answer: as messages, with stand-ins for the policy's, and as the ids that were used.

    `answered` is the answer as a message, `shown` that of the bridge to it, if one led there."""

    heard: Sequence[Message]
    prompt: Ints
    answer: Ints
    answered: Message
    shown: str = ""


class Dialect(Protocol):
    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    def open(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """The ids after which the policy speaks. Raises `BadInput` for a model that cannot show this."""
        ...

    def extend(self, said: Said, new: Sequence[Message], tools: Sequence[Schema] = ()) -> Bridge | None:
        """From that answer to the next one, or None."""
        ...

    def parse(self, answer: Sequence[int], prompt: Sequence[int] | Ints, tools: Sequence[Schema] = ()) -> Parsed: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text, no special tokens added."""
        ...


class TemplateDialect:
    """Any chat template; calls between `<tool_call>` tags as JSON, reasoning before `</think>`."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = tuple(stop_ids)
        self._may_open_thoughts = "<think>" in str(tokenizer.chat_template)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    def open(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        return render(self._tokenizer, list(messages), tools=tools)

    def extend(self, said: Said, new: Sequence[Message], tools: Sequence[Schema] = ()) -> Bridge | None:
        found = bridge(self._tokenizer, said.heard, said.answered, new, tools, said.shown)
        ended = len(said.answer) > 0 and int(said.answer[-1]) in self._stop_ids
        if found and found.ids and ended and found.ids[0] in self._stop_ids:
            return Bridge(found.ids[1:], found.shown)  # the policy has sampled the end of its turn already
        return found

    def parse(self, answer: Sequence[int], prompt: Sequence[int] | Ints, tools: Sequence[Schema] = ()) -> Parsed:
        return parse_text(self.decode(answer), self._may_open_thoughts and self._opens_a_thought(prompt))

    def _opens_a_thought(self, prompt: Sequence[int] | Ints) -> bool:
        tail = [int(token) for token in prompt[-OPENING_TAIL:]]
        return _OPENED.search(self._tokenizer.decode(tail)) is not None

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


def stand_in_for(message: Message) -> Message:
    """What a conversation holds in the place of something that the policy said."""
    return STAND_IN if message.get("role") == "assistant" else message


def parse_text(text: str, opened: bool = False) -> Parsed:
    """An answer in the most common form of tool calls and reasoning; `opened`: the prompt has begun a thought."""
    if opened and "</think>" not in text:
        return Parsed(text, "", text.strip())
    whole = f"<think>{text}" if opened else text
    thought = _THOUGHT.match(whole)
    reasoning, rest = (thought[1].strip(), whole[thought.end() :]) if thought else ("", whole)
    calls = tuple(_read_call(body) for body in _CALL.findall(rest))
    if not calls:
        return Parsed(text, rest, reasoning)
    readable = iter(calls)
    content = _CALL.sub(lambda match: match[0] if next(readable).problem else "", rest)
    return Parsed(text, content.strip(), reasoning, calls)


def _read_call(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", "", "", f"this tool call is not valid JSON: {one_line(error, 120)}")
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", "", "", SHAPE)
    return ToolCall("", name, json.dumps(arguments, ensure_ascii=False))
