"""Arrays in the memory of a device: a place, a shape and a dtype. Never an ndarray, so that no host code computes with one."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from hpctrain.backend.dtypes import item_bytes

Shape = tuple[int, ...]


class DeviceArray:
    """C-contiguous elements in a device's memory, which the array keeps alive.

    Views are made by `view`, `reshape` and slices of the first dim with step 1. Reading or writing elements is for kernels, and
    for the device's `upload` and `download`: everything that would do so on the host raises TypeError.

    Args:
        pointer: address on the device. owner: keeps the memory alive.
    """

    __slots__ = ("dtype", "itemsize", "owner", "pointer", "shape", "size")

    def __init__(self, pointer: int, shape: Shape, dtype: str, owner: Any) -> None:
        self.pointer, self.shape, self.dtype, self.owner = pointer, shape, dtype, owner
        self.size = math.prod(shape)
        self.itemsize = item_bytes(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice) -> DeviceArray:
        if not isinstance(index, slice) or index.step not in (None, 1):
            self._refuse()
        start, stop, _ = index.indices(self.shape[0])
        row = math.prod(self.shape[1:]) * self.itemsize
        return DeviceArray(self.pointer + start * row, (max(0, stop - start), *self.shape[1:]), self.dtype, self.owner)

    def reshape(self, *shape: Any) -> DeviceArray:
        """The same elements in another shape; -1 stands for what is left."""
        wanted: Shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if wanted.count(-1) == 1 and (known := -math.prod(wanted)):
            wanted = tuple(self.size // known if n == -1 else n for n in wanted)
        if -1 in wanted or math.prod(wanted) != self.size:
            raise ValueError(f"{self.size} elements of shape {self.shape} have no shape {wanted}.")
        return DeviceArray(self.pointer, wanted, self.dtype, self.owner)

    def view(self, dtype: str) -> DeviceArray:
        """The same bytes as a flat array of another dtype; they must be whole elements of it."""
        count, rest = divmod(self.nbytes, item_bytes(dtype))
        if rest:
            raise ValueError(f"{self.nbytes} bytes are no whole number of {dtype} elements.")
        return DeviceArray(self.pointer, (count,), dtype, self.owner)

    def __repr__(self) -> str:
        return f"DeviceArray({self.shape}, {self.dtype}, at {self.pointer:#x})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"Elements of {self!r} are in the device's memory; ask its arithmetic for to_host.")

    __array__ = __array_ufunc__ = __setitem__ = __iter__ = __float__ = __int__ = __bool__ = __contains__ = _refuse
