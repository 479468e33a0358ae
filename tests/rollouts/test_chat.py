"""Whole histories, as an agent sends them: what continues what, and what is trained where."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import weakref
from typing import Any

import numpy as np
import pytest

from outpace.errors import ComponentFailed, RequestFailed
from outpace.rollouts.client import PolicyClient
from outpace.types import Answer, Message, Trajectory
from support import naming

HI: Message = {"role": "user", "content": "hi"}
MORE: Message = {"role": "user", "content": "more"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def trained(trajectory: Trajectory) -> list[int]:
    return [int(token) for token in trajectory.tokens[trajectory.mask]]


def sampled_once(client: PolicyClient, *answers: Answer) -> None:
    """Every token of the answers is trainable in exactly one trajectory."""
    kept = sorted(token for trajectory in client.trajectories() for token in trained(trajectory))
    assert kept == sorted(token for answer in answers for token in answer.tokens.tolist())


async def test_a_history_that_goes_on_from_an_answer_keeps_its_tokens(
    any_tokenizer: Any, make_engine: Any, make_client: Any
) -> None:
    engine = make_engine(["one  two", "three"], any_tokenizer)
    client: PolicyClient = make_client(engine, speaks=any_tokenizer)
    first = await client.chat([HI])
    second = await client.chat([HI, first.message, MORE])
    sent = engine.prompts[second.request_id]
    before = [*engine.prompts[first.request_id], *first.tokens.tolist()]
    assert sent[: len(before)] == before
    assert len(client.trajectories()) == 1
    assert client.breaks == 0
    sampled_once(client, first, second)


@pytest.mark.parametrize(
    "changed",
    [
        lambda message: {**message, "refusal": None, "tool_calls": None, "annotations": []},
        lambda message: {**message, "content": [{"type": "text", "text": message["content"]}]},
        lambda message: {**message, "content": message["content"].strip()},
        lambda message: {**message, "name": None},
    ],
    ids=["empty fields", "parts", "stripped", "no name"],
)
async def test_what_says_the_same_is_the_same(make_engine: Any, make_client: Any, changed: Any) -> None:
    client: PolicyClient = make_client(make_engine([" one ", "two"]))
    first = await client.chat([HI])
    await client.chat([HI, changed(first.message), MORE])
    assert (len(client.trajectories()), client.breaks) == (1, 0)


async def test_arguments_that_were_written_anew_and_other_ids_are_the_same_call(
    make_engine: Any, make_client: Any
) -> None:
    client: PolicyClient = make_client(make_engine([CALL, "3"]))
    first = await client.chat([HI], tools=[TOOL])
    assert (first.content, first.calls[0].name, json.loads(first.calls[0].arguments)) == ("", "add", {"a": 1, "b": 2})
    again = copy.deepcopy(first.message)
    again["tool_calls"][0]["id"] = "other"
    again["tool_calls"][0]["function"]["arguments"] = '{"b":2,\n"a":1}'
    result = {"role": "tool", "tool_call_id": "other", "content": "3"}
    second = await client.chat([HI, again, result], tools=[TOOL])
    assert (len(client.trajectories()), client.breaks) == (1, 0)
    sampled_once(client, first, second)


async def test_an_agent_that_edits_its_history_begins_a_new_trajectory(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    first = await client.chat([HI])
    second = await client.chat([HI, {"role": "assistant", "content": "eleven"}, MORE])
    assert client.breaks == 1
    assert [trained(trajectory) for trajectory in client.trajectories()] == [
        first.tokens.tolist(),
        second.tokens.tolist(),
    ]


@pytest.mark.parametrize(
    "history",
    [[MORE], [{"role": "system", "content": "be kind"}, HI], [HI, MORE]],
    ids=["another question", "another system", "two questions"],
)
async def test_another_beginning_is_another_trajectory_and_no_break(
    make_engine: Any, make_client: Any, history: list[Message]
) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    await client.chat([HI])
    await client.chat(history)
    assert (len(client.trajectories()), client.breaks) == (2, 0)


async def test_other_tools_or_another_role_are_another_conversation(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two", "three"]))
    first = await client.chat([HI])
    await client.chat([HI, first.message, MORE], tools=[TOOL])
    await client.chat([HI, first.message, MORE], role="judge")
    assert [trajectory.role for trajectory in client.trajectories()] == ["policy", "policy", "judge"]
    assert client.breaks == 0


async def test_two_continuations_of_one_answer_train_it_once(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two", "three"]))
    first = await client.chat([HI])
    second, third = await asyncio.gather(
        client.chat([HI, first.message, MORE]), client.chat([HI, first.message, {"role": "user", "content": "less"}])
    )
    one, other = client.trajectories()
    assert trained(one) == [*first.tokens.tolist(), *second.tokens.tolist()]
    assert trained(other) == third.tokens.tolist()
    prefix = [int(token) for token in other.tokens]
    assert first.tokens.tolist() == prefix[first.prompt_tokens : first.prompt_tokens + len(first.tokens)]
    assert client.breaks == 0


async def test_equal_answers_to_equal_questions_go_on_each_for_itself(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["same", "same", "a", "b"]))
    first, second = await asyncio.gather(client.chat([HI]), client.chat([HI]))
    history = [HI, first.message, MORE]
    third, fourth = await asyncio.gather(client.chat(history), client.chat(history))
    assert len(client.trajectories()) == 2
    sampled_once(client, first, second, third, fourth)


async def test_a_template_that_rewrites_the_past_begins_anew_and_is_counted(
    tokenizer: Any, make_engine: Any, make_client: Any
) -> None:
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = tokenizer.chat_template.replace(
        "(message.content or '')", "(message.content or '') + (loop.length | string)"
    )
    engine = make_engine(["one", "two"], forgetful)
    client: PolicyClient = make_client(engine, speaks=forgetful)
    first = await client.chat([HI])
    second = await client.chat([HI, first.message, MORE])
    assert client.breaks == 1
    assert [trained(each) for each in client.trajectories()] == [first.tokens.tolist(), second.tokens.tolist()]
    assert forgetful.decode(engine.prompts[second.request_id]).count("one") == 1, "what was said is still shown"


async def test_a_growing_chat_that_cannot_go_on_exactly_begins_anew_too(
    tokenizer: Any, make_engine: Any, make_client: Any
) -> None:
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = tokenizer.chat_template.replace(
        "(message.content or '')", "(message.content or '') + (loop.length | string)"
    )
    client: PolicyClient = make_client(make_engine(["one", "two", "three"], forgetful), speaks=forgetful)
    await client.sample("hi")
    await client.sample("more")
    assert (client.breaks, len(client.trajectories())) == (1, 2)
    client.observe("plain")
    with pytest.raises(RequestFailed):
        await client.sample("go on")


async def test_a_call_that_cannot_be_read_stays_in_the_content_and_has_a_problem(
    make_engine: Any, make_client: Any
) -> None:
    broken = "see <tool_call>{nonsense</tool_call>"
    client: PolicyClient = make_client(make_engine([broken + CALL]))
    answer = await client.chat([HI], tools=[TOOL])
    assert answer.content == broken
    assert [bool(call.problem) for call in answer.calls] == [True, False]
    assert len({call.id for call in answer.calls}) == 2
    assert [call["function"]["name"] for call in answer.message["tool_calls"]] == ["add"]


async def test_an_answer_cannot_be_changed_by_whoever_got_it(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine([CALL, "two"]))
    answer = await client.chat([HI], tools=[TOOL])
    kept = answer.message
    kept["content"], kept["tool_calls"][0]["function"]["name"] = "changed", "changed"
    assert answer.message["tool_calls"][0]["function"]["name"] == "add"
    with pytest.raises(ValueError, match="read-only"):
        answer.tokens[0] = 7
    await client.chat([HI, answer.message, {"role": "tool", "content": "3"}], tools=[TOOL])
    assert client.breaks == 0


async def test_plain_text_that_goes_on_from_an_answer_is_the_same_sequence(
    tokenizer: Any, make_engine: Any, make_client: Any
) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two", "three"]))
    first = await client.complete("count: ")
    second = await client.complete(tokenizer.encode("count: ", add_special_tokens=False) + first.tokens.tolist())
    await client.complete("other")
    assert len(client.trajectories()) == 2
    assert second.prompt_tokens == first.prompt_tokens + len(first.tokens)


async def test_rewards_find_their_trajectory_by_request(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two", "three"]))
    first = await client.chat([HI])
    second = await client.chat([HI, first.message, MORE])
    other = await client.chat([MORE], role="judge")
    client.reward(2.0, request=first.request_id)
    client.reward(0.5, role="judge")
    client.turn_reward(1.0, second)
    one, judge = client.trajectories()
    assert (one.reward, one.turn_rewards.tolist()) == (2.0, [0.0, 1.0])
    assert (judge.reward, judge.turn_rewards.tolist()) == (0.5, [])
    client.reward(0.25, request=other)
    assert client.trajectories()[1].reward == 0.25


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "much"])
async def test_a_reward_that_is_no_number_is_refused(make_engine: Any, make_client: Any, wrong: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one"]))
    answer = await client.chat([HI])
    with pytest.raises(ValueError, match=repr(wrong)):
        client.reward(wrong, request=answer)
    with pytest.raises(ValueError, match=r"7\.0\.99"):
        client.reward(1.0, request="7.0.99")
    with pytest.raises(ValueError, match=naming("request", "role")):
        client.reward(1.0)


async def test_a_prefix_that_differs_from_what_was_sent_ends_the_run(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    first = await client.chat([HI])
    await client.chat([HI, first.message, MORE])
    turn = client._sampler.transcript.turns[0]
    turn.observed = turn.observed + np.int32(1)
    with pytest.raises(ComponentFailed, match=naming("7.0.0", "prefix")):
        client.trajectories()


async def test_threads_of_one_episode_are_chats_of_their_own(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two", "three"]))
    critic = client.conversation("critic")
    await client.sample("hi")
    await critic.sample("is it?")
    await client.sample("more")
    assert [(each.role, int(each.mask.sum())) for each in client.trajectories()] == [("critic", 3), ("policy", 8)]


# ----------------------------------------------------------------------------------------------- what is hard to tell


async def test_of_answers_that_say_the_same_the_one_that_was_sent_back_goes_on(
    make_engine: Any, make_client: Any
) -> None:
    client: PolicyClient = make_client(make_engine([CALL, CALL, "more"]))
    first, second = await asyncio.gather(client.chat([HI], tools=[TOOL]), client.chat([HI], tools=[TOOL]))
    history = [HI, second.message, {"role": "tool", "content": "3"}]
    third = await client.chat(history, tools=[TOOL])
    client.reward(1.0, request=second)
    lone, longer = sorted(client.trajectories(), key=lambda each: int(each.mask.sum()))
    assert (lone.reward, longer.reward) == (None, 1.0)
    assert trained(longer) == [*second.tokens.tolist(), *third.tokens.tolist()]
    assert trained(lone) == first.tokens.tolist()


async def test_siblings_share_only_what_is_rendered_alike(tokenizer: Any, make_engine: Any) -> None:
    from outpace.models.chat_format import TemplateChatFormat
    from outpace.rollouts.conversation import ConversationIndex

    thoughtful = copy.deepcopy(tokenizer)
    thoughtful.chat_template = tokenizer.chat_template.replace(
        "(message.content or '')", "(message.reasoning_content or '') + (message.content or '')"
    )
    openings: dict[bytes, list[int]] = {}
    rendered = []
    for thought in ("ONE", "TWO"):
        history = [HI, {"role": "assistant", "content": "yes", "reasoning_content": thought}, MORE]
        position = ConversationIndex(TemplateChatFormat(thoughtful, ()), openings).locate("policy", [], history)
        rendered.append(thoughtful.decode(position.observed))
    assert ["ONE" in rendered[0], "TWO" in rendered[1]] == [True, True]


async def test_examples_in_a_prompt_are_no_break(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    prompt = [HI, {"role": "assistant", "content": "as I would say"}, MORE]
    first = await client.chat(prompt)
    await client.chat([*prompt, first.message, MORE])
    assert (client.breaks, len(client.trajectories())) == (0, 1)


async def test_a_template_that_names_the_tool_from_the_call_is_not_continued_wrongly(
    tokenizer: Any, make_engine: Any, make_client: Any
) -> None:
    naming = copy.deepcopy(tokenizer)
    naming.chat_template = tokenizer.chat_template.replace(
        "{{- '<|' + message.role + '|>'",
        "{%- if message.role == 'tool' %}{{- '(' }}{%- if loop.previtem.tool_calls %}"
        "{{- loop.previtem.tool_calls[0].function.name }}{%- endif %}{{- ')' }}{%- endif %}"
        "{{- '<|' + message.role + '|>'",
    )
    engine = make_engine([CALL, "3"], naming)
    client: PolicyClient = make_client(engine, speaks=naming)
    first = await client.chat([HI], tools=[TOOL])
    second = await client.chat([HI, first.message, {"role": "tool", "content": "3"}], tools=[TOOL])
    assert "(add)<|tool|>3" in naming.decode(engine.prompts[second.request_id])
    assert client.breaks == 1


async def test_a_message_that_is_not_shown_is_named_also_beside_one_that_is(
    tokenizer: Any, make_engine: Any, make_client: Any
) -> None:
    mute = copy.deepcopy(tokenizer)
    mute.chat_template = tokenizer.chat_template.replace(
        "{{- '<|' + message.role + '|>' + (message.content or '') }}",
        "{%- if message.role != 'tool' %}{{- '<|' + message.role + '|>' + (message.content or '') }}{%- endif %}",
    )
    client: PolicyClient = make_client(make_engine(["one", "two"], mute), speaks=mute)
    first = await client.chat([HI])
    with pytest.raises(RequestFailed, match=r"template.*\btool\b"):
        await client.chat([HI, first.message, {"role": "tool", "content": "RESULT"}, MORE])


async def test_what_is_known_of_a_long_conversation_does_not_grow_with_its_square(
    make_engine: Any, make_client: Any
) -> None:
    client: PolicyClient = make_client(make_engine(["yes"] * 30))
    history = [{"role": "user", "content": "x" * 1000}]
    for _ in range(30):
        answer = await client.chat(history)
        history = [*history, answer.message, {"role": "user", "content": "x" * 1000}]
    kept = [known.rendered for alike in client._sampler.conversations._known.values() for known in alike]
    assert len([text for text in kept if text]) == 1


# ------------------------------------------------------------------------------------------------------ what is lost


async def test_an_answer_that_nobody_waits_for_any_more_is_still_counted(make_engine: Any, make_client: Any) -> None:
    engine = make_engine(["four"] * 100)
    client: PolicyClient = make_client(engine)
    asked = [asyncio.create_task(client.chat([HI])) for _ in range(100)]
    await engine.started.wait()
    for _ in range(4):
        await asyncio.sleep(0)
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    await client.abandon()
    assert client.sampled + client.abandoned == 4 * len(engine.prompts)


async def test_nothing_is_asked_after_the_end(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    await client.chat([HI])
    await client.abandon()
    for late in (client.chat([HI]), client.sample("hi"), client.complete("hi"), client.endpoint()):
        with pytest.raises(RequestFailed, match="episode"):
            await late


async def test_an_empty_history_is_refused(make_engine: Any, make_client: Any) -> None:
    with pytest.raises(RequestFailed, match="message"):
        await make_client(make_engine(["one"])).chat([])


async def test_a_request_that_failed_leaves_its_chat_as_it_was(make_engine: Any, make_client: Any) -> None:
    engine = make_engine(["one", RequestFailed("no"), RequestFailed("no"), "two"])
    client: PolicyClient = make_client(engine)
    await client.sample("hi")
    for _ in range(2):
        with pytest.raises(RequestFailed, match="no"):
            await client.sample("more")
    await client.sample("more")
    straight: PolicyClient = make_client(make_engine(["one", "two"]))
    await straight.sample("hi")
    await straight.sample("more")
    assert client.trajectory().tokens.tolist() == straight.trajectory().tokens.tolist()


async def test_a_first_prompt_that_failed_can_be_given_again(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine([RequestFailed("no"), "two"]))
    with pytest.raises(RequestFailed, match="no"):
        await client.sample("hi")
    assert await client.sample("hi") == "two"


async def test_of_several_rewards_for_one_trajectory_the_last_one_counts(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    first = await client.chat([HI])
    second = await client.chat([HI, first.message, MORE])
    client.reward(0.0, request=second)
    client.reward(1.0, request=first)
    assert client.trajectories()[0].reward == 1.0


async def test_what_is_sampled_does_not_depend_on_who_else_is_busy(make_engine: Any, make_client: Any) -> None:
    async def ids_beside(others: int) -> list[str]:
        client: PolicyClient = make_client(make_engine(["x"] * 6))
        crowd: PolicyClient = make_client(make_engine(["x"] * others), episode=1)

        async def ask(number: int) -> str:
            for _ in range(number):
                await asyncio.sleep(0)
            return (await client.chat([{"role": "user", "content": str(number)}])).request_id

        crowded = [crowd.chat([HI]) for _ in range(others)]
        return (await asyncio.gather(*crowded, *map(ask, range(6))))[others:]  # type: ignore[return-value]

    alone = await ids_beside(0)
    assert all([await ids_beside(others) == alone for others in (5, 15, 16, 17, 31, 64)])


async def test_a_finished_episode_is_freed_without_a_garbage_collection(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    await client.sample("hi")
    await client.chat([MORE])
    await client.abandon()
    gone = weakref.ref(client)
    gc.disable()
    try:
        del client
        assert gone() is None
    finally:
        gc.enable()
