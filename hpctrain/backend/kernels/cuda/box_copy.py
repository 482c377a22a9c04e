"""Copies between boxes of arrays of a device: what halos are packed and unpacked with."""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.cuda.device import pack_width
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.cuda.runtime import TAGS, CudaRuntime
from hpctrain.core.intervals import Box, shape_of, size_of

_DIMS = 4


def copy_box(
    runtime: CudaRuntime, target: DeviceArray, target_box: Box, source: DeviceArray, source_box: Box, *, accumulate: bool = False
) -> None:
    """Enqueue target[target_box] := source[source_box], or += with `accumulate`.

    Both arrays have one dtype and up to four dims, both boxes one shape, each inside its array; the two do not overlap in memory.
    """
    shape = shape_of(target_box)
    assert target.dtype == source.dtype, f"{source!r} has not the dtype of {target!r}"
    assert shape == shape_of(source_box), f"boxes {target_box} and {source_box} have different shapes"
    if not size_of(target_box):
        return
    (to, to_steps), (origin, origin_steps) = _corner(target, target_box), _corner(source, source_box)
    _, rows, columns, channels = (1,) * (_DIMS - len(shape)) + shape
    width = pack_width(target.itemsize, math.gcd(channels, *to_steps, *origin_steps), (to, origin))
    packs = channels // width
    steps = [np.int64(step) for step in (*to_steps, *origin_steps)]
    kernel = f"{'add' if accumulate else 'copy'}_box_{TAGS[target.dtype]}_w{width}"
    items = size_of(target_box) // width
    runtime.launch_items("copies", kernel, items, to, origin, *steps, np.int32(rows), np.int32(columns), np.int32(packs))


def _corner(array: DeviceArray, box: Box) -> tuple[DeviceArray, tuple[int, ...]]:
    """The array from the box's first element on, flat, and the steps of the three outer dims in elements."""
    assert all(start >= 0 and stop <= size for (start, stop), size in zip(box, array.shape, strict=True)), (
        f"{box} leaves {array!r}"
    )
    steps = [math.prod(array.shape[dim + 1 :]) for dim in range(array.ndim)]
    first = sum(start * step for (start, _), step in zip(box, steps, strict=True))
    outer = (0,) * (_DIMS - array.ndim) + tuple(steps[:-1])
    return array.reshape(-1)[first:], outer
