"""Tool loop: the policy answers, its tool calls run, and the results go back to it until an answer makes no call.

    environment: open, reset ──▶ policy answers ──▶ tool calls? ── none ──▶ reward, close ──▶ episode
                                       ▲                │ run all of them
                                       └ tool messages ◀┘

The `stop` reason of an episode is one of:

    stop      the answer made no call                    turns     rollout.max_turns answers were sampled
    empty     the answer made no call and has no text    calls     more than rollout.max_calls calls were made
    length    the answer reached rollout.max_tokens      tokens    rollout.max_episode_tokens tokens were sampled
    aborted   the engine aborted the answer              seconds   rollout.max_seconds have passed
    context   the conversation no longer fits into the model's context

`EpisodeUsage` counts what an episode has used of these budgets. It is pure: the clock is injected and nothing waits.

Invariants
- Every call of an answer gets a result before the episode ends. Calls of a truncated answer do not run.
- All stop reasons are normal ends, and the episode is graded. An episode without any answer fails, with the same stop
  reason.
- The environment is always closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.config.sections import RolloutConfig, ToolsConfig
from outpace.errors import ContextFull
from outpace.models.chat import as_messages
from outpace.protocols import ModelClient
from outpace.rollouts.environments.session import EnvironmentSession, EnvironmentSessions, reset_columns
from outpace.rollouts.tools.toolbox import Toolbox, ToolSource
from outpace.types import Answer, Episode, Failure, Message, Task, ToolCall


@dataclass
class EpisodeUsage:
    """Budget used by one episode. The time starts when this object is created."""

    limits: RolloutConfig
    clock: Callable[[], float]
    turns: int = 0
    calls: int = 0
    tokens: int = 0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def stop_reason(self) -> str | None:
        """Return the stop reason if no further answer is allowed, else None.

        The call budget ends the episode only once it is exceeded, so the policy still sees the last allowed results."""
        limits = self.limits
        if limits.max_calls is not None and self.calls > limits.max_calls:
            return "calls"
        if self.turns >= limits.max_turns:
            return "turns"
        if self.tokens_left() <= 0:
            return "tokens"
        return "seconds" if self.seconds_left() <= 0 else None

    def answered(self, tokens: int) -> None:
        self.turns += 1
        self.tokens += tokens

    def admit(self, calls: int) -> int:
        """Count the calls of an answer, and return how many of them are within the budget."""
        left = math.inf if self.limits.max_calls is None else self.limits.max_calls - self.calls
        self.calls += calls
        return int(min(calls, max(left, 0)))

    def tokens_left(self) -> float:
        limit = self.limits.max_episode_tokens
        return math.inf if limit is None else limit - self.tokens

    def seconds_left(self) -> float:
        limit = self.limits.max_seconds
        return math.inf if limit is None else self.started + limit - self.clock()

    def max_tokens(self) -> int | None:
        """Return the token limit of the next answer if it is below rollout.max_tokens, else None."""
        left = self.tokens_left()
        usual = math.inf if self.limits.max_tokens is None else self.limits.max_tokens
        return int(left) if left < usual else None


ENVIRONMENT_REWARD = "environment"
"""Name of the environment's reward in `Episode.rewards`."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolLoop:
    """Rollout (`outpace.protocols.Rollout`) with tools, an environment per episode, or both."""

    sources: Sequence[ToolSource] = ()
    environments: EnvironmentSessions | None = None
    limits: RolloutConfig = field(default_factory=RolloutConfig)
    tool_limits: ToolsConfig = field(default_factory=ToolsConfig)
    clock: Callable[[], float] = time.monotonic

    async def __call__(self, task: Task, client: ModelClient) -> Episode:
        if self.environments is None:
            return await self._episode(task, client, None)
        session = await self.environments.open(task)
        client.environment = session.instance
        try:
            return await self._episode(task, client, session)
        finally:
            await _close(session)

    async def _episode(self, task: Task, client: ModelClient, session: EnvironmentSession | None) -> Episode:
        opening = None if session is None else await session.reset(reset_columns(task))
        sources = self.sources if session is None else [*self.sources, session]
        episode = _ToolEpisode(
            client=client,
            toolbox=Toolbox(sources, self.tool_limits),
            usage=EpisodeUsage(self.limits, self.clock),
            prompt=with_observation(as_messages(task.prompt), opening),
        )
        stop = await episode.run()
        reward = await session.reward() if session is not None and episode.usage.turns else None
        return Episode(
            trajectories=[],
            completion=episode.new_messages,
            rewards={} if reward is None else {ENVIRONMENT_REWARD: reward},
            stop=stop,
            metrics=episode.metrics(),
            error=None if episode.usage.turns else episode.no_answer_reason,
            failures=[Failure(tool, reason, count) for (tool, reason), count in episode.failures.items()],
        )


