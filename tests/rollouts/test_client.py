"""The policy client: every request is explicit and every token is accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from outpace.errors import ComponentLost, RequestFailed
from outpace.models.chat import render
from outpace.models.chat_format import TemplateChatFormat
from outpace.rollouts.client import PolicyClient
from outpace.runtime.rng import request_seed
from outpace.types import OBSERVED, GroupOrder
from support import naming

MakeClient = Callable[..., PolicyClient]


def conversation(tokenizer: Any, *turns: str, **options: Any) -> list[int]:
    """Token ids of the rendered template for alternating user and assistant turns, up to the end of the last turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False, **options)
    return list(tokenizer.encode(text, add_special_tokens=False))


async def test_the_prompt_is_sent_as_the_template_renders_it(
    make_engine: Any, make_client: MakeClient, tokenizer: Any
) -> None:
    engine = make_engine(["hello<|end|>"])
    assert await make_client(engine).sample("hi") == "hello"
    assert engine.prompts == {"7.0.0": render(tokenizer, "hi")}


async def test_the_system_message_of_the_config_comes_first(
    make_engine: Any, make_client: MakeClient, tokenizer: Any
) -> None:
    engine = make_engine(["hello"])
    await make_client(engine, system="be kind").sample("hi")
    assert tokenizer.decode(engine.prompts["7.0.0"]).startswith("<|system|>be kind<|end|><|user|>hi")


async def test_every_sampling_field_is_sent(make_engine: Any, make_client: MakeClient, tokenizer: Any) -> None:
    engine = make_engine(["hello"])
    await make_client(engine, top_k=5).sample("hi")
    sent = engine.samplings["7.0.0"]
    assert (sent.max_tokens, sent.temperature, sent.top_p, sent.top_k) == (16, 0.5, 1.0, 5)
    assert (sent.stop_ids, sent.stop_strings) == ([tokenizer.eos_token_id], ["\n"])
    assert engine.bounds == [(2, None)]


async def test_a_rollout_can_override_sampling_fields_and_unknown_fields_are_refused(
    make_engine: Any, make_client: MakeClient
) -> None:
    engine = make_engine(["hello"])
    client = make_client(engine)
    with pytest.raises(TypeError, match="maximum"):
        await client.sample("hi", maximum=3)
    await client.sample("hi", max_tokens=3, stop_strings=["!"], temperature=0.5)
    sent = engine.samplings["7.0.0"]
    assert (sent.max_tokens, sent.stop_strings, sent.temperature) == (3, ["!"], 0.5)


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.9), ("top_p", 0.5), ("top_k", 3)])
async def test_overrides_that_change_the_sampling_distribution_are_refused_in_training(
    make_engine: Any, make_client: MakeClient, name: str, value: float
) -> None:
    engine = make_engine(["hello"])
    client = make_client(engine)
    with pytest.raises(RequestFailed, match=naming(name, str(value), f"rollout.{name}")):
        await client.sample("hi", **{name: value})
    assert engine.prompts == {}
    await client.sample("hi")  # nothing was appended by the refused request
    assert len(engine.prompts) == 1


async def test_a_held_out_episode_can_override_the_sampling_distribution(
    make_engine: Any, make_settings: Any, tokenizer: Any
) -> None:
    engine = make_engine(["hello"])
    order = GroupOrder(7, task=0, epoch=0, min_version=5, size=1, heldout=True, pinned=5)
    client = PolicyClient(engine, TemplateChatFormat(tokenizer, ()), make_settings(), order, 0)
    await client.sample("hi", temperature=0.0, top_p=0.5, top_k=3)
    (sent,) = engine.samplings.values()
    assert (sent.temperature, sent.top_p, sent.top_k) == (0.0, 0.5, 3)


async def test_every_request_has_its_own_seed(make_engine: Any, make_client: MakeClient) -> None:
    engine = make_engine(["a<|end|>", "b<|end|>"])
    for episode in (0, 1):
        client = make_client(engine, episode=episode)
        await client.sample("hi")
        await client.sample("more")
    seeds = {request: sampling.seed for request, sampling in engine.samplings.items()}
    assert seeds == {f"7.{episode}.{turn}": request_seed(11, 7, episode, turn) for episode in (0, 1) for turn in (0, 1)}
    assert len(set(seeds.values())) == 4


async def test_request_ids_are_listed_in_order(make_engine: Any, make_client: MakeClient) -> None:
    client = make_client(make_engine(["a<|end|>", "b<|end|>"]), episode=1)
    await client.sample("hi")
    await client.sample("more")
    assert client.requests == ["7.1.0", "7.1.1"]
    assert client.newest is not None
    assert client.newest.text == "b"


