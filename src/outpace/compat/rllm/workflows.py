"""`Workflow` and its rollout engine. One instance runs one episode; its requests go to the policy of the run."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import Any

from outpace.compat.rllm.types import Action, Episode, ModelOutput, RewardOutput, Trajectory
from outpace.compat.rllm.types import TerminationEvent, TerminationReason
from outpace.errors import BadInput, ContextFull
from outpace.models.frozen import thaw
from outpace.protocols import ModelClient
from outpace.rewards.builtin import solves

NO_EFFECT = ("application_id", "validate", "model", "enforce_max_prompt_length", "accumulate_reasoning")
RENAMED = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "stop": "stop_strings"}


class RolloutEngine:
    def __init__(self, client: ModelClient, is_validation: bool = False) -> None:
        self._client, self.is_validation = client, is_validation

    async def get_model_response(self, messages: Any, tools: Any = (), **kwargs: Any) -> ModelOutput:
        """Answer the messages. Other arguments are fields of `Sampling`; in training they must not change the sampling
        distribution."""
        options = {RENAMED.get(name, name): value for name, value in kwargs.items() if name not in NO_EFFECT}
        try:
            return ModelOutput.of(await self._client.chat(thaw(messages), tools=tools, **options))
        except ContextFull:
            raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED) from None


class BaseAgent(ABC):
    trajectory: Trajectory

    @abstractmethod
    def reset(self) -> None: ...


class Workflow(ABC):
    def __init__(
        self,
        rollout_engine: RolloutEngine,
        executor: ThreadPoolExecutor | None = None,
        timeout: float = 1e6,
        gamma: float = 0.0,
        reward_bonus_coeff: float = 0.0,
        **kwargs: Any,
    ) -> None:
        self.rollout_engine, self.executor = rollout_engine, executor
        self.timeout, self.gamma, self.reward_bonus_coeff = float(timeout), gamma, reward_bonus_coeff
        self._completed: list[Trajectory] = []

    @abstractmethod
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None: ...

    def reset(self, task: dict[str, Any] | None = None, uid: str | None = None) -> Any:
        self.task, self.uid, self._completed = task, uid, []
        for agent in self._agents():
            agent.reset()

    async def run_with_termination_handling(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        """Run within the time limit. What the workflow raises, other than a `TerminationEvent`, is raised: the run tries
        the episode again, or counts it as failed."""
        try:
            async with asyncio.timeout(float(kwargs.pop("timeout", self.timeout))) as limit:
                returned = await self.run(task, uid, **kwargs)
            if isinstance(returned, Episode):
                return returned
            reason = TerminationReason.UNKNOWN
        except TerminationEvent as event:
            reason = event.reason
        except TimeoutError:
            if not limit.expired():
                raise
            reason = TerminationReason.TIMEOUT
        return self.postprocess_episode(self.collect_trajectories(), reason)

    def commit(
        self,
        name: str | None = None,
        agent: BaseAgent | None = None,
        trajectory: Trajectory | None = None,
        reset: bool = False,
    ) -> None:
        committed = trajectory if agent is None else agent.trajectory
        if committed is None or (agent is not None and trajectory is not None):
            raise BadInput("Workflow.commit: pass either agent or trajectory")
        committed.name = name or committed.name
        if committed.steps:
            self._completed.append(deepcopy(committed))
        if agent is not None and reset:
            agent.reset()

    def collect_trajectories(self) -> Episode:
        done = {trajectory.uid for trajectory in self._completed}
        others = [agent.trajectory for agent in self._agents() if agent.trajectory.uid not in done]
        return Episode(trajectories=[*self._completed, *(deepcopy(each) for each in others if each.steps)])

    def compute_trajectory_reward(self, trajectory: Trajectory) -> None:
        trajectory.reward = float(sum(step.reward for step in trajectory.steps))

    def adjust_step_rewards(self, trajectory: Trajectory) -> None:
        raw = [step.reward for step in trajectory.steps]
        for step, before, now in zip(trajectory.steps[1:], raw, raw[1:], strict=False):
            step.reward += self.reward_bonus_coeff * (now - before)
        following = 0.0
        for step in reversed(trajectory.steps):
            step.reward = following = step.reward + self.gamma * following

    def assign_episode_correctness(self, episode: Episode) -> None:
        episode.is_correct = sum(trajectory.reward or 0.0 for trajectory in episode.trajectories) > 0

    def collect_metrics(self, episode: Episode) -> None:
        for name in {trajectory.name for trajectory in episode.trajectories}:
            rewards = [each.reward or 0.0 for each in episode.trajectories if each.name == name]
            episode.metrics[f"{name}_acc"] = sum(rewards) / len(rewards)

    def postprocess_episode(self, episode: Episode, termination_reason: TerminationReason | None = None) -> Episode:
        episode.id, episode.task = self.uid or episode.id, self.task
        for trajectory in episode.trajectories:
            trajectory.steps = [step for step in trajectory.steps if step.chat_completions]
            self.compute_trajectory_reward(trajectory)
            self.adjust_step_rewards(trajectory)
        self.assign_episode_correctness(episode)
        self.collect_metrics(episode)
        episode.termination_reason = termination_reason or TerminationReason.UNKNOWN
        return episode

    async def run_in_executor(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.executor, partial(fn, *args, **kwargs))

    def _agents(self) -> list[BaseAgent]:
        return [value for value in vars(self).values() if isinstance(value, BaseAgent)]


def countdown_reward_fn(task_info: dict[str, Any], action: str | Action) -> RewardOutput:
    """1 if the expression, between `<answer>` tags or alone, has the value `target` and uses each of `nums` once."""
    text = str(action.action if isinstance(action, Action) else action)
    expression = text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    solved = solves(expression, task_info["nums"], task_info["target"])
    return RewardOutput(reward=float(solved), is_correct=solved)
