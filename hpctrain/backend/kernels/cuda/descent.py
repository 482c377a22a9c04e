"""Momentum descent on flat memory of a device: one launch for all runs of an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from hpctrain.backend.arithmetic import UpdateRun
from hpctrain.backend.cuda.device import grid_for
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.cuda.runtime import TAGS, CudaRuntime
from hpctrain.backend.kernels.cuda.staging import Staging

#: elements of a block's work and of a thread's: `TILE` and `W` of descent.cu
TILE, PACK = 4096, 4

_THREADS = 256


class RunTable:
    """The runs of one update in the device's memory, uploaded where they differ from those of the update before.

    Args:
        item: dtype of scales and decays. capacity: the most runs.
    """

    def __init__(self, runtime: CudaRuntime, item: str, capacity: int) -> None:
        places = [(name, np.int64) for name in ("start", "stop", "offset", "first_tile")]
        self._row = np.dtype([*places, ("gradient_scale", item), ("decay", item)])
        self.capacity, self.tiles = capacity, 0
        self.memory = runtime.device.allocate(capacity * self._row.itemsize)
        self._staging = Staging(runtime, capacity * self._row.itemsize, count=2)
        self._runs: Sequence[UpdateRun] = ()

    def set(self, runs: Sequence[UpdateRun]) -> None:
        """Make these the table's runs, none of them empty."""
        if runs == self._runs:
            return
        self._runs = runs
        firsts = list(accumulate((-(-(run.stop - run.start // PACK * PACK) // TILE) for run in runs), initial=0))
        self.tiles = firsts[-1]
        rows = [
            (run.start, run.stop, run.offset, first, run.gradient_scale, run.decay)
            for run, first in zip(runs, firsts, strict=False)
        ]
        raw = np.array(rows, self._row).view(np.uint8)
        self._staging.upload(self.memory[: raw.size], raw)


class CudaDescent:
    """Implements `Descent`, with the bits of the host's. Tables are made when a part of the buffers is first updated.

    Args:
        data, gradient: flat, of one size. momentum: flat state, None where there is none. shadow: bfloat16 copy of `data`.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        data: DeviceArray,
        gradient: DeviceArray,
        momentum: DeviceArray | None,
        shadow: DeviceArray | None,
        *,
        factor: float,
        nesterov: bool,
    ) -> None:
        self._runtime, self._buffers = runtime, (data, gradient, momentum, shadow)
        self._kernel = f"descend_{TAGS[data.dtype]}"
        self._scalar = np.dtype(data.dtype).type
        arrays = [array for array in self._buffers if array is not None]
        self._aligned = np.int32(all(array.pointer % (PACK * array.itemsize) == 0 for array in arrays))
        self._factor, self._nesterov = self._scalar(factor), np.int32(nesterov)
        self._tables: dict[tuple[int, int], list[RunTable]] = {}

    def update(self, runs: Iterable[UpdateRun], lr: float) -> None:
        """Enqueue the update of the elements of `runs`."""
        wanted = tuple(run for run in runs if run.start < run.stop)
        if not wanted:
            return
        table = self._table(wanted)
        table.set(wanted)
        grid = grid_for(table.tiles, 1, self._runtime.device.multiprocessors)
        scalars = (np.int32(len(wanted)), self._scalar(lr), self._factor, self._nesterov, self._aligned, np.int64(table.tiles))
        self._runtime.launch("descent", self._kernel, grid, (_THREADS,), *self._buffers, table.memory, *scalars)

    def _table(self, runs: Sequence[UpdateRun]) -> RunTable:
        """The table for this part of the buffers, which a step updates once; one that became too small may still be read."""
        tables = self._tables.setdefault((runs[0].start, runs[-1].stop), [])
        if not tables or tables[-1].capacity < len(runs):
            capacity = 1 << (len(runs) - 1).bit_length()
            tables.append(RunTable(self._runtime, str(self._scalar.__name__), capacity))
        return tables[-1]
