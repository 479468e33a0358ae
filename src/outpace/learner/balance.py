"""Distribute the rows of a chunk over the ranks so that all ranks compute for about the same time.

    rows ─▶ units: rows that share their prompt ─▶ longest unit first, onto the least loaded rank ─▶ splits

The work of a unit is counted in tokens of linear layers: its unique tokens, because `packing` computes a shared prompt
once, plus attention. Training a linear layer takes 6 FLOP per parameter and token, attention 12 x layers x width per
pair of a token and one that it attends to. A decoder of width D has about 12 D² parameters per layer, so a pair costs
as much as 12 D / (6 x 12 D²) = 1 / (6 D) tokens. Work is an integer, in pairs: a token is 6 D of them.

Invariants
- The result depends on the arguments alone, so every rank computes the same shares without communication.
- Every row with a trained token has exactly one rank, other rows have none.
- Rows of a unit stay on one rank unless
  - together they exceed a pass: then every pass computes the prompt anyway, and the unit is cut into passes first;
  - a rank would have no rows; or
  - the busiest rank would have more than `TOLERANCE` times the mean work, and splits lower that by `MIN_GAIN`.
- With at least as many trained rows as ranks, every rank has one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from outpace.learner.packing import input_length
from outpace.types import Row

HIDDEN_SIZE = 2048
"""Width of a decoder of about a billion parameters."""

TOLERANCE = 1.05
"""Units are split only if the busiest rank has more work than this, relative to the mean."""

MIN_GAIN = 0.01
"""Fraction by which splits must lower the work of the busiest rank. Each split computes a prompt once more."""

PATIENCE = 8
"""Stop after this many consecutive splits without such a gain."""


def share_rows(
    rows: Sequence[Row], ranks: int, tokens_per_pass: int, hidden_size: int = HIDDEN_SIZE
) -> list[list[int]]:
    """Return for each rank the indices of its rows, ascending. `hidden_size` is the model's width: the smaller it is,
    the more attention counts."""
    units = _units(rows, tokens_per_pass, 6 * hidden_size)
    while len(units) < ranks and (large := _largest(units)):
        units = _with_split(units, large)
    return [sorted(item.index for unit in share for item in unit.items) for share in _balanced(units, ranks)]


def estimated_work(rows: Sequence[Row], tokens_per_pass: int, hidden_size: int = HIDDEN_SIZE) -> float:
    """Return the work of training on these rows on one rank, in tokens of linear layers."""
    return sum(unit.work for unit in _units(rows, tokens_per_pass, 6 * hidden_size)) / (6 * hidden_size)


@dataclass(frozen=True)
class _Item:
    """A row. `work` excludes its prompt."""

    index: int
    tokens: int  # after the prompt
    work: int


@dataclass(frozen=True)
class _Unit:
    """Rows that share a prompt, in order."""

    items: tuple[_Item, ...]
    prompt: int  # tokens
    prompt_work: int

    @cached_property
    def work(self) -> int:
        return self.prompt_work + sum(item.work for item in self.items)

    @property
    def index(self) -> int:
        return self.items[0].index

    def with_items(self, items: Iterable[_Item]) -> _Unit:
        return _Unit(tuple(sorted(items, key=lambda item: item.index)), self.prompt, self.prompt_work)

    def halves(self) -> tuple[_Unit, _Unit]:
        """Split into two units of about equal work. Both include the prompt."""
        first, second = _longest_first(self.items, 2)
        return self.with_items(first), self.with_items(second)


def _units(rows: Sequence[Row], tokens_per_pass: int, token_work: int) -> list[_Unit]:
    """Group the trained rows by prompt, and cut groups that exceed a pass as packing would."""
    groups: dict[bytes, list[_Item]] = {}
    for index, row in enumerate(rows):
        if length := input_length(row):
            prompt = row.mask.tobytes().find(1)
            rest = length - prompt
            work = rest * token_work + rest * prompt + _causal_pairs(rest)
            groups.setdefault(row.tokens[:prompt].tobytes(), []).append(_Item(index, rest, work))
    units = []
    for tokens, items in groups.items():
        prompt = len(tokens) // rows[items[0].index].tokens.itemsize
        whole = _Unit(tuple(items), prompt, prompt * token_work + _causal_pairs(prompt))
        units += [whole.with_items(part) for part in _passes(items, tokens_per_pass - prompt)]
    return units


def _causal_pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _passes(items: Iterable[_Item], limit: int) -> list[list[_Item]]:
    """Cut into runs of at most `limit` tokens or one row."""
    found: list[list[_Item]] = []
    size = 0
    for item in items:
        if not found or size + item.tokens > limit:
            found.append([])
            size = 0
        found[-1].append(item)
        size += item.tokens
    return found


# ---------------------------------------------------------------------------------------------------------- assignment


def _balanced(units: list[_Unit], ranks: int) -> list[list[_Unit]]:
    """Assign the units to ranks. As long as the busiest rank has too much work, split one of its units."""
    best = shares = _longest_first(units, ranks)
    failed = 0
    while failed < PATIENCE and not _is_balanced(best):
        busiest = max(shares, key=_load)
        splittable = [unit for unit in busiest if len(unit.items) > 1]  # longest first
        if not splittable:
            break
        # The largest may exceed any rank's share; the smallest may be what overloads this rank.
        candidates = [_with_split(units, unit) for unit in dict.fromkeys((splittable[0], splittable[-1]))]
        options = [(_longest_first(candidate, ranks), candidate) for candidate in candidates]
        shares, units = min(options, key=lambda option: sorted(map(_load, option[0]), reverse=True))
        if _maximum(shares) < (1 - MIN_GAIN) * _maximum(best):
            best, failed = shares, 0
        else:
            failed += 1
    return best


def _is_balanced(shares: list[list[_Unit]]) -> bool:
    """Whether further splits would gain little. No split lowers the work of a rank below its longest row."""
    mean = sum(map(_load, shares)) / len(shares)
    longest = max(
        (unit.prompt_work + item.work for share in shares for unit in share for item in unit.items), default=0
    )
    return _maximum(shares) <= max(TOLERANCE * mean, longest)


Part = TypeVar("Part", _Item, _Unit)


def _longest_first(parts: Iterable[Part], bins: int) -> list[list[Part]]:
    """Put each part, the longest first, into the bin with the least work. Ties: the bin with the fewest parts."""
    found: list[list[Part]] = [[] for _ in range(bins)]
    loads = [(0, 0, number) for number in range(bins)]  # a heap
    for part in sorted(parts, key=lambda part: (-part.work, part.index)):
        load, count, number = loads[0]
        heapq.heapreplace(loads, (load + part.work, count + 1, number))
        found[number].append(part)
    return found


def _load(share: Iterable[_Unit]) -> int:
    return sum(unit.work for unit in share)


def _maximum(shares: Iterable[Iterable[_Unit]]) -> int:
    return max(map(_load, shares))


def _largest(units: Iterable[_Unit]) -> _Unit | None:
    """Return the unit with the most work that can be split."""
    return max((unit for unit in units if len(unit.items) > 1), key=lambda unit: unit.work, default=None)


def _with_split(units: Iterable[_Unit], split: _Unit) -> list[_Unit]:
    return [part for unit in units for part in (unit.halves() if unit is split else (unit,))]
