"""The official `openai` client against a training run: what it counts is what the run records and trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

import outpace as api
from outpace.monitoring.rollout_files import RecordedAttempt
from support import INLINE, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Counts = list[tuple[int, int]]
"""Prompt and completion tokens of each answer, as the client counts them."""

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
DESCRIPTION = "Work out an expression."  # as the starter model knows it
TOOL: Any = {"type": "function", "function": {"name": "calculate", "parameters": SCHEMA, "description": DESCRIPTION}}
FLAT_TOOL: Any = {"type": "function", **TOOL["function"]}
FORCED: Any = {"type": "function", "function": {"name": "calculate"}}
OPENING = '<tool_call>{"name": "calculate"'


class Agent:
    """Asks the policy in every way that the client has, and counts the tokens of all answers."""

    def __init__(self, client: AsyncOpenAI, model: str, prompt: str) -> None:
        self._client, self._model = client, model
        self._messages: list[Any] = [{"role": "user", "content": prompt}]
        self.counts: Counts = []
        self.request_id = ""

    async def run(self) -> None:
        await self._chat()
        await self._stream()
        await self._chat(tools=[TOOL])
        await self._call_and_result(tools=[TOOL], tool_choice=FORCED)
        await self._call_and_result(tools=[TOOL], tool_choice="required")
        await self._responses()
        await self._samples()

    async def _chat(self, messages: Any = None, **options: Any) -> Any:
        asked = {"model": self._model, "messages": messages or self._messages, **options}
        answer = await self._client.chat.completions.create(**asked)
        self.request_id = answer.id
        self.counts.append((answer.usage.prompt_tokens, answer.usage.completion_tokens))
        return answer.choices[0].message

    async def _stream(self) -> None:
        counted = {"include_usage": True}
        asked = {"model": self._model, "messages": self._messages, "stream": True, "stream_options": counted}
        chunks = [chunk async for chunk in await self._client.chat.completions.create(**asked)]
        usage = chunks[-1].usage
        self.counts.append((usage.prompt_tokens, usage.completion_tokens))

    async def _call_and_result(self, **options: Any) -> None:
        message = await self._chat(**options)
        result = [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in message.tool_calls or ()]
        if result:
            await self._chat([*self._messages, message.model_dump(exclude_none=True), *result], tools=[TOOL])

    async def _responses(self) -> None:
        prompt = self._messages[0]["content"]
        asked: dict[str, Any] = {"model": self._model, "tools": [FLAT_TOOL]}
        first = await self._client.responses.create(input=prompt, tool_choice="required", **asked)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "12"}
            for item in first.output
            if item.type == "function_call"
        ]
        items: Any = results or "Again."
        stream = await self._client.responses.create(input=items, previous_response_id=first.id, stream=True, **asked)
        *_, last = [event async for event in stream]
        usages = [first.usage, last.response.usage]
        self.counts += [(usage.input_tokens, usage.output_tokens) for usage in usages]

    async def _samples(self) -> None:
        asked = {"model": self._model, "messages": self._messages, "n": 4, "logprobs": True}
        answer = await self._client.chat.completions.create(**asked)
        lengths = [len(choice.logprobs.content) for choice in answer.choices]
        assert sum(lengths) == answer.usage.completion_tokens
        self.counts += [(answer.usage.prompt_tokens, length) for length in lengths]


def recorded_counts(attempt: RecordedAttempt) -> Counts:
    """The same counts from the recorded trajectories."""
    found = []
    for trajectory in attempt.trajectories:
        position = 0
        for turn in trajectory.turns:
            if turn.sampled:
                found.append((position, len(turn.tokens)))
            position += len(turn.tokens)
    return found


def test_tokens_that_the_client_counts_are_recorded_and_trained_with_ratio_one_at_lag_zero(tmp_path: Path) -> None:
    log = tmp_path / "counts.jsonl"

    async def ask_in_every_way(task: api.Task, client: Any) -> None:
        endpoint = await client.endpoint()
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as openai:
            agent = Agent(openai, endpoint.model, task.prompt)
            await agent.run()
        group, episode, _ = agent.request_id.split(".")
        with log.open("a") as file:
            file.write(json.dumps({"group": int(group), "attempt": int(episode), "counts": agent.counts}) + "\n")

    settings: dict[str, Any] = {
        "model.path": "starter-agent",
        "tasks.name": "calculator",
        "rewards.functions": ["number"],
        "rollout.group_size": 2,
        "rollout.max_tokens": 40,
        "rollout.temperature": 0.5,
        "pacing.groups_per_step": 2,
        "pacing.max_lag": 0,
        "filter.uniform": False,
        "eval.count": 0,
        "learner.lr": 3e-4,
        "pacing.max_failed": 1,
        "run.steps": 2,
        "run.dir": str(tmp_path / "run"),
        **INLINE,
    }
    api.Trainer(rollout=ask_in_every_way, config=settings, quiet=True).train()
    attempts = list(api.read_rollouts(tmp_path / "run", outcome="trained"))
    assert len(attempts) == 2 * 2 * 2
    counted = {(line["group"], line["attempt"]): line["counts"] for line in read_lines(log)}
    for attempt in attempts:
        of_client = [tuple(pair) for pair in counted[attempt.group, attempt.attempt]]
        assert sorted(recorded_counts(attempt)) == sorted(of_client)
        assert len(of_client) >= 11
    turns = [turn for attempt in attempts for each in attempt.trajectories for turn in each.turns]
    assert sum(OPENING in turn.text[-80:] for turn in turns if not turn.sampled) >= 3 * len(attempts)
    assert any("tool" in turn.source for turn in turns), "no call was answered"
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    for line in metrics:
        assert line["offpolicy/ratio_max"] == pytest.approx(1, abs=1e-3)
        assert line["offpolicy/kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[-1]["lag/max"] == 0
