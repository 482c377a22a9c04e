"""Descents on flat memory of a device: one launch for all runs of an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from hpctrain.backend.arithmetic import Corrections, MomentRule, UpdateRun
from hpctrain.backend.cuda.device import grid_for
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.cuda.runtime import TAGS, CudaRuntime
from hpctrain.backend.cuda.runtime import Staging

#: elements of a block's work and of a thread's: `TILE` and `W` of runs.cuh
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


class RunTables:
    """Tables of runs, made when a part of the buffers is first updated, and what a launch over one takes.

    Args:
        dtype: of the buffers' elements. buffers: the flat arrays that a kernel takes, None for what there is not.
    """

    def __init__(self, runtime: CudaRuntime, dtype: str, buffers: Sequence[DeviceArray | None]) -> None:
        self._runtime, self.buffers = runtime, buffers
        self.scalar = np.dtype(dtype).type
        arrays = [array for array in buffers if array is not None]
        self._aligned = np.int32(all(array.pointer % (PACK * array.itemsize) == 0 for array in arrays))
        self._tables: dict[tuple[int, int], list[RunTable]] = {}

    def launch(self, source: str, kernel: str, runs: Iterable[UpdateRun], *scalars: np.generic) -> None:
        """Enqueue a kernel over the elements of `runs`, with its own arguments behind the runs."""
        wanted = tuple(run for run in runs if run.start < run.stop)
        if not wanted:
            return
        table = self._table(wanted)
        table.set(wanted)
        grid = grid_for(table.tiles, 1, self._runtime.device.multiprocessors)
        last = (*scalars, self._aligned, np.int64(table.tiles))
        kernel = f"{kernel}_{TAGS[np.dtype(self.scalar).name]}"
        self._runtime.launch(source, kernel, grid, (_THREADS,), *self.buffers, table.memory, np.int32(len(wanted)), *last)

    def _table(self, runs: Sequence[UpdateRun]) -> RunTable:
        """The table for this part of the buffers, which a step updates once; one that became too small may still be read."""
        tables = self._tables.setdefault((runs[0].start, runs[-1].stop), [])
        if not tables or tables[-1].capacity < len(runs):
            capacity = 1 << (len(runs) - 1).bit_length()
            tables.append(RunTable(self._runtime, str(self.scalar.__name__), capacity))
        return tables[-1]


class CudaDescent:
    """Implements `Descent`, with the bits of the host's.

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
        self._tables = RunTables(runtime, data.dtype, (data, gradient, momentum, shadow))
        self._factor, self._nesterov = self._tables.scalar(factor), np.int32(nesterov)

    def update(self, runs: Iterable[UpdateRun], lr: float) -> None:
        """Enqueue the update of the elements of `runs`."""
        self._tables.launch("descent", "descend", runs, self._tables.scalar(lr), self._factor, self._nesterov)


class CudaMomentDescent:
    """Implements `MomentDescent`, with the bits of the host's. Arguments: `Arithmetic.moment_descent`."""

    def __init__(
        self,
        runtime: CudaRuntime,
        data: DeviceArray,
        gradient: DeviceArray,
        first: DeviceArray,
        second: DeviceArray,
        shadow: DeviceArray | None,
        rule: MomentRule,
    ) -> None:
        self._tables = RunTables(runtime, data.dtype, (data, gradient, first, second, shadow))
        constants = (rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2, rule.epsilon)
        self._constants = [self._tables.scalar(constant) for constant in constants]

    def update(self, runs: Iterable[UpdateRun], corrections: Corrections, lr: float) -> None:
        """Enqueue the update of the elements of `runs`."""
        self._launch(runs, corrections, lr, directs=False)

    def direct(self, runs: Iterable[UpdateRun], corrections: Corrections) -> None:
        """Enqueue that the gradient becomes the direction."""
        self._launch(runs, corrections, 0.0, directs=True)

    def _launch(self, runs: Iterable[UpdateRun], corrections: Corrections, lr: float, *, directs: bool) -> None:
        scalar = self._tables.scalar
        scales = (scalar(corrections.first), scalar(corrections.root))
        self._tables.launch("moments", "moments", runs, scalar(lr), *self._constants, *scales, np.int32(directs))
