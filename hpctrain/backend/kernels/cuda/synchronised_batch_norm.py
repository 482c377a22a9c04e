"""Batch norm on a device whose statistics are those of several ranks: a round trip to the host in each direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.abilities import CallsHost
from hpctrain.backend.operators import Buffers
from hpctrain.backend.cuda.batch_norm import CudaBatchNorm
from hpctrain.backend.cuda.operator import Request
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.specs import BatchNormSpec, TensorSpec


class CudaSynchronisedBatchNorm(CallsHost, CudaBatchNorm):
    """As `CudaBatchNorm`, with moments and sums that the host merges over ranks. On a rank that is alone it is that very one.

    Collective: `forward` and `backward_input` call the merger once each, on every rank, and wait for it. What crosses is
    (2, channels) in float64, each way.
    """

    def __init__(
        self, spec: BatchNormSpec, *inputs: TensorSpec, training: bool, runtime: CudaRuntime, arithmetic: Arithmetic
    ) -> None:
        self._arithmetic = arithmetic
        self._merged_rows = 0
        self._own_gradients = np.zeros((2, spec.channels))
        super().__init__(spec, *inputs, training=training, runtime=runtime)

    def more_scratch(self, channels: int) -> Sequence[Request]:
        return (((2, channels), "float64"),)

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self.calls_host = not buffers.merger.alone

    def _finish_moments(self, partial: DeviceArray, x: DeviceArray, *sizes: np.generic) -> None:
        if not self.calls_host:
            super()._finish_moments(partial, x, *sizes)
            return
        exchanged = self.scratch[1]
        self._launch_channels("bn_moments_own", partial, x, exchanged, *sizes, *self._channels)
        moments = np.array(self._arithmetic.to_host(exchanged))
        self._merged_rows = self.buffers.merger.merge(self._rows, *moments)
        self._arithmetic.from_host(exchanged, moments)
        constants = np.int64(self._merged_rows), *self._channels, np.float64(self.norm.epsilon)
        arrays = *self._affine, self._coefficients, *self._batch_statistics
        self._launch_each_channel("bn_moments_merged", exchanged, *arrays, *constants)

    def _finish_gradients(self, partial: DeviceArray, d_gamma: DeviceArray, d_beta: DeviceArray, parts: np.int32) -> None:
        if not self.calls_host or self.norm.fixed:
            super()._finish_gradients(partial, d_gamma, d_beta, parts)
            return
        exchanged = self.scratch[1]
        self._launch_channels("bn_backward_own", partial, self._coefficients, d_gamma, d_beta, exchanged, parts, *self._channels)
        self._own_gradients = np.array(self._arithmetic.to_host(exchanged))

    def backward_input(self) -> None:
        wanted = any(grad is not None for grad in self.buffers.input_grads)
        if self.calls_host and not self.norm.fixed and wanted:
            exchanged, sums = self.scratch[1], self._own_gradients
            self.buffers.merger.sum(sums)
            self._arithmetic.from_host(exchanged, sums)
            rows = np.int64(self._merged_rows)
            self._launch_each_channel("bn_backward_merged", exchanged, self._coefficients, rows, *self._channels)
        super().backward_input()
