"""The nouns of outpace.

Invariants
- A version counts the batches that made the weights: it starts at 0, only grows, and survives resume.
- A trajectory is one exact token sequence, built by appending. What was sampled is never re-tokenised;
  every sampled token keeps the logprob it was drawn with and the version that drew it.
- A group is all episodes of one task at one admission: the unit of baseline, of pacing and of the ledger.

Everything here crosses process boundaries, so it is plain data that `outpace.wire` can encode.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Version = int
"""How many batches made these weights."""

OBSERVED: Version = -1
"""The version of a token that the policy did not sample: prompts, tool results, environment text."""

Message = dict[str, Any]
"""One chat message, in the usual role/content form."""

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

StopReason = Literal["stop", "length", "aborted", "lost"]
"""Why a generation ended: a stop token or string, the token limit, an abort, or that the server went away. After the
last two it is partial output; a lost answer is gone on with elsewhere before anybody sees it."""

Health = Literal["starting", "stale", "healthy", "suspect", "dead", "draining"]
"""How an engine is. Only a healthy one is given work; a suspect one may finish what it has."""

Outcome = Literal["finished", "filtered", "failed"]
"""What a worker says of a group it has closed."""


def _no_floats() -> Floats:
    return np.zeros(0, dtype=np.float32)


class Task(msgspec.Struct, frozen=True):
    """One problem. `prompt` is text (sent as one user message) or chat messages."""

    id: str
    prompt: str | list[Message]
    columns: dict[str, Any] = {}


class Sampling(msgspec.Struct, frozen=True):
    """How to sample. Every field is always sent: no server default or generation_config ever applies.

    `seed` is the key of the request's own noise stream: token i of the request draws its noise from
    (seed, i) alone, so neither slot nor batch nor process order can change what is sampled.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    stop_ids: list[int] = []
    stop_strings: list[str] = []


class Generation(msgspec.Struct, frozen=True):
    """What an engine returns for one request; after an abort, what it had so far.

    `logprobs` are those of the distribution actually sampled from (after temperature, top_k and top_p);
    at temperature 0 they are those of the softmax at temperature 1.
    """

    tokens: Ints
    logprobs: Floats
    versions: Ints
    stop: StopReason


class ToolCall(msgspec.Struct, frozen=True):
    """What an answer asks for. `arguments` is the text of a JSON object as the model wrote it; where that cannot be
    read, `problem` says why, for the model to hear."""

    id: str
    name: str
    arguments: str
    problem: str = ""


class Answer(msgspec.Struct, frozen=True):
    """One answer of the policy, found again by its `request_id`.

    `text` is all that was sampled, without special tokens; `content`, `reasoning` and `calls` are the parts that the
    model's dialect has for it. The arrays cannot be written to."""

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

    @property
    def message(self) -> Message:
        """The answer as a chat message, one of its own for everyone who asks: changing it changes nothing here."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
            if not call.problem
        ]
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.content, **reasoning, **({"tool_calls": calls} if calls else {})}


class Endpoint(msgspec.Struct, frozen=True):
    """Where an agent that speaks OpenAI's protocol finds the policy, for one episode and one role."""

    base_url: str
    api_key: str
    model: str


class Trajectory(msgspec.Struct, frozen=True):
    """One exact token sequence. `mask` marks the sampled, trainable tokens; others have version OBSERVED.

    Trajectories of one role are compared with one another. `reward` is this trajectory's own; None: the episode's.
    A turn is an unbroken run of sampled tokens; `turn_rewards` has one value per turn, or none at all."""

    tokens: Ints
    mask: Bools
    logprobs: Floats
    versions: Ints
    role: str = "policy"
    reward: float | None = None
    turn_rewards: Floats = msgspec.field(default_factory=_no_floats)
    sources: list[str] = []  # who wrote each unbroken run of tokens that were not sampled, or nothing: for people


