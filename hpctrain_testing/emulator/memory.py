"""Memory of the emulated device: host memory between protected pages and canary bytes.

Pinned memory is host memory that copies may use asynchronously. `read` and `write` convert device arrays to host values and back,
with the rounding of kernels. `EmulatedDeviceError` reports a mistake in a kernel or in the order of work.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable

import numpy as np

from hpctrain.backend.cuda.device import ALIGNMENT_BYTES, DeviceArray, bfloat16_bits, bfloat16_values
from hpctrain.backend.specs import item_bytes


class EmulatedDeviceError(AssertionError):
    """A mistake in a kernel or in the order of work that a GPU may not detect. It is a defect of hpctrain."""


_libc = ctypes.CDLL(None, use_errno=True)
_compare = ctypes.PyDLL(None).memcmp  # PyDLL keeps Python's lock: calls are too short to release it
_NO_ACCESS = 0
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PAGE = mmap.PAGESIZE

#: NaN in every float dtype, and unlikely as a value that a kernel writes
_CANARY = ctypes.create_string_buffer(bytes([0xF5, 0xFF]) * ((_PAGE + ALIGNMENT_BYTES) // 2))
#: amount of freed memory that stays inaccessible before its addresses are reused
_MOST_FREED = 256


def _protect(address: int, size_bytes: int, rights: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), rights):
        raise OSError(ctypes.get_errno(), "mprotect")


class GuardedMemory:
    """Zeroed bytes, aligned to ALIGNMENT_BYTES, between canaries, which are surrounded by pages on which every access faults.

    At least ALIGNMENT_BYTES of canary precede the bytes; after them the canary extends to the next multiple of it.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        inside = -(-(size_bytes + ALIGNMENT_BYTES) // _PAGE) * _PAGE
        self.pages = mmap.mmap(-1, inside + 2 * _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, _READ_AND_WRITE)
        self.begin = ctypes.addressof(ctypes.c_char.from_buffer(self.pages)) + _PAGE
        self.end = self.begin + inside
        self.pointer = self.begin + (inside - size_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        array_end = self.pointer + size_bytes
        places = ((self.begin, self.pointer - self.begin, "in front of"), (array_end, self.end - array_end, "after"))
        self._canaries = [(ctypes.c_void_p(start), ctypes.c_size_t(size), place) for start, size, place in places]
        for start, size, _ in self._canaries:
            ctypes.memmove(start, _CANARY, size.value)
        _protect(self.begin - _PAGE, _PAGE, _NO_ACCESS)
        _protect(self.end, _PAGE, _NO_ACCESS)

    def damage(self) -> str:
        """Return a clause that names the damaged canary; empty if none is damaged."""
        for start, size, place in self._canaries:
            if _compare(start, _CANARY, size):
                return f"bytes {place} an array of {self.size_bytes} bytes were written"
        return ""

    def take_away(self) -> None:
        """Make every access fault, and free the memory."""
        self.pages.madvise(mmap.MADV_DONTNEED)
        _protect(self.begin, self.end - self.begin, _NO_ACCESS)


class _Handle:
    """Owner of device arrays, which keeps their memory in use. The memory is freed with it."""

    __slots__ = ("__weakref__", "settle")

    def __init__(self, settle: Callable[[], None]) -> None:
        self.settle = settle


class Heap:
    """All memory of a device.

    Args:
        settle: callback that does all work of the device before the host reads its memory.
    """

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        self._settle = settle
        self._used: dict[int, GuardedMemory] = {}
        self._pointers: list[int] = []  # keys of `_used`, sorted
        self._freed: deque[GuardedMemory] = deque(maxlen=_MOST_FREED)
        self._damages: list[str] = []

    def allocate(self, size_bytes: int) -> DeviceArray:
        """Return zeroed uint8 memory. It stays in use as long as an array or view of it exists."""
        memory = GuardedMemory(size_bytes)
        handle = _Handle(self._settle)
        self._used[memory.pointer] = memory
        insort(self._pointers, memory.pointer)
        weakref.finalize(handle, self._free, memory).atexit = False
        return DeviceArray(memory.pointer, (size_bytes,), "uint8", handle)

    def _free(self, memory: GuardedMemory) -> None:
        self._pointers.remove(memory.pointer)
        del self._used[memory.pointer]
        if damage := memory.damage():
            self._damages.append(damage)
        memory.take_away()
        self._freed.append(memory)

    @property
    def used_bytes(self) -> int:
        """Total number of bytes in use."""
        return sum(memory.size_bytes for memory in list(self._used.values()))

    @property
    def arrays(self) -> int:
        """Number of arrays in use."""
        return len(self._used)

    def damages(self) -> list[str]:
        """Return clauses about all damaged canaries, including those of memory freed since the last call."""
        freed, self._damages = self._damages, []
        return freed + [damage for memory in list(self._used.values()) if (damage := memory.damage())]

    def require(self, *arrays: DeviceArray) -> None:
        """Raise unless each array is in memory in use.

        Raises:
            EmulatedDeviceError: an array is not in memory in use.
        """
        for array in arrays:
            pointers = self._pointers.copy()  # a copy, as other threads allocate and free at the same time
            place = bisect_right(pointers, array.pointer)
            memory = self._used.get(pointers[place - 1]) if place else None
            if array.size and (memory is None or array.pointer + array.nbytes > memory.pointer + memory.size_bytes):
                raise EmulatedDeviceError(f"{array!r} is not in memory in use: {self.describe(array.pointer)}.")

    def describe(self, address: int) -> str:
        """Return a clause that names the array nearest to an address."""
        for text, memories in (("", list(self._used.values())), ("freed ", list(self._freed))):
            for memory in memories:
                if memory.begin - _PAGE <= address < memory.end + _PAGE:
                    return _distance(address, memory, text)
        return "it is near no array of this device"


def _distance(address: int, memory: GuardedMemory, text: str) -> str:
    array = f"a {text}array of {memory.size_bytes} bytes" if text else f"an array of {memory.size_bytes} bytes"
    offset = address - memory.pointer
    if offset < 0:
        return f"it is {-offset} bytes in front of {array}"
    if offset < memory.size_bytes:
        return f"it is byte {offset} of {array}"
    return f"it is {offset - memory.size_bytes} bytes past the end of {array}"


def borrowed(array: DeviceArray) -> DeviceArray:
    """Return an array at the same address that does not keep its memory in use."""
    return DeviceArray(array.pointer, array.shape, array.dtype, None)


def on_host(array: DeviceArray) -> np.ndarray:
    """Return the elements as an ndarray over the same memory; bfloat16 as uint16. The device first does all its work.

    This serves tests. The device itself reads borrowed arrays in the middle of its work.
    """
    if isinstance(array.owner, _Handle):
        array.owner.settle()
    dtype = np.dtype("uint16" if array.dtype == "bfloat16" else array.dtype)
    if not array.size:
        return np.zeros(array.shape, dtype)
    raw = (ctypes.c_uint8 * (array.size * item_bytes(array.dtype))).from_address(array.pointer)
    values: np.ndarray = np.ctypeslib.as_array(raw).view(dtype)
    return values.reshape(array.shape)


def bytes_of(array: DeviceArray) -> np.ndarray:
    """Return a uint8 view (nbytes,) of all bytes."""
    return on_host(array).reshape(-1).view(np.uint8)


_NOBODY_HAS_WRITTEN = 0xFF


class PinnedMemory:
    """All pinned memory of a device."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # begin -> end
        self._begins: list[int] = []  # sorted

    def allocate(self, size_bytes: int) -> np.ndarray:
        """Return uninitialised memory, uint8 (size_bytes,)."""
        memory = np.full(size_bytes, _NOBODY_HAS_WRITTEN, np.uint8)
        begin = memory.ctypes.data
        self._ends[begin] = begin + size_bytes
        insort(self._begins, begin)
        weakref.finalize(memory, self._forget, begin).atexit = False
        return memory

    def _forget(self, begin: int) -> None:
        self._begins.remove(begin)
        del self._ends[begin]

    def require(self, array: np.ndarray) -> np.ndarray:
        """Return a uint8 view of all bytes of an array in pinned memory.

        Raises:
            ValueError: the array is not contiguous, or not in pinned memory.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"A copy needs contiguous memory, but an array of shape {array.shape} has strides {array.strides}.")
        begin, begins = array.ctypes.data, self._begins.copy()  # a copy, as other threads allocate at the same time
        place = bisect_right(begins, begin)
        end = self._ends.get(begins[place - 1], 0) if place else 0
        if array.nbytes and begin + array.nbytes > end:
            raise ValueError(f"A copy needs pinned memory, but this array of shape {array.shape} was not allocated by `pinned`.")
        return array.reshape(-1).view(np.uint8)


def read(array: DeviceArray) -> np.ndarray:
    """Return the elements on the host; bfloat16 is converted to float32."""
    values = on_host(array)
    return bfloat16_values(values) if array.dtype == "bfloat16" else values


def write(array: DeviceArray, values: np.ndarray) -> None:
    """Write values to an array, rounded to nearest even in its dtype."""
    on_host(array)[...] = bfloat16_bits(values) if array.dtype == "bfloat16" else values
