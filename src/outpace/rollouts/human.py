"""Human client: a person answers in place of the policy (`outpace play`).

    rollout ─ chat, sample, complete ─▶ HumanClient ─ HumanTurn: new messages, tools ─▶ person ─▶ text and calls

It supports everything a rollout can do with the policy client. There are no tokens, so trajectories are empty and token
limits have no effect. If the person gives up, the episode ends like a cancelled one.

`read_answer` parses typed lines:

    /call look_up volume=3 page=0        tool call; values are JSON, or text if the parameter is a string
    /call look_up {"volume": 3}          tool call with a JSON object
    The answer is 3                      any other line is text
    //call me                            text that begins with one slash
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from outpace.errors import BadInput, RequestFailed, one_line, plural
from outpace.models.chat import Schema, as_messages
from outpace.rollouts.transcript import TrajectoryBuilder
from outpace.types import Answer, Endpoint, Message, StopReason, ToolCall, Trajectory


@dataclass(frozen=True)
class HumanTurn:
    """What the person is shown before answering. `new` are the messages since the last turn of this role."""

    role: str
    messages: Sequence[Message]
    new: Sequence[Message]
    tools: Sequence[Schema]


@dataclass(frozen=True)
class TypedAnswer:
    """A typed answer: text, and tool calls as (name, arguments)."""

    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


class Person(Protocol):
    """User interface of the human client."""

    async def answer(self, human_turn: HumanTurn) -> TypedAnswer | None:
        """Return the answer, or None to give up the episode."""
        ...

    def show(self, text: str) -> None:
        """Show text that a rollout appends without requesting an answer."""
        ...


class HumanClient:
    """Implements `outpace.protocols.ModelClient` and the client attributes that `run_episode` uses."""

    min_version = 0
    breaks = 0
    environment: object | None = None

    def __init__(self, person: Person, system: str | None = None) -> None:
        self._person = person
        self._system = system
        self._lock = asyncio.Lock()  # concurrent requests share one keyboard
        self._shown: dict[str, list[Message]] = {}  # messages shown so far, by role
        self._main: list[Message] = []
        self._tools: Sequence[Schema] = ()
        self.requests: list[str] = []
        self.newest: Answer | None = None
        self.gave_up = False
        self._roles: dict[str, str] = {}  # role of each request
        self._rewards: dict[str, float] = {}  # by role
        self._turn_rewards: dict[str, float] = {}  # by request

    @property
    def answers(self) -> int:
        return len(self.requests)

    @property
    def silent_roles(self) -> list[str]:
        """Roles that have a reward but no answers."""
        return sorted(self._rewards.keys() - set(self._roles.values()))

    @property
    def stop(self) -> StopReason:
        return "stop" if self.newest is None else self.newest.stop

    # --------------------------------------------------------------------------------------------------- answers

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Schema] = (), role: str = "policy", **overrides: Any
    ) -> Answer:
        async with self._lock:
            history = as_messages(list(messages), self._system)
            human_turn = HumanTurn(role, history, self._new_messages(role, history), tools)
            typed = await self._person.answer(human_turn)
            if typed is None:
                self.gave_up = True
                raise asyncio.CancelledError
            self.newest = self._answer(typed)
            self._roles[self.newest.request_id] = role
            self._shown[role] = [*history, self.newest.message]
            return self.newest

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[Schema] = (), **overrides: Any
    ) -> str:
        self._main += [] if prompt is None else as_messages(prompt)
        self._tools = tools or self._tools
        answer = await self.chat(self._main, tools=self._tools, **overrides)
        self._main.append(answer.message)
        return answer.text

    def observe(self, text: str) -> None:
        self._person.show(text)

    def log_metric(self, name: str, value: float, weight: float = 1.0) -> None:
        """Do nothing: metrics of a human player's episodes are not collected."""

    async def complete(self, prompt: str | Sequence[int], *, role: str = "policy", **overrides: Any) -> Answer:
        text = prompt if isinstance(prompt, str) else f"[{plural(len(prompt), 'token')}]"
        return await self.chat([{"role": "text", "content": text}], role=role, **overrides)

    async def endpoint(self, role: str = "policy", *, key_in_url: bool = False) -> Endpoint:
        raise RequestFailed("endpoint: a human player has no URL; play a rollout that takes a client")

    async def abandon(self) -> None:
        """Do nothing: there are no in-flight requests."""

    # ---------------------------------------------------------------------------------------------------- rewards

    def reward(self, value: float, *, request: str | Answer | None = None, role: str | None = None) -> None:
        if request is not None and role is None:
            role = self._roles[self._answered_id(request)]
        elif request is not None or role is None:
            raise ValueError("reward: pass either request or role")
        self._rewards[role] = float(value)

    def turn_reward(self, value: float, request: str | Answer) -> None:
        self._turn_rewards[self._answered_id(request)] = float(value)

    @property
    def own_rewards(self) -> dict[str, float]:
        """Rewards set by the rollout, by role and by request."""
        return {**self._rewards, **self._turn_rewards}

    def rewarded(self) -> list[Trajectory]:
        """Return one trajectory per role with answers. They hold the rewards but no tokens."""
        turns: dict[str, list[float]] = {role: [] for role in self._roles.values()}
        for request, value in self._turn_rewards.items():
            turns[self._roles[request]].append(value)
        return [TrajectoryBuilder().build(role, self._rewards.get(role), given) for role, given in turns.items()]

    def trajectory(self) -> Trajectory:
        return TrajectoryBuilder().build()

    def trajectories(self, parts: Sequence[Any] | None = None) -> list[Trajectory]:
        return []

    def _new_messages(self, role: str, history: list[Message]) -> list[Message]:
        shown = self._shown.get(role, [])
        return history[len(shown) :] if history[: len(shown)] == shown else history

    def _answered_id(self, request: str | Answer) -> str:
        request_id = request.request_id if isinstance(request, Answer) else request
        if request_id not in self._roles:
            raise ValueError(f"request {request_id!r} has no answer in this episode")
        return request_id

    def _answer(self, typed: TypedAnswer) -> Answer:
        request_id = f"answer-{len(self.requests)}"
        self.requests.append(request_id)
        calls = [
            ToolCall(f"call_{request_id}_{index}", name, json.dumps(arguments, ensure_ascii=False))
            for index, (name, arguments) in enumerate(typed.calls)
        ]
        none = np.zeros(0, dtype=np.int32)
        return Answer(
            request_id=request_id,
            text=typed.text,
            content=typed.text,
            reasoning="",
            calls=tuple(calls),
            stop="stop",
            prompt_tokens=0,
            tokens=none,
            logprobs=none.astype(np.float32),
            versions=none,
        )


