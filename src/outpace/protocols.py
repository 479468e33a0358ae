"""The seams of the system: what each part promises, in small typed protocols.

`Engine`, `Learner` and `Worker` are served over a channel when they live in another process and called directly
when they live in this one (`outpace.runtime`). Hence their arguments and results are plain data of
`outpace.types`, and every method is a coroutine that may raise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from outpace.types import (
    Answer,
    ChunkReport,
    Endpoint,
    EngineStats,
    Episode,
    Floats,
    Generation,
    GroupOrder,
    GroupReport,
    Ints,
    LearnerStats,
    LoadReport,
    Manifest,
    Member,
    Message,
    Place,
    Sampling,
    StepReport,
    StopReason,
    Task,
    Trajectory,
    Version,
)


class Engine(Protocol):
    """Samples tokens.

    A request with `pinned = None` is served by the newest weights, and waits while these are older than
    `min_version`. A request pinned to a version is served by the resident weight set that was loaded with
    `pinned = True` and fails at once if that set is another version.
    """

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation: ...

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests now: each returns what it has, with stop reason `aborted`."""
        ...

    async def peek(self, request_id: str, after: int) -> Ints:
        """Tokens of a request under way beyond the first `after`; waits until there is at least one.

        Empty when the request has ended or is unknown."""
        ...

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        """Verify the snapshot, then swap at a token boundary; running sequences go on under the new weights.

        A snapshot that fails its checksums leaves the engine on the version it has and raises `CorruptData`; so does
        whatever else goes wrong, as `UpdateFailed` (it serves the version it had) or `UpdateTorn` (nothing)."""
        ...

    async def release_pinned(self) -> None:
        """Free the pinned weight set."""
        ...

    async def stats(self) -> EngineStats: ...


class Learner(Protocol):
    """Turns journalled groups into gradients, and one batch into one version. Calls run in the order given."""

    async def chunk(self, version: Version, places: list[Place], replayed: bool = False) -> ChunkReport:
        """Forward and backward over these groups as part of the batch that is trained from `version`.

        `replayed`: they were trained before. Their lag is reported apart; over a channel, all arguments are given."""
        ...

    async def step(self, version: Version) -> StepReport:
        """Close the batch trained from `version`: one exact normalisation, one optimizer step."""
        ...

    async def publish(self, leased: list[Version]) -> Manifest:
        """Snapshot the current weights. Buffers of the `leased` versions, which a reader may be copying, stay."""
        ...

    async def send(self, manifest: Manifest, meeting: dict[str, Any]) -> None:
        """Send a snapshot to the engine that comes to this meeting: what two ends of a process group must agree on.

        Training goes on meanwhile. Raises `UpdateFailed` when the other side stays away or falls silent."""
        ...

    async def save(self, directory: str, version: Version) -> bool:
        """Write model, optimizer, scheduler, random state and counters of `version` into an existing directory.

        The copy that is written is taken in the order of the calls; training goes on while it is being written. False:
        the learner is past that version, and nothing was written."""
        ...

    async def load(self, directory: str) -> Version:
        """Restore what `save` wrote; returns the version restored."""
        ...

    async def logprobs(self, sequences: list[Ints], temperature: float) -> list[Floats]:
        """What the current weights give every token of these sequences but the first, at this temperature."""
        ...

    async def stats(self) -> LearnerStats: ...


class Worker(Protocol):
    """Makes groups: runs episodes, grades them, closes the group, journals it."""

    async def run(self, order: GroupOrder) -> GroupReport: ...

    async def cancel(self, group: int) -> None:
        """Stop working on a group; its `run` returns a failed report."""
        ...

    async def release(self, segments: list[str]) -> None:
        """These journal segments hold nothing that is still needed."""
        ...

    async def record_rollouts(self, step: Version, places: list[Place]) -> None:
        """Write these journalled groups to `rollouts/`, as some of those that the step was trained on."""
        ...

    async def fleet(self, members: list[Member]) -> None:
        """Who samples, as of now: engines that came, went, were loaded, or do not serve."""
        ...

    async def openings(self, count: int) -> list[Ints]:
        """The first `count` tasks as the policy sees them: token ids of their prompts."""
        ...

    async def rng(self) -> bytes:
        """The state of this process's random number generators, for a checkpoint."""
        ...

    async def set_rng(self, state: bytes) -> None:
        """Go on with what `rng` gave, in another start of the run."""
        ...


class TaskSource(Protocol):
    """Problems by index. Indexing is cheap and pure: the same index always gives the same task."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Task: ...


class ModelClient(Protocol):
    """What a rollout holds in its hand to talk to the policy. Every token of every request is accounted for.

    `sample` goes on with one growing sequence; `chat` takes a whole history, as OpenAI's endpoint does, and goes on
    with the sequence that this history is the continuation of. Requests may run in parallel."""

    environment: object | None
    """The episode's environment, where it lives in this process, for reward functions that ask for it."""

    @property
    def stop(self) -> StopReason:
        """Why the newest completion ended."""
        ...

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[dict[str, Any]] = (), **overrides: Any
    ) -> str:
        """Append `prompt` (rendered) to the sequence, sample a completion, append it, return its text.

        A later prompt goes on with the chat. The first one may show `tools`, as schemas for the chat template."""
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
        **overrides: Any,
    ) -> Answer:
        """The policy's answer to a whole history. `overrides` are `max_tokens` and `stop_strings`, and in evaluation
        what shapes the distribution."""
        ...

    async def complete(self, prompt: str | Sequence[int], *, role: str = "policy", **overrides: Any) -> Answer:
        """What the policy writes after a plain text, without a chat template."""
        ...

    async def endpoint(self, role: str = "policy") -> Endpoint:
        """An OpenAI-compatible URL of this episode, which ends with it, for agents that know nothing of outpace."""
        ...

    def reward(self, value: float, *, request: str | Answer | None = None, role: str | None = None) -> None:
        """Give the trajectory with that request, or all of a role, a reward of its own, in place of the episode's."""
        ...

    def turn_reward(self, value: float, request: str | Answer) -> None:
        """Give one answer a reward on top of what its trajectory gets."""
        ...

    def trajectory(self) -> Trajectory: ...

    def trajectories(self) -> list[Trajectory]:
        """Everything that was sampled in this episode, each token once: one per branch of history and per role."""
        ...


Rollout = Callable[[Task, ModelClient], Awaitable[Episode | Trajectory | float | None]]
"""Makes one episode. None: the client's trajectory, for the reward functions to judge. A float is its own reward,
added to theirs."""

Reward = Callable[..., Any]
"""TRL's signature: f(prompts=[…], completions=[…], **columns) -> list of float or None; sync or async."""
