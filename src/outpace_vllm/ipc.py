"""CUDA IPC: handles, mapping and checksums of GPU memory that another process owns.

A handle is plain bytes, the same for every version of torch:

    8 bytes    magic
    16 bytes   owner: random id of the process that shares the memory
    64 bytes   the driver's handle of the allocation that contains the memory
    8 bytes    offset in that allocation
    8 bytes    length

Invariants
- The owner keeps shared memory for its whole lifetime: there is no reader count that a killed reader could leave too
  high.
- An allocation is mapped once, however often it is opened. When memory of a new owner is opened, the mappings of the
  previous owner are closed: its process is gone, and only the mapping keeps the memory from being freed.
- A tensor from `open_device_memory` is valid until then: copy out of it and drop it.
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
    """GPU memory cannot be shared with, or opened from, another process."""


class _Mappings:
    """The mapped allocations of one owner, by driver handle."""

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
            torch.cuda.synchronize()  # copies out of them may be running
        while self.addresses:
            _, address = self.addresses.popitem()
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


_mappings: dict[int, _Mappings] = {}


def open_device_memory(handle: bytes, device_index: int, nbytes: int) -> Tensor:
    """The memory of `handle` as a tensor of bytes on that device. Read only: it belongs to its owner."""
    owner, driver_handle, offset, length = _unpack(handle)
    if nbytes > length:
        raise DeviceMemoryError(f"the shared memory has {length} bytes, not {nbytes}")
    with _device_context(device_index):
        mappings = _mappings.setdefault(device_index, _Mappings())
        address = mappings.address(owner, driver_handle) + offset
        return torch.as_tensor(_CudaArray(address, nbytes), device=f"cuda:{device_index}")


def close_device_memory() -> None:
    """Unmap all allocations."""
    for device_index, mappings in _mappings.items():
        with _device_context(device_index):
            mappings.clear()


def share_device_memory(memory: Tensor, owner: bytes) -> bytes:
    """A handle of this memory for other processes. Keep `memory` alive for as long as they may open it."""
    assert memory.is_cuda, "only GPU memory can be shared this way"
    assert memory.dtype == torch.uint8, "shared memory must be uint8"
    address, base, size = ctypes.c_uint64(memory.data_ptr()), ctypes.c_uint64(), ctypes.c_size_t()
    driver_handle = _DriverHandle()
    with _device_context(memory.get_device()):
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        _call("cuIpcGetMemHandle", ctypes.byref(driver_handle), base)
    return _LAYOUT.pack(_MAGIC, owner, bytes(driver_handle), memory.data_ptr() - base.value, memory.nbytes)


def word_sums(content: Tensor, ranges: list[tuple[int, int]]) -> list[int]:
    """For each (offset, nbytes) in `content`, the sum of its 32-bit words modulo 2**63.

    Offsets are multiples of the word size, and bytes that pad the last word are zero."""
    words = content[: content.nbytes // _WORD_BYTES * _WORD_BYTES].view(torch.int32)
    sums = [
        words[offset // _WORD_BYTES : -(-(offset + nbytes) // _WORD_BYTES)].sum(dtype=torch.int64)
        for offset, nbytes in ranges
    ]
    return [total % _SUM_MODULUS for total in torch.stack(sums).tolist()] if sums else []


class _CudaArray:
    """A range of device memory with the CUDA array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def _unpack(handle: bytes) -> tuple[bytes, bytes, int, int]:
    if len(handle) != _LAYOUT.size:
        raise DeviceMemoryError(f"a handle has {_LAYOUT.size} bytes, not {len(handle)}")
    magic, owner, driver_handle, offset, nbytes = _LAYOUT.unpack(handle)
    if magic != _MAGIC:
        raise DeviceMemoryError("not a handle of shared GPU memory")
    return owner, driver_handle, offset, nbytes


def _map(driver_handle: bytes) -> int:
    address = ctypes.c_uint64()
    by_value = _DriverHandle.from_buffer_copy(driver_handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, ctypes.c_uint(_PEER_ACCESS))
    return address.value


@contextmanager
def _device_context(device_index: int) -> Iterator[None]:
    """Make the device current. The driver uses the calling thread's context, which torch creates by its first call."""
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().query()  # does not block
        yield


def _call(function: str, *arguments: object) -> None:
    code = getattr(_driver(), function)(*arguments)
    if code == 0:
        return
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    error_name = name.value.decode() if name.value else f"error {code}"
    hint = "; torch's expandable segments cannot be shared" if function == "cuIpcGetMemHandle" else ""
    raise DeviceMemoryError(f"{function}: {error_name}{hint}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
