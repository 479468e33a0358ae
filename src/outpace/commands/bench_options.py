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
    parser = BenchParser(epilog="Also takes settings for its runs, as --section.key value.", allow_abbrev=False)
    names = {key: f"--{key.replace('_', '-')}" for key in defaults}
    for key, name in names.items():
        spellings = dict.fromkeys((name, f"--{key}"))
        parser.add_argument(*spellings, type=positive, default=defaults[key], metavar=str(defaults[key]))
    options, others = parser.parse_known_args(words)
    for word in others:
        option = word.partition("=")[0]
        if option.startswith("--") and "." not in option:
            close = closest_names(option, names.values())
            hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(names.values())}"
            raise BadInput(f"{option}: no such option; {hint} (write settings as --section.key value)")
    return vars(options), others


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, not {text!r}")
    return int(text)


def run_benchmark(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Entry point of the scripts in `benchmarks/`: report an error of outpace as one line."""
    try:
        sys.exit(main(sys.argv[1:]))
    except OutpaceError as error:
        sys.exit(f"outpace: {error}")
