"""Options of a benchmark, `--name N` or `--name=N`, set apart from settings of the runs it starts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn

from outpace.errors import BadInput
from outpace.references import nearest


class BenchParser(argparse.ArgumentParser):
    """A usage error is one line, as everywhere else."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; `{self.prog} --help` lists the options")


def take_options(words: Sequence[str], defaults: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """The options, defaults filled in, and the words that are not options."""
    if "--help" in words or "-h" in words:
        print("options: " + ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in defaults.items()))
        print("and settings of the runs it starts, as --section.key value")
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
            raise BadInput(f"--{name}: needs a whole number of at least 1, not {value!r}")
        options[name] = int(value)
    return options, others


def _no_such_option(word: str, defaults: Mapping[str, int]) -> str:
    names = [f"--{name.replace('_', '-')}" for name in defaults]
    meant = nearest(word, names)
    hint = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(names)}"
    return f"{word}: no such option; {hint} (settings are written --section.key value)"
