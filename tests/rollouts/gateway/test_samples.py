"""`n` above 1: independent samples of one prompt, each a request that is recorded and trained."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from outpace.errors import RequestFailed

HI: list[Any] = [{"role": "user", "content": "hi"}]
TEXTS = ["one<|end|>", "two<|end|>", "three<|end|>"]


async def test_samples_have_their_own_requests_seeds_and_trajectories(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine(*TEXTS, "more<|end|>")
    client = policy(engine)
    agent = agent_of(await gateway.open(client))
    answer = await agent.chat.completions.create(model="m", messages=HI, n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (0, "one"),
        (1, "two"),
        (2, "three"),
    ]
    assert (
        client.requests
        == [choice.model_extra["request_id"] for choice in answer.choices]
        == ["7.0.0", "7.0.1", "7.0.2"]
    )
    assert len({sampling.seed for sampling in engine.samplings}) == 3
    assert len(set(engine.prompts)) == 1
    kept = client.trajectories()
    assert [int(each.mask.sum()) for each in kept] == [4, 4, 6]
    assert answer.usage.completion_tokens == 14
    assert answer.usage.prompt_tokens == len(kept[0].tokens) - 4
    messages = [*HI, {"role": "assistant", "content": "two"}, *HI]
    await agent.chat.completions.create(model="m", messages=messages)
    assert (len(client.trajectories()), client.breaks) == (3, 0)
    client.turn_reward(1.0, answer.choices[1].model_extra["request_id"])
    assert [each.turn_rewards.tolist() for each in client.trajectories() if len(each.turn_rewards)] == [[1.0, 0.0]]


async def test_samples_that_continue_an_answer_train_it_once(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    client = policy(typing_engine("one<|end|>", "two<|end|>", "three<|end|>"))
    agent = agent_of(await gateway.open(client))
    await agent.chat.completions.create(model="m", messages=HI)
    messages = [*HI, {"role": "assistant", "content": "one"}, *HI]
    await agent.chat.completions.create(model="m", messages=messages, n=2)
    kept = client.trajectories()
    assert [int(each.mask.sum()) for each in kept] == [4 + 4, 6]
    shared = min(len(each.tokens) for each in kept) - 6
    np.testing.assert_array_equal(kept[0].tokens[:shared], kept[1].tokens[:shared])


async def test_streamed_samples_are_told_apart_by_their_index(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine(*TEXTS, by_hand=True)
    agent = agent_of(await gateway.open(policy(engine)))
    stream = await agent.chat.completions.create(
        model="m", messages=HI, n=3, stream=True, stream_options={"include_usage": True}
    )
    openings = [await anext(stream) for _ in range(3)]
    assert [(chunk.id, chunk.choices[0].index) for chunk in openings] == [("7.0.0", index) for index in range(3)]
    await engine.write(2)
    early = [await anext(stream) for _ in range(3)]
    assert {chunk.choices[0].index: chunk.choices[0].delta.content for chunk in early} == {0: "on", 1: "tw", 2: "th"}
    await engine.write(99)
    *rest, last = [chunk async for chunk in stream]
    texts = ["", "", ""]
    for chunk in [*early, *rest]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["one", "two", "three"]
    finished = [(chunk.choices[0].index, chunk.choices[0].finish_reason) for chunk in rest]
    assert [each for each in finished if each[1]] == [(0, "stop"), (1, "stop"), (2, "stop")]
    assert (last.choices, last.usage.completion_tokens) == ([], 14)


async def test_text_completions_are_sampled_n_times_too(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    client = policy(typing_engine(*TEXTS))
    agent = agent_of(await gateway.open(client))
    answer = await agent.completions.create(model="m", prompt="x", n=3, best_of=3)
    assert [choice.text for choice in answer.choices] == ["one", "two", "three"]
    assert len(client.trajectories()) == 3


async def test_a_failed_sample_fails_the_request_and_ends_the_others(
    gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    engine = typing_engine("one", RequestFailed("logits are not finite"), by_hand=True)
    client = policy(engine)
    endpoint = await gateway.open(client)
    headers = {"x-api-key": endpoint.api_key}
    body = {"model": "m", "messages": HI, "n": 2}
    async with http.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as response:
        assert response.status == 400
        assert "logits are not finite" in await response.text()
    assert engine.aborted == ["7.0.0"]


async def test_no_sample_of_a_failed_request_is_trained(policy: Any, typing_engine: Any) -> None:
    client = policy(typing_engine("one<|end|>", RequestFailed("logits are not finite")))
    with pytest.raises(RequestFailed):
        await client.chat_samples(2, HI)
    assert client.trajectories() == []
    assert client.abandoned >= 4


async def test_samples_are_recorded_in_the_order_of_their_requests_however_fast_each_is(
    policy: Any, typing_engine: Any
) -> None:
    engine = typing_engine("three<|end|>", "two<|end|>", "one<|end|>", by_hand=True)
    client = policy(engine)
    sampled = asyncio.create_task(client.chat_samples(3, HI))
    for _ in range(10):  # until all three requests are sent
        await asyncio.sleep(0)
    await engine.write(4)
    await engine.write(99)
    assert [answer.content for answer in await sampled] == ["three", "two", "one"]
    assert [int(each.mask.sum()) for each in client.trajectories()] == [6, 4, 4]
    assert client.newest.content == "one"


async def test_an_agent_that_disconnects_aborts_all_samples(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine(*TEXTS, by_hand=True)
    client = policy(engine)
    stream = await agent_of(await gateway.open(client)).chat.completions.create(
        model="m", messages=HI, n=3, stream=True
    )
    await engine.write(2)
    while not (await anext(stream)).choices[0].delta.content:
        pass
    await stream.close()
    await engine.stopped.wait()
    await gateway.close_session(client)
    assert sorted(engine.aborted) == ["7.0.0", "7.0.1", "7.0.2"]
    assert (client.abandoned, client.trajectories()) == (6, [])
