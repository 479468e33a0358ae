"""Wire format between processes: msgpack frames of typed structs.

A frame is a 4-byte little-endian length and a msgpack body. Arrays are encoded as (dtype, bytes); they must be
one-dimensional and of one of a few dtypes. Decoding checks types and never runs code: a malformed frame raises
`WireError`.
"""

from __future__ import annotations

import base64
import struct
from typing import Any, TypeVar

import msgspec
import numpy as np

from outpace.errors import OutpaceError

T = TypeVar("T")

MAX_FRAME = 1 << 30
"""Maximum bytes of a frame body. Longer frames are rejected before memory is allocated for them."""

HEADER = struct.Struct("<I")

_ARRAY_DTYPES = ("int32", "int64", "float32", "float64", "bool", "uint8")
_DTYPES = {name: np.dtype(name) for name in _ARRAY_DTYPES}  # creating one from its name takes longer
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class WireError(OutpaceError):
    """The bytes are not a frame of the expected type."""


def _encode_extension(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        name = _DTYPE_NAMES.get(value.dtype)  # a lookup, because `dtype.name` builds a new string on every access
        if name is None or value.ndim != 1:
            raise NotImplementedError(
                f"only 1-d arrays of {_ARRAY_DTYPES} can be encoded, not {value.dtype.name}[{value.ndim}d]"
            )
        return (name, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded for another process")


def _decode_extension(expected: type, value: Any) -> Any:
    if getattr(expected, "__origin__", expected) is np.ndarray:
        name, raw = value
        if name not in _DTYPES:
            raise ValueError(f"unsupported array dtype {name!r}")
        return np.frombuffer(base64.b64decode(raw) if isinstance(raw, str) else raw, dtype=_DTYPES[name])
    raise NotImplementedError(f"cannot decode {expected}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_extension)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T] | Any) -> T:
    """Decode `data` as the type `kind`. Raises `WireError` if it does not match."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_extension)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise WireError(f"not a {getattr(kind, '__name__', kind)}: {error}") from None


def encode_json(value: Any) -> bytes:
    """Encode as one line of JSON. The bytes of arrays are base64."""
    return msgspec.json.encode(value, enc_hook=_encode_extension)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode what `encode_json` returned. Raises `msgspec.DecodeError` if it does not match."""
    return msgspec.json.decode(data, type=kind, dec_hook=_decode_extension)


def frame(body: bytes) -> bytes:
    if len(body) > MAX_FRAME:
        raise WireError(f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


class FrameBuffer:
    """Splits the received bytes of a stream into frames."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._data = bytearray()
        self._start = 0  # offset of the next frame

    def add(self, data: bytes) -> None:
        del self._data[: self._start]
        self._start = 0
        self._data += data

    def next_body(self) -> bytes | None:
        """Return the body of the next frame, or None if it has not arrived. Raises `WireError` if it is too long."""
        start = self._start + HEADER.size
        if len(self._data) < start:
            return None
        (size,) = HEADER.unpack_from(self._data, self._start)
        if size > self._limit:
            raise WireError(f"a frame of {size} bytes exceeds the limit of {self._limit}")
        if len(self._data) < start + size:
            return None
        self._start = start + size
        body = bytes(memoryview(self._data)[start : self._start])
        if self._start == len(self._data):
            self._data.clear()
            self._start = 0
        return body


def encodable_text(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode()
