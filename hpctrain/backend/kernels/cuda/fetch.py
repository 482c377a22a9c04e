"""Values on their way from a device to the host, which the host asks for when it needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.cuda.runtime import PinnedBuffer, host_values

#: gives what is asked for from the elements that came
Reading = Callable[[np.ndarray], np.ndarray]


class CudaFetch:
    """Implements `Fetch`: a copy to pinned memory that is enqueued.

    Args:
        buffer: that the elements of `source` are copied to. reading: is applied to them.
        kept: arrays that the work before the copy reads by address; their memory is not given back before the fetch is.
    """

    def __init__(self, buffer: PinnedBuffer, source: DeviceArray, reading: Reading, kept: Sequence[DeviceArray] = ()) -> None:
        self._buffer, self._source, self._reading, self._kept = buffer, source, reading, tuple(kept)

    def result(self) -> np.ndarray:
        """Wait for the copy and give the elements in the source's shape (bfloat16 as float32), read only, after the reading."""
        self._buffer.event.synchronize()
        values = host_values(self._source, self._buffer.bits(self._source))
        values = self._reading(values.reshape(self._source.shape))
        values.flags.writeable = False
        return values


class FetchBuffers:
    """Two pinned buffers in turn for all that is fetched from one place: a fetch is valid until the next but one begins."""

    def __init__(self, runtime: CudaRuntime, size_bytes: int) -> None:
        self._first, self._second = (PinnedBuffer(runtime, size_bytes) for _ in range(2))

    def fetch(self, source: DeviceArray, reading: Reading = np.asarray, kept: Sequence[DeviceArray] = ()) -> CudaFetch:
        """Enqueue the copy of at most the buffers' size; `reading` and `kept` as in `CudaFetch`."""
        self._first, self._second = self._second, self._first
        self._first.download(source.reshape(-1))
        return CudaFetch(self._first, source, reading, kept)
