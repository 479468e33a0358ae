import json
import random
from pathlib import Path

import pytest
from benchmarks.memory import MemorySample, StepTail, analyze, growth, main, print_table

from outpace.errors import BadInput

MIB = 1 << 20


def samples(per_step: float, noise: float, fds_from: int = 20, fds_to: int = 20) -> list[MemorySample]:
    rng = random.Random(5)
    steps = range(20, 2001, 20)
    return [
        MemorySample(
            step,
            int(500 * MIB + (per_step * step + noise * rng.gauss(0, 1)) * MIB + (100 * MIB if step < 300 else 0)),
            processes=4,
            threads=12 + (step % 7 == 0),
            fds=round(fds_from + (fds_to - fds_from) * step / 2000),
        )
        for step in steps
    ]


def test_noise_around_a_level_is_flat() -> None:
    result = analyze(samples(per_step=0.0, noise=0.5))
    assert result["flat"] is True
    assert result["samples"] == 51


def test_the_warm_up_before_the_window_does_not_count() -> None:
    assert analyze(samples(0.0, 0.1), 1000, 2000)["pss"]["verdict"] == "flat"
    assert analyze(samples(0.0, 0.1), 1000, 2000)["pss"]["level"] == pytest.approx(500 * MIB, rel=0.01)


def test_a_leak_is_reported_as_growing_with_its_slope_inside_the_interval() -> None:
    result = analyze(samples(per_step=0.02, noise=0.5))
    assert result["flat"] is False
    assert result["pss"]["verdict"] == "growing"
    assert result["pss"]["low"] <= 0.02 * MIB <= result["pss"]["high"]
    assert result["pss"]["per_step"] == pytest.approx(0.02 * MIB, rel=0.1)


def test_too_much_noise_gives_no_verdict() -> None:
    result = analyze(samples(per_step=0.0, noise=60.0))
    assert result["pss"]["verdict"] == "unclear"
    assert result["flat"] is False


def test_a_file_descriptor_leak_is_not_flat() -> None:
    result = analyze(samples(0.0, 0.1, fds_from=20, fds_to=60))
    assert result["pss"]["verdict"] == "flat"
    assert result["flat"] is False


def test_memory_that_shrinks_is_flat() -> None:
    assert growth(list(range(50)), [100.0 - step for step in range(50)]).verdict == "flat"


def test_too_few_samples_are_an_error_not_a_verdict() -> None:
    with pytest.raises(ValueError, match=r"\b3\b"):
        growth([1, 2, 3], [1, 1, 1])
    with pytest.raises(ValueError, match=r"\b5000\b.*\b6000\b"):
        analyze(samples(0, 0), 5000, 6000)


def test_the_step_tail_reads_only_whole_lines_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = StepTail(path)
    assert tail.newest() == 0
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert tail.newest() == 2
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert tail.newest() == 3


def test_the_table_can_be_printed_from_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = analyze(samples(0.0, 0.5))
    print_table(json.loads(json.dumps(result)))
    assert "flat" in capsys.readouterr().out


def test_a_run_too_short_for_a_verdict_is_refused_before_it_starts() -> None:
    with pytest.raises(BadInput, match=r"--steps: .*\b50\b"):
        main(["--steps", "50"])
