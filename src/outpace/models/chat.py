"""Chat rendering: prompts and conversations to token ids, with the model's own chat template.

Invariants
- Rendering is a pure function of tokenizer and messages, so training, the plain example script and user code give the
  policy the same ids.
- Sampled answers are never rendered again: `bridge` renders a placeholder in their place and takes what follows.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from outpace.errors import BadInput, RequestFailed, one_line
from outpace.types import Message

Schema = dict[str, Any]
"""A tool in the form chat templates expect: `{"type": "function", "function": {name, description, parameters}}`."""

TemplateKwargs = Mapping[str, Any]
"""Extra variables for a chat template, such as `enable_thinking`."""
NO_KWARGS: TemplateKwargs = MappingProxyType({})

PLACEHOLDER: Message = {"role": "assistant", "content": "stand-in"}
"""Stands for an answer of the policy in a conversation to render."""


def as_messages(prompt: str | list[Message], system: str | None = None) -> list[Message]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    has_system = bool(messages) and messages[0].get("role") == "system"
    if system and not has_system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def text_decoder(tokenizer: Any, special_tokens: bool) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes token ids: with special tokens, exactly; or without them, cleaned up if the
    tokenizer does that.

    Where transformers only wraps the tokenizers library, calls the library directly, which takes half the time."""
    from transformers import PreTrainedTokenizerFast

    kind, fast, skip = type(tokenizer), PreTrainedTokenizerFast, not special_tokens
    only_wraps = issubclass(kind, fast) and (kind.decode, kind._decode) == (fast.decode, fast._decode)
    if only_wraps and (special_tokens or not tokenizer.clean_up_tokenization_spaces):
        backend = tokenizer.backend_tokenizer
        return lambda tokens: str(backend.decode(list(tokens), skip_special_tokens=skip))
    cleaning = {"clean_up_tokenization_spaces": False} if special_tokens else {}
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=skip, **cleaning))


def render(
    tokenizer: Any,
    prompt: str | list[Message],
    system: str | None = None,
    tools: Sequence[Schema] = (),
    template_kwargs: TemplateKwargs = NO_KWARGS,
    generation_prompt: bool = True,
) -> list[int]:
    """Return the ids of a conversation, including the generation prompt unless it ends with an answer."""
    if tokenizer.chat_template:
        messages = as_messages(prompt, system)
        template = _Template(tokenizer, tools, template_kwargs)
        if template_kwargs:
            template.check_kwargs()
        try:
            (text,) = template.texts([messages], generation_prompt)
            checked = tools and generation_prompt
            ignores_tools = checked and text == _Template(tokenizer, (), template_kwargs).text(messages)
        except TemplateError as error:
            raise RequestFailed(f"the chat template of {_name(tokenizer)} failed: {one_line(error)}") from error
        if ignores_tools:
            raise BadInput(f"rollout.environment: the chat template of {_name(tokenizer)} does not render tools")
        return _ids(tokenizer, text)
    if tools:
        raise BadInput(f"rollout.environment: tools need a chat template, but {_name(tokenizer)} has none")
    if template_kwargs:
        raise RequestFailed(f"chat_template_kwargs: {_name(tokenizer)} has no chat template")
    return [int(token) for token in tokenizer.encode(_plain(as_messages(prompt, system)))]


@dataclass(frozen=True)
class Bridge:
    """The ids between two answers.

    `rendered` is the text of the conversation up to the second answer. Pass it to the next `bridge` call to save a
    rendering."""

    ids: list[int]
    rendered: str = ""


def bridge(
    tokenizer: Any,
    history: Sequence[Message],
    answer: Message,
    new: Sequence[Message],
    tools: Sequence[Schema] = (),
    rendered: str = "",
    template_kwargs: TemplateKwargs = NO_KWARGS,
) -> Bridge | None:
    """Return the ids from one answer of the policy to the next: end of turn, the new messages, generation prompt.

    history: the conversation before the first answer, with placeholders for earlier answers.
    answer: the first answer, as a message.
    new: the messages after it.
    rendered: `Bridge.rendered` of the bridge to the first answer, if any.

    Returns None when the exact ids cannot be continued: the template renders earlier turns differently once `new`
    follows, or renders `new` differently because of the answer. Raises `RequestFailed` when the template does not
    render a message of `new` at all, since no other rendering would.
    """
    if not tokenizer.chat_template:
        raise RequestFailed(f"{_name(tokenizer)} has no chat template to continue a chat with; use observe(text)")
    template = _Template(tokenizer, tools, template_kwargs)
    try:
        *opened, whole = template.texts([*([] if rendered else [history]), [*history, PLACEHOLDER, *new]])
        before = (rendered or opened[0]) + PLACEHOLDER["content"]
        tail = whole.removeprefix(before)
        if not whole.startswith(before) or _depends_on_calls(template, history, answer, new, tail):
            return None
        _check_visible(template, history, new, whole)
    except TemplateError:  # for example a template that requires the call before its result
        return None
    # Tokenize after the placeholder: some tokenizers treat the beginning of a text differently.
    opening = _facts_of(tokenizer).placeholder_ids
    ids = _ids(tokenizer, PLACEHOLDER["content"] + tail)
    return Bridge(ids[len(opening) :], whole) if ids[: len(opening)] == opening else None


