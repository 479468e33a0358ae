"""Protocols of the components and of user code.

`Engine`, `Learner`, `Worker` and `Producer` are called over RPC when they run in another process and directly when they
run in this one (`outpace.runtime`). Their arguments and results are therefore plain data from `outpace.types`, and
every method is a coroutine that may raise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from outpace.types import (
    Aggregate,
    Answer,
    ChunkReport,
    Endpoint,
    EngineStats,
    Episode,
    FleetMember,
    Floats,
    Generation,
    GroupOrder,
    GroupReport,
    Ints,
    JournalLocation,
    LearnerStats,
    LoadReport,
    Manifest,
    Message,
    Sampling,
    StepReport,
    StopReason,
    Task,
    Trajectory,
    Version,
)


class Engine(Protocol):
    """Samples tokens.

    A request with `pinned = None` runs on the newest weights and waits while these are older than `min_version`. A
    request pinned to a version runs on the weight set loaded with `pinned = True` and fails immediately if that set has
    another version.
    """

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        """Sample a completion in one attempt. Stop reason `interrupted` or `lost` means partial output: send the
        request again with the tokens so far. `EngineFleet` does this, so its callers never see these two reasons."""
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Abort these requests. Each returns its tokens so far with stop reason `aborted`."""
        ...

    async def stream_tokens(self, request_id: str, after: int) -> Ints:
        """Return the tokens of an in-flight request beyond the first `after`, waiting until there is at least one.

        Empty if the request has ended or is unknown."""
        ...

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        """Verify the snapshot, then swap weights at a token boundary. Running sequences continue under the new weights.

        Raises `CorruptData` if a checksum does not match; the engine keeps its version. Raises `UpdateFailed` on any
        other failure that leaves the engine on its version, and `UpdateTorn` if the engine can serve no version."""
        ...

    async def release_pinned(self) -> None:
        """Free the pinned weight set."""
        ...

    async def stats(self) -> EngineStats: ...


class Learner(Protocol):
    """Trains on journaled groups; each batch produces one policy version. Calls run in order."""

    async def chunk(self, version: Version, places: list[JournalLocation], replayed: bool = False) -> ChunkReport:
        """Run forward and backward over these groups, as part of the batch trained from `version`.

        `replayed`: the groups were trained on before; their lag is reported separately. Over RPC all arguments must be
        passed."""
        ...

    async def step(self, version: Version) -> StepReport:
        """Close the batch trained from `version`: normalize exactly once and take one optimizer step."""
        ...

    async def publish(self, leased: list[Version]) -> Manifest:
        """Snapshot the current weights. Keeps the buffers of the `leased` versions, which a reader may be copying."""
        ...

    async def send(self, manifest: Manifest, meeting: dict[str, Any]) -> None:
        """Send a snapshot to an engine over a process group. `meeting` holds the rendezvous parameters of both ends.

        Training continues meanwhile. Raises `UpdateFailed` if the other side does not join or stops responding."""
        ...

    async def save(self, directory: str, version: Version) -> bool:
        """Write model, optimizer, scheduler, random state and counters of `version` into an existing directory.

        The state is copied in call order; training continues while the copy is written. Returns False and writes
        nothing if the learner is past that version."""
        ...

    async def load(self, directory: str) -> Version:
        """Restore what `save` wrote. Returns the restored version."""
        ...

    async def logprobs(self, sequences: list[Ints], temperature: float) -> list[Floats]:
        """Return the current policy's logprobs of every token but the first, at this temperature."""
        ...

    async def stats(self) -> LearnerStats: ...


class Worker(Protocol):
    """Generates groups: runs the episodes, grades them, scores the group and journals it."""

    async def run(self, order: GroupOrder) -> GroupReport: ...

    async def cancel(self, group: int) -> None:
        """Cancel a group. Its `run` returns a failed report."""
        ...

    async def release(self, segments: list[str]) -> None:
        """Free these journal segments: nothing in them is needed anymore."""
        ...

    async def record_rollouts(self, step: Version, places: list[JournalLocation]) -> None:
        """Write these journaled groups to `rollouts/`. The step was trained on them, possibly among others."""
        ...

    async def fleet(self, members: list[FleetMember]) -> None:
        """Replace the list of engines: membership, loaded versions and whether each one serves."""
        ...

    async def first_prompts(self, count: int) -> list[Ints]:
        """Return the prompt token ids of the first `count` tasks."""
        ...

    async def rng(self) -> bytes:
        """Return the state of this process's random number generators, for a checkpoint."""
        ...

    async def set_rng(self, state: bytes) -> None:
        """Restore the state that `rng` returned in an earlier start of the run."""
        ...


