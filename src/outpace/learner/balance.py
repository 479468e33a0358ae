from collections.abc import Sequence

from outpace.types import Row


def share_rows(rows: Sequence[Row], ranks: int, tokens_per_pass: int) -> list[list[int]]:
    return [list(range(rank, len(rows), ranks)) for rank in range(ranks)]