async def test_evaluation_requests_have_ids_distinct_from_training_requests(
    make_engine: Any, make_settings: Any, tokenizer: Any
) -> None:
    engine = make_engine(["hello"])
    order = GroupOrder(7, task=0, epoch=0, min_version=5, size=1, heldout=True, pinned=5)
    await PolicyClient(engine, TemplateChatFormat(tokenizer, ()), make_settings(), order, 0).sample("hi")
    assert list(engine.prompts) == ["eval-5.7.0.0"]
    assert engine.bounds == [(5, 5)]


async def test_sampled_tokens_keep_their_logprobs_and_versions(
    make_engine: Any, make_client: MakeClient, tokenizer: Any
) -> None:
    client = make_client(make_engine(["ab<|end|>"]))
    await client.sample("hi")
    built = client.trajectory()
    prompt = len(render(tokenizer, "hi"))
    assert built.mask.tolist() == [False] * prompt + [True] * 3
    assert built.versions.tolist() == [OBSERVED] * prompt + [3] * 3
    assert built.logprobs[prompt:].tolist() == pytest.approx([-0.01, -0.02, -0.03])


async def test_a_conversation_of_several_turns_matches_the_rendered_template_token_for_token(
    make_engine: Any, make_client: MakeClient, any_tokenizer: Any
) -> None:
    end = any_tokenizer.eos_token
    client = make_client(make_engine([f"the answer{end}", f"is{end}"], any_tokenizer), with_tokenizer=any_tokenizer)
    await client.sample("first")
    await client.sample("second")
    built = client.trajectory()
    whole = conversation(any_tokenizer, "first", "the answer", "second", "is")
    assert built.tokens.tolist() == whole[: len(built.tokens)]
    assert any_tokenizer.decode(built.tokens[built.mask]) == f"the answer{end}is{end}"
    assert set(built.versions[built.mask].tolist()) == {3, 4}


async def test_the_template_is_rendered_with_the_whole_conversation(
    make_engine: Any, make_client: MakeClient, tokenizer: Any
) -> None:
    counting = deepcopy(tokenizer)
    counting.chat_template = (
        "{% for message in messages %}{{ loop.index ~ message.role ~ ':' ~ message.content ~ '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ (messages | length + 1) ~ 'assistant:' }}{% endif %}"
    )
    client = make_client(make_engine(["b<|end|>", "d<|end|>", "f<|end|>"]), with_tokenizer=counting)
    for text in ("a", "c", "e"):
        await client.sample(text)
    assert tokenizer.decode(client.trajectory().tokens) == (
        "1user:a<|end|>2assistant:b<|end|>3user:c<|end|>4assistant:d<|end|>5user:e<|end|>6assistant:f<|end|>"
    )


async def test_each_request_carries_exactly_the_tokens_so_far(
    make_engine: Any, make_client: MakeClient, any_tokenizer: Any
) -> None:
    end = any_tokenizer.eos_token
    engine = make_engine([f"one{end}", f"two{end}", f"three{end}"], any_tokenizer)
    client = make_client(engine, with_tokenizer=any_tokenizer)
    for text in ("a", "b", "c"):
        await client.sample(text)
    tokens = client.trajectory().tokens.tolist()
    for prompt in engine.prompts.values():
        assert prompt == tokens[: len(prompt)]


async def test_a_missing_end_of_turn_token_is_appended_and_not_trained_on(
    make_engine: Any, make_client: MakeClient, any_tokenizer: Any
) -> None:
    client = make_client(make_engine(["cut", "more"], any_tokenizer), with_tokenizer=any_tokenizer)
    await client.sample("first")
    await client.sample("second")
    built = client.trajectory()
    whole = conversation(any_tokenizer, "first", "cut", "second", "more")
    assert built.tokens.tolist() == whole[: len(built.tokens)]
    assert any_tokenizer.decode(built.tokens[built.mask]) == "cutmore"


async def test_no_second_end_of_turn_is_added_after_a_different_stop_token(
    make_engine: Any, make_settings: Any, tokenizer: Any
) -> None:
    stops = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    order = GroupOrder(7, task=0, epoch=0, min_version=0, size=1)
    chat_format = TemplateChatFormat(tokenizer, stops)
    client = PolicyClient(make_engine(["a<|pad|>", "b"]), chat_format, make_settings(), order, 0)
    await client.sample("x")
    await client.sample("y")
    assert (
        tokenizer.decode(client.trajectory().tokens)
        == "<|user|>x<|end|><|assistant|>a<|pad|><|user|>y<|end|><|assistant|>b"
    )


