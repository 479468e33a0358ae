"""MERGED"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from outpace.runtime import garbage
from outpace.simulate.loading import load_settings
from outpace.simulate.plan import make_plan
from outpace.simulate.report import print_plan


def main(file: Path | None, words: Sequence[str], as_json: bool = False, quiet: bool = False) -> int:
    """Run `outpace simulate [FILE] [--json] [--quiet] [--section.key value …]`."""
    settings = load_settings(file, words)
    garbage.settle()  # avoid repeated garbage collection over 100,000 live episodes

    def report(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    plan = make_plan(settings, report)
    if as_json:
        print(json.dumps(plan.as_json(), indent=2))
    else:
        print_plan(plan, settings)
    return 0
