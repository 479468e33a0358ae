"""Chat formats: messages to token ids, continuation after sampled tokens, and parsing of answers.

    TemplateChatFormat   the chat template of any tokenizer
    RendererChatFormat   model families of the optional package `renderers`, which renders them token by token

`chat_format_for` chooses one by `model.renderer` and the model's name. `renderers` is imported only when needed.

Invariants
- Sampled tokens are never rendered again: `extend` returns only the ids that follow them, or None if the format would
  render earlier turns differently. The caller then has to start a new sequence.
- Parsing never changes a token. Text that cannot be parsed as a tool call stays in the content and also becomes a call
  with a `problem`, so that the error can be returned to the model.
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
_REASONING = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
_OPENED = re.compile(r"<think>\s*\Z")
OPENING_TAIL = 16
"""Number of ids at the end of a prompt that are searched for an opening `<think>`."""


@dataclass(frozen=True)
class Parsed:
    """An answer as whole text and in its parts. The caller assigns the ids of the tool calls."""

    text: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Said:
    """A conversation up to an answer, as messages and as the ids that were used.

    history: the messages before the answer, with placeholders for the policy's.
    answer_message: the answer as a message.
    rendered: that of the bridge to the answer, if any.
    """

    history: Sequence[Message]
    prompt: Ints
    answer: Ints
    answer_message: Message
    shown: str = ""


class Dialect(Protocol):
    """How a model family writes a chat."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    def open(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """Return the prompt ids of a conversation. Raises `BadInput` if the model cannot render it."""
        ...

    def extend(self, state: Said, new: Sequence[Message], tools: Sequence[Schema] = ()) -> Bridge | None:
        """Return the ids from that answer to the next one, or None if it cannot be continued exactly."""
        ...

    def parse(self, answer: Sequence[int], prompt: Sequence[int] | Ints, tools: Sequence[Schema] = ()) -> Parsed:
        """Split an answer into content, reasoning and tool calls."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text without special tokens."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, without special tokens."""
        ...


class TemplateDialect:
    """Any chat template. Tool calls are JSON between `<tool_call>` tags, reasoning ends with `</think>`."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = tuple(stop_ids)
        self._may_open_reasoning = "<think>" in str(tokenizer.chat_template)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    def open(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        return render(self._tokenizer, list(messages), tools=tools)

    def extend(self, state: Said, new: Sequence[Message], tools: Sequence[Schema] = ()) -> Bridge | None:
        found = bridge(self._tokenizer, state.history, state.answer_message, new, tools, state.shown)
        ended = len(state.answer) > 0 and int(state.answer[-1]) in self._stop_ids
        if found and found.ids and ended and found.ids[0] in self._stop_ids:
            return Bridge(found.ids[1:], found.shown)  # the policy already sampled its end-of-turn token
        return found

    def parse(self, answer: Sequence[int], prompt: Sequence[int] | Ints, tools: Sequence[Schema] = ()) -> Parsed:
        return parse_text(self.decode(answer), self._may_open_reasoning and self._opens_reasoning(prompt))

    def _opens_reasoning(self, prompt: Sequence[int] | Ints) -> bool:
        tail = [int(token) for token in prompt[-OPENING_TAIL:]]
        return _OPENED.search(self._tokenizer.decode(tail)) is not None

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


def stand_in_for(message: Message) -> Message:
    """Return the placeholder for a message of the policy, any other message unchanged."""
    return STAND_IN if message.get("role") == "assistant" else message


def parse_text(text: str, opened: bool = False) -> Parsed:
    """Parse the most common form of tool calls and reasoning. `opened`: the prompt ends inside `<think>`."""
    if opened and "</think>" not in text:
        return Parsed(text, "", text.strip())
    whole = f"<think>{text}" if opened else text
    match = _REASONING.match(whole)
    reasoning, rest = (match[1].strip(), whole[match.end() :]) if match else ("", whole)
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
