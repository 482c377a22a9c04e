"""Memory of the emulated device: host memory that ends at a page which nobody may touch."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import numpy as np

from hpctrain.backend.cuda.device import ALIGNMENT_BYTES
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.dtypes import item_bytes

_libc = ctypes.CDLL(None, use_errno=True)
_NO_ACCESS = 0


class GuardedMemory:
    """So many zeroed bytes, aligned to ALIGNMENT_BYTES; behind them (from the next multiple of it on) every access is a fault."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        page = mmap.PAGESIZE
        pages = -(-size_bytes // page)
        self._pages = mmap.mmap(-1, (pages + 1) * page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        if _libc.mprotect(ctypes.c_void_p(address + pages * page), ctypes.c_size_t(page), _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.pointer = address + (pages * page - size_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class Heap:
    """All memory that is in use, by address."""

    def __init__(self) -> None:
        self._live: weakref.WeakValueDictionary[int, GuardedMemory] = weakref.WeakValueDictionary()

    def allocate(self, size_bytes: int) -> DeviceArray:
        memory = GuardedMemory(size_bytes)
        self._live[memory.pointer] = memory
        return DeviceArray(memory.pointer, (size_bytes,), "uint8", memory)

    @property
    def used_bytes(self) -> int:
        return sum(memory.size_bytes for memory in self._live.values())


def on_host(array: DeviceArray) -> np.ndarray:
    """The elements as an ndarray over the same memory; bfloat16 as uint16. For the emulated device's own use."""
    dtype = np.dtype("uint16" if array.dtype == "bfloat16" else array.dtype)
    if not array.size:
        return np.zeros(array.shape, dtype)
    raw = (ctypes.c_uint8 * (array.size * item_bytes(array.dtype))).from_address(array.pointer)
    values: np.ndarray = np.ctypeslib.as_array(raw).view(dtype)
    return values.reshape(array.shape)
