"""Shared data types.

Invariants
- A policy version is the number of batches trained into the weights. It starts at 0, only grows, and survives resume.
- A trajectory is one exact token sequence, built by appending. Sampled tokens are never re-tokenized; each keeps the
  logprob it was sampled with and the version that sampled it.
- A group is all episodes of one task from one admission: the unit of the baseline, of pacing and of the ledger.

Everything here crosses process boundaries, so it is plain data that `outpace.runtime.wire` can encode.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Version = int
"""Policy version: the number of batches trained into the weights."""

OBSERVED: Version = -1
"""Version of tokens that the policy did not sample: prompts, tool results, environment text."""

Message = dict[str, Any]
"""One chat message with `role` and `content`."""

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

StopReason = Literal["stop", "length", "aborted", "interrupted", "lost"]
"""Why a generation ended: a stop token or stop string, the token limit, an abort, a weight update of the server, or a
failure. The last three mean partial output. An interrupted generation is continued on the same engine, a lost one on
another if there is one; neither reaches a rollout."""

Health = Literal["starting", "stale", "healthy", "suspect", "dead", "draining"]
"""Engine health. Only a healthy engine gets new requests; a suspect engine may finish its in-flight requests."""

Outcome = Literal["finished", "filtered", "failed"]
"""Result of a group: trainable, filtered out, or failed."""


def _no_ints() -> Ints:
    return np.zeros(0, dtype=np.int32)


def _no_floats() -> Floats:
    return np.zeros(0, dtype=np.float32)


class Task(msgspec.Struct, frozen=True):
    """One problem to solve. `prompt` is text (sent as one user message) or a list of chat messages.

    `episodes` are attempts that were made elsewhere. They are trained on instead of rollouts of this run, and graded
    only if none of them has a reward."""

    id: str
    prompt: str | list[Message]
    columns: dict[str, Any] = {}
    episodes: list[Episode] = []


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters. Every field is always sent, so no server default or generation_config applies.

    `seed` keys the request's own random stream: token i depends on (seed, i) alone, so slot, batch composition and
    process order cannot change the sampled tokens.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    stop_ids: list[int] = []
    stop_strings: list[str] = []


class Generation(msgspec.Struct, frozen=True):
    """Engine output for one request. After an abort it holds the tokens sampled so far.

    `logprobs` belong to the distribution actually sampled from (after temperature, top_k and top_p);
    at temperature 0 they belong to the softmax at temperature 1.
    """

    tokens: Ints
    logprobs: Floats
    versions: Ints
    stop: StopReason


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in a completion. `arguments` is the JSON object exactly as the model wrote it. If it cannot be
    parsed, `problem` holds the error message to return to the model."""

    id: str
    name: str
    arguments: str
    problem: str = ""


class Answer(msgspec.Struct, frozen=True):
    """One completion of the policy, identified by `request_id`.

    `text` is the completion without special tokens, including the opening of a tool call that the request forced.
    `content`, `reasoning` and `calls` are `text` as parsed by the model's chat format. The arrays are read-only and
    contain only what was sampled."""

    request_id: str
    text: str
    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    stop: StopReason
    prompt_tokens: int
    tokens: Ints
    logprobs: Floats
    versions: Ints
    prompt_ids: Ints = msgspec.field(default_factory=_no_ints)  # what the tokens continue

    @property
    def message(self) -> Message:
        """The completion as a new chat message. The caller may modify it."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
            if not call.problem
        ]
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.content, **reasoning, **({"tool_calls": calls} if calls else {})}


class Endpoint(msgspec.Struct, frozen=True):
    """An OpenAI-compatible endpoint of the policy, for one episode and one role."""

    base_url: str
    api_key: str
    model: str


class Trajectory(msgspec.Struct, frozen=True):
    """One exact token sequence. `mask` marks the sampled, trainable tokens; all others have version OBSERVED.

    Advantages compare trajectories of the same role. A `reward` other than None overrides the episode's reward.
    The trajectory is then a separate attempt, or part of one attempt with all others of the same role and `attempt`
    number.
    A turn is a contiguous run of sampled tokens; `turn_rewards` has one value per turn or is empty."""

    tokens: Ints
    mask: Bools
    logprobs: Floats
    versions: Ints
    role: str = "policy"
    reward: float | None = None
    turn_rewards: Floats = msgspec.field(default_factory=_no_floats)
    sources: list[str] = []  # for display: the origin of each contiguous run of tokens that were not sampled, or empty
    attempt: int | None = None


class Failure(msgspec.Struct, frozen=True):
    """`count` failures with the same reason. `source` is "rollout", "reward NAME" or "tool NAME"."""

    source: str
    reason: str
    count: int = 1


class Episode(msgspec.Struct, frozen=True):
    """One attempt at a task. A failed attempt has an `error` and is not trained on. `failures` lists everything that
    failed, including failures that the attempt survived, such as a tool call. An `error` without an entry in `failures`
    comes from the rollout."""

    trajectories: list[Trajectory]
    completion: str | list[Message] = ""
    rewards: dict[str, float] = {}
    reward: float = 0.0
    stop: str = "stop"
    metrics: dict[str, float] = {}
    requests: list[str] = []
    error: str | None = None
    traceback: str = ""  # of the user's own code, if that failed
    failures: list[Failure] = []
    extra: dict[str, Any] = {}  # columns of its record in `rollouts/`


class Row(msgspec.Struct, frozen=True):
    """A trajectory to train on. In the journal, `advantages` are computed within the group, before any batch-level
    normalization, or empty if they need a critic. A learner backend gets the final advantages.

    Estimators that need the whole batch use the remaining fields: `episode` is an index into the record's rewards;
    role, reward, turn rewards and attempt are the trajectory's."""

    tokens: Ints
    mask: Bools
    logprobs: Floats
    versions: Ints
    advantages: Floats = msgspec.field(default_factory=_no_floats)
    episode: int = 0
    role: str = "policy"
    reward: float | None = None
    turn_rewards: Floats = msgspec.field(default_factory=_no_floats)
    sources: list[str] = []
    attempt: int | None = None


