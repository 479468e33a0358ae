"""Advantages of a batch from given scores, without any learner backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from outpace.algorithms.advantages import compute_gae
from outpace.learner.backend import OLD_LOGP, OLD_VALUES, REFERENCE_LOGP, RETURNS
from outpace.learner.batch_learner import AdvantagePipeline, CollectedGroup
from outpace.types import Floats, GroupRecord, Row
from support import resolved

NONE = np.zeros(0, dtype=np.float32)


@pytest.fixture
def scored(make_rows: Callable[..., list[Row]]) -> Callable[..., CollectedGroup]:
    """Return a function that makes a group of two rows without advantages, with rewards 1 and 0 and these scores."""

    def make(score: Callable[[int], dict[str, Floats]]) -> CollectedGroup:
        rows = [
            msgspec.structs.replace(row, advantages=NONE, episode=number) for number, row in enumerate(make_rows(2))
        ]
        record = GroupRecord(0, "task", 0, 0, rows, [1.0, 0.0])
        return CollectedGroup(record, [score(int(row.mask.sum())) for row in rows], replayed=False)

    return make


def ramp(count: int) -> Floats:
    return np.linspace(0.1, 0.7, count, dtype=np.float32)


def examples(group: CollectedGroup, **settings: Any) -> list[tuple[Floats, dict[str, Floats]]]:
    """Return the advantages of each row's trained tokens, and its extras."""
    pipeline = AdvantagePipeline(resolved({key.replace("__", "."): value for key, value in settings.items()}))
    assert pipeline.needs_scores == bool(group.scores[0])
    (rows,) = pipeline.examples([group])
    return [(example.row.advantages[example.row.mask], example.extras) for example in rows]


def test_gae_follows_from_given_values(scored: Callable[..., CollectedGroup]) -> None:
    group = scored(lambda count: {OLD_LOGP: -ramp(count), OLD_VALUES: ramp(count)})
    chosen = {"advantage__name": "gae", "advantage__normalizer": "none", "advantage__gae_lambda": 0.9}
    found = examples(group, **chosen, advantage__gamma=0.95)
    for (advantages, extras), reward in zip(found, [1.0, 0.0], strict=True):
        values = ramp(len(advantages)).astype(np.float64)
        rewards = np.append(np.zeros(len(values) - 1), reward)
        expected, targets = compute_gae(rewards, values, 0.95, 0.9)
        np.testing.assert_allclose(advantages, expected, rtol=1e-6)
        np.testing.assert_allclose(extras[RETURNS], targets, rtol=1e-6)


def test_kl_in_the_reward_follows_from_given_logprobs(scored: Callable[..., CollectedGroup]) -> None:
    group = scored(lambda count: {OLD_LOGP: -ramp(count), REFERENCE_LOGP: -2 * ramp(count)})
    kl = {"kl__coefficient": 0.5, "kl__place": "reward", "kl__estimator": "k1"}
    found = examples(group, **kl, advantage__name="dr_grpo")
    totals = [reward - 0.5 * float(ramp(len(row)).sum()) for (row, _), reward in zip(found, [1.0, 0.0], strict=True)]
    for (advantages, _), total in zip(found, totals, strict=True):
        np.testing.assert_allclose(advantages, total - sum(totals) / 2, rtol=1e-5)


def test_rows_without_advantages_are_refused_if_scores_cannot_give_them(scored: Callable[..., CollectedGroup]) -> None:
    with pytest.raises(ValueError, match="advantages"):
        examples(scored(lambda count: {}), learner__stream=False)
