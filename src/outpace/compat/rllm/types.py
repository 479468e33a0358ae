"""Tasks, steps, trajectories, episodes and results, with the fields and defaults of rLLM.

The messages of a step are an immutable copy: a list that grows after the step was made does not change it.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from outpace.models.frozen import freeze
from outpace.types import Answer

UNNAMED = "default_traj_name"


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


def _new_id() -> str:
    return str(uuid.uuid4())


@dataclass
class Task:
    """Evaluators may use it like the row of the dataset: `task["target"]` is `task.metadata["target"]`."""

    id: str
    instruction: str | list[dict[str, Any]]
    metadata: dict[str, Any] = field(default_factory=dict)
    dataset_dir: Path = field(default_factory=Path)
    sub_dir: Path | None = None

    def __getitem__(self, column: str) -> Any:
        return self.metadata[column]

    def __contains__(self, column: object) -> bool:
        return column in self.metadata

    def get(self, column: str, default: Any = None) -> Any:
        return self.metadata.get(column, default)


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
        return cls(
            text=answer.text,
            content=answer.content,
            reasoning=answer.reasoning,
            tool_calls=list(answer.calls),
            prompt_ids=answer.prompt_ids.tolist(),
            completion_ids=answer.tokens.tolist(),
            logprobs=answer.logprobs.tolist(),
            prompt_length=answer.prompt_tokens,
            completion_length=len(answer.tokens),
            finish_reason="stop" if answer.stop == "stop" else "length",
            weight_version=int(answer.versions.min()) if len(answer.versions) else None,
            request_id=answer.request_id,
        )


@dataclass
class _Record:
    metadata: dict[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def info(self) -> dict[str, Any]:
        return self.metadata

    def to_dict(self) -> dict[str, Any]:
        return asdict(self, dict_factory=lambda pairs: {k: v.value if isinstance(v, Enum) else v for k, v in pairs})


@dataclass
class Step(_Record):
    id: str = field(default_factory=_new_id)
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
        if (output := self.model_output) is None:
            return
        self.id = output.request_id or self.id
        self.prompt_ids = self.prompt_ids or list(output.prompt_ids or [])
        self.response_ids = self.response_ids or list(output.completion_ids or [])
        self.logprobs = self.logprobs or list(output.logprobs or [])
        self.weight_version = output.weight_version

    @classmethod
    def from_model_output(cls, model_output: ModelOutput, messages: Any = None, action: Any = None) -> Step:
        answer = {"role": "assistant", "content": model_output.content, "reasoning": model_output.reasoning}
        return cls(
            chat_completions=[*(messages or []), answer],
            thought=model_output.reasoning or "",
            action=action,
            model_response=model_output.content or "",
            model_output=model_output,
        )


@dataclass
class Trajectory(_Record):
    uid: str = field(default_factory=_new_id)
    name: str = UNNAMED
    task: Any = None
    steps: list[Step] = field(default_factory=list)
    reward: float | None = None
    input: dict[str, Any] | None = None
    output: Any = None
    signals: dict[str, float] = field(default_factory=dict)

    def is_cumulative(self) -> bool:
        chats = [step.chat_completions for step in self.steps]
        return all(after[: len(before)] == before for before, after in zip(chats, chats[1:], strict=False))


@dataclass
class Episode(_Record):
    id: str = field(default_factory=_new_id)
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

    @property
    def rollout_idx(self) -> str:
        return self.id.rpartition(":")[2]


@dataclass
class TrajectoryGroup:
    """Trajectories of one task and one name: those that are compared with each other."""

    trajectories: list[Trajectory]
    group_id: str = ""
    metadata: list[dict[str, Any]] = field(default_factory=list)
    weight_version: int = 0

    @property
    def group_role(self) -> str:
        return self.group_id.rpartition(":")[2] if ":" in self.group_id[:-1] else "all_groups"

    @property
    def task_id(self) -> str:
        return self.group_id.rpartition(":")[0] or self.group_id


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
