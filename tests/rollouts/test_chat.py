"""Whole message histories, as an agent sends them: what each request continues, and where each token is trained."""

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
from outpace.rollouts.transcript import EpisodePart
from outpace.types import Answer, Message, Trajectory
from support import naming

HI: Message = {"role": "user", "content": "hi"}
MORE: Message = {"role": "user", "content": "more"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def trained(trajectory: Trajectory) -> list[int]:
    return [int(token) for token in trajectory.tokens[trajectory.mask]]


def assert_trained_once(client: PolicyClient, *answers: Answer) -> None:
    """Every token of the answers is trainable in exactly one trajectory."""
    kept = sorted(token for trajectory in client.trajectories() for token in trained(trajectory))
    assert kept == sorted(token for answer in answers for token in answer.tokens.tolist())


async def test_a_history_that_extends_an_answer_reuses_its_exact_tokens(
    any_tokenizer: Any, make_engine: Any, make_client: Any
) -> None:
    engine = make_engine(["one  two", "three"], any_tokenizer)
    client: PolicyClient = make_client(engine, with_tokenizer=any_tokenizer)
    first = await client.chat([HI])
    second = await client.chat([HI, first.message, MORE])
    sent = engine.prompts[second.request_id]
    before = [*engine.prompts[first.request_id], *first.tokens.tolist()]
    assert sent[: len(before)] == before
    assert len(client.trajectories()) == 1
    assert client.breaks == 0
    assert_trained_once(client, first, second)


@pytest.mark.parametrize(
    "changed",
    [
        lambda message: {**message, "refusal": None, "tool_calls": None, "annotations": []},
        lambda message: {**message, "content": [{"type": "text", "text": message["content"]}]},
        lambda message: {**message, "content": message["content"].strip()},
        lambda message: {**message, "name": None},
    ],
    ids=["empty fields", "content parts", "stripped", "name is None"],
)
async def test_an_equivalent_assistant_message_continues_the_trajectory(
    make_engine: Any, make_client: Any, changed: Any
) -> None:
    client: PolicyClient = make_client(make_engine([" one ", "two"]))
    first = await client.chat([HI])
    await client.chat([HI, changed(first.message), MORE])
    assert (len(client.trajectories()), client.breaks) == (1, 0)


async def test_reformatted_arguments_and_a_different_id_are_the_same_tool_call(
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
    assert_trained_once(client, first, second)


async def test_an_edited_history_starts_a_new_trajectory_and_counts_a_break(make_engine: Any, make_client: Any) -> None:
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
    ids=["different prompt", "system message", "two user messages"],
)
async def test_an_unrelated_history_starts_a_new_trajectory_and_is_not_a_break(
    make_engine: Any, make_client: Any, history: list[Message]
) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    await client.chat([HI])
    await client.chat(history)
    assert (len(client.trajectories()), client.breaks) == (2, 0)


async def test_different_tools_or_a_different_role_start_a_separate_conversation(
    make_engine: Any, make_client: Any
) -> None:
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


async def test_parts_of_an_episode_are_trained_once_each_with_their_own_role_and_reward(
    make_engine: Any, make_client: Any
) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two", "three", "four"]))
    first = await client.chat([HI])
    second = await client.chat([HI, first.message, MORE])
    third = await client.chat([MORE])
    await client.chat([{"role": "user", "content": "unused"}])
    solver = EpisodePart([first.request_id, third.request_id], "solver", 1.0)
    judge = EpisodePart([first.request_id, second.request_id], "judge", 0.5)
    rows = client.trajectories([solver, judge])
    assert [(row.role, row.reward, row.attempt) for row in rows] == [
        ("solver", 1.0, 0),
        ("solver", 1.0, 0),
        ("judge", 0.5, 1),
    ]
    assert [trained(row) for row in rows] == [answer.tokens.tolist() for answer in (first, third, second)]
    with pytest.raises(ValueError, match=r"7\.0\.9"):
        client.trajectories([EpisodePart(["7.0.9"], "solver")])


async def test_identical_answers_to_identical_prompts_are_continued_separately(
    make_engine: Any, make_client: Any
) -> None:
    client: PolicyClient = make_client(make_engine(["same", "same", "a", "b"]))
    first, second = await asyncio.gather(client.chat([HI]), client.chat([HI]))
    history = [HI, first.message, MORE]
    third, fourth = await asyncio.gather(client.chat(history), client.chat(history))
    assert len(client.trajectories()) == 2
    assert_trained_once(client, first, second, third, fourth)


async def test_a_template_that_rewrites_earlier_turns_starts_a_new_trajectory_and_counts_a_break(
    tokenizer: Any, make_engine: Any, make_client: Any
) -> None:
    rewriting = copy.deepcopy(tokenizer)
    rewriting.chat_template = tokenizer.chat_template.replace(
        "(message.content or '')", "(message.content or '') + (loop.length | string)"
    )
    engine = make_engine(["one", "two"], rewriting)
    client: PolicyClient = make_client(engine, with_tokenizer=rewriting)
    first = await client.chat([HI])
    second = await client.chat([HI, first.message, MORE])
    assert client.breaks == 1
    assert [trained(each) for each in client.trajectories()] == [first.tokens.tolist(), second.tokens.tolist()]
    assert rewriting.decode(engine.prompts[second.request_id]).count("one") == 1, (
        "the earlier answer is still in the prompt"
    )


async def test_sample_starts_a_new_trajectory_when_the_template_rewrites_earlier_turns(
    tokenizer: Any, make_engine: Any, make_client: Any
) -> None:
    rewriting = copy.deepcopy(tokenizer)
    rewriting.chat_template = tokenizer.chat_template.replace(
        "(message.content or '')", "(message.content or '') + (loop.length | string)"
    )
    client: PolicyClient = make_client(make_engine(["one", "two", "three"], rewriting), with_tokenizer=rewriting)
    await client.sample("hi")
    await client.sample("more")
    assert (client.breaks, len(client.trajectories())) == (1, 2)
    client.observe("plain")
    with pytest.raises(RequestFailed):
        await client.sample("go on")


async def test_an_unparseable_tool_call_stays_in_the_content_and_records_a_problem(
    make_engine: Any, make_client: Any
) -> None:
    broken = "see <tool_call>{nonsense</tool_call>"
    client: PolicyClient = make_client(make_engine([broken + CALL]))
    answer = await client.chat([HI], tools=[TOOL])
    assert answer.content == broken
    assert [bool(call.problem) for call in answer.calls] == [True, False]
    assert len({call.id for call in answer.calls}) == 2
    assert [call["function"]["name"] for call in answer.message["tool_calls"]] == ["add"]


async def test_changing_a_returned_answer_does_not_affect_the_conversation(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine([CALL, "two"]))
    answer = await client.chat([HI], tools=[TOOL])
    kept = answer.message
    kept["content"], kept["tool_calls"][0]["function"]["name"] = "changed", "changed"
    assert answer.message["tool_calls"][0]["function"]["name"] == "add"
    with pytest.raises(ValueError, match="read-only"):
        answer.tokens[0] = 7
    await client.chat([HI, answer.message, {"role": "tool", "content": "3"}], tools=[TOOL])
    assert client.breaks == 0


async def test_a_completion_prompt_that_extends_an_answer_continues_its_trajectory(
    tokenizer: Any, make_engine: Any, make_client: Any
) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two", "three"]))
    first = await client.complete("count: ")
    second = await client.complete(tokenizer.encode("count: ", add_special_tokens=False) + first.tokens.tolist())
    await client.complete("other")
    assert len(client.trajectories()) == 2
    assert second.prompt_tokens == first.prompt_tokens + len(first.tokens)


async def test_rewards_are_assigned_to_trajectories_by_request_or_role(make_engine: Any, make_client: Any) -> None:
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
async def test_an_invalid_reward_or_an_unknown_request_is_refused(
    make_engine: Any, make_client: Any, wrong: Any
) -> None:
    client: PolicyClient = make_client(make_engine(["one"]))
    answer = await client.chat([HI])
    with pytest.raises(ValueError, match=repr(wrong)):
        client.reward(wrong, request=answer)
    with pytest.raises(ValueError, match=r"7\.0\.99"):
        client.reward(1.0, request="7.0.99")
    with pytest.raises(ValueError, match=naming("request", "role")):
        client.reward(1.0)


async def test_a_prefix_that_differs_from_the_sent_tokens_raises_component_failed(
    make_engine: Any, make_client: Any
) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    first = await client.chat([HI])
    await client.chat([HI, first.message, MORE])
    turn = client._sampler.transcript.turns[0]
    turn.observed = turn.observed + np.int32(1)
    with pytest.raises(ComponentFailed, match=naming("7.0.0", "prefix")):
        client.trajectories()


async def test_conversations_of_one_episode_are_independent(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two", "three"]))
    critic = client.conversation("critic")
    await client.sample("hi")
    await critic.sample("is it?")
    await client.sample("more")
    assert [(each.role, int(each.mask.sum())) for each in client.trajectories()] == [("critic", 3), ("policy", 8)]


# ------------------------------------------------------------------------------------------------ ambiguous histories


async def test_of_identical_answers_the_one_in_the_history_is_continued(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine([CALL, CALL, "more"]))
    first, second = await asyncio.gather(client.chat([HI], tools=[TOOL]), client.chat([HI], tools=[TOOL]))
    history = [HI, second.message, {"role": "tool", "content": "3"}]
    third = await client.chat(history, tools=[TOOL])
    client.reward(1.0, request=second)
    lone, longer = sorted(client.trajectories(), key=lambda each: int(each.mask.sum()))
    assert (lone.reward, longer.reward) == (None, 1.0)
    assert trained(longer) == [*second.tokens.tolist(), *third.tokens.tolist()]
    assert trained(lone) == first.tokens.tolist()


async def test_episodes_of_a_group_share_only_prefixes_that_render_identically(
    tokenizer: Any, make_engine: Any
) -> None:
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


async def test_assistant_messages_in_the_first_prompt_do_not_count_as_a_break(
    make_engine: Any, make_client: Any
) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    prompt = [HI, {"role": "assistant", "content": "as I would say"}, MORE]
    first = await client.chat(prompt)
    await client.chat([*prompt, first.message, MORE])
    assert (client.breaks, len(client.trajectories())) == (0, 1)


async def test_a_template_that_depends_on_the_previous_tool_call_is_rendered_in_full(
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
    client: PolicyClient = make_client(engine, with_tokenizer=naming)
    first = await client.chat([HI], tools=[TOOL])
    second = await client.chat([HI, first.message, {"role": "tool", "content": "3"}], tools=[TOOL])
    assert "(add)<|tool|>3" in naming.decode(engine.prompts[second.request_id])
    assert client.breaks == 1


async def test_a_role_that_the_template_drops_is_named_in_the_error(
    tokenizer: Any, make_engine: Any, make_client: Any
) -> None:
    dropping = copy.deepcopy(tokenizer)
    dropping.chat_template = tokenizer.chat_template.replace(
        "{{- '<|' + message.role + '|>' + (message.content or '') }}",
        "{%- if message.role != 'tool' %}{{- '<|' + message.role + '|>' + (message.content or '') }}{%- endif %}",
    )
    client: PolicyClient = make_client(make_engine(["one", "two"], dropping), with_tokenizer=dropping)
    first = await client.chat([HI])
    with pytest.raises(RequestFailed, match=r"template.*\btool\b"):
        await client.chat([HI, first.message, {"role": "tool", "content": "RESULT"}, MORE])


async def test_memory_for_a_long_conversation_does_not_grow_quadratically(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["yes"] * 30))
    history = [{"role": "user", "content": "x" * 1000}]
    for _ in range(30):
        answer = await client.chat(history)
        history = [*history, answer.message, {"role": "user", "content": "x" * 1000}]
    kept = [known.rendered for alike in client._sampler.conversations._known.values() for known in alike]
    assert len([text for text in kept if text]) == 1


# ------------------------------------------------------------------------------------- abandoned and failed requests


async def test_tokens_of_cancelled_requests_are_still_counted(make_engine: Any, make_client: Any) -> None:
    engine = make_engine(["four"] * 100)
    client: PolicyClient = make_client(engine)
    requests = [asyncio.create_task(client.chat([HI])) for _ in range(100)]
    await engine.started.wait()
    for _ in range(4):
        await asyncio.sleep(0)
    for task in requests:
        task.cancel()
    await asyncio.wait(requests)
    await client.abandon()
    assert client.sampled + client.abandoned == 4 * len(engine.prompts)


async def test_requests_after_the_end_of_the_episode_are_refused(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    await client.chat([HI])
    await client.abandon()
    for late in (client.chat([HI]), client.sample("hi"), client.complete("hi"), client.endpoint()):
        with pytest.raises(RequestFailed, match="episode"):
            await late


async def test_an_empty_history_is_refused(make_engine: Any, make_client: Any) -> None:
    with pytest.raises(RequestFailed, match="message"):
        await make_client(make_engine(["one"])).chat([])


async def test_a_failed_request_leaves_its_conversation_unchanged(make_engine: Any, make_client: Any) -> None:
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


async def test_a_first_prompt_can_be_sent_again_after_a_failed_request(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine([RequestFailed("no"), "two"]))
    with pytest.raises(RequestFailed, match="no"):
        await client.sample("hi")
    assert await client.sample("hi") == "two"


async def test_the_last_of_several_rewards_for_one_trajectory_is_used(make_engine: Any, make_client: Any) -> None:
    client: PolicyClient = make_client(make_engine(["one", "two"]))
    first = await client.chat([HI])
    second = await client.chat([HI, first.message, MORE])
    client.reward(0.0, request=second)
    client.reward(1.0, request=first)
    assert client.trajectories()[0].reward == 1.0


async def test_request_ids_do_not_depend_on_the_load_of_other_episodes(make_engine: Any, make_client: Any) -> None:
    async def ids_beside(others: int) -> list[str]:
        client: PolicyClient = make_client(make_engine(["x"] * 6))
        crowd: PolicyClient = make_client(make_engine(["x"] * others), episode=1)

        async def delayed_chat(number: int) -> str:
            for _ in range(number):
                await asyncio.sleep(0)
            return (await client.chat([{"role": "user", "content": str(number)}])).request_id

        crowded = [crowd.chat([HI]) for _ in range(others)]
        return (await asyncio.gather(*crowded, *map(delayed_chat, range(6))))[others:]  # type: ignore[return-value]

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