class JournalLocation(msgspec.Struct, frozen=True, order=True):
    """Location of a record in the journal."""

    segment: str
    offset: int
    length: int


class GroupOrder(msgspec.Struct, frozen=True):
    """The controller's request to a worker to generate one group.

    `group` is the admission index, unique over the whole run. `position` is the index of the prompt visit in the task
    order over all epochs; re-rolls have their own (`outpace.tasks.order`). `min_version` is the oldest policy version
    that may serve it; with `pinned`, every token comes from exactly that version. A held-out group is graded and
    reported but never journaled.
    """

    group: int
    task: int  # index into the task source
    epoch: int
    min_version: Version
    size: int
    heldout: bool = False
    heldout_set: str = ""  # held-out groups only: the name of the set in `eval.sets`; empty: the other held-out tasks
    pinned: Version | None = None
    show: bool = False  # held-out groups only: also return readable episodes
    position: int = 0
    recorded: bool = False  # completions journaled by an earlier attempt at this visit may be reused
    draw: int | None = None  # seeds the sampling noise; None: use the group number
    version: Version | None = None  # newest version allowed in supplied episodes; None: no limit
    first_attempt: int = 0  # number of the first episode among the attempts at this task


class EpisodeView(msgspec.Struct, frozen=True):
    """A readable summary of one episode. `rollouts/` has the full record: see `outpace.monitoring.rollout_files`."""

    task_id: str
    prompt: str
    completion: str
    reward: float
    stop: str
    version: Version
    rewards: dict[str, float] = {}  # by reward function, unweighted
    heldout_set: str = ""
    attempt: int = 0


class Aggregate(msgspec.Struct, omit_defaults=True):
    """Values of one metric, in a form that merges with others of the same rule: `outpace.monitoring.metrics`. Each rule
    uses only some of the fields."""

    rule: str
    weight: float = 0.0  # sum of the weights; ratio: of the denominators
    total: float = 0.0  # weighted sum of the values; ratio: sum of the numerators
    squares: float = 0.0  # std: weighted sum of the squared deviations from the mean
    value: float = 0.0  # min, max, last
    values: list[tuple[float, float]] = []  # percentiles: values with their weights


class GroupReport(msgspec.Struct, frozen=True):
    """A worker's report on a completed group. Metadata only: the tokens are in the journal at `place`."""

    group: int
    task_id: str
    outcome: Outcome
    reason: str = ""
    place: JournalLocation | None = None
    rewards: list[float] = []
    reward_parts: dict[str, float] = {}  # mean by reward function
    parts: list[dict[str, float]] = []  # held-out group: unweighted rewards by function, one entry per reward
    episodes: int = 0
    failed_episodes: int = 0
    tokens_sampled: int = 0
    oldest: Version = 0  # smallest version among trainable tokens
    newest: Version = 0
    truncated: int = 0  # episodes that reached the token limit
    seconds: float = 0.0
    measured: dict[str, Aggregate] = {}  # metrics by name, except those in other fields
    views: list[EpisodeView] = []  # held-out group with `show`: every episode; group not trained on: one, clipped
    cancelled: bool = False  # cancelled by the controller, not failed by a rollout or a reward
    traceback: str = ""  # of user code that failed, for display
    failures: list[Failure] = []  # of all episodes, by source and reason
    supplied: bool = False  # the episodes came with the task: nothing was sampled, and tokens may be older than allowed


class FinishedGroup(msgspec.Struct, frozen=True):
    """A finished group as the journal stores it for the controller: its order and its report."""

    order: GroupOrder
    report: GroupReport


class AttemptRecord(msgspec.Struct, frozen=True):
    """One attempt as written to `rollouts/`, without its trained rows: these are in the group's record."""

    stop: str
    reward: float | None = None  # the full return; None: the attempt failed
    rewards: dict[str, float] = {}
    error: str | None = None
    untrained: list[Row] = []  # trajectories that are not trained on
    prompt: str = ""  # the task's prompt, set only if the attempt made no request
    extra: dict[str, Any] = {}  # columns that reward functions added


