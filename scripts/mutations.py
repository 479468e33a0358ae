"""Mutation testing: change one place of the code at a time and see whether a quick test fails.

    python scripts/mutations.py                                    twenty mutations, always the same
    python scripts/mutations.py --seed 7 --count 5 --only ledger   others

A mutation changes a comparison, a constant or an operator, negates a condition or removes a statement. It is applied in
a temporary copy of the repository, where the tests of that file run until the first failure:

    caught      a test fails, or takes longer than a minute; the table names it
    survived    all tests pass: a missing test, or a change without effect
    error       the tests could not run: a module no longer imports, or the test process crashed
    time limit  the tests take several times as long as without the mutation
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SEED = 20
COUNT = 20
SLOWER = (ROOT / "Makefile").read_text().partition("\nSLOWER := ")[2].partition("\n")[0]
"""Markers of the tests that `make test` leaves out."""
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "runs")

TARGETS = {
    "src/outpace/controller/scheduler.py": [
        "tests/controller/test_scheduler.py",
        "tests/controller",
        "tests/simulator",
    ],
    "src/outpace/controller/ledger.py": ["tests/controller/test_ledger.py", "tests/controller", "tests/simulator"],
    "src/outpace/learner/loss.py": ["tests/learner/test_loss.py", "tests/learner"],
    "src/outpace/learner/packing.py": [
        "tests/learner/test_packing.py",
        "tests/learner/test_forward.py",
        "tests/learner",
    ],
    "src/outpace/learner/batch_learner.py": ["tests/learner/test_batch_learner.py", "tests/learner"],
    "src/outpace/engines/fleet.py": ["tests/engines/test_fleet.py", "tests/engines/test_failover.py"],
    "src/outpace/rollouts/transcript.py": ["tests/rollouts/test_chat.py", "tests/rollouts"],
}
"""Files to mutate, and the tests that should notice, the most likely ones first."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


class Mutation(NamedTuple):
    file: str
    line: int
    start: int  # offsets in the file
    end: int
    old: str
    new: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]

    def describe(self) -> str:
        change = f"remove `{self.old}`" if self.new == "pass" else f"`{self.old}` -> `{self.new}`"
        return " ".join(change.split())


# ------------------------------------------------------------------------------------------------------------ mutations


def mutations_of(file: str, source: str) -> list[Mutation]:
    """Return every mutation of a file, in order."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    encoded = source.encode()

    def offset(line: int, column: int) -> int:
        return len(encoded[: starts[line - 1] + column].decode())

    found = []
    for node, new in _changes(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        found.append(Mutation(file, node.lineno, start, end, source[start:end], new))
    return sorted(set(found))


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for node in _computing(tree):
        if isinstance(node, ast.stmt) and _is_removable(node):
            yield node, "pass"
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        if isinstance(node, ast.expr) and (changed := _changed(node)) is not None:
            yield node, f"({ast.unparse(changed)})"


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the tree without annotations, docstrings, error messages and format strings."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "msg"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.JoinedStr | ast.Import):
                yield from _computing(child)


def _is_removable(node: ast.stmt) -> bool:
    """Whether the statement has an effect and the code is still valid without it."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Delete)


def _changed(node: ast.expr) -> ast.expr | None:
    """Return a changed copy of an expression; None if it is not of a kind that is mutated."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            changed.ops = [COMPARISONS[type(op)]()]
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            changed.op = OPERATORS[type(op)]()
        case ast.BoolOp(op=op):
            changed.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.Constant(value=bool(value)):
            changed.value = not value
        case ast.Constant(value=int(value) | float(value)):
            changed.value = value + 1
        case _:
            return None
    return changed


def draw(seed: int, count: int, only: str = "") -> list[Mutation]:
    """Draw different mutations, in turn from each target."""
    chance = random.Random(seed)
    piles = []
    for file in TARGETS:
        if only in file:
            pile = mutations_of(file, (ROOT / file).read_text())
            chance.shuffle(pile)
            piles.append(pile)
    drawn: list[Mutation] = []
    while len(drawn) < count and any(piles):
        drawn += [pile.pop() for pile in piles if pile][: count - len(drawn)]
    return sorted(drawn)


# ---------------------------------------------------------------------------------------------------------------- tests


def run_tests(home: Path, tests: Sequence[str], limit_s: float) -> str:
    """Run tests until the first failure: "caught by" the test, "survived", "error" or "time limit"."""
    words = ["-x", "-q", "-rfE", "--tb=no", "--timeout=60", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    command = [sys.executable, "-m", "pytest", *words, "-m", f"not ({SLOWER})", *tests]
    environment = {**os.environ, "PYTHONPATH": str(home / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=home, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return "time limit"
        output.seek(0)
        return outcome_of(process.returncode, output.read())


def outcome_of(code: int, output: str) -> str:
    if code == 0:
        return "survived"
    failed = re.search(r"^FAILED \S*?([^/\s]+::\S+)", output, re.MULTILINE)
    return f"caught by {failed[1]}" if code == 1 and failed else "error"


def check_unchanged(home: Path, file: str) -> float:
    """Run the tests of a target without a mutation, which must pass. Returns how long they take."""
    began = time.monotonic()
    outcome = run_tests(home, TARGETS[file], limit_s=3600)
    if outcome != "survived":
        raise SystemExit(f"{file}: its tests fail without a mutation: {outcome}")
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--only", default="", help="mutate only files whose path contains this")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    options = parser.parse_args()
    drawn = draw(options.seed, options.count, options.only)
    if options.list:
        for mutation in drawn:
            print(f"{mutation.file}:{mutation.line}  {mutation.describe()}")
        return
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="outpace-mutations-") as folder:
        home = Path(folder) / "outpace"
        shutil.copytree(ROOT, home, ignore=NOT_COPIED, symlinks=True)
        seconds = {file: check_unchanged(home, file) for file in dict.fromkeys(each.file for each in drawn)}
        for mutation in drawn:
            original = (home / mutation.file).read_text()
            (home / mutation.file).write_text(mutation.apply(original))
            outcome = run_tests(home, TARGETS[mutation.file], limit_s=180 + 4 * seconds[mutation.file])
            (home / mutation.file).write_text(original)
            outcomes.append(outcome.split(" by ")[0])
            place = f"{mutation.file.removeprefix('src/outpace/')}:{mutation.line}"
            print(f"{place:34} {mutation.describe():70} {outcome}", flush=True)
    print(", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("caught", "survived", "error", "time limit")))


if __name__ == "__main__":
    main()
