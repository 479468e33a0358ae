from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.runtime import wire
from outpace.types import Generation, GroupRecord, JournalLocation, Row, Task


def generation(length: int) -> Generation:
    return Generation(
        np.arange(length, dtype=np.int32),
        np.linspace(-1, 0, length, dtype=np.float32),
        np.zeros(length, dtype=np.int32),
        "stop",
    )


@given(st.integers(0, 50))
def test_arrays_come_back_equal_and_of_the_same_dtype(length: int) -> None:
    sent = generation(length)
    received: Generation = wire.decode(wire.encode(sent), Generation)
    assert received.tokens.dtype == np.int32
    np.testing.assert_array_equal(received.tokens, sent.tokens)
    np.testing.assert_array_equal(received.logprobs, sent.logprobs)
    assert received.stop == "stop"


def test_a_nested_record_round_trips() -> None:
    g = generation(3)
    row = Row(g.tokens, np.ones(3, dtype=np.bool_), g.logprobs, g.versions, g.logprobs)
    received: GroupRecord = wire.decode(wire.encode(GroupRecord(7, "t", 0, 2, [row], [1.0])), GroupRecord)
    assert received.group == 7
    np.testing.assert_array_equal(received.rows[0].mask, row.mask)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_a_typed_error_or_decode_to_the_type(data: bytes) -> None:
    try:
        decoded: JournalLocation = wire.decode(data, JournalLocation)
    except wire.WireError:
        return
    assert isinstance(decoded, JournalLocation)


def test_a_pickle_is_refused() -> None:
    import pickle

    with pytest.raises(wire.WireError):
        wire.decode(pickle.dumps({"id": "x"}), Task)


def test_an_array_of_objects_is_refused_when_encoding() -> None:
    with pytest.raises(NotImplementedError):
        wire.encode(np.array([object()]))


def test_an_unsupported_array_dtype_is_refused_when_decoding() -> None:
    body = wire.encode(generation(2)).replace(b"\xa5int32", b"\xa5int16", 1)
    with pytest.raises(wire.WireError):
        wire.decode(body, Generation)
