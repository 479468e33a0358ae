"""The engine benchmark, on loads too small to time."""

from __future__ import annotations

import re
from typing import Any

import pytest

from outpace.commands import bench_engine
from outpace.commands.bench_engine import GenerationLoad


def test_the_benchmark_checks_correctness_and_reports_the_speed_of_engine_and_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(policy: object, seed: int, *_: object, **__: object) -> GenerationLoad:
        return GenerationLoad("small", bench_engine._prompts(policy, 4, seed), [3, 3, 3, 6])  # type: ignore[arg-type]

    monkeypatch.setattr(bench_engine, "_equal_load", small)
    monkeypatch.setattr(bench_engine, "_long_tailed_load", small)
    monkeypatch.setattr(bench_engine, "_groups_load", small)
    result = bench_engine.run(threads=1, repeats=1)
    assert [row["tokens"] for row in result["loads"]] == [15, 15, 15, 15]
    assert all(row["engine_tokens_per_s"] > 0 and row["generate_tokens_per_s"] > 0 for row in result["loads"])
    assert result["correctness"]["greedy_wrong"] == 0
    assert result["correctness"]["logprob_error"] < 1e-4
    bench_engine.print_table(result)
    assert re.search(r"\bgreedy\D+64\D+64\b", capsys.readouterr().out)


def result_of(*, wrong: int = 0, error: float = 1e-6, equal: float = 1.6, long_tailed: float = 2.6) -> dict[str, Any]:
    numbers = {"requests": 64, "tokens": 4096, "engine_tokens_per_s": 2.0, "generate_tokens_per_s": 1.0}
    return {
        "parameters": 1000,
        "threads": 1,
        "repeats": 1,
        "loads": [
            {"load": "equal lengths", "ratio": equal, **numbers},
            {"load": "long-tailed", "ratio": long_tailed, **numbers},
            {"load": "groups", "ratio": 0.1, **numbers},
        ],
        "correctness": {
            "greedy_requests": 64,
            "greedy_equal": 64 - wrong,
            "greedy_ties": 0,
            "greedy_wrong": wrong,
            "logprob_error": error,
        },
    }


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"wrong": 1}, r"\b1 greedy\b"),
        ({"error": 2e-4}, r"logprobs.*\b2\.0e-04\b"),
        ({"error": float("nan")}, r"logprobs.*\bnan\b"),
        ({"equal": 1.49}, r"equal lengths.*\b1\.49\b"),
        ({"long_tailed": 2.49}, r"long-tailed.*\b2\.49\b"),
    ],
)
def test_a_missed_target_is_named_and_fails_the_command(
    numbers: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_engine, "run", lambda *_, **__: result_of(**numbers))
    assert bench_engine.main([]) == 1
    (missed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missed: ")]
    assert re.search(expected, missed)


def test_targets_that_are_just_met_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_engine, "run", lambda *_, **__: result_of(error=1e-4, equal=1.5, long_tailed=2.5))
    assert bench_engine.main([]) == 0
    assert "missed" not in capsys.readouterr().out


def test_every_load_but_groups_has_a_target() -> None:
    policy = bench_engine._small_llama(0)
    loads = [bench_engine._equal_load(policy, 0), bench_engine._long_tailed_load(policy, 0)]
    assert {load.name for load in loads} == set(bench_engine.MIN_RATIO)
