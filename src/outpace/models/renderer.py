"""MERGED"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outpace.errors import BadInput, RequestFailed, one_line
from outpace.models.chat import Bridge, Schema
from outpace.models.dialect import SHAPE, Parsed, Said
from outpace.references import nearest
from outpace.types import Ints, Message, ToolCall

if TYPE_CHECKING:
    from renderers.base import ParsedToolCall

log = logging.getLogger(__name__)


def renderer_dialect(tokenizer: Any, stop_ids: Sequence[int], wanted: str | None) -> RendererDialect | None:
    """Return the format of the family `wanted`, or of the family of the model's name, or None."""
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP, RENDERER_REGISTRY

    family = wanted or MODEL_RENDERER_MAP.get(getattr(tokenizer, "name_or_path", ""))
    if family is None:
        return None
    try:
        config = config_from_name(family)
    except (KeyError, ValueError):
        close = nearest(family, RENDERER_REGISTRY or MODEL_RENDERER_MAP.values())
        hint = f"did you mean {close[0]}?" if close else "see the package renderers for its families"
        raise BadInput(f"model.renderer: unknown family {family!r}; {hint}") from None
    try:
        return RendererDialect(create_renderer(tokenizer, config), tokenizer, stop_ids)
    except Exception as error:  # boundary: an unsuitable tokenizer raises various exceptions
        raise BadInput(f"model.renderer: the tokenizer does not fit {family}: {one_line(error)}") from error


class RendererDialect:
    """Chat format of a model family of the package `renderers`."""

    def __init__(self, renderer: Any, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._stop_ids = tuple(dict.fromkeys([*stop_ids, *renderer.get_stop_token_ids()]))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    def open(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        try:
            return list(
                self._renderer.render_ids(list(messages), tools=_tool_specs(tools) or None, add_generation_prompt=True)
            )
        except Exception as error:  # boundary: each family raises its own exceptions
            raise RequestFailed(f"cannot render this conversation: {one_line(error)}") from error

    def extend(self, state: Said, new: Sequence[Message], tools: Sequence[Schema] = ()) -> Bridge | None:
        prompt, answer = state.prompt.tolist(), state.answer.tolist()
        try:
            whole = self._renderer.bridge_to_next_turn(prompt, answer, list(new), tools=_tool_specs(tools) or None)
        except Exception:  # boundary: rendering from the start may work, or raises a better error
            log.debug("cannot continue a conversation, rendering it from the start", exc_info=True)
            return None
        ids = None if whole is None else list(whole.token_ids)
        before = [*prompt, *answer]
        return Bridge(ids[len(before) :]) if ids is not None and ids[: len(before)] == before else None

    def parse(self, answer: Sequence[int], prompt: Sequence[int] | Ints, tools: Sequence[Schema] = ()) -> Parsed:
        try:
            parsed = self._renderer.parse_response(
                list(answer), tools=_tool_specs(tools) or None, prompt_ids=[int(token) for token in prompt]
            )
        except Exception:  # boundary: any text is a valid answer
            log.warning("cannot parse an answer, using its text as it is", exc_info=True)
            return Parsed(self.decode(answer), self.decode(answer))
        calls = tuple(map(_tool_call, parsed.tool_calls))
        unparsed = "".join(each.raw for each, call in zip(parsed.tool_calls, calls, strict=True) if call.problem)
        return Parsed(self.decode(answer), (parsed.content or "") + unparsed, parsed.reasoning_content or "", calls)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


def _tool_call(parsed: ParsedToolCall) -> ToolCall:
    from renderers.base import ToolCallParseStatus

    readable = parsed.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
    if not readable or not parsed.name or isinstance(parsed.arguments, str):
        reason = "this tool call is not valid JSON" if parsed.status == ToolCallParseStatus.INVALID_JSON else SHAPE
        return ToolCall(parsed.id or "", parsed.name or "", "", reason)
    return ToolCall(parsed.id or "", parsed.name, json.dumps(parsed.arguments or {}, ensure_ascii=False))


def _tool_specs(tools: Sequence[Schema]) -> list[dict[str, Any]]:
    """Return the inner `function` objects of OpenAI's form, which the package expects."""
    return [dict(tool.get("function", tool)) for tool in tools]
