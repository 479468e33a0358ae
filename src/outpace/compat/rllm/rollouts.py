"""Workflows and agent flows as rollouts of outpace: one call per episode.

    task ─▶ workflow or flow ─▶ rLLM episode ─▶ evaluator ─▶ steps tied to their requests ─▶ outpace.Episode

A step belongs to the request whose id it has, which a step made from a model output does. Any other step belongs to the
request with the same messages and answer. Position and order never matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, update_wrapper
from numbers import Real
from typing import Any

import outpace
from outpace.compat.rllm.types import UNNAMED, AgentConfig, Episode, EvalOutput, ModelOutput
from outpace.compat.rllm.types import Step, Task, TerminationReason, Trajectory
from outpace.compat.rllm.workflows import RolloutEngine, Workflow
from outpace.errors import BadInput
from outpace.models.frozen import thaw
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.conversation import AnsweredChat
from outpace.rollouts.transcript import EpisodePart
from outpace.runtime.async_tools import call_user_function

EMPTY = "rllm/empty_episodes"
outpace.metric(EMPTY, "sum", unit="episodes", meaning="episodes without a step; they are not trained on")

STOPS = {
    TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED: "length",
    TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED: "context",
}
"""Termination reasons that outpace has another name for."""


class AgentFlowFn:
    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        update_wrapper(self, fn)
        self.fn, self.name = fn, name

    async def arun(self, task: Task, config: AgentConfig) -> Any:
        return await call_user_function(self.fn, task, config)

    def run(self, task: Task, config: AgentConfig) -> Any:
        return asyncio.run(self.arun(task, config))

    __call__ = run


class EvaluatorFn:
    def __init__(self, fn: Callable[..., Any]) -> None:
        update_wrapper(self, fn)
        self.fn = fn

    def evaluate(self, task: Any, episode: Episode) -> EvalOutput:
        result = self.fn(task, episode)
        if isinstance(result, EvalOutput):
            return result
        reward, is_correct = result if isinstance(result, tuple) else (result, result > 0)
        return EvalOutput(float(reward), bool(is_correct))

    __call__ = evaluate


def rollout(fn: Any = None, *, name: str = "solver") -> Any:
    """Decorator of `f(task, config)`, plain or async, which returns an `Episode`, a `Trajectory` or None."""
    return (lambda function: AgentFlowFn(function, name)) if fn is None else AgentFlowFn(fn, name)


def evaluator(fn: Any = None) -> Any:
    """Decorator of `f(task, episode)`, which returns an `EvalOutput`, a reward, or a reward and whether it is correct."""
    return EvaluatorFn if fn is None else EvaluatorFn(fn)


@cache
def _executor(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


@dataclass
class EpisodeRollout:
    """Either `workflow_class`, or `agent_flow` and `evaluator`, are given."""

    workflow_class: type[Workflow] | None = None
    workflow_args: dict[str, Any] = field(default_factory=dict)
    agent_flow: Any = None
    evaluator: Any = None
    threads: int = 256
    masked: frozenset[TerminationReason] = frozenset()
    is_validation: bool = False

    async def __call__(self, given: outpace.Task, client: PolicyClient) -> outpace.Episode:
        task = Task(given.id, given.prompt, dict(given.columns))
        client.answered = []
        run = self._run_flow if self.workflow_class is None else self._run_workflow
        return self._converted(await run(task, f"{task.id}:{client.attempt}", client), client)

    async def _run_workflow(self, task: Task, uid: str, client: PolicyClient) -> Episode:
        assert self.workflow_class is not None
        engine = RolloutEngine(client, self.is_validation)
        workflow = self.workflow_class(rollout_engine=engine, executor=_executor(self.threads), **self.workflow_args)
        workflow.reset(task.metadata, uid)
        episode = await workflow.run_with_termination_handling(task.metadata, uid)
        _tie_steps(episode, client)
        return episode

    async def _run_flow(self, task: Task, uid: str, client: PolicyClient) -> Episode:
        endpoint = await client.endpoint(key_in_url=True)
        config = AgentConfig(endpoint.base_url, endpoint.model, uid, is_validation=self.is_validation)
        flow = getattr(self.agent_flow, "arun", None) or self.agent_flow.run
        episode = self._as_episode(await call_user_function(flow, task, config))
        rest = _tie_steps(episode, client)
        for trajectory in episode.trajectories:
            if not trajectory.steps:  # the flow left them to the requests that no step has
                trajectory.steps = [Step.from_model_output(ModelOutput.of(each.answer), each.messages) for each in rest]
                rest = []
        result = await call_user_function(self.evaluator.evaluate, task, episode)
        for trajectory in episode.trajectories:
            trajectory.reward = result.reward if trajectory.reward is None else trajectory.reward
        episode.metrics |= {signal.name: signal.value for signal in result.signals}
        episode.is_correct = result.is_correct
        episode.termination_reason = episode.termination_reason or TerminationReason.ENV_DONE
        return episode

    def _as_episode(self, returned: Any) -> Episode:
        name = getattr(self.agent_flow, "name", UNNAMED)
        returned = Trajectory(name=name) if returned is None else returned
        if isinstance(returned, Trajectory):
            returned.name = name if returned.name == UNNAMED else returned.name
            return Episode(trajectories=[returned])
        if isinstance(returned, Episode):
            return returned
        raise BadInput(f"agent_flow: returned {type(returned).__name__}, not an Episode, a Trajectory or None")

    def _converted(self, episode: Episode, client: PolicyClient) -> outpace.Episode:
        reason = episode.termination_reason or TerminationReason.UNKNOWN
        stop = STOPS.get(reason, reason.value)
        if reason in self.masked:
            return outpace.Episode([], error=f"left out: rllm.compact_filtering.mask_{reason.value} is set", stop=stop)
        known = {each.answer.request_id for each in client.answered or ()}
        parts = []
        for index, trajectory in enumerate(episode.trajectories):
            if unknown := [number for number, step in enumerate(trajectory.steps) if step.id not in known]:
                problem = f"step {unknown[0]} of trajectory {trajectory.name} is the answer to no request"
                return outpace.Episode([], error=problem, stop=stop)
            if trajectory.steps:
                role = f"{UNNAMED}_{index}" if trajectory.name == UNNAMED else trajectory.name
                reward = trajectory.steps[-1].reward if trajectory.reward is None else trajectory.reward
                parts.append(EpisodePart([step.id for step in trajectory.steps], role, float(reward)))
        if not parts:
            client.log_metric(EMPTY, 1.0)
            return outpace.Episode([], error="the episode has no steps", stop="empty")
        metrics = {f"terminated_{each.value}": float(each is reason) for each in TerminationReason}
        metrics |= {name: float(value) for name, value in episode.metrics.items() if isinstance(value, Real)}
        metrics["correct"] = float(episode.is_correct)
        return outpace.Episode(client.trajectories(parts), stop=stop, metrics=metrics)


def _tie_steps(episode: Episode, client: PolicyClient) -> list[AnsweredChat]:
    """Give every step the id and the tokens of its request. Returns the requests that no step has, in their order."""
    left = sorted(client.answered or (), key=lambda each: client.requests.index(each.answer.request_id))
    for step in (step for trajectory in episode.trajectories for step in trajectory.steps):
        chat = thaw(step.chat_completions)
        if chat and chat[-1].get("role") != "assistant":
            chat.append({"role": "assistant", "content": step.model_response})
        same_id = [each for each in left if each.answer.request_id == step.id]
        for found in (same_id or [each for each in left if each.is_recorded_as(chat)])[:1]:
            left.remove(found)
            step.model_output = ModelOutput.of(found.answer)
            step.__post_init__()
            step.model_response = step.model_response or found.answer.content
    return left