class GroupRecord(msgspec.Struct, frozen=True):
    """A finished group as the learner reads it. `rewards` and `parts` (unweighted rewards by function) have one entry
    per attempt that did not fail. `attempts` has one entry per attempt, or is empty if `rollouts/` is off."""

    group: int
    task_id: str
    epoch: int
    admitted: Version
    rows: list[Row]
    rewards: list[float]
    parts: list[dict[str, float]] = []
    attempts: list[AttemptRecord] = []


class ChunkReport(msgspec.Struct, frozen=True):
    """Result of one forward/backward pass over some groups of the open batch. Holds sums, which add up across
    chunks."""

    tokens: int
    rows: int
    loss_sum: float
    lag_counts: dict[int, int] = {}  # lag in versions -> trained tokens, without replayed groups
    replay_lag_counts: dict[int, int] = {}  # the same for replayed groups
    seconds: float = 0.0


class StepReport(msgspec.Struct, frozen=True):
    """Result of one optimizer step. `version` is the policy version that the step produced."""

    version: Version
    loss: float
    tokens: int
    grad_norm: float
    lr: float
    skipped: bool = False  # loss or gradient norm was not finite: the weights did not change
    seconds: float = 0.0
    metrics: dict[str, float] = {}


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor inside a snapshot's buffer."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int
    crc32: int


class WeightDelta(msgspec.Struct, frozen=True):
    """Changes since the snapshot of version `base`, in a separate file. Enough for a reader that holds `base`."""

    base: Version
    path: str
    nbytes: int
    crc32: int  # of the file


class LoraAdapter(msgspec.Struct, frozen=True):
    """Marks a snapshot whose tensors are a LoRA adapter on top of the run's base model."""

    rank: int
    alpha: float
    targets: list[str]  # names of the adapted modules


class DeviceMemory(msgspec.Struct, frozen=True):
    """A snapshot in accelerator memory that another process on the same machine can map.

    `handle` is the driver's IPC handle as bytes. Tensor offsets are relative to the start of this memory."""

    device: str  # the accelerator's id, the same in every process
    handle: bytes
    nbytes: int
    sums: list[int]  # one checksum per tensor: the sum of its bytes modulo 2**63


class Manifest(msgspec.Struct, frozen=True):
    """Describes one published snapshot. `incarnation` distinguishes the weights of this start of the run from the
    weights of any other start.

    The tensors are in the file at `path` or in `device` memory, optionally with a `delta`."""

    incarnation: str
    version: Version
    path: str
    tensors: list[TensorSpec]
    seconds: float = 0.0  # how long the snapshot blocked the learner
    delta: WeightDelta | None = None
    adapter: LoraAdapter | None = None
    device: DeviceMemory | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class LoadPhases(msgspec.Struct, frozen=True):
    """Seconds of the phases of a weight update of a server. The last three make up the pause."""

    prepare_s: float = 0.0  # verify and transfer, while the server samples
    hold_s: float = 0.0  # until it stops sampling
    copy_s: float = 0.0  # until it has the new weights
    resume_s: float = 0.0  # until it samples again

    @property
    def pause_s(self) -> float:
        return self.hold_s + self.copy_s + self.resume_s


class LoadReport(msgspec.Struct, frozen=True):
    """An engine's report on a weight update."""

    version: Version
    pause_s: float  # how long sampling was paused
    seconds: float  # the whole load, mostly outside the pause
    bytes: int
    phases: LoadPhases | None = None  # of a server; None: the embedded engine


class EngineStats(msgspec.Struct, frozen=True):
    """Running totals of one engine since it started."""

    version: Version
    running: int  # requests, including those of an evaluation
    waiting: int
    tokens: int  # tokens, prefill_tokens, shared_tokens and steps count training rollouts only
    prefill_tokens: int
    steps: int
    busy_s: float  # seconds spent computing for training rollouts
    core_s: float  # CPU seconds (device seconds on an accelerator) within busy_s
    eval_busy_s: float
    slots: int
    threads: int
    turns: int = 0  # iterations of the compute thread, training and evaluation; grows as long as it makes progress
    health: Health = "healthy"
    limit: int = 0  # most requests sent to it at once; 0: no limit
    retries: int = 0  # requests that failed on the server; they are retried, in whole or in part
    shared_tokens: int = 0  # prompt tokens that the embedded engine took from another request instead of computing them


class FleetMember(msgspec.Struct, frozen=True):
    """The controller's view of one engine, for routing requests."""

    name: str
    socket: str  # path of its RPC socket
    serves: bool
    version: Version = 0
    pinned: Version | None = None  # version of its pinned weight set, if loaded
    leaving: bool = False  # draining: finishes in-flight requests and gets no new ones


class LearnerStats(msgspec.Struct, frozen=True):
    """Running totals of the learner since it started."""

    version: Version
    busy_s: float
    core_s: float  # CPU seconds (device seconds on an accelerator) within busy_s
    tokens: int
    threads: int
    parameters: int
