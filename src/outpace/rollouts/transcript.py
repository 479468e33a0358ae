"""Transcript: every token of one episode, as a tree of turns with the exact ids each answer was sampled from.

    prompt ─▶ answer ─▶ observed ─▶ answer          first trajectory
                  └───▶ observed ─▶ answer          second trajectory: the shared answer is context, trained only above

Invariants
- The prompt of a turn is its parent's prompt, its parent's answer verbatim, and the tokens observed since.
- Across the trajectories, every sampled token is trainable exactly once, under the prefix it was sampled from. This is
  checked against the checksum of the prompt that was sent, and a mismatch ends the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from outpace.errors import ComponentFailed
from outpace.types import OBSERVED, Generation, Ints, Trajectory

OBSERVATION = "observation"
"""Source of text that is not a chat message."""


class TrajectoryBuilder:
    """Builds a trajectory by appending. Sampled ids are kept verbatim, with their logprobs and versions."""

    def __init__(self) -> None:
        self._pieces: list[Ints] = []
        self._generations: list[tuple[int, Generation]] = []  # with the position of the first token
        self._length = 0
        self._sources: list[list[str]] = []  # sources of each run of observed tokens
        self._observing = False  # whether the last token was observed

    def observe(self, tokens: Ints | Sequence[int], source: str = OBSERVATION) -> None:
        """Append tokens that the policy did not sample. `source` names their origin for display."""
        count = len(tokens)
        if not count:
            return
        if not self._observing:
            self._sources.append([])
            self._observing = True
        if source not in self._sources[-1]:
            self._sources[-1].append(source)
        self._pieces.append(np.asarray(tokens, dtype=np.int32))
        self._length += count

    def sampled(self, generation: Generation) -> None:
        """Append tokens sampled after exactly the tokens so far."""
        count = len(generation.tokens)
        self._pieces.append(generation.tokens)
        self._generations.append((self._length, generation))
        self._length += count
        self._observing &= count == 0

    def build(
        self, role: str = "policy", reward: float | None = None, turn_rewards: Sequence[float] = ()
    ) -> Trajectory:
        mask = np.zeros(self._length, dtype=np.bool_)
        logprobs = np.zeros(self._length, dtype=np.float32)
        versions = np.full(self._length, OBSERVED, dtype=np.int32)
        for start, generation in self._generations:
            sampled = slice(start, start + len(generation.tokens))
            mask[sampled], logprobs[sampled], versions[sampled] = True, generation.logprobs, generation.versions
        return Trajectory(
            tokens=np.concatenate(self._pieces, dtype=np.int32) if self._pieces else np.zeros(0, dtype=np.int32),
            mask=mask,
            logprobs=logprobs,
            versions=versions,
            role=role,
            reward=reward,
            turn_rewards=np.array(turn_rewards, dtype=np.float32) if turn_rewards else np.zeros(0, dtype=np.float32),
            sources=[", ".join(sources) for sources in self._sources],
        )


class EpisodePart(NamedTuple):
    """The answers of one agent in an episode, by request id. They are rewarded and compared as one attempt."""

    requests: Sequence[str]
    role: str
    reward: float | None = None


@dataclass(eq=False, slots=True)
class Turn:
    """One request and its answer, once it has arrived."""

    request_id: str
    role: str
    parent: Turn | None
    observed: Ints
    source: str = OBSERVATION  # origin of the observed tokens
    prompt_length: int = 0
    prompt_check: int = 0
    generation: Generation | None = None

    @property
    def length(self) -> int:
        """Number of tokens in the answer."""
        return 0 if self.generation is None else len(self.generation.tokens)

    def lineage(self) -> list[Turn]:
        """Return the turns from the first one to this one."""
        found: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    def prompt(self) -> Ints:
        """Return the prompt ids of this turn."""
        if self.parent is None:
            return self.observed
        parts: list[Ints] = []
        for turn in self.lineage():
            parts.append(turn.observed)
            if turn is not self:
                assert turn.generation is not None, "a turn follows an answer"
                parts.append(turn.generation.tokens)
        return np.concatenate(parts)

    def is_prefix_of(self, ids: Ints) -> bool:
        """Whether `ids` begin with this turn's prompt and answer."""
        assert self.generation is not None
        end = self.prompt_length + len(self.generation.tokens)
        answered = np.array_equal(ids[self.prompt_length : end], self.generation.tokens)
        return answered and crc32(ids[: self.prompt_length].tobytes()) == self.prompt_check


