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

import importlib.util
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from outpace.errors import BadInput, RequestFailed, one_line
from outpace.models.chat import NO_KWARGS, PLACEHOLDER, Bridge, Schema, TemplateKwargs, bridge, render, text_decoder
from outpace.runtime.references import closest_names
from outpace.types import Ints, Message, ToolCall

if TYPE_CHECKING:
    from renderers.base import ParsedToolCall


TOOL_CALL_SHAPE = 'a tool call is an object like {"name": "...", "arguments": {...}}'

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_REASONING = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
_OPENED = re.compile(r"<think>\s*\Z")
OPENING_TAIL = 16
"""Number of ids at the end of a prompt that are searched for an opening `<think>`."""


class ParsedAnswer(msgspec.Struct, frozen=True):
    """An answer as whole text and in its parts. The caller assigns the ids of the tool calls."""

    text: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class AnsweredConversation:
    """A conversation up to an answer, as messages and as the ids that were used.

    history: the messages before the answer, with placeholders for the policy's messages.
    answer_message: the answer as a message.
    rendered: `Bridge.rendered` of the bridge to the answer, if any.
    """

    history: Sequence[Message]
    prompt: Ints
    answer: Ints
    answer_message: Message
    rendered: str = ""


class ChatFormat(ABC):
    """How a model family writes a chat. `stop_ids` are the tokens that end an answer."""

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._decode = text_decoder(tokenizer, special_tokens=False)
        self.stop_ids = tuple(stop_ids)

    @abstractmethod
    def open(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        template_kwargs: TemplateKwargs = NO_KWARGS,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Return the prompt ids of a conversation. Without `generation_prompt`, the conversation ends with an answer.
        Raises `BadInput` if the model cannot render it."""

    @abstractmethod
    def extend(
        self,
        state: AnsweredConversation,
        new: Sequence[Message],
        tools: Sequence[Schema] = (),
        template_kwargs: TemplateKwargs = NO_KWARGS,
    ) -> Bridge | None:
        """Return the ids from that answer to the next one, or None if it cannot be continued exactly."""

    @abstractmethod
    def parse(self, answer: Sequence[int], prompt: Sequence[int] | Ints, tools: Sequence[Schema] = ()) -> ParsedAnswer:
        """Split an answer into content, reasoning and tool calls."""

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        """Return the text, by default without special tokens."""
        return str(self._tokenizer.decode(list(tokens))) if special_tokens else self._decode(tokens)

    def encode(self, text: str, opens: bool = False) -> list[int]:
        """Return the ids of plain text. `opens`: add the special tokens of a text's beginning."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=opens)]


class TemplateChatFormat(ChatFormat):
    """Any chat template. Tool calls are JSON between `<tool_call>` tags, reasoning ends with `</think>`."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        super().__init__(tokenizer, stop_ids)
        self._may_open_reasoning = "<think>" in str(tokenizer.chat_template)

    def open(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        template_kwargs: TemplateKwargs = NO_KWARGS,
        generation_prompt: bool = True,
    ) -> list[int]:
        return render(self._tokenizer, list(messages), None, tools, template_kwargs, generation_prompt)

    def extend(
        self,
        state: AnsweredConversation,
        new: Sequence[Message],
        tools: Sequence[Schema] = (),
        template_kwargs: TemplateKwargs = NO_KWARGS,
    ) -> Bridge | None:
        found = bridge(
            self._tokenizer, state.history, state.answer_message, new, tools, state.rendered, template_kwargs
        )
        ended = len(state.answer) > 0 and int(state.answer[-1]) in self.stop_ids
        if found and found.ids and ended and found.ids[0] in self.stop_ids:
            return Bridge(found.ids[1:], found.rendered)  # the policy already sampled its end-of-turn token
        return found

    def parse(self, answer: Sequence[int], prompt: Sequence[int] | Ints, tools: Sequence[Schema] = ()) -> ParsedAnswer:
        return parse_text(self.decode(answer), self._may_open_reasoning and self._opens_reasoning(prompt))

    def _opens_reasoning(self, prompt: Sequence[int] | Ints) -> bool:
        tail = [int(token) for token in prompt[-OPENING_TAIL:]]
        return _OPENED.search(self._tokenizer.decode(tail)) is not None


def placeholder_for(message: Message) -> Message:
    """Return the placeholder for a message of the policy, any other message unchanged."""
    return PLACEHOLDER if message.get("role") == "assistant" else message


def parse_text(text: str, opened: bool = False) -> ParsedAnswer:
    """Parse the most common form of tool calls and reasoning. `opened`: the prompt ends inside `<think>`."""
    if not opened and "<" not in text:
        return ParsedAnswer(text, text)
    if opened and "</think>" not in text:
        return ParsedAnswer(text, "", text.strip())
    whole = f"<think>{text}" if opened else text
    match = _REASONING.match(whole)
    reasoning, rest = (match[1].strip(), whole[match.end() :]) if match else ("", whole)
    calls = tuple(_read_call(body) for body in _CALL.findall(rest))
    if not calls:
        return ParsedAnswer(text, rest, reasoning)
    readable = iter(calls)
    content = _CALL.sub(lambda match: match[0] if next(readable).problem else "", rest)
    return ParsedAnswer(text, content.strip(), reasoning, calls)


def _read_call(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", "", "", f"this tool call is not valid JSON: {one_line(error, 120)}")
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", "", "", TOOL_CALL_SHAPE)
    return ToolCall("", name, json.dumps(arguments, ensure_ascii=False))


log = logging.getLogger(__name__)


def renderer_chat_format(tokenizer: Any, stop_ids: Sequence[int], wanted: str | None) -> RendererChatFormat | None:
    """Return the format of the family `wanted`, by default of the model name's family; None if it has none."""
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP, RENDERER_REGISTRY

    family = wanted or MODEL_RENDERER_MAP.get(getattr(tokenizer, "name_or_path", ""))
    if family is None:
        return None
    try:
        config = config_from_name(family)
    except (KeyError, ValueError):
        close = closest_names(family, RENDERER_REGISTRY or MODEL_RENDERER_MAP.values())
        hint = f"did you mean {close[0]}?" if close else "see the package renderers for its families"
        raise BadInput(f"model.renderer: unknown family {family!r}; {hint}") from None
    try:
        return RendererChatFormat(create_renderer(tokenizer, config), tokenizer, stop_ids)
    except Exception as error:  # boundary: an unsuitable tokenizer raises various exceptions
        raise BadInput(f"model.renderer: the tokenizer does not fit {family}: {one_line(error)}") from error


class RendererChatFormat(ChatFormat):
    """Chat format of a model family of the package `renderers`."""

    def __init__(self, renderer: Any, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        super().__init__(tokenizer, dict.fromkeys([*stop_ids, *renderer.get_stop_token_ids()]))
        self._renderer = renderer

    def open(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        template_kwargs: TemplateKwargs = NO_KWARGS,
        generation_prompt: bool = True,
    ) -> list[int]:
        if template_kwargs:
            raise RequestFailed('chat_template_kwargs: only model.renderer = "template" uses a chat template')
        specs = _tool_specs(tools) or None
        try:
            return list(self._renderer.render_ids(list(messages), tools=specs, add_generation_prompt=generation_prompt))
        except Exception as error:  # boundary: each family raises its own exceptions
            raise RequestFailed(f"cannot render this conversation: {one_line(error)}") from error

    def extend(
        self,
        state: AnsweredConversation,
        new: Sequence[Message],
        tools: Sequence[Schema] = (),
        template_kwargs: TemplateKwargs = NO_KWARGS,
    ) -> Bridge | None:
        prompt, answer = state.prompt.tolist(), state.answer.tolist()
        try:
            whole = self._renderer.bridge_to_next_turn(prompt, answer, list(new), tools=_tool_specs(tools) or None)
        except Exception:  # boundary: rendering from the start may work, or raises a better error
            log.debug("cannot continue a conversation, rendering it from the start", exc_info=True)
            return None
        ids = None if whole is None else list(whole.token_ids)
        before = [*prompt, *answer]
        return Bridge(ids[len(before) :]) if ids is not None and ids[: len(before)] == before else None

    def parse(self, answer: Sequence[int], prompt: Sequence[int] | Ints, tools: Sequence[Schema] = ()) -> ParsedAnswer:
        try:
            parsed = self._renderer.parse_response(
                list(answer), tools=_tool_specs(tools) or None, prompt_ids=[int(token) for token in prompt]
            )
        except Exception:  # boundary: any text is a valid answer
            log.warning("cannot parse an answer, using its text as it is", exc_info=True)
            return ParsedAnswer(self.decode(answer), self.decode(answer))
        calls = tuple(map(_tool_call, parsed.tool_calls))
        unparsed = "".join(each.raw for each, call in zip(parsed.tool_calls, calls, strict=True) if call.problem)
        return ParsedAnswer(
            self.decode(answer), (parsed.content or "") + unparsed, parsed.reasoning_content or "", calls
        )


def _tool_call(parsed: ParsedToolCall) -> ToolCall:
    from renderers.base import ToolCallParseStatus

    readable = parsed.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
    if not readable or not parsed.name or isinstance(parsed.arguments, str):
        reason = (
            "this tool call is not valid JSON" if parsed.status == ToolCallParseStatus.INVALID_JSON else TOOL_CALL_SHAPE
        )
        return ToolCall(parsed.id or "", parsed.name or "", "", reason)
    return ToolCall(parsed.id or "", parsed.name, json.dumps(parsed.arguments or {}, ensure_ascii=False))


def _tool_specs(tools: Sequence[Schema]) -> list[dict[str, Any]]:
    """Return the inner `function` objects of OpenAI's form, which the package expects."""
    return [dict(tool.get("function", tool)) for tool in tools]


TEMPLATE = "template"
"""Value of `model.renderer` for the model's own chat template."""


def chat_format_for(tokenizer: Any, stop_ids: Sequence[int], wanted: str | None = None) -> ChatFormat:
    """Return the chat format that `model.renderer` names; by default the model family's format, or its template."""
    template = TemplateChatFormat(tokenizer, stop_ids)
    if wanted == TEMPLATE or (wanted is None and not _may_be_a_hub_name(tokenizer)):
        return template
    if importlib.util.find_spec("renderers") is None:
        if wanted is not None:
            raise BadInput(f'model.renderer: {wanted} needs the package renderers: pip install "outpace[renderers]"')
        return template
    return renderer_chat_format(tokenizer, stop_ids, wanted) or template


def _may_be_a_hub_name(tokenizer: Any) -> bool:
    """Whether a family could match: families list exact hub names. Avoids loading `renderers`, which takes a second."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(getattr(tokenizer, "name_or_path", ""))))
