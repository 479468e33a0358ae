"""Run the commands of docs/benchmarks.md again and replace their output, with the date and the machine.

    python scripts/regenerate_benchmarks.py                     every section, except (gpu) without a GPU and (slow)
    python scripts/regenerate_benchmarks.py end-to-end engine   these sections
    python scripts/regenerate_benchmarks.py --list              the sections

A section is what is between two marks, and starts with its commands. Text outside of the marks stays as it is.

    <!-- generated: NAME (gpu, slow) -->
    ```bash
    commands
    ```
    date and machine, and what the commands printed
    <!-- end of NAME -->

Run it from a clean clone after `make test`, on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"

SECTION = re.compile(
    r"<!-- generated: (?P<name>[\w-]+)(?: \((?P<needs>[\w, ]+)\))? -->\n(?P<body>.*?)<!-- end of (?P=name) -->",
    re.DOTALL,
)
COMMANDS = re.compile(r"```bash\n(?P<commands>.*?)```\n", re.DOTALL)


@dataclass(frozen=True)
class Section:
    name: str
    needs: frozenset[str]
    commands: str

    def due(self, has_gpu: bool) -> bool:
        """Return whether the section is regenerated when none is named."""
        return "slow" not in self.needs and (has_gpu or "gpu" not in self.needs)


def sections(page: str) -> Iterator[Section]:
    for found in SECTION.finditer(page):
        commands = COMMANDS.match(found["body"])
        if commands is None:
            sys.exit(f"{found['name']}: the section must start with its commands")
        needs = frozenset(filter(None, (found["needs"] or "").replace(" ", "").split(",")))
        yield Section(found["name"], needs, commands["commands"])


def regenerated(page: str, name: str, output: str, stamp: str) -> str:
    """Return the page with another output of a section."""

    def replace(found: re.Match[str]) -> str:
        commands = COMMANDS.match(found["body"])
        if found["name"] != name or commands is None:
            return found[0]
        first, last = found[0].partition("\n")[0], found[0].rpartition("\n")[2]
        return f"{first}\n{commands[0]}\n{stamp}:\n\n```text\n{output.rstrip()}\n```\n{last}"

    return SECTION.sub(replace, page)


def run(section: Section) -> str:
    """Return what the commands print to standard output. Exit code 1 means that a benchmark missed its limit, and is
    recorded as well."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", section.commands],
        cwd=ROOT, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    print(done.stdout)
    if done.returncode not in (0, 1):
        sys.exit(f"{section.name}: exit code {done.returncode}")
    return done.stdout


def stamp(machine: dict[str, str | int]) -> str:
    hardware = [str(machine["cpu"]), f"{machine['cores']} cores", *filter(None, [str(machine["gpu"])])]
    versions = [f"{name} {version}" for name, version in machine.items() if name not in ("cpu", "cores", "gpu")]
    return ", ".join([f"{date.today():%Y-%m-%d}", *hardware, *versions])


def main() -> None:
    from outpace.hardware.machine import describe_machine

    parser = argparse.ArgumentParser(description="Run the commands of docs/benchmarks.md again.")
    parser.add_argument("names", nargs="*", metavar="SECTION")
    parser.add_argument("--list", action="store_true", help="list the sections")
    options = parser.parse_args()
    known = {section.name: section for section in sections(PAGE.read_text())}
    if options.list:
        for each in known.values():
            print(each.name, *sorted(each.needs))
        return
    if unknown := [name for name in options.names if name not in known]:
        sys.exit(f"{unknown[0]}: no such section; the sections are {', '.join(known)}")
    machine = describe_machine()
    for name in options.names or [each.name for each in known.values() if each.due(bool(machine["gpu"]))]:
        print(f"== {name}", file=sys.stderr)
        output = run(known[name])
        PAGE.write_text(regenerated(PAGE.read_text(), name, output, stamp(machine)))


if __name__ == "__main__":
    main()
