"""Serialization of arguments for grader processes."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.rewards.functions import pack_arguments, unpack_arguments


def round_trip(arguments: dict[str, list[Any]], count: int) -> dict[str, Any]:
    return unpack_arguments(*pack_arguments(arguments), count)


def shape(value: Any) -> Any:
    """Return the value with all its types, for comparison."""
    if isinstance(value, list | tuple):
        return type(value), [shape(each) for each in value]
    if isinstance(value, dict):
        return [(shape(key), shape(each)) for key, each in value.items()]
    return type(value), repr(value)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | st.text()
foreign = st.fractions() | st.decimals() | st.dates() | st.tuples(st.integers()) | st.complex_numbers()
keys = st.text("ab") | st.integers() | st.booleans()
values = st.recursive(
    scalars | foreign,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_arguments_round_trip_with_their_types(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    column = st.lists(values, min_size=count, max_size=count) | values.map(lambda value: [value] * count)
    arguments = data.draw(st.dictionaries(st.sampled_from("abc"), column))
    got = round_trip(arguments, count)
    assert {name: shape(got[name]) for name in arguments} == {name: shape(sent) for name, sent in arguments.items()}


@pytest.mark.parametrize("value", ["x" * 10_000, ("x" * 10_000,)])
def test_a_value_shared_by_all_samples_is_sent_once(value: Any) -> None:
    arguments = {"prompts": [value] * 100, "completions": [str(number) for number in range(100)]}
    assert len(pack_arguments(arguments)[0]) < 20_000
    got = round_trip(arguments, 100)
    assert got == arguments
    assert got["prompts"][0] is got["prompts"][99]


@pytest.mark.parametrize("value", ["text", 1, 0.5, None, True, b"x", [1, ["a"]], {"role": "user", "content": ""}])
def test_plain_data_is_sent_as_msgpack(value: Any) -> None:
    assert not pack_arguments({"column": [value, value]})[1]


@pytest.mark.parametrize("value", [(1, 2), Decimal(1), Fraction(1), 2**64, "\ud800", {1: 2}, {"a": {3}}])
def test_values_that_msgpack_rejects_or_changes_are_pickled(value: Any) -> None:
    assert pack_arguments({"plain": ["x"], "column": [value]})[1]


def test_a_self_referencing_list_round_trips() -> None:
    circle: list[Any] = []
    circle.append(circle)
    again = round_trip({"column": [circle]}, 1)["column"][0]
    assert again[0] is again
