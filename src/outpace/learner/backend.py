"""What every learner backend is given: rows with advantages, and named values for each trained token. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outpace.types import Floats, Row

OLD_LOGP = "old_logp"
OLD_VALUES = "old_values"
REFERENCE_LOGP = "reference_logp"
"""Names of scores: logprobs, values and reference logprobs of trained tokens under the weights at the start of the
step."""

RETURNS = "returns"
KEEP = "keep"
"""Names of values that come with the scores in training: critic targets, and which tokens the batch masks keep."""

Extras = Mapping[str, Floats]
"""Additional values of a row by name, one per trained token."""


def check_rows(rows: Iterable[Row]) -> None:
    """Raise `ValueError` for a row that cannot be trained. Advantages are computed before a row reaches a backend
    (`outpace.learner.advantage_pipeline`); a backend refuses rows without them."""
    for row in rows:
        count = len(row.tokens)
        if count and not len(row.advantages):
            raise ValueError("a row has no advantages; compute them before training")
        parts = (row.mask, row.logprobs, row.versions, row.advantages)
        if any(len(part) != count for part in parts):
            raise ValueError(f"a row of {count} tokens has arrays of other lengths: {[len(part) for part in parts]}")
        if count and row.mask[0]:
            raise ValueError("the first token of a row cannot be trained: no token predicts it")
