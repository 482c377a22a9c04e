"""The rule by which holders of the same tensors share what is written: each of them follows it for itself."""

from __future__ import annotations

import numpy as np

from hpctrain.core.intervals import Box, even_interval, replace_dim, shape_of, size_of

#: a smaller part is written by one of those that hold it, for each part of a file costs some time of its own
_SMALLEST_SHARED_BYTES = 1 << 16


class WriteShares:
    """Shares parts out over holders of the same: large ones evenly, small ones to those that have least so far.

    Args:
        number: of this holder. holders: of all.
    """

    def __init__(self, number: int, holders: int) -> None:
        self._number, self._loads = number, [0] * holders

    def own(self, box: Box, itemsize: int) -> Box | None:
        """The box of this holder within one that all of them hold; None: nothing of it. Asked alike on each."""
        size, holders = size_of(box) * itemsize, len(self._loads)
        lengths = shape_of(box)
        dim = int(np.argmax(lengths)) if lengths else 0
        if size >= _SMALLEST_SHARED_BYTES and lengths[dim] >= holders:
            begin = box[dim][0]
            start, stop = even_interval(lengths[dim], holders, self._number)
            return replace_dim(box, dim, (begin + start, begin + stop))
        owner = self._loads.index(min(self._loads))
        self._loads[owner] += size
        return box if owner == self._number else None
