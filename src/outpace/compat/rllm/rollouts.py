"""Workflows and agent flows as rollouts of outpace: one call per episode.

    task ─▶ workflow or flow ─▶ rLLM episode ─▶ evaluator ─▶ steps tied to their requests ─▶ outpace.Episode

A step made from a model output has the id of its request. Any other step belongs to the request with the same messages
and answer. Position and order never matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from numbers import Real
from typing import Any

import outpace
from outpace.compat.rllm import types as rllm
from outpace.errors import BadInput, ContextFull
from outpace.models.frozen import thaw
from outpace.protocols import ModelClient
from outpace.rollouts.answered_chats import AnsweredChat, match_answers
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.episode import episode_of_parts
from outpace.rollouts.transcript import EpisodePart
from outpace.runtime.async_tools import TimeLimitError, call_user_function, with_time_limit

Reason = rllm.TerminationReason
NO_EFFECT = ("application_id", "validate", "model", "enforce_max_prompt_length", "accumulate_reasoning")
RENAMED = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "stop": "stop_strings"}
STOPS = {Reason.MAX_RESPONSE_LENGTH_EXCEEDED: "length", Reason.MAX_PROMPT_LENGTH_EXCEEDED: "context"}
"""Request arguments that outpace ignores or renames, and the stop reasons of termination reasons."""


class RolloutEngine:
    def __init__(self, client: ModelClient, is_validation: bool = False) -> None:
        self._client, self.is_validation = client, is_validation

    async def get_model_response(self, messages: Any, tools: Any = (), **kwargs: Any) -> rllm.ModelOutput:
        """Answer the messages. In training, other arguments must not change the sampling distribution."""
        options = {RENAMED.get(name, name): value for name, value in kwargs.items() if name not in NO_EFFECT}
        try:
            return rllm.ModelOutput.of(await self._client.chat(thaw(messages), tools=tools, **options))
        except ContextFull:
            raise rllm.TerminationEvent(Reason.MAX_PROMPT_LENGTH_EXCEEDED) from None


class BaseAgent(ABC):
    trajectory: rllm.Trajectory

    @abstractmethod
    def reset(self) -> None: ...


class Workflow(ABC):
    def __init__(
        self, rollout_engine: RolloutEngine, executor: Any = None, timeout: float = 1e6, **kwargs: Any
    ) -> None:
        self.rollout_engine, self.executor, self.timeout = rollout_engine, executor, float(timeout)
        self.gamma, self.reward_bonus_coeff = kwargs.get("gamma", 0.0), kwargs.get("reward_bonus_coeff", 0.0)

    @abstractmethod
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> rllm.Episode | None: ...

    def reset(self, task: dict[str, Any] | None = None, uid: str | None = None) -> Any:
        self.task, self.uid = task, uid
        self._completed: list[rllm.Trajectory] = []
        for agent in self._agents():
            agent.reset()

    async def run_with_termination_handling(self, task: dict[str, Any], uid: str, **kwargs: Any) -> rllm.Episode:
        limit = float(kwargs.pop("timeout", self.timeout))
        try:
            returned = await with_time_limit(limit, self.run(task, uid, **kwargs))
            if isinstance(returned, rllm.Episode):
                return returned
            reason = Reason.UNKNOWN
        except rllm.TerminationEvent as event:
            reason = event.reason
        except TimeLimitError:
            reason = Reason.TIMEOUT
        return self.postprocess_episode(self.collect_trajectories(), reason)

    def commit(self, name: str | None = None, agent: Any = None, trajectory: Any = None, reset: bool = False) -> None:
        if (agent is None) == (trajectory is None):
            raise BadInput("Workflow.commit: pass either agent or trajectory")
        committed = trajectory if agent is None else agent.trajectory
        committed.name = name or committed.name
        if committed.steps:
            self._completed.append(deepcopy(committed))
        if agent is not None and reset:
            agent.reset()

    def collect_trajectories(self) -> rllm.Episode:
        done = {trajectory.uid for trajectory in self._completed}
        others = [agent.trajectory for agent in self._agents() if agent.trajectory.uid not in done]
        return rllm.Episode(trajectories=[*self._completed, *(deepcopy(each) for each in others if each.steps)])

    def compute_trajectory_reward(self, trajectory: rllm.Trajectory) -> None:
        trajectory.reward = float(sum(step.reward for step in trajectory.steps))

    def adjust_step_rewards(self, trajectory: rllm.Trajectory) -> None:
        changes = [now.reward - before.reward for before, now in pairwise(trajectory.steps)]
        for step, change in zip(trajectory.steps[1:], changes, strict=True):
            step.reward += self.reward_bonus_coeff * change
        following = 0.0
        for step in reversed(trajectory.steps):
            step.reward = following = step.reward + self.gamma * following

    def assign_episode_correctness(self, episode: rllm.Episode) -> None:
        episode.is_correct = sum(trajectory.reward or 0.0 for trajectory in episode.trajectories) > 0

    def collect_metrics(self, episode: rllm.Episode) -> None:
        for name in {trajectory.name for trajectory in episode.trajectories}:
            rewards = [each.reward or 0.0 for each in episode.trajectories if each.name == name]
            episode.metrics[f"{name}_acc"] = sum(rewards) / len(rewards)

    def postprocess_episode(self, episode: rllm.Episode, termination_reason: Reason | None = None) -> rllm.Episode:
        episode.id, episode.task = self.uid or episode.id, self.task
        for trajectory in episode.trajectories:
            trajectory.steps = [step for step in trajectory.steps if step.chat_completions]
            self.compute_trajectory_reward(trajectory)
            self.adjust_step_rewards(trajectory)
        self.assign_episode_correctness(episode)
        self.collect_metrics(episode)
        episode.termination_reason = termination_reason or Reason.UNKNOWN
        return episode

    async def run_in_executor(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await call_user_function(fn, *args, **kwargs)

    def _agents(self) -> list[BaseAgent]:
        return [value for value in vars(self).values() if isinstance(value, BaseAgent)]


@dataclass(frozen=True)
class AgentFlowFn:
    run: Callable[..., Any]
    name: str


@dataclass(frozen=True)
class EvaluatorFn:
    fn: Callable[..., Any]

    def evaluate(self, task: Any, episode: rllm.Episode) -> rllm.EvalOutput:
        result = self.fn(task, episode)
        if isinstance(result, rllm.EvalOutput):
            return result
        reward, is_correct = result if isinstance(result, tuple) else (result, result > 0)
        return rllm.EvalOutput(float(reward), bool(is_correct))


def rollout(fn: Any = None, *, name: str = "solver") -> Any:
    """Decorator of `f(task, config)`, plain or async, which returns an `Episode`, a `Trajectory` or None."""
    return partial(AgentFlowFn, name=name) if fn is None else AgentFlowFn(fn, name)


def evaluator(fn: Any = None) -> Any:
    """Decorator of `f(task, episode)`, which returns an `EvalOutput`, a reward, or a pair `(reward, is_correct)`."""
    return EvaluatorFn if fn is None else EvaluatorFn(fn)


@dataclass
class EpisodeRollout:
    """Rollout of an rLLM script. Either `workflow_class` is set, or `agent_flow` and `evaluator`."""

    workflow_class: type[Workflow] | None = None
    workflow_args: dict[str, Any] = field(default_factory=dict)
    agent_flow: Any = None
    evaluator: Any = None
    left_out: frozenset[str] = frozenset()  # termination reasons
    is_validation: bool = False

    async def __call__(self, given: outpace.Task, client: ModelClient) -> outpace.Episode:
        assert isinstance(client, PolicyClient)
        client.answered = []
        task = rllm.Task(given.id, given.prompt, given.columns)
        run = self._run_flow if self.workflow_class is None else self._run_workflow
        return self._converted(await run(task, f"{task.id}:{client.attempt}", client), client)

    async def _run_workflow(self, task: rllm.Task, uid: str, client: PolicyClient) -> rllm.Episode:
        assert self.workflow_class is not None
        engine = RolloutEngine(client, self.is_validation)
        workflow = self.workflow_class(rollout_engine=engine, executor=None, **self.workflow_args)
        workflow.reset(task, uid)
        episode = await workflow.run_with_termination_handling(task, uid)
        _tie_steps(episode, client)
        return episode

    async def _run_flow(self, task: rllm.Task, uid: str, client: PolicyClient) -> rllm.Episode:
        endpoint = await client.endpoint(key_in_url=True)
        config = rllm.AgentConfig(endpoint.base_url, endpoint.model, uid, is_validation=self.is_validation)
        flow = getattr(self.agent_flow, "arun", None) or self.agent_flow.run
        episode = self._as_episode(await call_user_function(flow, task, config))
        rest = _tie_steps(episode, client)
        for trajectory in episode.trajectories:
            if not trajectory.steps:  # the flow left them out: use the requests that no step has
                trajectory.steps = [_step_of(each) for each in rest]
                rest = []
        result = await call_user_function(self.evaluator.evaluate, task, episode)
        for trajectory in episode.trajectories:
            trajectory.reward = result.reward if trajectory.reward is None else trajectory.reward
        episode.metrics |= {signal.name: signal.value for signal in result.signals}
        episode.is_correct = bool(result.is_correct)
        episode.termination_reason = episode.termination_reason or Reason.ENV_DONE
        return episode

    def _as_episode(self, returned: Any) -> rllm.Episode:
        name = getattr(self.agent_flow, "name", rllm.UNNAMED)
        returned = rllm.Trajectory(name=name) if returned is None else returned
        if isinstance(returned, rllm.Trajectory):
            returned.name = name if returned.name == rllm.UNNAMED else returned.name
            return rllm.Episode(trajectories=[returned])
        if isinstance(returned, rllm.Episode):
            return returned
        raise BadInput(f"agent_flow: returned {type(returned).__name__}, not an Episode, a Trajectory or None")

    def _converted(self, episode: rllm.Episode, client: PolicyClient) -> outpace.Episode:
        reason = episode.termination_reason or Reason.UNKNOWN
        stop = STOPS.get(reason, reason.value)
        if reason.value in self.left_out:
            return outpace.Episode([], error=f"left out: rllm.compact_filtering.mask_{reason.value} is set", stop=stop)
        parts = []
        for index, trajectory in enumerate(trajectory for trajectory in episode.trajectories if trajectory.steps):
            role = f"{rllm.UNNAMED}_{index}" if trajectory.name == rllm.UNNAMED else trajectory.name
            reward = trajectory.steps[-1].reward if trajectory.reward is None else trajectory.reward
            parts.append(EpisodePart([step.id for step in trajectory.steps], role, float(reward)))
        metrics = {f"terminated_{each.value}": float(each is reason) for each in Reason}
        metrics |= {name: float(value) for name, value in episode.metrics.items() if isinstance(value, Real)}
        return episode_of_parts(client, parts, stop, {**metrics, "correct": float(episode.is_correct)})


def _step_of(chat: AnsweredChat) -> rllm.Step:
    return rllm.Step.from_model_output(rllm.ModelOutput.of(chat.answer), chat.messages)


def _tie_steps(episode: rllm.Episode, client: PolicyClient) -> list[AnsweredChat]:
    """Give every step the id and the tokens of its request. Returns the requests without a step, in request order."""
    answered = sorted(client.answered or (), key=lambda each: client.requests.index(each.answer.request_id))
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    found = match_answers(answered, [(step.id, _with_answer(step)) for step in steps])
    for step, chat in zip(steps, found, strict=True):
        if chat is not None:
            step.model_output = rllm.ModelOutput.of(chat.answer)
            step.__post_init__()
    return [chat for chat in answered if not any(chat is each for each in found)]


def _with_answer(step: rllm.Step) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = thaw(step.chat_completions)
    if chat and chat[-1].get("role") != "assistant":
        chat.append({"role": "assistant", "content": step.model_response})
    return chat