@dataclass(frozen=True)
class _Template:
    """A tokenizer's chat template with the tools and extra variables of one conversation."""

    tokenizer: Any
    tools: Sequence[Schema]
    kwargs: TemplateKwargs

    def text(self, messages: Sequence[Message]) -> str:
        return self.texts([messages])[0]

    def texts(self, conversations: Sequence[Sequence[Message]], generation_prompt: bool = True) -> list[str]:
        """Render several conversations at once, which prepares the tools only once."""
        prepared = [list(map(_for_template, messages)) for messages in conversations]
        try:
            texts: list[str] = self.tokenizer.apply_chat_template(
                prepared,
                tools=list(self.tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.kwargs,
            )
        except TemplateError:
            raise
        except Exception as error:  # boundary: a template may do anything with the values it is given
            raise TemplateError(f"{type(error).__name__}: {one_line(error)}") from error
        return texts

    def check_kwargs(self) -> None:
        """Reject extra variables that would override the template arguments of the request itself."""
        taken = {"messages", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        if names := sorted(taken & self.kwargs.keys()):
            raise RequestFailed(f"chat_template_kwargs: {', '.join(names)} cannot be set here")

    def fact_key(self, *more: Any) -> tuple[Any, ...]:
        """Return the key of a fact that depends on this template and on `more`."""
        return (self.tokenizer.chat_template, bool(self.tools), repr(dict(self.kwargs)), *more)


MAX_FACTS = 4096
"""Facts are cleared at this number, because extra variables may differ from request to request."""


@dataclass(frozen=True)
class _TemplateFacts:
    """Cached properties of a tokenizer and its template. Each costs another rendering, so it is determined once per
    pair of a message's role and the role before it."""

    placeholder_ids: list[int]
    known: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    def add(self, key: tuple[Any, ...], fact: bool) -> bool:
        if len(self.known) >= MAX_FACTS:
            self.known.clear()
        self.known[key] = fact
        return fact


_facts: WeakKeyDictionary[Any, _TemplateFacts] = WeakKeyDictionary()


def _facts_of(tokenizer: Any) -> _TemplateFacts:
    if tokenizer not in _facts:
        _facts[tokenizer] = _TemplateFacts(_ids(tokenizer, PLACEHOLDER["content"]))
    return _facts[tokenizer]


def _depends_on_calls(
    template: _Template, history: Sequence[Message], answer: Message, new: Sequence[Message], tail: str
) -> bool:
    """Whether the template renders `new` differently after tool calls, for example with the name of the tool."""
    if not answer.get("tool_calls"):
        return False
    facts = _facts_of(template.tokenizer)
    key = template.fact_key("calls", *dict.fromkeys(message.get("role") for message in new))
    if key in facts.known:
        return facts.known[key]
    called = {**PLACEHOLDER, "tool_calls": answer["tool_calls"]}
    return facts.add(key, not template.text([*history, called, *new]).endswith(tail))


def _check_visible(template: _Template, history: Sequence[Message], new: Sequence[Message], whole: str) -> None:
    """Raise if the template omits a message of `new`. That depends on its role and the role before it."""
    facts = _facts_of(template.tokenizer)
    before = "assistant"
    for index, message in enumerate(new):
        key = template.fact_key("visible", before, message.get("role"))
        before = str(message.get("role"))
        if key in facts.known:
            continue
        changed = [*new[:index], _changed(message), *new[index + 1 :]]
        if whole == template.text([*history, PLACEHOLDER, *changed]):
            name = _name(template.tokenizer)
            raise RequestFailed(f"the chat template of {name} does not render {before} messages here")
        facts.add(key, True)


def _plain(messages: Sequence[Message]) -> str:
    """Return a single prompt, after an optional system text, for a model without a chat template."""
    *before, last = messages
    if last.get("role") != "user" or [message.get("role") for message in before] not in ([], ["system"]):
        raise BadInput("tasks: prompts are chat messages, but the tokenizer has no chat template; use text prompts")
    return "\n".join(str(message["content"]) for message in messages)


def as_text(prompt: str | list[Message]) -> str:
    """Return a human-readable prompt."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {_readable(message)}" for message in prompt)


def _readable(message: Message) -> str:
    """Return the content of a message, and its tool calls as `name(arguments)`."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    calls = [f"{function.get('name')}({function.get('arguments')})" for function in functions]
    content = message.get("content")
    return " ".join([*([str(content)] if content or not calls else []), *calls])


def _for_template(message: Message) -> Message:
    """Convert a message with tool calls from OpenAI's form: templates expect the arguments as an object, not as JSON
    text, and the content as text, not None."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed = [_parse_arguments(call) for call in calls]
    return {**message, "content": message.get("content") or "", "tool_calls": parsed}


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _changed(message: Message) -> Message:
    """Return the message with other content: the rendered text must change with it."""
    return {**message, "content": "something else" if message.get("content") != "something else" else ""}


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or "the model"
