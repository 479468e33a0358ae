"""Episodes with tools: the policy answers, what it calls is run, it hears the results and answers again.

    environment: open, reset ──▶ the policy answers ──▶ calls? ── none ──▶ reward, close ──▶ episode
                                       ▲                  │ run, all of them
                                       └─ tool messages ◀─┘

An episode ends with an answer that makes no call, or for one of these reasons, its `stop`:

    stop      the answer made no call                      turns     rollout.max_turns answers were given
    empty     the same, and it said nothing at all         calls     more calls than rollout.max_calls were made
    length    the answer ran into rollout.max_tokens       tokens    rollout.max_episode_tokens are sampled
    aborted   the engine gave the answer up                seconds   rollout.max_seconds are over
    context   the conversation has outgrown the context of the model

Invariants
- Every call of an answer is answered before the episode ends. An answer that was cut off calls nothing.
- All of these are ordinary ends, and the episode is judged. Without a single answer there is nothing to judge, and the
  episode has failed, with the same stop reason.
- The environment is closed in every case.
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

from outpace.errors import ContextFull
from outpace.models.chat import as_messages
from outpace.protocols import ModelClient
from outpace.rollouts.environments.stage import Stage, Stages, columns_of
from outpace.rollouts.limits import Limits, Spent
from outpace.rollouts.tools.toolbox import Offer, Toolbox, ToolLimits
from outpace.types import Answer, Episode, Failure, Message, Task, ToolCall

REWARD = "environment"
"""The name of the environment's own reward among those of the reward functions."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolLoop:
    """A rollout (`outpace.protocols.Rollout`) with tools, with an environment for every episode, or with both."""

    offers: Sequence[Offer] = ()
    stages: Stages | None = None
    limits: Limits = field(default_factory=Limits)
    tool_limits: ToolLimits = field(default_factory=ToolLimits)
    clock: Callable[[], float] = time.monotonic

    async def __call__(self, task: Task, client: ModelClient) -> Episode:
        if self.stages is None:
            return await self._episode(task, client, None)
        stage = await self.stages.open(task)
        client.environment = stage.instance
        try:
            return await self._episode(task, client, stage)
        finally:
            await _close(stage)

    async def _episode(self, task: Task, client: ModelClient, stage: Stage | None) -> Episode:
        opening = None if stage is None else await stage.reset(columns_of(task))
        stands = [] if stage is None else [Offer("rollout.environment", stage, ordered=True)]
        talk = _Talk(
            client=client,
            toolbox=Toolbox([*self.offers, *stands], self.tool_limits),
            spent=Spent(self.limits, self.clock),
            prompt=with_observation(as_messages(task.prompt), opening),
        )
        stop = await talk.run()
        reward = await stage.reward() if stage is not None and talk.spent.turns else None
        return Episode(
            trajectories=[],
            completion=talk.said,
            rewards={} if reward is None else {REWARD: reward},
            stop=stop,
            metrics=talk.metrics(),
            error=None if talk.spent.turns else talk.nothing_said,
            failures=[Failure(tool, reason, count) for (tool, reason), count in talk.failures.items()],
        )


@dataclass
class _Talk:
    """The conversation of one episode."""

    client: ModelClient
    toolbox: Toolbox
    spent: Spent
    prompt: list[Message]
    said: list[Message] = field(default_factory=list)  # everything after the prompt
    fates: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)  # of tools, by name and reason
    nothing_said: str = ""  # why there is not a single answer

    async def run(self) -> str:
        """Let the policy speak until the episode ends; the reason why it did."""
        try:
            while (over := self.spent.over()) is None:
                answer = await self._answer()
                if answer.stop != "stop" or not answer.calls:
                    return self._reason(answer)
                await self._run(answer.calls)
            return over
        except ContextFull as error:
            self.nothing_said = str(error)
            return "context"
        except _TimeIsOver:
            self.nothing_said = f"no answer within rollout.max_seconds = {self.spent.limits.seconds:g} s"
            return "seconds"

    async def _answer(self) -> Answer:
        limit, left = self.spent.max_tokens(), self.spent.seconds_left()
        overrides: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
        try:
            async with asyncio.timeout(None if left == math.inf else left) as time_left:
                answer = await self.client.chat([*self.prompt, *self.said], tools=self.toolbox.schemas, **overrides)
        except TimeoutError:
            if time_left.expired():
                raise _TimeIsOver from None
            raise
        self.spent.answered(len(answer.tokens))
        self.said.append(answer.message)
        return answer

    async def _run(self, calls: Sequence[ToolCall]) -> None:
        results = await self.toolbox.run(calls, self.spent.admit(len(calls)), self.spent.seconds_left)
        self.fates.update(result.fate for result in results)
        self.failures.update((f"tool {result.call.name}", result.failure) for result in results if result.failure)
        self.said += [result.message for result in results]

    def _reason(self, answer: Answer) -> str:
        if answer.stop == "length" and self.spent.tokens_left() <= 0:
            return "tokens"
        return "empty" if answer.stop == "stop" and not answer.text.strip() else answer.stop

    def metrics(self) -> dict[str, float]:
        return {
            "turns": self.spent.turns,
            "tool_calls": self.spent.calls,
            "tool_errors": self.spent.calls - self.fates["done"],
            "tool_timeouts": self.fates["timeout"],
        }


class _TimeIsOver(Exception):
    """The episode has used up its seconds in the middle of an answer."""


async def _close(stage: Stage) -> None:
    """Shielded: whoever gives the episode up while its environment is being closed must not leave it open."""
    try:
        await asyncio.shield(stage.close())
    except Exception:  # a boundary to the user's code: the episode is over, and what it brought stands
        log.warning("an environment could not be closed", exc_info=True)


def with_observation(messages: list[Message], text: str | None) -> list[Message]:
    """The messages with `text` at the end of the last one of the user; the given ones are left as they are."""
    if not text:
        return messages
    last = next((index for index in reversed(range(len(messages))) if messages[index].get("role") == "user"), None)
    if last is None:
        return [*messages, {"role": "user", "content": text}]
    content = messages[last].get("content") or ""
    longer = [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text
    return [*messages[:last], {**messages[last], "content": longer}, *messages[last + 1 :]]