CALL = "/call"


def read_answer(lines: Sequence[str], tools: Sequence[Schema]) -> TypedAnswer:
    """Parse typed lines into text and tool calls. Raises `BadInput` for a malformed call."""
    calls = tuple(read_call(line, tools) for line in lines if is_call(line))
    text_lines = [line[1:] if line.startswith("//") else line for line in lines if not is_call(line)]
    return TypedAnswer("\n".join(text_lines), calls)


def is_call(line: str) -> bool:
    return line.split(maxsplit=1)[:1] == [CALL]


def read_call(line: str, tools: Sequence[Schema]) -> tuple[str, dict[str, Any]]:
    _, name, rest = (*line.split(maxsplit=2), "", "")[:3]
    if not name:
        raise BadInput(f"{CALL}: name a tool, as in {CALL} name key=value or {CALL} name {{JSON}}")
    rest = rest.strip()
    if rest.startswith("{"):
        return name, _parse_object(name, rest)
    return name, _parse_pairs(name, rest, _string_parameters(name, tools))


def _parse_object(name: str, text: str) -> dict[str, Any]:
    try:
        arguments: dict[str, Any] = json.loads(text)  # text that starts with a brace is an object, or fails to parse
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{CALL} {name}: not valid JSON: {one_line(error)}") from None
    return arguments


def _parse_pairs(name: str, text: str, string_parameters: set[str]) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"{CALL} {name}: {one_line(error)}; quote text as in key='two words'") from None
    for word in words:
        if not word.partition("=")[0].isidentifier() or "=" not in word:
            raise BadInput(f"{CALL} {name}: {one_line(word, 60)!r} is not key=value; quote text as in key='two words'")
    pairs = [word.partition("=") for word in words]
    return {key: value if key in string_parameters else _parse_value(value) for key, _, value in pairs}


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _string_parameters(name: str, tools: Sequence[Schema]) -> set[str]:
    """Return the string parameters of a tool. Their values are never parsed as JSON."""
    described: Schema = next((tool["function"] for tool in tools if tool["function"].get("name") == name), {})
    properties = described.get("parameters", {}).get("properties", {})
    return {key for key, schema in properties.items() if schema.get("type") == "string"}


def tool_signature(tool: Schema) -> str:
    """Describe a tool in one line: `look_up(volume: integer, page: integer)  description`."""
    described = tool["function"]
    parameters = described.get("parameters", {})
    required = parameters.get("required", [])
    shown = [
        f"{key}{'' if key in required else '?'}: {schema.get('type', 'any')}"
        for key, schema in parameters.get("properties", {}).items()
    ]
    return f"{described['name']}({', '.join(shown)})  {one_line(described.get('description', ''))}".rstrip()