class Failure(msgspec.Struct, frozen=True):
    """Something that failed `count` times for one reason. `source` names it: "rollout", "reward NAME", "tool NAME"."""

    source: str
    reason: str
    count: int = 1


class Episode(msgspec.Struct, frozen=True):
    """One attempt at a task. `error` is None unless the attempt failed; then it trains nothing. `failures` has what
    failed in it, also what it survived, such as a tool; an error without one is the rollout's."""

    trajectories: list[Trajectory]
    completion: str | list[Message] = ""
    rewards: dict[str, float] = {}
    reward: float = 0.0
    stop: str = "stop"
    metrics: dict[str, float] = {}
    requests: list[str] = []
    error: str | None = None
    traceback: str = ""  # of the user's own code, where that is what failed
    failures: list[Failure] = []


class Row(msgspec.Struct, frozen=True):
    """A trajectory to train on. `advantages` are those of the group: what follows over a batch is not in them yet.

    The other fields say where they came from, for estimators that need the batch: `episode` is an index into the
    record's rewards; role, reward and turn rewards are the trajectory's."""

    tokens: Ints
    mask: Bools
    logprobs: Floats
    versions: Ints
    advantages: Floats
    episode: int = 0
    role: str = "policy"
    reward: float | None = None
    turn_rewards: Floats = msgspec.field(default_factory=_no_floats)
    sources: list[str] = []


class Place(msgspec.Struct, frozen=True, order=True):
    """Where a record lies in the journal."""

    segment: str
    offset: int
    length: int


class GroupOrder(msgspec.Struct, frozen=True):
    """The controller's order to a worker: make one group.

    `group` is the admission index, unique over the whole run; `position` is the visit it makes, in the order of tasks
    over all epochs. `min_version` is the oldest version that may serve it; with `pinned`, every token comes from
    exactly that version. A held-out group is judged and reported but never journalled.
    """

    group: int
    task: int  # index into the task source
    epoch: int
    min_version: Version
    size: int
    heldout: bool = False
    pinned: Version | None = None
    show: bool = False  # held out: also send back the episodes in a form for people to read
    position: int = 0
    recorded: bool = False  # answers that the journal keeps of an earlier attempt at this visit may be used again
    draw: int | None = None  # what its noise is drawn by; None: its group number


class EpisodeView(msgspec.Struct, frozen=True):
    """A rollout for people to read. `rollouts/` has more of it: see `outpace.observe.rollout_files`."""

    task_id: str
    prompt: str
    completion: str
    reward: float
    stop: str
    version: Version


class GroupReport(msgspec.Struct, frozen=True):
    """A worker's word on a group it has closed: metadata only, the tokens lie at `place` in the journal."""

    group: int
    task_id: str
    outcome: Outcome
    reason: str = ""
    place: Place | None = None
    rewards: list[float] = []
    reward_parts: dict[str, float] = {}  # mean by reward function
    episodes: int = 0
    failed_episodes: int = 0
    tokens_sampled: int = 0
    oldest: Version = 0  # smallest version among trainable tokens
    newest: Version = 0
    truncated: int = 0  # episodes that ran into the token limit
    seconds: float = 0.0
    metrics: dict[str, float] = {}
    views: list[EpisodeView] = []  # held out, if ordered: every episode; not trainable: one of them, clipped
    cancelled: bool = False  # given up on request: nothing that a rollout or a reward did wrong
    traceback: str = ""  # where user code failed, for people
    failures: list[Failure] = []  # of all its episodes, by source and reason


class Kept(msgspec.Struct, frozen=True):
    """What the journal keeps for the controller: a finished group, as it was ordered and as it was reported."""

    order: GroupOrder
    report: GroupReport


class AttemptRecord(msgspec.Struct, frozen=True):
    """What `rollouts/` says of one attempt, apart from the rows of its group that are trained on."""

    stop: str
    reward: float | None = None  # the whole return; None: it failed
    rewards: dict[str, float] = {}
    error: str | None = None
    untrained: list[Row] = []  # its trajectories that are not trained on
    prompt: str = ""  # that of the task, where the policy was asked nothing