@dataclass
class Transcript:
    """All answered turns of an episode, and the rewards the rollout set for them."""

    turns: list[Turn] = field(default_factory=list)  # answered turns only
    rewards: dict[str, float] = field(default_factory=dict)  # trajectory rewards, by a request in the trajectory
    role_rewards: dict[str, float] = field(default_factory=dict)
    turn_rewards: dict[str, float] = field(default_factory=dict)

    def begin(
        self, request_id: str, role: str, parent: Turn | None, observed: Sequence[int], source: str = OBSERVATION
    ) -> tuple[Turn, Ints]:
        """Return a new turn and the prompt ids to send for it."""
        turn = Turn(request_id, role, parent, np.array(observed, dtype=np.int32), source)
        prompt = turn.prompt()
        turn.prompt_length, turn.prompt_check = len(prompt), crc32(prompt.tobytes())
        return turn, prompt

    def set_reward(self, request_id: str, value: float) -> None:
        """Set the reward of the trajectory that contains this request. The last one set wins."""
        self.rewards.pop(request_id, None)
        self.rewards[request_id] = value

    def longest_prefix(self, ids: Sequence[int], role: str) -> tuple[Turn | None, int]:
        """Return the turn of this role whose prompt and answer are the longest prefix of `ids`, and its length."""
        wanted = np.array(ids, dtype=np.int32)
        best: tuple[Turn | None, int] = (None, 0)
        for turn in self.turns:
            assert turn.generation is not None, "only answered turns are kept"
            length = turn.prompt_length + len(turn.generation.tokens)
            if turn.role == role and best[1] < length <= len(wanted) and turn.is_prefix_of(wanted):
                best = turn, length
        return best

    def trajectories(self) -> list[Trajectory]:
        """Return one trajectory per branch, in the order the branches were finished."""
        parents = {id(turn.parent) for turn in self.turns if turn.parent is not None}
        leaves = [turn for turn in self.turns if id(turn) not in parents]
        claimed: set[int] = set()
        return [self._trajectory(leaf, claimed) for leaf in leaves]

    def split(self, parts: Sequence[EpisodePart]) -> list[Trajectory]:
        """Return the trajectories of each part. Answers outside of a part are context in it, and an answer in several
        parts is trained in the first. A part has several trajectories if no single sequence contains all its answers.

        Raises `ValueError` for a request without an answer."""
        answered = {turn.request_id: turn for turn in self.turns}
        trained: set[int] = set()
        found: list[Trajectory] = []
        for number, part in enumerate(parts):
            if missing := [request for request in part.requests if request not in answered]:
                raise ValueError(f"request {missing[0]!r} has no answer in this episode")
            chosen = {id(turn): turn for turn in (answered[request] for request in part.requests)}
            continued = {id(turn) for leaf in chosen.values() for turn in leaf.lineage()[:-1]}
            context = {id(turn) for turn in self.turns} - chosen.keys() | trained
            leaves = [turn for turn in chosen.values() if id(turn) not in continued]
            given = [msgspec.structs.replace(self._trajectory(leaf, context), role=part.role) for leaf in leaves]
            if part.reward is not None:
                given = [msgspec.structs.replace(each, reward=part.reward, attempt=number) for each in given]
            found += given
            trained |= chosen.keys()
        return found

    def branch(self, leaf: Turn, after: Sequence[int]) -> Trajectory:
        """Return the sequence up to this turn and the tokens observed `after` it, ignoring other branches."""
        return self._trajectory(leaf, set(), after)

    def _trajectory(self, leaf: Turn, claimed: set[int], after: Sequence[int] = ()) -> Trajectory:
        built = TrajectoryBuilder()
        own: list[Turn] = []
        for turn in leaf.lineage():
            assert turn.generation is not None, "a turn follows an answer"
            built.observe(turn.observed, turn.source)
            if id(turn) in claimed:
                built.observe(turn.generation.tokens, "assistant")
            else:
                claimed.add(id(turn))
                own.append(turn)
                built.sampled(turn.generation)
        built.observe(after)
        trajectory = built.build(leaf.role, self._reward(leaf.role, own), self._turn_rewards(own))
        _assert_prefixes(trajectory, own)
        return trajectory

    def _reward(self, role: str, own: list[Turn]) -> float | None:
        """Return the last reward set for one of these turns, or else the reward of the role."""
        if not self.rewards:
            return self.role_rewards.get(role)
        requests = {turn.request_id for turn in own}
        given = [value for request_id, value in self.rewards.items() if request_id in requests]
        return given[-1] if given else self.role_rewards.get(role)

    def _turn_rewards(self, own: list[Turn]) -> list[float]:
        """Return one reward per contiguous run of sampled tokens, or an empty list if no turn has a reward."""
        if not self.turn_rewards or not any(turn.request_id in self.turn_rewards for turn in own):
            return []
        return [sum(self.turn_rewards.get(turn.request_id, 0.0) for turn in run) for run in _runs(own)]


def _runs(own: list[Turn]) -> Iterator[list[Turn]]:
    """Group turns into contiguous runs of sampled tokens. Turns without tokens are skipped."""
    run: list[Turn] = []
    for turn in own:
        assert turn.generation is not None
        if run and len(turn.observed):
            yield run
            run = []
        if len(turn.generation.tokens):
            run.append(turn)
    if run:
        yield run


def _assert_prefixes(trajectory: Trajectory, own: list[Turn]) -> None:
    """Check that every turn trained on here follows exactly the prompt that was sent for it."""
    check, done = 0, 0
    for turn in own:
        check = crc32(trajectory.tokens[done : turn.prompt_length].tobytes(), check)
        done = turn.prompt_length
        if check != turn.prompt_check:
            problem = f"request {turn.request_id} would be trained under a prefix it was not sampled from"
            raise ComponentFailed("rollout", problem)
