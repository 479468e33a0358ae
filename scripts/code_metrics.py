"""How the code reads, in numbers: `python scripts/code_metrics.py [--list]`, in the repository root.

Prints one table: size of the library, class names defined twice, words and names that the code should not use. With
`--list`, also where each of them is. Names are taken from definitions on the syntax tree, words from whole files.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path("src/outpace")
ROOT_MODULES = {"__init__", "trainer", "cli", "types", "protocols", "errors"}
"""The public face and the types of data: what the root may hold."""

WORDS = ("whoever", "somebody", "nobody", "anybody", "hearsay", "held against", "gives way")

MODULES = {
    "making", "caretaker", "staff", "enrolment", "roster", "courier", "survivors", "verdicts", "account", "door",
    "desk", "gate", "shelf", "watching", "running", "sending", "lane", "lanes", "asking", "speaking", "dialect",
    "thread", "dialogue", "stage", "actor", "kinds", "closing", "credit", "servant", "household", "family",
    "lifeline", "guardian", "turnstile", "together", "scratch", "giving_way", "dependent", "methods", "rules",
    "aliases", "closed", "totals", "objective", "scoring", "core",
}  # fmt: skip
"""Module names that do not say what is in the module. A `core` is allowed once."""

IDENTIFIERS = {
    "caretaker", "enrolment", "roster", "courier", "survivors", "desk", "shelf", "lane", "lanes", "dialect",
    "servant", "household", "lifeline", "turnstile", "surrogate", "stamp", "lockstep", "mourning", "undertaker",
    "seat", "wish", "peek", "peeks", "giving",
}  # fmt: skip
"""Words that no class, function, method or parameter name should contain."""

WHOLE_NAMES = {"hear", "tell", "take_a_seat", "settle", "Flight"}
"""Names that say nothing as a whole, though their words are fine in others (InFlightRequest)."""

EXEMPT = ("config",)
"""Packages whose names are settings, which users have in their files."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="also print where each word and name is")
    parser.add_argument("--packages", action="store_true", help="also print the lines of each package")
    options = parser.parse_args()
    files = sorted(LIBRARY.rglob("*.py"))
    if not files:
        sys.exit(f"{LIBRARY}: no such directory; run this in the repository root")
    lines = [len(path.read_text().splitlines()) for path in files]
    found = {
        "class names defined twice": classes_defined_twice(files),
        "modules at the root besides the public ones": [
            path for path in map(str, sorted(LIBRARY.glob("*.py"))) if Path(path).stem not in ROOT_MODULES
        ],
        "functions of more than 70 lines": list(long_functions(files)),
        "files of more than 500 lines": [str(path) for path, count in zip(files, lines, strict=True) if count > 500],
        "replaced names": list(replaced_names(files)),
        f"uses of {', '.join(WORDS)}": list(words_used()),
    }
    rows = [
        ("library files", len(files)),
        ("library lines", sum(lines)),
        ("median lines of a file", round(statistics.median(lines))),
        ("files of 60 lines or fewer", sum(count <= 60 for count in lines)),
        *((name, len(places)) for name, places in found.items()),
    ]
    print("| measure | value |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value:,} |")
    if options.packages:
        print_packages(files)
    if options.list:
        for name, places in found.items():
            print(f"\n{name}:", *places, sep="\n  ")


def print_packages(files: list[Path]) -> None:
    """Print the lines of each package: all of them, code, docstrings, imports. The rest is blank or a comment."""
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in files:
        parts = path.relative_to(LIBRARY).parts
        sizes[parts[0] if len(parts) > 1 else "root"] += line_kinds(path.read_text())
    print("\n| package | lines | code | docstrings | imports |\n|---|---|---|---|---|")
    for name, size in [*sorted(sizes.items()), ("together", sum(sizes.values(), Counter()))]:
        print(f"| {name} | {size['lines']:,} | {size['code']:,} | {size['docstrings']:,} | {size['imports']:,} |")


def line_kinds(source: str) -> Counter[str]:
    lines = source.splitlines()
    kinds = Counter(lines=len(lines), other=sum(not line.strip() or line.strip().startswith("#") for line in lines))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                kinds["docstrings"] += (node.end_lineno or 0) - node.lineno + 1
                kinds["other"] -= sum(not line.strip() for line in lines[node.lineno - 1 : node.end_lineno])
            case ast.Import() | ast.ImportFrom():
                kinds["imports"] += (node.end_lineno or 0) - node.lineno + 1
    kinds["code"] = 2 * kinds["lines"] - kinds.total()
    return kinds


def classes_defined_twice(files: list[Path]) -> list[str]:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in files:
        if "compat" in path.parts:  # the names of other libraries
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def long_functions(files: list[Path]) -> Iterator[str]:
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 70:
                    yield f"{path}:{node.lineno}: {node.name}, {length} lines"


def replaced_names(files: list[Path]) -> Iterator[str]:
    modules = Counter(path.stem for path in files)
    for path in files:
        if path.relative_to(LIBRARY).parts[0] in EXEMPT:
            continue
        stem = path.stem.strip("_")
        if stem in MODULES and (stem != "core" or modules[stem] > 1):
            yield f"{path}: module {stem}"
        for node in ast.walk(ast.parse(path.read_text())):
            for kind, name in definitions(node):
                words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
                if IDENTIFIERS & set(words) or name.strip("_") in WHOLE_NAMES:
                    yield f"{path}:{getattr(node, 'lineno', 0)}: {kind} {name}"


def definitions(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.ClassDef(name=name):
            yield "class", name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield "function", name
        case ast.arg(arg=name):
            yield "parameter", name


def words_used() -> Iterator[str]:
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    places = [
        path
        for folder, suffix in (("src", "py"), ("tests", "py"), ("docs", "md"))
        for path in Path(folder).rglob(f"*.{suffix}")
    ]
    for path in sorted([*places, Path("README.md"), Path("CONTRIBUTING.md")]):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for word in pattern.findall(line):
                yield f"{path}:{number}: {word}"


if __name__ == "__main__":
    main()
