"""The benchmark itself, on loads too small to time."""

from __future__ import annotations

import pytest

from outpace.bench import engine
from outpace.bench.engine import Load


def test_the_benchmark_checks_correctness_and_reports_both_sides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(policy: object, seed: int) -> Load:
        return Load("small", engine._prompts(policy, 4, seed), [3, 3, 3, 6])  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "_equal_load", small)
    monkeypatch.setattr(engine, "_long_tailed_load", small)
    result = engine.run(threads=1, repeats=1)
    assert [row["tokens"] for row in result["loads"]] == [15, 15]
    assert all(row["engine_tokens_per_s"] > 0 and row["generate_tokens_per_s"] > 0 for row in result["loads"])
    assert result["correctness"]["greedy_wrong"] == 0
    assert result["correctness"]["logprob_error"] < 1e-4
    engine.print_table(result)
    assert "greedy: 64 of 64 outputs equal" in " ".join(capsys.readouterr().out.split())
