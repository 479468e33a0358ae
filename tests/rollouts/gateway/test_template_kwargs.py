"""`chat_template_kwargs` of a request: extra variables of the chat template, and part of what a conversation is."""

from __future__ import annotations

import copy
from typing import Any

import openai
import pytest

HI: list[Any] = [{"role": "user", "content": "hi"}]
GREETING = "{{- 'Dear ' + whom if whom }}"


async def test_template_kwargs_reach_the_template_and_other_kwargs_start_another_conversation(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any, tokenizer: Any
) -> None:
    polite = copy.deepcopy(tokenizer)
    polite.chat_template = GREETING + tokenizer.chat_template
    engine = typing_engine("one<|end|>", with_tokenizer=polite)
    client = policy(engine, with_tokenizer=polite)
    agent = agent_of(await gateway.open(client))
    messages = [*HI, {"role": "assistant", "content": "one"}, *HI]

    async def ask(messages: Any, kwargs: Any) -> None:
        await agent.chat.completions.create(
            model="m", messages=messages, extra_body={"chat_template_kwargs": kwargs} if kwargs else None
        )

    await ask(HI, {"whom": "Ann"})
    await ask(messages, {"whom": "Ann"})
    assert engine.prompts[0] == "Dear Ann<|user|>hi<|end|><|assistant|>"
    assert len(client.trajectories()) == 1
    await ask(messages, {"whom": "Bob"})
    await ask(messages, None)
    assert (len(client.trajectories()), client.breaks) == (3, 0)
    assert [prompt.partition("<|")[0] for prompt in engine.prompts] == ["Dear Ann", "Dear Ann", "Dear Bob", ""]


@pytest.mark.parametrize("kwargs", [{"add_generation_prompt": False}, {"messages": []}, {"whom": 7}])
async def test_template_kwargs_that_the_template_cannot_take_are_refused(
    kwargs: dict[str, Any], gateway: Any, policy: Any, typing_engine: Any, agent_of: Any, tokenizer: Any
) -> None:
    polite = copy.deepcopy(tokenizer)
    polite.chat_template = GREETING + tokenizer.chat_template
    agent = agent_of(await gateway.open(policy(typing_engine("x"), with_tokenizer=polite)))
    with pytest.raises(openai.BadRequestError, match=r"template"):
        await agent.chat.completions.create(model="m", messages=HI, extra_body={"chat_template_kwargs": kwargs})
