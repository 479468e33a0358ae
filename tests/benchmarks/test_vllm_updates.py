from __future__ import annotations

import io

import pytest
from benchmarks.vllm_updates import CALLS, Case, Update, missed_targets, parsed, print_table
from rich.console import Console

from outpace.errors import BadInput
from outpace.types import LoadPhases, LoadReport
from support import names


def case(name: str, *copies_s: float) -> Case:
    reports = [
        LoadReport(1, pause_s=copy_s + 0.25, seconds=copy_s + 2, bytes=8, phases=LoadPhases(0.5, 0.125, copy_s, 0.125))
        for copy_s in copies_s
    ]
    updates = [Update.of(report, silence_s=0.4, call_s=1.5, tok_s=800.0) for report in reports]
    return Case(name, 64, updates, tok_s_before=1000.0, tok_s_after=900.0, cores=(0.75, 0.25))


def test_the_table_shows_the_medians_of_the_phases_and_the_longest_pause() -> None:
    output = io.StringIO()
    print_table([case("running", 0.25, 0.5, 4.0)], Console(file=output, width=200))
    (line,) = [line for line in output.getvalue().splitlines() if "running" in line]
    assert names(line, "64 0.500 0.125 0.750 2.500 0.400 1.500 4.250 1,000 800 900 0.75 0.25")


def test_a_median_pause_above_the_limit_is_missed_unless_it_was_made_of_separate_calls() -> None:
    cases = [case("alone", 0.1), case("running", 0.1, 3.0, 4.0), case(f"running{CALLS}", 9.0)]
    (message,) = missed_targets(cases)
    assert names(message, "running 3.25 1")


def test_an_unknown_option_value_is_rejected() -> None:
    with pytest.raises(BadInput, match="--requests"):
        parsed(["--requests", "many"])
