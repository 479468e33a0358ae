"""The table of places to kill at, against the places there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import outpace
from drills.points import ELSEWHERE, OF_AGENTS, POINTS, WHILE_RESUMING, Point

SOURCE = Path(outpace.__file__).parent


def places() -> set[str]:
    """Every label in the source, as a regular expression: what is made up at run time matches any word."""
    return {label for file in SOURCE.rglob("*.py") for label in labels_in(ast.parse(file.read_text()))}


def labels_in(module: ast.Module) -> Iterator[str]:
    named = {ast.unparse(node.targets[0]): node.value for node in ast.walk(module) if isinstance(node, ast.Assign)}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "diagnostics.crash_point":
            yield from labels_of(node.args[0], named)


def labels_of(node: ast.expr, named: dict[str, ast.expr]) -> Iterator[str]:
    match node:
        case ast.Constant(value=str() as text):
            yield re.escape(text)
        case ast.JoinedStr(values=parts):
            yield "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"\w+" for part in parts)
        case ast.IfExp():
            yield from labels_of(node.body, named)
            yield from labels_of(node.orelse, named)
        case ast.Name() | ast.Attribute():
            yield from labels_of(named[ast.unparse(node)], named)
        case _:
            raise AssertionError(f"what label is {ast.unparse(node)}?")


def every() -> list[Point]:
    return [*POINTS, *OF_AGENTS, *(point for _, *deaths in WHILE_RESUMING for point in deaths)]


def drilled() -> set[str]:
    return {point.label for point in every()}


def test_every_place_in_the_code_is_drilled_or_tested_elsewhere() -> None:
    known = drilled() | set(ELSEWHERE)
    assert [place for place in sorted(places()) if not any(re.fullmatch(place, label) for label in known)] == []


def test_every_drill_has_its_place_in_the_code() -> None:
    there = places()
    assert [label for label in sorted(drilled()) if not any(re.fullmatch(place, label) for place in there)] == []


def test_there_are_at_least_sixty_pairs_of_process_and_place() -> None:
    points = every()
    assert len({(point.part, point.label) for point in points}) >= 60
    assert {point.part for point in points} == {"controller", "learner", "engine", "worker", "grader", "stage"}
