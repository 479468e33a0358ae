"""`outpace simulate [FILE] [--json] [--quiet] [--section.key value …]`."""

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
    settings = load_settings(file, words)
    garbage.settle()  # 100,000 episodes under way would be searched again and again

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    plan = make_plan(settings, say)
    if as_json:
        print(json.dumps(plan.as_json(), indent=2))
    else:
        print_plan(plan, settings)
    return 0
