"""From prompts and conversations to token ids, by the model's own chat template.

Invariants
- Rendering is a pure function of tokenizer and messages, so the pipeline, the plain example script and a user's own
  code all give the policy the same ids.
- What the policy has said is never rendered again: `bridge` puts a stand-in in its place and takes what follows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from outpace.errors import BadInput, RequestFailed, one_line
from outpace.types import Message

Schema = dict[str, Any]
"""One tool as chat templates take it: `{"type": "function", "function": {name, description, parameters}}`."""

STAND_IN: Message = {"role": "assistant", "content": "stand-in"}
"""What a conversation holds where the policy spoke."""


def as_messages(prompt: str | list[Message], system: str | None = None) -> list[Message]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    brings_its_own = bool(messages) and messages[0].get("role") == "system"
    if system and not brings_its_own:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def render(
    tokenizer: Any, prompt: str | list[Message], system: str | None = None, tools: Sequence[Schema] = ()
) -> list[int]:
    """The ids after which the policy speaks."""
    if tokenizer.chat_template:
        messages = as_messages(prompt, system)
        try:
            text = _text(tokenizer, messages, tools)
        except TemplateError as error:
            raise RequestFailed(f"the chat template of {_name(tokenizer)} refuses: {one_line(error)}") from error
        if tools and text == _text(tokenizer, messages):
            raise BadInput(f"rollout.environment: the chat template of {_name(tokenizer)} shows the model no tools")
        return _ids(tokenizer, text)
    if tools:
        raise BadInput(f"rollout.environment: tools need a chat template, and {_name(tokenizer)} has none")
    return [int(token) for token in tokenizer.encode(_plain(as_messages(prompt, system)))]


@dataclass(frozen=True)
class Bridge:
    """The ids between two answers, and how the conversation up to the second one was `shown`: whoever goes on from
    there and hands this back saves a rendering."""

    ids: list[int]
    shown: str = ""


def bridge(
    tokenizer: Any,
    heard: Sequence[Message],
    answered: Message,
    said: Sequence[Message],
    tools: Sequence[Schema] = (),
    shown: str = "",
) -> Bridge | None:
    """From one answer of the policy to the next: how the first one ends, `said`, and how the second one begins.

    `heard` is the conversation before the first answer, with stand-ins for those still earlier; `answered` is that
    answer. None: the template would show the policy's past in another way once `said` is there, or `said` in another
    way because of what was answered, so that it cannot be continued exactly. A template that does not show `said` at
    all is an error, since no other rendering would. `shown` is that of the bridge to the first answer, if any.
    """
    if not tokenizer.chat_template:
        raise RequestFailed(f"{_name(tokenizer)} has no chat template to continue a chat by; use observe(text)")
    try:
        *opened, whole = _texts(tokenizer, [*([] if shown else [heard]), [*heard, STAND_IN, *said]], tools)
        before = (shown or opened[0]) + STAND_IN["content"]
        tail = whole.removeprefix(before)
        if not whole.startswith(before) or _looks_back(tokenizer, heard, answered, said, tools, tail):
            return None
        _refuse_hidden(tokenizer, heard, said, tools, whole)
    except TemplateError:  # for instance one that wants to see the call before its result
        return None
    # Tokenised behind the stand-in, because some tokenizers treat the beginning of a text in a way of their own.
    opening = _learned(tokenizer).stand_in
    ids = _ids(tokenizer, STAND_IN["content"] + tail)
    return Bridge(ids[len(opening) :], whole) if ids[: len(opening)] == opening else None


@dataclass(frozen=True)
class _Learned:
    """What was found out about a tokenizer: the ids of the stand-in, and what its template does. Finding out takes
    another rendering, so it is done once for each pair of a message's role and the role before it."""

    stand_in: list[int]
    looks_back: dict[tuple[Any, ...], bool]
    shown: set[tuple[Any, ...]]


_of_tokenizers: WeakKeyDictionary[Any, _Learned] = WeakKeyDictionary()


def _learned(tokenizer: Any) -> _Learned:
    if tokenizer not in _of_tokenizers:
        _of_tokenizers[tokenizer] = _Learned(_ids(tokenizer, STAND_IN["content"]), {}, set())
    return _of_tokenizers[tokenizer]


def _looks_back(
    tokenizer: Any,
    heard: Sequence[Message],
    answered: Message,
    said: Sequence[Message],
    tools: Sequence[Schema],
    tail: str,
) -> bool:
    """Whether the template shows `said` in another way where it follows calls, as one that names the tool does."""
    if not answered.get("tool_calls"):
        return False
    key = (tokenizer.chat_template, bool(tools), tuple(dict.fromkeys(message.get("role") for message in said)))
    known = _learned(tokenizer).looks_back
    if key not in known:
        called = {**STAND_IN, "tool_calls": answered["tool_calls"]}
        known[key] = not _text(tokenizer, [*heard, called, *said], tools).endswith(tail)
    return known[key]


def _refuse_hidden(
    tokenizer: Any, heard: Sequence[Message], said: Sequence[Message], tools: Sequence[Schema], whole: str
) -> None:
    """Refuse a template that leaves out something of `said`: who speaks decides that, and after whom."""
    shown = _learned(tokenizer).shown
    before = "assistant"
    for index, message in enumerate(said):
        key = (tokenizer.chat_template, bool(tools), before, message.get("role"))
        before = str(message.get("role"))
        if key in shown:
            continue
        otherwise = [*said[:index], _changed(message), *said[index + 1 :]]
        if whole == _text(tokenizer, [*heard, STAND_IN, *otherwise], tools):
            raise RequestFailed(f"the chat template of {_name(tokenizer)} does not show messages of {before} here")
        shown.add(key)


def _plain(messages: Sequence[Message]) -> str:
    """A single prompt, and a system text before it, for a model without a chat template."""
    *before, last = messages
    if last.get("role") != "user" or [message.get("role") for message in before] not in ([], ["system"]):
        raise BadInput(
            "tasks: prompts are chat messages, but the model's tokenizer has no chat template; use text prompts"
        )
    return "\n".join(str(message["content"]) for message in messages)


def as_text(prompt: str | list[Message]) -> str:
    """A prompt for people to read."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {_readable(message)}" for message in prompt)


def _readable(message: Message) -> str:
    """What a message says, and what it calls as a programmer would write it."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    calls = [f"{function.get('name')}({function.get('arguments')})" for function in functions]
    content = message.get("content")
    return " ".join([*([str(content)] if content or not calls else []), *calls])


def _text(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> str:
    return _texts(tokenizer, [messages], tools)[0]


def _texts(tokenizer: Any, conversations: Sequence[Sequence[Message]], tools: Sequence[Schema] = ()) -> list[str]:
    """Several at once cost less than one after the other: the tools are prepared once."""
    shown = [list(map(_for_template, messages)) for messages in conversations]
    texts: list[str] = tokenizer.apply_chat_template(
        shown, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
    )
    return texts


def _for_template(message: Message) -> Message:
    """Templates take the arguments of a call as an object, and content as text; OpenAI's protocol has them as JSON and
    perhaps as nothing."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "content": message.get("content") or "", "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _changed(message: Message) -> Message:
    """The same message saying something else: it must not look the same to the policy."""
    return {**message, "content": "something else" if message.get("content") != "something else" else ""}


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or "the model"