class Producer(Protocol):
    """Runs the user's data producer."""

    async def produce(self, number: int, step: Version) -> dict[str, Aggregate]:
        """Request round `number`, counted from 0 over all starts of the run, and journal it. Returns its metrics once
        it is on disk. A round that is already on disk is not requested again. `step` is the learner's version."""
        ...

    async def fleet(self, members: list[FleetMember]) -> None:
        """Replace the list of engines, as `Worker.fleet` does."""
        ...


class TaskSource(Protocol):
    """Tasks by index. Indexing must be cheap and pure: the same index always returns the same task."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Task: ...


@runtime_checkable
class TaskStream(Protocol):
    """Tasks that arrive during the run, each used once. Every process of the run may build the object; only the
    controller calls it."""

    def next_task(self, number: int, /) -> Task | None:
        """Return task `number`, counted from 0 over all starts of the run; None: there are no more.

        Called in order, on a thread; may block until there is a task. What it returns is journaled before it is used:
        a resumed run continues with the next number."""
        ...


class ModelClient(Protocol):
    """A rollout's client for the policy. Records every token of every request.

    `sample` extends one growing sequence. `chat` takes a whole message history, like OpenAI's endpoint, and extends the
    sequence that the history continues. Requests may run in parallel."""

    environment: object | None
    """The episode's environment if it runs in this process, for reward functions that take it as an argument."""

    @property
    def stop(self) -> StopReason:
        """Why the latest completion ended."""
        ...

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[dict[str, Any]] = (), **overrides: Any
    ) -> str:
        """Append the rendered `prompt` to the sequence, sample a completion, append it and return its text.

        Later prompts continue the chat. The first call may pass `tools`, as schemas for the chat template."""
        ...

    def observe(self, text: str) -> None:
        """Append text that the policy did not write."""
        ...

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] = (),
        role: str = "policy",
        must_call: Sequence[str] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> Answer:
        """Sample the policy's completion of a whole message history. `overrides` may set `max_tokens` and
        `stop_strings`, and in evaluation also the parameters of the sampling distribution.

        `must_call` forces the completion to start with a call of one of these functions: with its name
        if there is only one, otherwise with the beginning that all calls share. Forced tokens are neither sampled nor
        trained on.
        `chat_template_kwargs` are extra variables for the chat template."""
        ...

    async def complete(self, prompt: str | Sequence[int], *, role: str = "policy", **overrides: Any) -> Answer:
        """Sample a completion of plain text or token ids, without a chat template."""
        ...

    async def endpoint(self, role: str = "policy", *, key_in_url: bool = False) -> Endpoint:
        """Return an OpenAI-compatible endpoint for agents that do not use this client. It closes with the episode.
        `key_in_url`: the URL alone gives access, and the API key that the agent sends is ignored."""
        ...

    def reward(self, value: float, *, request: str | Answer | None = None, role: str | None = None) -> None:
        """Set the reward of the trajectory with that request, or of all trajectories of a role. It replaces the
        episode's reward."""
        ...

    def turn_reward(self, value: float, request: str | Answer) -> None:
        """Give one completion a reward on top of its trajectory's."""
        ...

    def log_metric(self, name: str, value: float, weight: float = 1.0) -> None:
        """Report a value of a metric: see `outpace.log_metric`. May be called on any thread."""
        ...

    def trajectory(self) -> Trajectory: ...

    def trajectories(self, parts: Sequence[Any] | None = None) -> list[Trajectory]:
        """Return everything sampled in this episode, each token once: one trajectory per history branch and role.

        With `parts` (`outpace.rollouts.transcript.EpisodePart`), only their answers are trained, each part with its own
        role and reward, regardless of the role of the requests."""
        ...


Rollout = Callable[[Task, ModelClient], Awaitable[Episode | Trajectory | float | None]]
"""Runs one episode. Returning None submits the client's trajectory to the reward functions. A returned float is added
to their rewards."""

Reward = Callable[..., Any]
"""TRL's signature: f(prompts=[...], completions=[...], **columns) -> list of float or None; sync or async."""
