"""The reward `reasoning_gym`: reasoning-gym's own score for each answer, between 0 and 1.

The answer is the content of the last `<answer>…</answer>`. Without these tags it is the last non-empty line, or the
whole text if the correct answer has several lines.

Security: some of the package's scorers pass the answer to Python's `eval`, directly or through sympy. Answers to those
tasks are parsed first, without running them; an answer that contains anything but lists of constants, or anything but
arithmetic, scores 0.0 and is not evaluated. Arithmetic can still run forever, so formulas are scored in forks
(`outpace.rewards.builtin.score_in_forks`), where a timeout affects one answer and not the group. The whole function
runs in a grader process that can be killed.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from outpace.rewards.builtin import Completion, last_text, score_in_forks
from outpace.tasks.reasoning_gym import make_generator

EVALUATED_AS_LIST = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
EVALUATED_AS_FORMULA = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorers evaluate the answer, by the expected kind of value."""

COMPARES_TUPLES = frozenset({"arc_agi", "rearc"})
"""Scorers that compare grids with tuples; JSON columns hold lists."""

MAX_LENGTH = 10_000
MAX_EXPONENT = 1000
TINY = 1e-9
CPU_LIMIT_S = 5.0
"""CPU time per formula."""
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
    """Return the dataset's score for each answer."""
    entries = [
        _Entry(last_text(completion), {"question": question, "answer": right, "metadata": data}, name, _as_key(chosen))
        for question, completion, right, data, name, chosen in zip(
            prompts, completions, answer, metadata, source, options, strict=True
        )
    ]
    for entry in entries:
        _dataset(entry.source, entry.options)  # build once here, not in every fork
    formulas = [entry for entry in entries if entry.source in EVALUATED_AS_FORMULA]
    forked = iter(score_in_forks(_score, formulas, CPU_LIMIT_S))
    scores = [next(forked) if entry.source in EVALUATED_AS_FORMULA else _score(entry) for entry in entries]
    return [score or 0.0 for score in scores]


@dataclass(frozen=True)
class _Entry:
    text: str
    problem: dict[str, Any]
    source: str
    options: str


def _as_key(options: dict[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


def _score(entry: _Entry) -> float:
    problem = entry.problem
    answer = parse_answer(entry.text, problem["answer"])
    if not is_safe_to_evaluate(answer, entry.source):
        return 0.0
    if entry.source in COMPARES_TUPLES:
        grids = {key: tuple(map(tuple, problem["metadata"][key])) for key in ("input", "output")}
        problem = {**problem, "metadata": {**problem["metadata"], **grids}}
    try:
        return float(_dataset(entry.source, entry.options).score_answer(answer, problem))
    except Exception:  # boundary to the package: some scorers raise on text they cannot parse
        return 0.0


@lru_cache(maxsize=16)
def _dataset(source: str, options: str) -> Any:
    return make_generator(source, seed=0, size=1, **json.loads(options))


def parse_answer(text: str, right: str | None) -> str:
    """Extract the answer from a completion; it may have several lines only if the correct answer `right` does."""
    from reasoning_gym.utils import extract_answer

    tagged: str | None = extract_answer(text)
    if tagged is not None:
        return tagged
    if right is None or "\n" in right.strip():
        return text.strip()
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def is_safe_to_evaluate(answer: str, source: str) -> bool:
    """Return whether evaluating the answer in that task's scorer can only do arithmetic or build a list."""
    if source not in EVALUATED_AS_LIST | EVALUATED_AS_FORMULA:
        return True
    if len(answer) > MAX_LENGTH:
        return False
    try:
        nodes = list(ast.walk(ast.parse(answer.strip(), mode="eval")))
    except (SyntaxError, ValueError):
        # `eval` rejects it too, and a list may be plain text. Sympy accepts more than Python, so formulas are refused.
        return source in EVALUATED_AS_LIST
    except (RecursionError, MemoryError):  # nested too deeply to check
        return False
    if source in EVALUATED_AS_LIST:
        return all(isinstance(node, LIST_NODES) and _is_allowed_name(node) for node in nodes)
    return all(isinstance(node, FORMULA_NODES) and _is_arithmetic(node) for node in nodes) and _powers_bounded(nodes)


def _is_allowed_name(node: ast.AST) -> bool:
    """Allow only all-caps names, as in valid answers: `eval` would also resolve the scorer's own lowercase variables,
    including the one that holds the correct answer."""
    return not isinstance(node, ast.Name) or (node.id.isalpha() and node.id.isupper())


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    return True


def _powers_bounded(nodes: list[ast.AST]) -> bool:
    """Return whether no power, including nested powers, exceeds MAX_EXPONENT: a power tower would run forever.

    `nodes` lists parents before children. The degree is that of the polynomial in which every number is a variable."""
    degrees: dict[ast.AST, float] = {}
    for node in reversed(nodes):
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        degrees[node] = max(1.0, sum(degrees[part] for part in parts))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            degrees[node] = degrees[node.left] * _upper_bound(node.right)
            if degrees[node] > MAX_EXPONENT:
                return False
    return True


def _upper_bound(exponent: ast.AST) -> float:
    """Return an upper bound of an exponent's value; infinite if it contains a power."""
    parts = list(ast.walk(exponent))
    if any(isinstance(part, ast.Pow) for part in parts):
        return math.inf
    sizes = [
        abs(part.value) for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, int | float)
    ]
    return math.prod(float(min(max(size, 1 / max(size, TINY), 2), 1 / TINY)) for size in sizes)
