"""Environment episodes: classes whose methods are tools, recorded token for token."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

import pytest

from outpace.config.sections import RolloutConfig
from outpace.errors import BadInput, ComponentFailed
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.environments.session import (
    SINGLE_KIND,
    EnvironmentSource,
    all_give_rewards,
    check_kinds,
)
from outpace.rollouts.episode import run_episode
from outpace.rollouts.tool_loop import ToolLoop, with_observation
from outpace.rollouts.tools.functions import tools_of
from outpace.types import OBSERVED, Episode, Task
from rollouts_support import environment_sessions
from support import naming


def kind(factory: Callable[[], object]) -> dict[str, EnvironmentSource]:
    return {SINGLE_KIND: EnvironmentSource("environment", factory=factory)}


def as_rollout(factory: Callable[[], object], limits: RolloutConfig) -> ToolLoop:
    return ToolLoop(environments=environment_sessions(kind(factory)), limits=limits)


TASK = Task("t1", "Find the number.", {"secret": 7, "colour": "red"})


class Guessing:
    """A number to guess: each guess is a tool call."""

    made: ClassVar[list[Guessing]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.guesses: list[int] = []
        self.threads: set[threading.Thread] = set()

    def reset(self, secret: int) -> str:
        self.secret = secret
        self.threads.add(threading.current_thread())
        return " It is below ten."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self.guesses.append(number)
        self.threads.add(threading.current_thread())
        if number < 0:
            raise ValueError("numbers are not negative")
        return "right" if number == self.secret else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        self.threads.add(threading.current_thread())
        return 1.0 / len(self.guesses) if self.secret in self.guesses else 0.0


class Waiting:
    """All methods are async, and there is no `get_reward`."""

    async def reset(self, **columns: Any) -> None:
        self.columns = columns
        await asyncio.sleep(0)

    async def look(self) -> list[str]:
        """See which columns there are."""
        await asyncio.sleep(0)
        return sorted(self.columns)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


Play = Callable[..., Any]


@pytest.fixture
def play(make_engine: Any, make_client: Callable[..., PolicyClient], tokenizer: Any) -> Play:
    """Run one episode and return it with its engine; every answer ends its turn."""

    async def run(
        answers: list[Any], environment: Any = Guessing, turns: int = 8, with_tokenizer: Any = None, task: Task = TASK
    ) -> tuple[Episode, Any]:
        Guessing.made.clear()
        end = (with_tokenizer or tokenizer).eos_token
        script = [answer + end if isinstance(answer, str) else answer for answer in answers]
        engine = make_engine(script, with_tokenizer)
        rollout = as_rollout(environment, RolloutConfig(max_turns=turns))
        return await run_episode(rollout, task, make_client(engine, with_tokenizer=with_tokenizer), 60.0), engine

    return run


def contents(episode: Episode, role: str) -> list[str]:
    assert isinstance(episode.completion, list)
    return [message["content"] for message in episode.completion if message["role"] == role]


async def test_the_model_calls_tools_until_an_answer_has_no_call(play: Play) -> None:
    episode, _ = await play(["Low. " + call("guess", number=3), call("guess", number=7), "It is 7."])
    assert episode.error is None
    first, result, *_, last = episode.completion
    assert first["content"] == "Low."
    (made,) = first["tool_calls"]
    assert made["function"] == {"name": "guess", "arguments": '{"number": 3}'}
    assert result == {"role": "tool", "tool_call_id": made["id"], "name": "guess", "content": "higher"}
    assert contents(episode, "tool") == ["higher", "right"]
    assert last == {"role": "assistant", "content": "It is 7."}
    assert (episode.rewards, episode.stop) == ({"environment": 0.5}, "stop")
    assert episode.metrics == {"turns": 3, "tool_calls": 2, "tool_errors": 0, "tool_timeouts": 0, "breaks": 0}
    assert episode.requests == ["7.0.0", "7.0.1", "7.0.2"]


async def test_the_trajectory_matches_the_rendered_template_token_for_token(play: Play, any_tokenizer: Any) -> None:
    answers = ["Low. " + call("guess", number=3), call("guess", number=9) + call("guess", number=7), "It is 7."]
    episode, engine = await play(answers, with_tokenizer=any_tokenizer)
    user = {"role": "user", "content": "Find the number. It is below ten."}
    schemas = [tool.schema for tool in tools_of(Guessing).values()]
    written = iter(answers)
    chat = [
        {"role": "assistant", "content": next(written)} if message["role"] == "assistant" else message
        for message in episode.completion
    ]
    text = any_tokenizer.apply_chat_template([user, *chat], tools=schemas, tokenize=False)
    whole = any_tokenizer.encode(text, add_special_tokens=False)
    (trajectory,) = episode.trajectories
    tokens = trajectory.tokens.tolist()
    assert tokens == whole[: len(tokens)]
    assert any_tokenizer.decode(whole[len(tokens) :]).strip() == ""
    for prompt in engine.prompts.values():
        assert prompt == tokens[: len(prompt)]


async def test_only_sampled_tokens_train_with_their_own_logprobs_and_versions(play: Play, any_tokenizer: Any) -> None:
    answers = [call("guess", number=3), "I give up."]
    episode, engine = await play(answers, with_tokenizer=any_tokenizer)
    (trajectory,) = episode.trajectories
    sampled = [any_tokenizer.encode(answer + any_tokenizer.eos_token, add_special_tokens=False) for answer in answers]
    first, second = (len(prompt) for prompt in engine.prompts.values())
    for start, ids, version in ((first, sampled[0], 3), (second, sampled[1], 4)):
        part = slice(start, start + len(ids))
        assert trajectory.tokens[part].tolist() == ids
        assert trajectory.mask[part].all()
        assert trajectory.versions[part].tolist() == [version] * len(ids)
        assert trajectory.logprobs[part].tolist() == pytest.approx([-(i + 1) / 100 for i in range(len(ids))])
    assert trajectory.mask.sum() == len(sampled[0]) + len(sampled[1])
    assert set(trajectory.versions[~trajectory.mask].tolist()) == {OBSERVED}
    assert not trajectory.logprobs[~trajectory.mask].any()


async def test_sampled_tokens_that_retokenization_would_merge_are_kept(play: Play, chatml: Any) -> None:
    """The model writes `the` letter by letter; re-encoding its text would give one token."""
    letters = [token for letter in "the" for token in chatml.encode(letter)]
    assert letters != chatml.encode("the")

    class Spelling:
        eos_token = chatml.eos_token
        eos_token_id = chatml.eos_token_id
        chat_template = chatml.chat_template
        apply_chat_template = staticmethod(chatml.apply_chat_template)
        decode = staticmethod(chatml.decode)

        @staticmethod
        def encode(text: str, **options: Any) -> list[int]:
            if not text.startswith("the"):
                return list(chatml.encode(text, **options))
            return letters + list(chatml.encode(text.removeprefix("the"), **options))

    episode, _ = await play(["the" + call("guess", number=7), "done"], with_tokenizer=Spelling)
    (trajectory,) = episode.trajectories
    assert trajectory.tokens[trajectory.mask].tolist()[: len(letters)] == letters


async def test_the_prompt_contains_the_tools_and_the_observation(play: Play, tokenizer: Any) -> None:
    _, engine = await play(["7"])
    prompt = tokenizer.decode(engine.prompts["7.0.0"])
    assert '"name": "guess"' in prompt
    assert "Your guess." in prompt
    assert "<|user|>Find the number. It is below ten.<|end|><|assistant|>" in prompt


@pytest.mark.parametrize(
    ("invalid_call", "words"),
    [
        (call("peek"), ("'peek'", "guess")),
        (call("reset", secret=1), ("'reset'", "guess")),
        ('<tool_call>{"name": </tool_call>', ("valid JSON",)),
        ("<tool_call>guess 3</tool_call>", ("valid JSON",)),
        (call("guess"), ("guess", "number")),
        (call("guess", number="many"), ("guess", "number", "Input should be a valid integer")),
        (call("guess", number=1, hint=True), ("guess", "hint")),
        (call("guess", number=-1), ("guess", "ValueError", "numbers are not negative")),
    ],
)
async def test_a_failed_call_returns_an_error_to_the_model_and_the_episode_continues(
    play: Play, invalid_call: str, words: tuple[str, ...]
) -> None:
    episode, engine = await play([invalid_call, call("guess", number=7), "It is 7."])
    assert episode.error is None
    first, second = contents(episode, "tool")
    assert first.startswith("error: ")
    assert re.search(naming(*words), first)
    assert second == "right"
    assert episode.metrics["tool_errors"] == 1
    assert bool(episode.failures) == ("ValueError" in words)  # an invalid call never reaches the method
    assert episode.rewards["environment"] > 0
    assert len(engine.prompts) == 3


async def test_calls_after_a_failed_call_still_run(play: Play) -> None:
    episode, _ = await play([call("peek") + call("guess", number=7), "done"])
    assert contents(episode, "tool")[1] == "right"


async def test_the_turn_limit_ends_the_episode(play: Play) -> None:
    episode, engine = await play([call("guess", number=n) for n in (1, 2, 7, 4)], turns=3)
    assert (episode.stop, len(engine.prompts)) == ("turns", 3)
    assert episode.rewards == {"environment": pytest.approx(1 / 3)}, "the last call still counts"
    (trajectory,) = episode.trajectories
    assert trajectory.mask[-1], "nothing is appended after the last answer"


async def test_a_truncated_answer_ends_the_episode_without_running_its_calls(
    make_engine: Any, make_client: Callable[..., PolicyClient]
) -> None:
    engine = make_engine([call("guess", number=7)])
    engine.stop = "length"
    episode = await run_episode(as_rollout(Guessing, RolloutConfig()), TASK, make_client(engine), 60.0)
    assert (episode.stop, contents(episode, "tool")) == ("length", [])


async def test_every_episode_has_its_own_environment_instance(play: Play, make_engine: Any, make_client: Any) -> None:
    Guessing.made.clear()
    engine = make_engine(lambda episode, turn: [call("guess", number=episode) + "<|end|>", "done<|end|>"][turn])
    rollout = as_rollout(Guessing, RolloutConfig())
    await asyncio.gather(*(run_episode(rollout, TASK, make_client(engine, episode=n), 60.0) for n in range(3)))
    assert sorted(environment.guesses for environment in Guessing.made) == [[0], [1], [2]]


async def test_sync_environment_methods_run_off_the_event_loop(play: Play) -> None:
    await play([call("guess", number=7), "done"])
    (environment,) = Guessing.made
    assert threading.current_thread() not in environment.threads


async def test_all_environment_methods_can_be_async(play: Play) -> None:
    episode, _ = await play([call("look"), "done"], environment=Waiting)
    assert contents(episode, "tool") == ['["colour", "prompt", "secret"]']
    assert (episode.error, episode.rewards) == (None, {})


async def test_a_factory_can_be_any_function(play: Play) -> None:
    episode, _ = await play([call("guess", number=7), "done"], environment=lambda: Guessing())
    assert episode.rewards == {"environment": 1.0}


async def test_the_prompt_of_the_task_is_not_modified(play: Play) -> None:
    messages = [{"role": "user", "content": "Find it."}]
    for _ in range(2):
        await play(["7"], task=Task("t", messages, TASK.columns))
    assert messages == [{"role": "user", "content": "Find it."}]


async def test_a_hanging_tool_is_ended_by_the_episode_time_limit(make_engine: Any, make_client: Any) -> None:
    release = threading.Event()

    class Hanging:
        def reset(self) -> None: ...

        def wait(self) -> None:
            """Wait for ever."""
            release.wait()

    client = make_client(make_engine([call("wait") + "<|end|>"]))
    episode = await run_episode(as_rollout(Hanging, RolloutConfig()), TASK, client, 0.05)
    release.set()
    assert re.search(naming("rollout.timeout_s", "0.05 s"), episode.error or "")


@pytest.mark.parametrize("reward", [None, "much", float("nan")])
async def test_a_reward_that_is_not_a_finite_number_fails_the_episode(play: Play, reward: Any) -> None:
    class Odd(Guessing):
        def get_reward(self) -> Any:
            return reward

    episode, _ = await play(["7"], environment=Odd)
    assert re.search(naming("get_reward", repr(reward)), episode.error or "")


async def test_an_environment_that_cannot_be_reset_fails_the_episode(play: Play) -> None:
    episode, _ = await play(["7"], task=Task("t", "Find it."))
    assert "secret" in (episode.error or "")


async def test_an_engine_failure_propagates(play: Play) -> None:
    with pytest.raises(ComponentFailed):
        await play([call("guess", number=1), ComponentFailed("engine-0", "died")])


async def test_a_chat_template_without_tools_is_refused_for_an_environment(play: Play, tokenizer: Any) -> None:
    silent = deepcopy(tokenizer)
    silent.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(BadInput, match=r"^rollout\.environment: .*tools"):
        await play(["7"], with_tokenizer=silent)


async def test_a_template_that_rewrites_earlier_turns_produces_two_trajectories(play: Play, tokenizer: Any) -> None:
    rewriting = deepcopy(tokenizer)
    rewriting.chat_template = "{{ tools }}{{ messages | length }}" + tokenizer.chat_template
    episode, _ = await play([call("guess", number=1), "done"], with_tokenizer=rewriting)
    assert (episode.error, episode.metrics["breaks"]) == (None, 1)
    assert len(episode.trajectories) == 2


def test_environment_classes_are_checked_before_the_run_starts() -> None:
    class Bare:
        pass

    class Undocumented(Guessing):
        def tool(self) -> None: ...

    check_kinds(kind(Guessing), "")
    check_kinds(kind(lambda: Bare()), "")
    with pytest.raises(BadInput, match=r"^environment: .*Bare.*reset"):
        check_kinds(kind(Bare), "")
    with pytest.raises(BadInput, match=r"Undocumented\.tool"):
        check_kinds(kind(Undocumented), "")


def test_all_give_rewards_depends_on_get_reward() -> None:
    assert all_give_rewards(kind(Guessing))
    assert not all_give_rewards(kind(Waiting))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "a"}], [{"role": "user", "content": "ab"}]),
        ([{"role": "system", "content": "s"}], [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}],
            [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "x"}],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
    ],
)
def test_an_observation_is_appended_to_the_last_user_message(messages: Any, expected: Any) -> None:
    assert with_observation(messages, "b") == expected
    assert with_observation(messages, None) == messages
