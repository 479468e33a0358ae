"""Generate the tables of docs/from_trl.md: fields of TRL's configs, and names in its logs.

python scripts/trl_docs.py            write the tables
python scripts/trl_docs.py --check    exit with 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from_trl.md"


def treatment(name: str) -> str:
    """Return what happens to a field."""
    from outpace.compat.trl.config import AS_IN_TRL
    from outpace.config.other_libraries import EQUIVALENTS

    if name in AS_IN_TRL:
        return "as in TRL"
    found = EQUIVALENTS[name]
    reason = found.note.removesuffix("; leave this out").replace("|", "\\|")
    if not found.settings:
        return f"no effect: {reason}" if found.harmless else f"refused: {reason}"
    return ", ".join(f"`{setting}`" for setting in found.settings) + (f" ({reason})" if reason else "")


def _fields(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows of a table. Fields with the same treatment share a row."""
    rows: dict[str, list[str]] = {}
    for name, default in fields.items():
        rows.setdefault(treatment(name), []).append(f"`{name}` {json.dumps(default)}")
    yield "| field and default | here |\n|---|---|"
    yield from (f"| {', '.join(names)} | {how} |" for how, names in rows.items())


def tables() -> dict[str, str]:
    """Return the tables by their names in the page."""
    from outpace.compat.trl.config import ASYNC_FIELDS, GRPO_FIELDS
    from outpace.monitoring.transformers_callbacks import LOG_NAMES

    own = {name: default for name, default in ASYNC_FIELDS.items() if GRPO_FIELDS.get(name, ...) != default}
    logs = ["| TRL | here |\n|---|---|", *(f"| `{theirs}` | `{ours}` |" for ours, theirs in LOG_NAMES.items())]
    return {
        "GRPOConfig": "\n".join(_fields(GRPO_FIELDS)),
        "AsyncGRPOConfig": "\n".join(_fields(own)),
        "logs": "\n".join(logs),
    }


def generate(page: str) -> str:
    """Return the page with its tables replaced."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: scripts/trl_docs.py -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = before + begin + table + "\n" + end + rest.partition(end)[2]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the tables of docs/from_trl.md.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is out of date; write nothing")
    options = parser.parse_args()
    page = PAGE.read_text()
    if not options.check:
        PAGE.write_text(generate(page))
    elif generate(page) != page:
        sys.exit("docs/from_trl.md is out of date; run `python scripts/trl_docs.py`")


if __name__ == "__main__":
    main()
