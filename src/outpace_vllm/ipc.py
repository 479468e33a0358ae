"""Weights in GPU memory that another process owns: how they are named, opened and checked.

A handle is plain bytes, the same in every version of torch:

    8 bytes    magic
    16 bytes   owner: drawn at random by the process that shares the memory
    64 bytes   the driver's handle of the allocation that the memory is in
    8 bytes    where in that allocation it begins
    8 bytes    how long it is

Invariants
- Whoever shares memory keeps it for as long as it lives itself: there is no count of readers that one which is killed
  could leave too high.
- An allocation is mapped once, however often it is asked for. Those of an earlier owner are unmapped as soon as another
  one's comes: its process is gone, and the mapping is all that keeps the memory from being free.
- What `open_device_memory` returns is valid until then: copy out of it, and let go.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_LAYOUT = struct.Struct("<8s16s64sQQ")
_MAGIC = b"outpaceG"
_DRIVER_HANDLE_BYTES = 64
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is

_SUM_MODULUS = 2**63
_WORD_BYTES = 4


class _DriverHandle(ctypes.Structure):
    """Passed to the driver by value."""

    _fields_ = [("reserved", ctypes.c_char * _DRIVER_HANDLE_BYTES)]


class DeviceMemoryError(RuntimeError):
    """Memory of another process cannot be shared or opened."""


class _Mappings:
    """The allocations of one owner that are mapped here, by the driver's handle."""

    def __init__(self) -> None:
        self.owner = b""
        self.addresses: dict[bytes, int] = {}

    def address(self, owner: bytes, handle: bytes) -> int:
        if owner != self.owner:
            self.clear()
            self.owner = owner
        if handle not in self.addresses:
            self.addresses[handle] = _map(handle)
        return self.addresses[handle]

    def clear(self) -> None:
        if self.addresses:
            torch.cuda.synchronize()  # somebody may be copying out of them
        while self.addresses:
            _, address = self.addresses.popitem()
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


_mappings: dict[int, _Mappings] = {}


def open_device_memory(handle: bytes, device_index: int, nbytes: int) -> Tensor:
    """The bytes that `handle` names, as a tensor on that device. The memory is its owner's: only read it."""
    owner, driver_handle, offset, length = _unpacked(handle)
    if nbytes > length:
        raise DeviceMemoryError(f"the shared memory has {length} bytes, not {nbytes}")
    with _current(device_index):
        mappings = _mappings.setdefault(device_index, _Mappings())
        address = mappings.address(owner, driver_handle) + offset
        return torch.as_tensor(_Described(address, nbytes), device=f"cuda:{device_index}")


def close_device_memory() -> None:
    """Unmap everything."""
    for device_index, mappings in _mappings.items():
        with _current(device_index):
            mappings.clear()


def share_device_memory(memory: Tensor, owner: bytes) -> bytes:
    """A handle of these bytes for other processes; `memory` has to be kept for as long as they may open it."""
    assert memory.is_cuda, "only memory of a GPU can be shared so"
    assert memory.dtype == torch.uint8, "shared memory is plain bytes"
    address, base, size = ctypes.c_uint64(memory.data_ptr()), ctypes.c_uint64(), ctypes.c_size_t()
    driver_handle = _DriverHandle()
    with _current(memory.get_device()):
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        _call("cuIpcGetMemHandle", ctypes.byref(driver_handle), base)
    return _LAYOUT.pack(_MAGIC, owner, bytes(driver_handle), memory.data_ptr() - base.value, memory.nbytes)


def word_sums(content: Tensor, places: list[tuple[int, int]]) -> list[int]:
    """One sum per (offset, nbytes) in `content`: its 32-bit words added up, modulo 2**63.

    Offsets are multiples of a word, and the bytes between the end of a place and its last word's are zero."""
    words = content[: content.nbytes // _WORD_BYTES * _WORD_BYTES].view(torch.int32)
    sums = [
        words[offset // _WORD_BYTES : -(-(offset + nbytes) // _WORD_BYTES)].sum(dtype=torch.int64)
        for offset, nbytes in places
    ]
    return [total % _SUM_MODULUS for total in torch.stack(sums).tolist()] if sums else []


class _Described:
    """A range of device memory as torch takes it from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def _unpacked(handle: bytes) -> tuple[bytes, bytes, int, int]:
    if len(handle) != _LAYOUT.size:
        raise DeviceMemoryError(f"a handle has {_LAYOUT.size} bytes, not {len(handle)}")
    magic, owner, driver_handle, offset, nbytes = _LAYOUT.unpack(handle)
    if magic != _MAGIC:
        raise DeviceMemoryError("these bytes are no handle of shared GPU memory")
    return owner, driver_handle, offset, nbytes


def _map(driver_handle: bytes) -> int:
    address = ctypes.c_uint64()
    by_value = _DriverHandle.from_buffer_copy(driver_handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, ctypes.c_uint(_PEER_ACCESS))
    return address.value


@contextmanager
def _current(device_index: int) -> Iterator[None]:
    """The driver works on the context of the calling thread: the one that torch has made there by its first call."""
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().query()  # waits for nothing
        yield


def _call(function: str, *arguments: object) -> None:
    code = getattr(_driver(), function)(*arguments)
    if code == 0:
        return
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    described = name.value.decode() if name.value else f"error {code}"
    hint = "; torch's expandable segments cannot be shared" if function == "cuIpcGetMemHandle" else ""
    raise DeviceMemoryError(f"{function}: {described}{hint}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
