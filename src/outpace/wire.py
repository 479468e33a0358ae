"""What crosses a process boundary: msgpack frames of typed structs, and nothing else.

A frame is a 4-byte little-endian length and a msgpack body. Arrays travel as (dtype, bytes), one-dimensional,
in a small set of dtypes. Decoding checks types and never runs code: a malformed frame raises `WireError`.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import msgspec
import numpy as np

from outpace.errors import OutpaceError

T = TypeVar("T")

MAX_FRAME = 1 << 30
"""Longer frames are refused before anything is allocated for them."""

HEADER = struct.Struct("<I")

_ARRAY_DTYPES = ("int32", "int64", "float32", "float64", "bool", "uint8")
_NAMES = {np.dtype(name): name for name in _ARRAY_DTYPES}


class WireError(OutpaceError):
    """Bytes that are not a frame of the expected type."""


def _encode_extension(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        name = _NAMES.get(value.dtype)  # a look-up: `dtype.name` is put together anew for everyone who asks
        if name is None or value.ndim != 1:
            raise NotImplementedError(
                f"arrays on the wire are 1-d of {_ARRAY_DTYPES}, not {value.dtype.name}[{value.ndim}d]"
            )
        return (name, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} does not travel between processes")


def _decode_extension(expected: type, value: Any) -> Any:
    if expected is np.ndarray or getattr(expected, "__origin__", None) is np.ndarray:
        name, raw = value
        if name not in _ARRAY_DTYPES:
            raise ValueError(f"array of dtype {name!r}")
        return np.frombuffer(raw, dtype=name)
    raise NotImplementedError(f"cannot decode {expected}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_extension)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T] | Any) -> T:
    """Decode `data` as `kind`; anything else is a `WireError`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_extension)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise WireError(f"not a {getattr(kind, '__name__', kind)}: {error}") from None


def frame(body: bytes) -> bytes:
    if len(body) > MAX_FRAME:
        raise WireError(f"a frame of {len(body)} bytes is longer than {MAX_FRAME}")
    return HEADER.pack(len(body)) + body
