"""From prompts and conversations to token ids, by the model's own chat template.

Invariants
- Rendering is a pure function of tokenizer and messages, so the pipeline, the plain example script and a user's own
  code all give the policy the same ids.
- What the policy has said is never rendered again: `bridge` puts a stand-in in its place and takes what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        text = _text(tokenizer, messages, tools)
        if tools and text == _text(tokenizer, messages):
            raise BadInput(f"rollout.environment: the chat template of {_name(tokenizer)} shows the model no tools")
        return _ids(tokenizer, text)
    if tools:
        raise BadInput(f"rollout.environment: tools need a chat template, and {_name(tokenizer)} has none")
    if isinstance(prompt, str):
        return [int(token) for token in tokenizer.encode((system + "\n" if system else "") + prompt)]
    raise BadInput("tasks: prompts are chat messages, but the model's tokenizer has no chat template; use text prompts")


def bridge(
    tokenizer: Any, heard: Sequence[Message], said: Sequence[Message], tools: Sequence[Schema] = ()
) -> list[int]:
    """The ids between two answers of the policy: how the first one ends, `said`, and how the second one begins.

    `heard` is the conversation before the first answer, with stand-ins for those still earlier. A template that would
    show the policy's past in another way once `said` is there cannot be continued exactly, and that is an error.
    """
    if not tokenizer.chat_template:
        raise RequestFailed(f"{_name(tokenizer)} has no chat template to continue a chat by; use observe(text)")
    try:
        before = _text(tokenizer, heard, tools) + STAND_IN["content"]
        whole = _text(tokenizer, [*heard, STAND_IN, *said], tools)
        otherwise = _text(tokenizer, [*heard, STAND_IN, *map(_changed, said)], tools)
    except TemplateError as error:
        raise RequestFailed(f"the chat template of {_name(tokenizer)} refuses: {one_line(error)}") from error
    if not whole.startswith(before):
        raise RequestFailed(f"the chat template of {_name(tokenizer)} rewrites earlier turns: it cannot be continued")
    if whole == otherwise:
        roles = ", ".join(sorted({str(message.get("role")) for message in said}))
        raise RequestFailed(f"the chat template of {_name(tokenizer)} does not show messages of {roles} here")
    # Tokenised behind the stand-in, because some tokenizers treat the beginning of a text in a way of their own.
    opening = _ids(tokenizer, STAND_IN["content"])
    ids = _ids(tokenizer, STAND_IN["content"] + whole.removeprefix(before))
    if ids[: len(opening)] != opening:
        raise RequestFailed(f"the chat template of {_name(tokenizer)} joins an answer and what follows in one token")
    return ids[len(opening) :]


def as_text(prompt: str | list[Message]) -> str:
    """A prompt for people to read."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


def _text(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> str:
    return str(
        tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
    )


def _changed(message: Message) -> Message:
    """The same message saying something else: it must not look the same to the policy."""
    return {**message, "content": "something else" if message.get("content") != "something else" else ""}


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or "the model"
