"""The script that regenerates docs/benchmarks.md, on a small page."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

PAGE = """\
# Page

Written by hand.

<!-- generated: greeting -->
```bash
echo hello
```

old output
<!-- end of greeting -->

More text.

<!-- generated: large (gpu, slow) -->
```bash
echo large
```
<!-- end of large -->
"""


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "regenerate_benchmarks.py"))


def test_a_regenerated_section_has_its_commands_the_machine_and_the_new_output(script: dict[str, Any]) -> None:
    greeting, _ = script["sections"](PAGE)
    page = script["regenerated"](PAGE, "greeting", script["run"](greeting), "2026-01-01, a machine")
    assert "```bash\necho hello\n```\n\n2026-01-01, a machine:\n\n```text\nhello\n```\n<!-- end of greeting -->" in page
    assert "old output" not in page
    assert script["regenerated"](page, "greeting", "hello", "2026-01-01, a machine") == page


def test_everything_outside_of_the_section_stays(script: dict[str, Any]) -> None:
    page = script["regenerated"](PAGE, "greeting", "hello", "today")
    start, end = "<!-- generated: greeting -->", "<!-- end of greeting -->"
    assert page.partition(start)[0] == PAGE.partition(start)[0]
    assert page.partition(end)[2] == PAGE.partition(end)[2]


def test_sections_that_need_a_gpu_or_hours_run_only_with_a_gpu_or_by_name(script: dict[str, Any]) -> None:
    greeting, large = script["sections"](PAGE)
    assert (greeting.due(has_gpu=False), large.due(has_gpu=True)) == (True, False)


def test_the_page_has_sections_with_commands(script: dict[str, Any]) -> None:
    names = [section.name for section in script["sections"]((ROOT / "docs" / "benchmarks.md").read_text())]
    assert {"end-to-end", "end-to-end-gpu", "learner-growth"} <= set(names)
    assert len(names) == len(set(names))
