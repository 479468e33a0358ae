"""Benchmark options: split `--name N` and `--name=N` from settings of the benchmark's runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from outpace.errors import BadInput, OutpaceError
from outpace.runtime.references import closest_names


class BenchParser(argparse.ArgumentParser):
    """Reports a usage error as one line, like every other command."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; `{self.prog} --help` lists the options")


def take_options(words: Sequence[str], defaults: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Split `--name N` and `--name=N` options from settings of the benchmark's runs. Missing options get defaults."""
    if "--help" in words or "-h" in words:
        print("options: " + ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in defaults.items()))
        print("also takes settings for its runs, as --section.key value")
        raise SystemExit(0)
    options = dict(defaults)
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if word.startswith("--") and name not in options and "." not in name:
            raise BadInput(_no_such_option(word.partition("=")[0], defaults))
        if not word.startswith("--") or name not in options:
            others.append(word)
            continue
        if not equals:
            value = rest.pop(0) if rest else ""
        if not value.isdecimal() or int(value) < 1:
            raise BadInput(f"--{name}: must be a positive integer, not {value!r}")
        options[name] = int(value)
    return options, others


def _no_such_option(word: str, defaults: Mapping[str, int]) -> str:
    names = [f"--{name.replace('_', '-')}" for name in defaults]
    similar = closest_names(word, names)
    hint = f"did you mean {similar[0]}?" if similar else f"the options are {', '.join(names)}"
    return f"{word}: no such option; {hint} (write settings as --section.key value)"


def run_benchmark(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Entry point of the scripts in `benchmarks/`: report an error of outpace as one line."""
    try:
        sys.exit(main(sys.argv[1:]))
    except OutpaceError as error:
        sys.exit(f"outpace: {error}")