async def test_observed_text_is_appended_verbatim(make_engine: Any, make_client: MakeClient, tokenizer: Any) -> None:
    engine = make_engine(["1+1=", "good"])
    client = make_client(engine)
    await client.sample("sum")
    client.observe("2")
    await client.sample()
    assert tokenizer.decode(client.trajectory().tokens) == "<|user|>sum<|end|><|assistant|>1+1=2good"
    assert tokenizer.decode(client.trajectory().tokens[client.trajectory().mask]) == "1+1=good"


async def test_a_chat_prompt_after_plain_observed_text_is_refused(make_engine: Any, make_client: MakeClient) -> None:
    engine = make_engine(["a"])
    client = make_client(engine)
    client.observe("once upon a time")
    with pytest.raises(RequestFailed):
        await client.sample("hi")
    assert engine.prompts == {}


async def test_the_conversation_cannot_change_while_a_request_is_in_flight(
    make_engine: Any, make_client: MakeClient
) -> None:
    engine = make_engine([None])
    client = make_client(engine)
    sampling = asyncio.create_task(client.sample("hi"))
    await engine.started.wait()
    with pytest.raises(RequestFailed):
        await client.sample()
    with pytest.raises(RequestFailed):
        client.observe("x")
    assert len(engine.prompts) == 1
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)


async def test_an_abandoned_request_is_aborted_once(make_engine: Any, make_client: MakeClient) -> None:
    engine = make_engine([None])
    client = make_client(engine)
    sampling = asyncio.create_task(client.sample("hi"))
    await engine.started.wait()
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    await client.abandon()
    await client.abandon()
    assert engine.aborted == ["7.0.0"]


async def test_tokens_of_an_abandoned_request_are_counted_and_not_trained_on(
    make_engine: Any, make_client: MakeClient, tokenizer: Any
) -> None:
    engine = make_engine([None])
    engine.partial = "hal"
    client = make_client(engine)
    pending = asyncio.create_task(client.sample("hi"))
    await engine.started.wait()
    await client.abandon()
    assert client.abandoned == len("hal")
    with pytest.raises(RequestFailed, match="episode"):
        await pending
    assert not client.trajectory().mask.any()


async def test_abandon_stops_waiting_for_an_engine_that_ignores_the_abort(
    make_engine: Any, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    class IgnoresAbort(type(make_engine([]))):  # type: ignore[misc]
        async def abort(self, request_ids: list[str]) -> None:
            self.aborted += request_ids

    monkeypatch.setattr("outpace.rollouts.requests.ABORT_GRACE_S", 0.01)
    engine = make_engine([None])
    engine.__class__ = IgnoresAbort
    client = make_client(engine)
    pending = asyncio.create_task(client.sample("hi"))
    await engine.started.wait()
    await client.abandon()
    assert (engine.aborted, client.abandoned) == (["7.0.0"], 0)
    await asyncio.gather(pending, return_exceptions=True)
    assert pending.cancelled()


async def test_abandon_without_requests_in_flight_aborts_nothing(make_engine: Any, make_client: MakeClient) -> None:
    engine = make_engine(["hello"])
    client = make_client(engine)
    await client.sample("hi")
    await client.abandon()
    assert engine.aborted == []


async def test_a_rollout_can_time_out_a_request_and_continue(
    make_engine: Any, make_client: MakeClient, tokenizer: Any
) -> None:
    engine = make_engine([None, "late"])
    client = make_client(engine)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await client.sample("hi")
    await client.sample("hi")
    assert engine.prompts["7.0.1"] == render(tokenizer, "hi")
    assert tokenizer.decode(client.trajectory().tokens) == "<|user|>hi<|end|><|assistant|>late"


async def test_the_stop_reason_is_that_of_the_newest_answer(make_engine: Any, make_client: MakeClient) -> None:
    engine = make_engine(["hello"])
    engine.stop = "length"
    client = make_client(engine)
    await client.sample("hi")
    assert client.stop == "length"


@pytest.mark.parametrize(
    "trouble", [ComponentLost("engine-0", "closed its connection"), RequestFailed("it was closed"), None]
)
async def test_abandoning_a_request_never_fails_even_if_the_engine_is_lost_or_hangs(
    trouble: Exception | None, make_engine: Any, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def abort(_: list[str]) -> None:
        if trouble is None:
            await asyncio.Event().wait()  # the engine hangs, or is down and may come back
        else:
            raise trouble

    monkeypatch.setattr("outpace.rollouts.requests.ABORT_GRACE_S", 0.01)
    engine = make_engine([None, None])
    engine.abort = abort
    client = make_client(engine)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await client.sample("hi")
    pending = asyncio.create_task(client.sample("hi"))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await client.abandon()
        await asyncio.gather(pending, return_exceptions=True)
    assert pending.cancelled()
    assert client.abandoned == 0
