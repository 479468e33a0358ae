"""The controller benchmark measures a whole run of the real driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import controller
from outpace.errors import BadInput
from outpace.monitoring.line_file import read_lines


async def test_a_run_with_idle_components_trains_every_group_and_records_every_step(tmp_path: Path) -> None:
    cost = await controller.measure(
        tmp_path / "run", controller.scheduler_settings(64, group_size=4, groups_per_step=8)
    )
    assert (cost.groups, cost.episodes, cost.events) == (64, 256, 512)
    assert cost.us_per_event > 0
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(1, 9))


def test_an_unknown_option_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match=r"^--nonsense: .*--groups\b.*--group-size\b"):
        controller.main(["--nonsense"])
