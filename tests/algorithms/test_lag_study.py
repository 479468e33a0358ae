"""Staleness study: the plan varies only the lag, and the document shows the measured results."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

from outpace.config.load import load_config
from outpace.config.validation import resolve

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lag_study", ROOT / "scripts" / "lag_study.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lag_study"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def test_the_study_fixes_the_lag_exactly_and_varies_nothing_else(study: ModuleType) -> None:
    for run in study.plan():
        config = resolve(load_config(None, run.arguments))
        assert config.run.deterministic
        assert (config.pacing.max_lag, config.run.seed) == (run.lag, run.seed)
        assert config.learner.lr == (study.LR if run.setting == "usual" else study.STRESS_LR)
        if run.method == study.DEFAULT:
            assert config.policy_loss.name == "truncated_is"
            assert config.correction.masks == ["opsm"]


def test_the_study_covers_five_seeds_at_every_lag_and_every_correction_at_large_lags(study: ModuleType) -> None:
    runs = set(study.plan())
    for lag in (0, 1, 2, 4, 8):
        for method in ("none", "default"):
            assert sum((run.setting, run.method, run.lag) == ("usual", method, lag) for run in runs) == 5
    for method in study.OTHERS:
        assert {run.lag for run in runs if (run.setting, run.method) == ("usual", method)} == {4, 8}
    known = study.finished(ROOT / "docs" / "data" / "lag_study.jsonl")
    assert runs <= set(known)


def test_the_document_shows_the_tables_computed_from_the_data(study: ModuleType) -> None:
    known = study.finished(ROOT / "docs" / "data" / "lag_study.jsonl")
    document = (ROOT / "docs" / "algorithms.md").read_text()
    for caption, table in study.tables(known).items():
        assert caption in document
        assert table in document, caption


def test_the_default_measured_as_good_at_lag_4_as_at_lag_0(study: ModuleType) -> None:
    known = study.finished(ROOT / "docs" / "data" / "lag_study.jsonl")
    fresh, stale = (statistics.fmean(study.accuracies(known, "usual", "default", lag)) for lag in (0, 4))
    assert stale >= fresh - 0.03
    uncorrected = statistics.fmean(study.accuracies(known, "usual", "none", 4))
    assert uncorrected < fresh - 0.03, "without a correction, lag hurts"
