"""The grader of reasoning-gym's tasks: the package's own score for each answer, between 0 and 1.

The answer is what stands in the last `<answer>…</answer>`. Without these tags it is the last line that is not empty, or
the whole text where the right answer has several lines.

Some of the package's graders hand the answer to Python's `eval`, directly or through sympy. An answer to one of these
tasks is first parsed, without being run: one that holds anything but lists of constants, or anything but arithmetic,
counts as wrong and is not passed on. Arithmetic can still be made to last for ever, so answers to be evaluated as
formulas are judged in forks (`outpace.rewards.forked`): one that is cut off costs itself and no other of its group. The
grader as a whole runs in a process that can be killed.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from outpace.rewards.forked import judged
from outpace.rewards.text import Completion, last_text
from outpace.tasks.reasoning_gym import make_generator

EVALUATED_AS_LIST = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
EVALUATED_AS_FORMULA = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""The tasks whose graders evaluate the answer, by what it is supposed to be."""

COMPARES_TUPLES = frozenset({"arc_agi", "rearc"})
"""Their graders compare grids with tuples, which a column of JSON types does not have."""

MAX_LENGTH = 10_000
MAX_EXPONENT = 1000
TINY = 1e-9
CPU_LIMIT_S = 5.0
"""For one formula."""
LIST_NODES = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.UnaryOp, ast.USub, ast.UAdd, ast.Name, ast.Load)
FORMULA_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.UnaryOp, ast.USub, ast.UAdd),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow),
)
FUNCTIONS = frozenset(
    (
        *("Abs", "abs", "erf", "exp", "ln", "log", "sqrt", "cot", "csc", "sec"),
        *("cos", "cosh", "sin", "sinh", "tan", "tanh", "acos", "acosh", "asin", "asinh", "atan", "atanh"),
    )
)


def reasoning_gym(
    prompts: Sequence[str],
    completions: Sequence[Completion],
    *,
    answer: Sequence[str | None],
    metadata: Sequence[dict[str, Any]],
    source: Sequence[str],
    options: Sequence[dict[str, Any]],
    **columns: Any,
) -> list[float]:
    """The score that the data set gives to each answer."""
    entries = [
        _Entry(last_text(completion), {"question": question, "answer": right, "metadata": told}, name, _key(chosen))
        for question, completion, right, told, name, chosen in zip(
            prompts, completions, answer, metadata, source, options, strict=True
        )
    ]
    for entry in entries:
        _grader(entry.source, entry.options)  # made here once, and not in every fork
    formulas = [entry for entry in entries if entry.source in EVALUATED_AS_FORMULA]
    slow = iter(judged(_score, formulas, CPU_LIMIT_S))
    scores = [next(slow) if entry.source in EVALUATED_AS_FORMULA else _score(entry) for entry in entries]
    return [score or 0.0 for score in scores]


@dataclass(frozen=True)
class _Entry:
    text: str
    problem: dict[str, Any]
    source: str
    options: str


def _key(options: dict[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


def _score(entry: _Entry) -> float:
    problem = entry.problem
    answer = extracted(entry.text, problem["answer"])
    if not is_harmless(answer, entry.source):
        return 0.0
    if entry.source in COMPARES_TUPLES:
        grids = {key: tuple(map(tuple, problem["metadata"][key])) for key in ("input", "output")}
        problem = {**problem, "metadata": {**problem["metadata"], **grids}}
    try:
        return float(_grader(entry.source, entry.options).score_answer(answer, problem))
    except Exception:  # the boundary to the package: some graders raise on text that they cannot read
        return 0.0


@lru_cache(maxsize=16)
def _grader(source: str, options: str) -> Any:
    return make_generator(source, seed=0, size=1, **json.loads(options))


def extracted(text: str, right: str | None) -> str:
    """The answer in a completion; `right`, the right one, tells whether it may have several lines."""
    from reasoning_gym.utils import extract_answer

    tagged: str | None = extract_answer(text)
    if tagged is not None:
        return tagged
    if right is None or "\n" in right.strip():
        return text.strip()
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def is_harmless(answer: str, source: str) -> bool:
    """Whether nothing but arithmetic or a list can come of it when the grader of that task evaluates the answer."""
    if source not in EVALUATED_AS_LIST | EVALUATED_AS_FORMULA:
        return True
    if len(answer) > MAX_LENGTH:
        return False
    try:
        nodes = list(ast.walk(ast.parse(answer.strip(), mode="eval")))
    except (SyntaxError, ValueError):
        # `eval` will refuse it too, and the list may also be written as plain text. Sympy reads more than Python.
        return source in EVALUATED_AS_LIST
    except (RecursionError, MemoryError):  # too deep to be looked at
        return False
    if source in EVALUATED_AS_LIST:
        return all(isinstance(node, LIST_NODES) and _is_no_variable(node) for node in nodes)
    return all(isinstance(node, FORMULA_NODES) and _is_arithmetic(node) for node in nodes) and _is_low(nodes)


def _is_no_variable(node: ast.AST) -> bool:
    """`eval` would also find the grader's own variables, such as the one with the right answer. Words that answers
    consist of are in capitals, which those are not."""
    return not isinstance(node, ast.Name) or (node.id.isalpha() and node.id.isupper())


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    return True


def _is_low(nodes: list[ast.AST]) -> bool:
    """Whether no power, nor power of powers, is above MAX_EXPONENT: a tower would take longer than anybody waits.

    `nodes` has parents before their children. A degree is that of a polynomial, with every number for a variable."""
    degrees: dict[ast.AST, float] = {}
    for node in reversed(nodes):
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        degrees[node] = max(1.0, sum(degrees[part] for part in parts))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            degrees[node] = degrees[node.left] * _greatest(node.right)
            if degrees[node] > MAX_EXPONENT:
                return False
    return True


def _greatest(exponent: ast.AST) -> float:
    """No arithmetic with these numbers gives more; without end where it has a power of its own."""
    parts = list(ast.walk(exponent))
    if any(isinstance(part, ast.Pow) for part in parts):
        return math.inf
    sizes = [
        abs(part.value) for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, int | float)
    ]
    return math.prod(float(min(max(size, 1 / max(size, TINY), 2), 1 / TINY)) for size in sizes)
