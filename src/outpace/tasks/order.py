"""The order of tasks: an unbounded sequence of positions 0, 1, 2, … over as many epochs as a run needs.

Invariants
- Every epoch visits every task exactly once.
- The order is a pure function of (count, seed, shuffle, position). Nothing is stored, so a resumed run needs only its
  position, and a source with a billion tasks uses no memory.

The shuffle is a Feistel network over the smallest even number of bits that holds every index, keyed by (seed, epoch).
An index outside the source is encrypted again until it falls inside (cycle walking), which keeps it a permutation.

Repeated visits have separate positions and draws, above those of all first visits (`REROLL`, `REPEATED_DRAWS`).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

ROUNDS = 6

REROLL = 1 << 48
"""`REROLL * n + position` is the position of the n-th re-roll of a visit. No first visit has a position this high."""

REPEATED_DRAWS = 1 << 40
"""`REPEATED_DRAWS + group` is the draw number of a visit that was cancelled before; other visits draw by position."""


def reroll_number(position: int) -> int:
    """Return 0 for a first visit, n for the n-th re-roll of one."""
    return position // REROLL


def first_visit(position: int) -> int:
    """Return the position of the first visit that this one repeats, or its own."""
    return position % REROLL


@dataclass(frozen=True)
class TaskOrder:
    """The unbounded sequence of tasks: `task(position)` returns the epoch and the task index at a position. A re-roll
    has those of the visit that it repeats."""

    count: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("there are no tasks")

    def task(self, position: int) -> tuple[int, int]:
        assert position >= 0
        epoch, offset = divmod(first_visit(position), self.count)
        return epoch, self._shuffled(epoch, offset) if self.shuffle else offset

    def _shuffled(self, epoch: int, offset: int) -> int:
        half_bits = max(1, ((self.count - 1).bit_length() + 1) // 2)
        key = f"{self.seed}/{epoch}".encode()
        index = _feistel(offset, half_bits, key)
        while index >= self.count:
            index = _feistel(index, half_bits, key)
        return index


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    """Apply a keyed permutation of the integers below 4 ** half_bits."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(ROUNDS):
        digest = blake2b(b"%d/%d/%b" % (number, right, key), digest_size=16).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return (left << half_bits) | right
