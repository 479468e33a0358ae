"""Tasks, steps, trajectories, episodes and results, with the fields and defaults of rLLM.

The messages of a step are an immutable copy: a list that grows after the step was made does not change it.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from outpace.models.frozen import freeze
from outpace.types import Answer

UNNAMED = "default_traj_name"
__all__ = [
    "Action", "AgentConfig", "Episode", "EvalOutput", "ModelOutput", "RewardOutput", "Signal", "Step", "Task",
    "TerminationEvent", "TerminationReason", "Trajectory", "TrajectoryGroup",
]  # fmt: skip


class TerminationReason(Enum):
    MAX_PROMPT_LENGTH_EXCEEDED = "max_prompt_length_exceeded"
    MAX_RESPONSE_LENGTH_EXCEEDED = "max_response_length_exceeded"
    ENV_DONE = "env_done"
    MAX_TURNS_EXCEEDED = "max_turns_exceeded"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"
    ERROR = "error"


class TerminationEvent(Exception):
    def __init__(self, reason: TerminationReason = TerminationReason.UNKNOWN) -> None:
        super().__init__(f"Terminated: {reason}")
        self.reason = reason


class Task(dict[str, Any]):
    """A row of the dataset, which is also its `metadata`."""

    def __init__(
        self, id: str, instruction: Any, metadata: Any = (), dataset_dir: Path = Path(), sub_dir: Path | None = None
    ) -> None:
        super().__init__(metadata)
        self.id, self.instruction, self.dataset_dir, self.sub_dir = id, instruction, dataset_dir, sub_dir

    @property
    def metadata(self) -> dict[str, Any]:
        return self


@dataclass
class AgentConfig:
    base_url: str
    model: str
    session_uid: str
    metadata: dict[str, Any] = field(default_factory=dict)
    is_validation: bool = False
    sampling_params: dict[str, Any] = field(default_factory=dict)


@dataclass
class Action:
    action: Any = None


@dataclass
class ModelOutput:
    """An answer of the policy. `request_id` ties it, and the step that is made with it, to its tokens."""

    text: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_length: int = 0
    completion_length: int = 0
    finish_reason: str | None = None
    weight_version: int | None = None
    request_id: str | None = None

    @classmethod
    def of(cls, answer: Answer) -> ModelOutput:
        ids, logprobs, prompt = answer.tokens.tolist(), answer.logprobs.tolist(), answer.prompt_ids.tolist()
        texts = answer.text, answer.content, answer.reasoning, list(answer.calls)
        finish = "stop" if answer.stop == "stop" else "length"
        version = int(answer.versions.min()) if ids else None
        return cls(*texts, prompt, ids, logprobs, len(prompt), len(ids), finish, version, answer.request_id)


@dataclass
class _Record:
    metadata: dict[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def info(self) -> dict[str, Any]:
        return self.metadata

    def to_dict(self) -> dict[str, Any]:
        return asdict(self, dict_factory=lambda pairs: {k: v.value if isinstance(v, Enum) else v for k, v in pairs})


_new_id = partial(field, default_factory=lambda: str(uuid.uuid4()))


@dataclass
class Step(_Record):
    id: str = _new_id()
    input: Any = None
    output: Any = None
    action: Any = None
    reward: float = 0.0
    done: bool = False
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    chat_completions: Any = ()
    observation: Any = None
    thought: str = ""
    model_response: str = ""
    model_output: ModelOutput | None = None
    mc_return: float = 0.0
    advantage: list[float] | float | None = None
    weight_version: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, freeze(value) if name == "chat_completions" else value)

    def __post_init__(self) -> None:
        if (output := self.model_output) is not None:
            self.id, self.weight_version = output.request_id or self.id, output.weight_version
            self.prompt_ids = self.prompt_ids or list(output.prompt_ids or [])
            self.response_ids = self.response_ids or list(output.completion_ids or [])
            self.logprobs = self.logprobs or list(output.logprobs or [])
            self.model_response = self.model_response or output.content or ""
            self.thought = self.thought or output.reasoning or ""

    @classmethod
    def from_model_output(cls, model_output: ModelOutput, messages: Any = None, action: Any = None) -> Step:
        answer = {"role": "assistant", "content": model_output.content, "reasoning": model_output.reasoning}
        return cls(chat_completions=[*(messages or ()), answer], action=action, model_output=model_output)


@dataclass
class Trajectory(_Record):
    uid: str = _new_id()
    name: str = UNNAMED
    task: Any = None
    steps: list[Step] = field(default_factory=list)
    reward: float | None = None
    input: dict[str, Any] | None = None
    output: Any = None
    signals: dict[str, float] = field(default_factory=dict)


@dataclass
class Episode(_Record):
    id: str = _new_id()
    task: Any = None
    termination_reason: TerminationReason | None = None
    is_correct: bool = False
    session_id: str | None = None
    trajectories: list[Trajectory] = field(default_factory=list)
    artifacts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def task_id(self) -> str:
        return self.id.rpartition(":")[0] or self.id


@dataclass
class TrajectoryGroup:
    """Trajectories of one task with the same name, which are compared with each other."""

    trajectories: list[Trajectory]
    group_id: str = ""
    metadata: list[dict[str, Any]] = field(default_factory=list)
    weight_version: int = 0


@dataclass
class Signal:
    name: str
    value: float
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvalOutput:
    reward: float
    is_correct: bool | None = None
    signals: list[Signal] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


RewardOutput = EvalOutput
