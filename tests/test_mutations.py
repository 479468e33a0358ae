"""scripts/mutations.py: which changes it makes and how it reads the outcome of the tests."""

from __future__ import annotations

import ast
import tomllib

import pytest
from scripts.mutations import COUNT, ROOT, SEED, SLOWER, TARGETS, draw, mutations_of, outcome_of

SOURCE = '''
"""Docstring."""
def pay(amount: int = 3, fee: "1" = None) -> int:
    """Return 1."""
    if amount < 0 and fee:
        raise ValueError("below 0" + str(1 + 1))
    accounts["ü"] = f"{amount + 1}"
    log(amount); return amount - 2
'''


def test_comparisons_constants_operators_conditions_and_statements_are_mutated() -> None:
    assert {(mutation.old, mutation.new) for mutation in mutations_of("pay.py", SOURCE)} == {
        ("3", "(4)"),
        ("amount < 0", "(amount <= 0)"),
        ("0", "(1)"),
        ("amount < 0 and fee", "(amount < 0 or fee)"),
        ("amount < 0 and fee", "(not (amount < 0 and fee))"),
        ('accounts["ü"] = f"{amount + 1}"', "pass"),
        ("log(amount)", "pass"),
        ("amount - 2", "(amount + 2)"),
        ("2", "(3)"),
    }


def test_mutations_are_valid_code_that_differs() -> None:
    for mutation in draw(SEED, COUNT):
        source = (ROOT / mutation.file).read_text()
        assert ast.dump(ast.parse(mutation.apply(source))) != ast.dump(ast.parse(source)), mutation


def test_every_target_and_its_tests_exist() -> None:
    assert [path for file, tests in TARGETS.items() for path in (file, *tests) if not (ROOT / path).exists()] == []


def test_the_quick_tests_are_those_without_any_marker_of_the_project() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = {marker.partition(":")[0] for marker in settings["tool"]["pytest"]["ini_options"]["markers"]}
    assert set(SLOWER.split(" or ")) == declared


def test_the_same_seed_draws_the_same_mutations_from_every_target() -> None:
    drawn = draw(SEED, COUNT)
    assert drawn == draw(SEED, COUNT) != draw(SEED + 1, COUNT)
    assert len(set(drawn)) == COUNT
    assert {mutation.file for mutation in drawn} == set(TARGETS)


@pytest.mark.parametrize(
    ("code", "output", "outcome"),
    [
        (0, "3 passed", "survived"),
        (1, "FAILED tests/a/test_b.py::test_c[1] - assert 1", "caught by test_b.py::test_c[1]"),
        (1, "ERROR tests/a/test_b.py::test_c - ImportError", "error"),
        (2, "ERROR tests/a/test_b.py", "error"),
        (-11, "Segmentation fault", "error"),
    ],
)
def test_only_a_failed_test_counts_as_caught(code: int, output: str, outcome: str) -> None:
    assert outcome_of(code, output) == outcome
