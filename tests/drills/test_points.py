"""The table of drilled crash points matches the crash points in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import outpace
from drills.points import AGENT_POINTS, POINTS, TESTED_ELSEWHERE, WHILE_RESUMING, Point

SOURCE = Path(outpace.__file__).parent


def crash_points() -> set[str]:
    """Return every label in the source as a regular expression; a part computed at run time matches any word."""
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
            raise AssertionError(f"cannot resolve the crash point label {ast.unparse(node)}")


def all_points() -> list[Point]:
    return [*POINTS, *AGENT_POINTS, *(point for _, *deaths in WHILE_RESUMING for point in deaths)]


def drilled_labels() -> set[str]:
    return {point.label for point in all_points()}


def test_every_crash_point_in_the_code_is_drilled_or_tested_elsewhere() -> None:
    known = drilled_labels() | set(TESTED_ELSEWHERE)
    assert [
        pattern for pattern in sorted(crash_points()) if not any(re.fullmatch(pattern, label) for label in known)
    ] == []


def test_every_drilled_crash_point_exists_in_the_code() -> None:
    existing = crash_points()
    assert [
        label for label in sorted(drilled_labels()) if not any(re.fullmatch(pattern, label) for pattern in existing)
    ] == []


def test_there_are_at_least_sixty_pairs_of_process_and_crash_point() -> None:
    points = all_points()
    assert len({(point.process, point.label) for point in points}) >= 60
    assert {point.process for point in points} == {"controller", "learner", "engine", "worker", "grader", "environment"}