@dataclass
class _ToolEpisode:
    """State of one running episode."""

    client: ModelClient
    toolbox: Toolbox
    usage: EpisodeUsage
    prompt: list[Message]
    new_messages: list[Message] = field(default_factory=list)  # all messages after the prompt
    statuses: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)  # tool failures by tool and reason
    no_answer_reason: str = ""  # why the episode has no answer

    async def run(self) -> str:
        """Sample answers and run tool calls until the episode ends. Returns the stop reason."""
        try:
            while (stop := self.usage.stop_reason()) is None:
                answer = await self._answer()
                if answer.stop != "stop" or not answer.calls:
                    return self._stop_reason(answer)
                await self._run(answer.calls)
            return stop
        except ContextFull as error:
            self.no_answer_reason = str(error)
            return "context"
        except _TimeLimitReached:
            self.no_answer_reason = f"no answer within rollout.max_seconds = {self.usage.limits.max_seconds:g} s"
            return "seconds"

    async def _answer(self) -> Answer:
        limit, left = self.usage.max_tokens(), self.usage.seconds_left()
        overrides: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
        try:
            async with asyncio.timeout(None if left == math.inf else left) as time_left:
                messages = [*self.prompt, *self.new_messages]
                answer = await self.client.chat(messages, tools=self.toolbox.schemas, **overrides)
        except TimeoutError:
            if time_left.expired():
                raise _TimeLimitReached from None
            raise
        self.usage.answered(len(answer.tokens))
        self.new_messages.append(answer.message)
        return answer

    async def _run(self, calls: Sequence[ToolCall]) -> None:
        results = await self.toolbox.run(calls, self.usage.admit(len(calls)), self.usage.seconds_left)
        self.statuses.update(result.status for result in results)
        self.failures.update((f"tool {result.call.name}", result.failure) for result in results if result.failure)
        self.new_messages += [result.message for result in results]

    def _stop_reason(self, answer: Answer) -> str:
        if answer.stop == "length" and self.usage.tokens_left() <= 0:
            return "tokens"
        return "empty" if answer.stop == "stop" and not answer.text.strip() else answer.stop

    def metrics(self) -> dict[str, float]:
        return {
            "turns": self.usage.turns,
            "tool_calls": self.usage.calls,
            "tool_errors": self.usage.calls - self.statuses["done"],
            "tool_timeouts": self.statuses["timeout"],
        }


class _TimeLimitReached(Exception):
    """rollout.max_seconds passed while an answer was being sampled."""


async def _close(session: EnvironmentSession) -> None:
    """Close the environment. Shielded, so that cancelling the episode meanwhile does not leave it open."""
    try:
        await asyncio.shield(session.close())
    except Exception:  # user code: the episode is over, and its result is still valid
        log.warning("closing an environment failed", exc_info=True)


def with_observation(messages: list[Message], text: str | None) -> list[Message]:
    """Return a copy of the messages with `text` appended to the last user message."""
    if not text:
        return messages
    last = next((index for index in reversed(range(len(messages))) if messages[index].get("role") == "user"), None)
    if last is None:
        return [*messages, {"role": "user", "content": text}]
    content = messages[last].get("content") or ""
    longer = [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text
    return [*messages[:last], {**messages[last], "content": longer}, *messages[last + 1 :]]
