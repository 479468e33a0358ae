from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.publish import Case, Round, main, missed_targets, print_table
from rich.console import Console

from benchmarks import publish as bench
from outpace.errors import BadInput

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}

ROUNDS = [Round(0.1, 1.0, 2.0, fresh=True), *(Round(0.1, held, 0.3, fresh=False) for held in (0.11, 0.12, 0.9))]
GOOD = Case(parameters=135_000_000, nbytes=540_000_000, threads=2, delta_nbytes=0, rounds=ROUNDS)


def test_the_ratio_is_the_median_of_the_rounds_that_reuse_a_buffer() -> None:
    assert GOOD.ratio == pytest.approx(1.2)
    assert GOOD.summary()["first_ratio"] == pytest.approx(10.0)
    assert GOOD.summary()["rounds"] == 3
    assert missed_targets({"whole": GOOD}) == []


def test_missed_targets_are_named() -> None:
    slow = replace(GOOD, rounds=[replace(each, held_s=0.16) for each in ROUNDS])
    (message,) = missed_targets({"whole": GOOD, "with deltas": slow})
    assert "with deltas" in message
    assert re.search(r"\b1\.60\b.*\b1\.5\b", message)


def test_the_table_shows_publishing_with_and_without_deltas() -> None:
    output = io.StringIO()
    print_table({"whole": GOOD, "with deltas": GOOD}, Console(file=output, width=120))
    assert len(re.findall(r"\b1\.20\D+1\.5\b", output.getvalue())) == 2
    assert re.search(r"\b135\.0M\b.*\b540 MB\b.*\b2 threads\b", output.getvalue())


def test_a_real_learner_is_measured_with_and_without_deltas(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SHAPE", TINY)
    monkeypatch.setattr(bench, "PAUSE_S", 0.0)
    assert main(["--rounds", "3", "--parameters=1M", "--run.threads=1"]) in (0, 1)  # the speed is not tested here
    found = next(json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert found.keys() == {"whole", "with deltas"}
    for case in found.values():
        assert (case["rounds"], case["threads"]) == (3, 1)
        assert case["parameters"] == pytest.approx(1e6, rel=0.1)
        assert case["nbytes"] == 4 * case["parameters"]
        assert all(case[name] > 0 for name in ("copy_s", "held_s", "sealed_s", "first_held_s"))


def test_a_model_too_small_for_the_shape_and_an_unknown_option_are_refused() -> None:
    with pytest.raises(BadInput, match=r"--parameters: .*\b32\b"):
        main(["--parameters", "1"])
    with pytest.raises(BadInput, match=r"--round: .*--rounds\b"):
        main(["--round", "3"])


def test_help_explains_the_parameter_count(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "million" in capsys.readouterr().out