class GroupRecord(msgspec.Struct, frozen=True):
    """What the learner reads of a finished group. `rewards` and `parts` (single rewards by function, unweighted) have
    one entry per attempt that did not fail. `attempts` has one entry per attempt, or none where `rollouts/` is off."""

    group: int
    task_id: str
    epoch: int
    admitted: Version
    rows: list[Row]
    rewards: list[float]
    parts: list[dict[str, float]] = []
    attempts: list[AttemptRecord] = []


class ChunkReport(msgspec.Struct, frozen=True):
    """What one forward/backward over some groups of the open batch did. Sums, not means: sums add up."""

    tokens: int
    rows: int
    loss_sum: float
    lag_counts: dict[int, int] = {}  # lag in versions -> trained tokens, without those of replayed groups
    replay_lag_counts: dict[int, int] = {}  # the same of replayed groups
    seconds: float = 0.0


class StepReport(msgspec.Struct, frozen=True):
    """One closed batch: `version` is the version the step produced."""

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


class Delta(msgspec.Struct, frozen=True):
    """What has changed since the snapshot of `base`, in a file of its own: enough for whoever has that one."""

    base: Version
    path: str
    nbytes: int
    crc32: int  # of the file


class Adapter(msgspec.Struct, frozen=True):
    """The tensors are those of a low-rank adapter on top of the model that the run began with."""

    rank: int
    alpha: float
    targets: list[str]  # names of the modules that it adapts


class DeviceMemory(msgspec.Struct, frozen=True):
    """A snapshot in an accelerator's memory, which another process of the same machine can map.

    `handle` is what the driver gives for it, as plain bytes; offsets of the tensors count from its beginning."""

    device: str  # the accelerator's own id, the same in every process
    handle: bytes
    nbytes: int
    sums: list[int]  # one per tensor: its bytes added up as integers, modulo 2**63


class Manifest(msgspec.Struct, frozen=True):
    """Names one published snapshot. `incarnation` tells weights of this start of the run from any other's.

    The tensors lie in the file at `path` or in `device` memory. There may be a `delta` beside them."""

    incarnation: str
    version: Version
    path: str
    tensors: list[TensorSpec]
    seconds: float = 0.0  # how long the learner was held up by the snapshot
    delta: Delta | None = None
    adapter: Adapter | None = None
    device: DeviceMemory | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class LoadReport(msgspec.Struct, frozen=True):
    """An engine's word on a weight update."""

    version: Version
    pause_s: float  # how long sampling stood still
    seconds: float  # the whole load, mostly outside the pause
    bytes: int


class EngineStats(msgspec.Struct, frozen=True):
    """Running totals of one engine since it started."""

    version: Version
    running: int  # requests, those of an evaluation included
    waiting: int
    tokens: int  # these three are of training rollouts only
    prefill_tokens: int
    steps: int
    busy_s: float  # seconds spent computing for training rollouts
    core_s: float  # processor seconds (device seconds on an accelerator) of that
    eval_busy_s: float
    slots: int
    threads: int
    turns: int = 0  # of the compute thread, for training and evaluation alike: it gets on while this grows
    health: Health = "healthy"
    limit: int = 0  # requests that are sent to it at once; 0: as many as there are
    retries: int = 0  # requests, or parts of them, that were made again


class Member(msgspec.Struct, frozen=True):
    """An engine as the controller sees it, for those who choose one."""

    name: str
    socket: str  # where it is to be called
    serves: bool
    version: Version = 0
    pinned: Version | None = None  # the version of its second weight set, if it has one loaded
    leaving: bool = False  # it finishes what it has and gets nothing more


class LearnerStats(msgspec.Struct, frozen=True):
    """Running totals of the learner since it started."""

    version: Version
    busy_s: float
    core_s: float  # processor seconds (device seconds on an accelerator) of that
    tokens: int
    threads: int
    parameters: int
