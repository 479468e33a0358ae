"""Opening tokens of tool calls, for answers that must call a function.

Short conversations that end with a call are rendered in the model's own chat format and compared. The opening therefore
consists of the tokens that the model itself would use.

    prompt │ <tool_call>{"name": " │ add │ ", │ "arguments": {…
           └── several functions ──┘     │    │
           └────────── one function ─────┴────┘   the token after the name ends it

A chat format that does not render calls, or does not parse them back, raises `RequestFailed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from outpace.errors import RequestFailed
from outpace.models.chat import NO_KWARGS, Schema, TemplateKwargs
from outpace.models.chat_format import ChatFormat
from outpace.types import Message

_QUESTION: Message = {"role": "user", "content": "?"}
_ARGUMENTS = ('{"a": 1}', '{"text": "b"}')
"""Calls with different arguments are compared, so that the opening does not depend on them."""


def call_opening(
    chat_format: ChatFormat,
    names: Sequence[str],
    tools: Sequence[Schema],
    template_kwargs: TemplateKwargs = NO_KWARGS,
) -> list[int]:
    """Return the opening tokens of a call of one of these functions, including the name if there is only one.

    Raises `RequestFailed` if the chat format does not show how a call starts."""
    prompt = chat_format.open([_QUESTION], tools, template_kwargs)

    def renderings(name: str) -> Iterator[list[int]]:
        for arguments in _ARGUMENTS:
            call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
            answered: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            ids = chat_format.open([_QUESTION, answered], tools, template_kwargs, generation_prompt=False)
            answer = _until_stop(ids[len(prompt) :], chat_format.stop_ids)
            calls = chat_format.parse(answer, prompt, tools).calls
            if ids[: len(prompt)] != prompt or [(each.name, each.problem) for each in calls] != [(name, "")]:
                raise RequestFailed(
                    "tool_choice: the chat format of this model does not show how a tool call opens, "
                    "so calls cannot be forced; use auto"
                )
            yield answer

    name = names[0]
    calls = list(renderings(name))
    of_any_name = common_prefix([*calls, *renderings("y" if name.startswith("x") else "x")])
    if len(set(names)) > 1:
        return of_any_name
    return _with_name(chat_format, common_prefix(calls), len(of_any_name), name)


def common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    return [same[0] for same in takewhile(lambda same: len(set(same)) == 1, zip(*sequences, strict=False))]


def _with_name(chat_format: ChatFormat, ids: list[int], before: int, name: str) -> list[int]:
    """Return the ids up to and including the token that ends the name, which starts after `before` ids."""
    for length in range(before + 1, len(ids) + 1):
        text = chat_format.decode(ids[before:length], special_tokens=True)
        start = text.find(name)
        if start >= 0 and len(text) > start + len(name):
            return ids[:length]
    raise RequestFailed(f"tool_choice: the chat format of this model does not separate the name {name!r} of a call")


def _until_stop(answer: list[int], stop_ids: Sequence[int]) -> list[int]:
    """Return the answer up to and including its first stop token."""
    end = next((index for index, token in enumerate(answer) if token in stop_ids), len(answer))
    return answer[: end + 1]
