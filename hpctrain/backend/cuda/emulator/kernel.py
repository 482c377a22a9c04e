"""A kernel of the emulated device: arguments checked against the kernel's parameters, then run on this CPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import numpy as np

from hpctrain.backend.cuda.device import Argument, Extent
from hpctrain.backend.cuda.device_array import DeviceArray

_MOST_PARAMETERS = 64
_SHARED_BYTES = 48 << 10


def pack_arguments(name: str, sizes: Sequence[int], arguments: Sequence[Argument]) -> list[bytes]:
    """The bytes of each argument, as a kernel with parameters of these sizes takes them.

    Raises:
        TypeError: a number of arguments or a size that the kernel does not have.
    """
    if len(sizes) != len(arguments):
        raise TypeError(f"{name} takes {len(sizes)} arguments, not {len(arguments)}.")
    packed = [_bytes(name, i, argument) for i, argument in enumerate(arguments)]
    for i, (raw, size) in enumerate(zip(packed, sizes, strict=True)):
        if len(raw) != size:
            raise TypeError(f"Argument {i} of {name} has {len(raw)} bytes, the kernel takes {size}.")
    return packed


def _bytes(name: str, i: int, argument: Argument) -> bytes:
    if argument is None:
        return bytes(8)
    if isinstance(argument, DeviceArray):
        return argument.pointer.to_bytes(8, "little")
    if isinstance(argument, np.generic):
        return argument.tobytes()
    raise TypeError(f"Argument {i} of {name} is {type(argument).__name__}; kernels take device arrays and NumPy scalars.")


class CpuKernel:
    """One kernel of a built source.

    Args:
        order: gives the order of blocks and threads of the next launch: 0 ascending, 1 descending, else a seed.
        enqueue: takes (stream, work, text).
    """

    def __init__(self, library: ctypes.CDLL, name: str, order: Callable[[], int], enqueue: Callable[..., None]) -> None:
        sizes = (ctypes.c_int * _MOST_PARAMETERS)()
        count = getattr(library, f"sizes_{name}")(sizes)
        self._launch = getattr(library, f"launch_{name}")
        self._sizes, self._name, self._order, self._enqueue = list(sizes[:count]), name, order, enqueue

    def __call__(self, stream: object, grid: Extent, block: Extent, *arguments: Argument) -> None:
        packed = pack_arguments(self._name, self._sizes, arguments)
        if math.prod(block) > 1024 or not math.prod(block) or not math.prod(grid):
            raise ValueError(f"{self._name} cannot be launched on a grid {grid} of blocks {block}.")
        kept = [argument for argument in arguments if isinstance(argument, DeviceArray)]  # memory lives until the work is done
        self._enqueue(stream, lambda: self._run(grid, block, packed, kept), self._name)

    def _run(self, grid: Extent, block: Extent, packed: Sequence[bytes], kept: Sequence[DeviceArray]) -> None:
        holders = [ctypes.create_string_buffer(raw, len(raw)) for raw in packed]
        pointers = (ctypes.c_void_p * len(holders))(*(ctypes.addressof(holder) for holder in holders))
        three = [(ctypes.c_uint * 3)(*(*extent, 1, 1)[:3]) for extent in (grid, block)]
        if self._launch(pointers, *three, ctypes.c_uint(_SHARED_BYTES), ctypes.c_uint(self._order())):
            raise AssertionError(f"Not every thread of a block of {self._name} comes to the same barrier.")
