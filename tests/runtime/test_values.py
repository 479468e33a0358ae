"""Values sent to a child process arrive unchanged, types included, or are refused by name."""

from __future__ import annotations

import threading
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import BadInput
from outpace.runtime import wire
from outpace.runtime.by_value import decode_values, encode_plain, encode_values
from outpace.runtime.wire import encodable_text

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=15,
)
ODD = (
    st.integers()
    | st.tuples(st.integers())
    | st.frozensets(st.text())
    | st.decimals(allow_nan=False)
    | st.just("\ud800")
    | st.dictionaries(st.integers(), st.text(), max_size=3)
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@given(st.dictionaries(st.text(max_size=5), PLAIN, max_size=4))
def test_plain_values_are_encoded_as_msgpack(values: dict[str, Any]) -> None:
    body, by_value = encode_values(values)
    assert not by_value
    assert same(decode_values(body, by_value), values)
    assert wire.decode(body, Any) == values


@given(st.dictionaries(st.text(max_size=5), PLAIN | ODD | st.lists(ODD, max_size=3), max_size=4))
def test_all_values_arrive_with_their_types(values: dict[str, Any]) -> None:
    body, by_value = encode_values(values)
    assert same(decode_values(body, by_value), values)


def test_other_values_survive_beside_one_that_is_not_plain() -> None:
    values = {"none": None, "exact": Decimal("0.1"), "circle": []}
    values["circle"].append(values["circle"])  # type: ignore[union-attr]
    body, by_value = encode_values(values)
    arrived = decode_values(body, by_value)
    assert (arrived["none"], arrived["exact"]) == (None, Decimal("0.1"))
    assert arrived["circle"][0] is arrived["circle"]


def test_a_value_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(BadInput, match=r"^lock: "):
        encode_values({"fine": 1, "lock": threading.Lock()})


@given(PLAIN | ODD)
def test_a_value_that_can_be_encoded_plain_decodes_to_itself(value: Any) -> None:
    body = encode_plain(value)
    if body is not None:
        assert same(wire.decode(body, Any), value)


@given(st.text(st.characters() | st.characters(categories=["Cs"])))
def test_any_text_can_be_made_encodable(text: str) -> None:
    sent = encodable_text(text)
    assert encode_plain(sent) is not None
    assert len(sent) == len(text)
