"""Softmax cross entropy with label smoothing (Szegedy et al., CVPR 2016) and the two accuracies, on a device."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.operators import LossOperator, LossSums
from hpctrain.backend.kernels.cuda.fetch import CudaFetch, FetchBuffers
from hpctrain.backend.kernels.cuda.runtime import TAGS, CudaRuntime
from hpctrain.backend.cuda.runtime import Staging
from hpctrain.backend.kernels.labels import MixedLabels, checked_labels
from hpctrain.backend.specs import SoftmaxCrossEntropySpec

_CLASSES_OF_A_WARP, _WARP, _MOST_THREADS = 128, 32, 256
_SUMS = 3  # loss, first, among the first few


class CudaLossHandle:
    """Implements `LossHandle`: the sums of one batch on their way to the host."""

    def __init__(self, sums: CudaFetch | None, count: int) -> None:
        self._sums, self._count = sums, count

    def result(self) -> LossSums:
        """Wait for the sums, and give them. To be asked for before the second batch after this one is run."""
        if self._sums is None:
            return LossSums(0.0, 0, 0, 0)
        loss, top1, top5 = self._sums.result().tolist()
        return LossSums(loss, int(top1), int(top5), self._count)


class _Rows:
    """Memory for the labels, losses and ranks of up to so many rows."""

    def __init__(self, runtime: CudaRuntime, capacity: int) -> None:
        def memory(dtype: str, item_bytes: int) -> DeviceArray:
            return runtime.device.allocate(capacity * item_bytes).view(dtype)

        self.labels, self.ranks, self.losses = memory("int32", 4), memory("int32", 4), memory("float64", 8)
        self.staging = Staging(runtime, 4 * capacity, count=2)


class CudaSoftmaxCrossEntropy(LossOperator):
    """Over logits (N, classes) on the device; labels integer (N,) of the host.

    Losses are summed in float64 whatever the logits' dtype. The memory for rows grows with the largest batch, and is kept.
    """

    def __init__(self, spec: SoftmaxCrossEntropySpec, runtime: CudaRuntime) -> None:
        self.spec, self._runtime = spec, runtime
        self._sums = runtime.device.allocate(8 * _SUMS).view("float64")
        self._fetches = FetchBuffers(runtime, self._sums.nbytes)
        self._rows: dict[int, _Rows] = {}

    def run(
        self, logits: DeviceArray, labels: np.ndarray | MixedLabels, global_count: int, d_logits: DeviceArray | None
    ) -> CudaLossHandle:
        assert not isinstance(labels, MixedLabels), "a configuration that mixes images is refused beside this set"
        count, classes = logits.shape
        if count == 0:
            return CudaLossHandle(None, 0)
        rows = self._rows_for(count)
        rows.staging.upload(rows.labels[:count], checked_labels(labels, classes))
        self._launch_rows(rows, logits, d_logits, 0.0 if d_logits is None else 1.0 / global_count)
        arguments = (rows.losses, rows.ranks, self._sums, np.int32(self.spec.top), np.int64(count))
        self._runtime.launch("loss", "sum_losses", (1,), (_MOST_THREADS,), *arguments)
        return CudaLossHandle(self._fetches.fetch(self._sums), count)

    def _launch_rows(self, rows: _Rows, logits: DeviceArray, d_logits: DeviceArray | None, scale: float) -> None:
        count, classes = logits.shape
        threads = min(_MOST_THREADS, -(-classes // _CLASSES_OF_A_WARP) * _WARP)
        places = (logits, rows.labels, d_logits, rows.losses, rows.ranks)
        scalars = (np.int32(classes), np.float64(self.spec.smoothing), np.float64(scale))
        self._runtime.launch("loss", f"cross_entropy_{TAGS[logits.dtype]}", (count,), (threads,), *places, *scalars)

    def _rows_for(self, count: int) -> _Rows:
        capacity = 1 << (count - 1).bit_length()
        if capacity not in self._rows:
            self._rows[capacity] = _Rows(self._runtime, capacity)
        return self._rows[capacity]
