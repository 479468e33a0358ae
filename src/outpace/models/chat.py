"""From a task's prompt to token ids, by the model's own chat template.

Invariant: rendering is a pure function of tokenizer and prompt, so the pipeline, the plain example script and a user's
own code all give the policy the same ids.
"""

from __future__ import annotations

from typing import Any

from outpace.errors import BadInput
from outpace.types import Message


def as_messages(prompt: str | list[Message], system: str | None = None) -> list[Message]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    brings_its_own = bool(messages) and messages[0].get("role") == "system"
    if system and not brings_its_own:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def render(tokenizer: Any, prompt: str | list[Message], system: str | None = None) -> list[int]:
    """The ids after which the policy speaks."""
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template(
            as_messages(prompt, system), tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return [int(token) for token in ids]
    if isinstance(prompt, str):
        return [int(token) for token in tokenizer.encode((system + "\n" if system else "") + prompt)]
    raise BadInput("tasks: prompts are chat messages, but the model's tokenizer has no chat template; use text prompts")


def as_text(prompt: str | list[Message]) -> str:
    """A prompt for people to read."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)
