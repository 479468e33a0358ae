"""The client: every request explicit, every token accounted for."""

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
    """The template's own ids for user and assistant turns that alternate, up to the end of the last one."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False, **options)
    return list(tokenizer.encode(text, add_special_tokens=False))


async def test_the_prompt_goes_out_as_the_template_renders_it(
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


async def test_every_field_of_sampling_is_sent(make_engine: Any, make_client: MakeClient, tokenizer: Any) -> None:
    engine = make_engine(["hello"])
    await make_client(engine, top_k=5).sample("hi")
    sent = engine.samplings["7.0.0"]
    assert (sent.max_tokens, sent.temperature, sent.top_p, sent.top_k) == (16, 0.5, 1.0, 5)
    assert (sent.stop_ids, sent.stop_strings) == ([tokenizer.eos_token_id], ["\n"])
    assert engine.bounds == [(2, None)]


async def test_a_rollout_may_override_fields_and_no_others(make_engine: Any, make_client: MakeClient) -> None:
    engine = make_engine(["hello"])
    client = make_client(engine)
    with pytest.raises(TypeError, match="maximum"):
        await client.sample("hi", maximum=3)
    await client.sample("hi", max_tokens=3, stop_strings=["!"], temperature=0.5)
    sent = engine.samplings["7.0.0"]
    assert (sent.max_tokens, sent.stop_strings, sent.temperature) == (3, ["!"], 0.5)


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.9), ("top_p", 0.5), ("top_k", 3)])
async def test_a_distribution_that_the_learner_does_not_know_is_refused_in_training(
    make_engine: Any, make_client: MakeClient, name: str, value: float
) -> None:
    engine = make_engine(["hello"])
    client = make_client(engine)
    with pytest.raises(RequestFailed, match=naming(name, str(value), f"rollout.{name}")):
        await client.sample("hi", **{name: value})
    assert engine.prompts == {}
    await client.sample("hi")  # nothing was appended by the refused request
    assert len(engine.prompts) == 1


async def test_a_held_out_episode_may_be_sampled_in_any_way(
    make_engine: Any, make_settings: Any, tokenizer: Any
) -> None:
    engine = make_engine(["hello"])
    order = GroupOrder(7, task=0, epoch=0, min_version=5, size=1, heldout=True, pinned=5)
    client = PolicyClient(engine, TemplateChatFormat(tokenizer, ()), make_settings(), order, 0)
    await client.sample("hi", temperature=0.0, top_p=0.5, top_k=3)
    (sent,) = engine.samplings.values()
    assert (sent.temperature, sent.top_p, sent.top_k) == (0.0, 0.5, 3)


async def test_every_request_has_a_seed_of_its_own(make_engine: Any, make_client: MakeClient) -> None:
    engine = make_engine(["a<|end|>", "b<|end|>"])
    for episode in (0, 1):
        client = make_client(engine, episode=episode)
        await client.sample("hi")
        await client.sample("more")
    seeds = {request: sampling.seed for request, sampling in engine.samplings.items()}
    assert seeds == {f"7.{episode}.{turn}": request_seed(11, 7, episode, turn) for episode in (0, 1) for turn in (0, 1)}
    assert len(set(seeds.values())) == 4


async def test_the_lineage_lists_the_requests_in_order(make_engine: Any, make_client: MakeClient) -> None:
    client = make_client(make_engine(["a<|end|>", "b<|end|>"]), episode=1)
    await client.sample("hi")
    await client.sample("more")
    assert client.requests == ["7.1.0", "7.1.1"]
    assert client.newest is not None
    assert client.newest.text == "b"


async def test_requests_of_an_evaluation_cannot_be_mistaken_for_those_of_training(
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


async def test_a_chat_of_several_turns_is_token_for_token_what_the_template_renders(
    make_engine: Any, make_client: MakeClient, any_tokenizer: Any
) -> None:
    end = any_tokenizer.eos_token
    client = make_client(make_engine([f"the answer{end}", f"is{end}"], any_tokenizer), speaks=any_tokenizer)
    await client.sample("first")
    await client.sample("second")
    built = client.trajectory()
    whole = conversation(any_tokenizer, "first", "the answer", "second", "is")
    assert built.tokens.tolist() == whole[: len(built.tokens)]
    assert any_tokenizer.decode(built.tokens[built.mask]) == f"the answer{end}is{end}"
    assert set(built.versions[built.mask].tolist()) == {3, 4}


async def test_the_template_sees_the_whole_conversation_so_far(
    make_engine: Any, make_client: MakeClient, tokenizer: Any
) -> None:
    counting = deepcopy(tokenizer)
    counting.chat_template = (
        "{% for message in messages %}{{ loop.index ~ message.role ~ ':' ~ message.content ~ '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ (messages | length + 1) ~ 'assistant:' }}{% endif %}"
    )
    client = make_client(make_engine(["b<|end|>", "d<|end|>", "f<|end|>"]), speaks=counting)
    for said in ("a", "c", "e"):
        await client.sample(said)
    assert tokenizer.decode(client.trajectory().tokens) == (
        "1user:a<|end|>2assistant:b<|end|>3user:c<|end|>4assistant:d<|end|>5user:e<|end|>6assistant:f<|end|>"
    )


async def test_each_request_carries_exactly_the_tokens_so_far(
    make_engine: Any, make_client: MakeClient, any_tokenizer: Any
) -> None:
    end = any_tokenizer.eos_token
    engine = make_engine([f"one{end}", f"two{end}", f"three{end}"], any_tokenizer)
    client = make_client(engine, speaks=any_tokenizer)
    for said in ("a", "b", "c"):
        await client.sample(said)
    tokens = client.trajectory().tokens.tolist()
    for prompt in engine.prompts.values():
        assert prompt == tokens[: len(prompt)]


async def test_an_answer_without_an_end_of_turn_gets_one_that_does_not_train(
    make_engine: Any, make_client: MakeClient, any_tokenizer: Any
) -> None:
    client = make_client(make_engine(["cut", "more"], any_tokenizer), speaks=any_tokenizer)
    await client.sample("first")
    await client.sample("second")
    built = client.trajectory()
    whole = conversation(any_tokenizer, "first", "cut", "second", "more")
    assert built.tokens.tolist() == whole[: len(built.tokens)]
    assert any_tokenizer.decode(built.tokens[built.mask]) == "cutmore"


async def test_another_end_of_turn_than_the_templates_is_not_doubled(
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


async def test_observed_text_is_appended_as_it_is(make_engine: Any, make_client: MakeClient, tokenizer: Any) -> None:
    engine = make_engine(["1+1=", "good"])
    client = make_client(engine)
    await client.sample("sum")
    client.observe("2")
    await client.sample()
    assert tokenizer.decode(client.trajectory().tokens) == "<|user|>sum<|end|><|assistant|>1+1=2good"
    assert tokenizer.decode(client.trajectory().tokens[client.trajectory().mask]) == "1+1=good"


async def test_a_prompt_in_the_middle_of_nowhere_is_refused(make_engine: Any, make_client: MakeClient) -> None:
    engine = make_engine(["a"])
    client = make_client(engine)
    client.observe("once upon a time")
    with pytest.raises(RequestFailed):
        await client.sample("hi")
    assert engine.prompts == {}


async def test_the_sequence_cannot_change_under_a_request(make_engine: Any, make_client: MakeClient) -> None:
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


async def test_what_an_abandoned_request_had_sampled_is_counted_and_not_trained_on(
    make_engine: Any, make_client: MakeClient, tokenizer: Any
) -> None:
    engine = make_engine([None])
    engine.partial = "hal"
    client = make_client(engine)
    left = asyncio.create_task(client.sample("hi"))
    await engine.started.wait()
    await client.abandon()
    assert client.abandoned == len("hal")
    with pytest.raises(RequestFailed, match="episode"):
        await left
    assert not client.trajectory().mask.any()


async def test_an_engine_that_does_not_end_a_request_is_not_waited_for_without_end(
    make_engine: Any, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(type(make_engine([]))):  # type: ignore[misc]
        async def abort(self, request_ids: list[str]) -> None:
            self.aborted += request_ids

    monkeypatch.setattr("outpace.rollouts.requests.ABORT_GRACE_S", 0.01)
    engine = make_engine([None])
    engine.__class__ = Deaf
    client = make_client(engine)
    left = asyncio.create_task(client.sample("hi"))
    await engine.started.wait()
    await client.abandon()
    assert (engine.aborted, client.abandoned) == (["7.0.0"], 0)
    await asyncio.gather(left, return_exceptions=True)
    assert left.cancelled()


async def test_nothing_is_aborted_where_nothing_runs(make_engine: Any, make_client: MakeClient) -> None:
    engine = make_engine(["hello"])
    client = make_client(engine)
    await client.sample("hi")
    await client.abandon()
    assert engine.aborted == []


async def test_a_rollout_may_give_up_on_an_answer_and_go_on(
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
async def test_giving_up_is_no_failure_whatever_has_become_of_the_engine(
    trouble: Exception | None, make_engine: Any, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def abort(_: list[str]) -> None:
        if trouble is None:
            await asyncio.Event().wait()  # it hangs, or is down and may be back some time
        else:
            raise trouble

    monkeypatch.setattr("outpace.rollouts.requests.ABORT_GRACE_S", 0.01)
    engine = make_engine([None, None])
    engine.abort = abort
    client = make_client(engine)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await client.sample("hi")
    left = asyncio.create_task(client.sample("hi"))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await client.abandon()
        await asyncio.gather(left, return_exceptions=True)
    assert left.cancelled()
    assert client.abandoned == 0
