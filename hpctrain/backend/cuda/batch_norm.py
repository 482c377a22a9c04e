"""Batch normalisation (Ioffe and Szegedy, ICML 2015) on the device, with an optional addition and ReLU after it.

`CudaSynchronisedBatchNorm` merges the statistics of several ranks, which needs a round trip to the host in forward and in
backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.device import Argument, DeviceArray, Extent, pack_width
from hpctrain.backend.cuda.operator import CudaOperator
from hpctrain.backend.cuda.runtime import THREADS, CudaRuntime
from hpctrain.backend.operators import Buffers, CallsHost, InPlace, Request, StepContext
from hpctrain.backend.specs import BatchNormSpec, TensorSpec, item_bytes, parameter_dtype

#: number of coefficients of a channel in batch_norm.cu
_COEFFICIENTS = 7
#: minimum number of rows that a thread sums, if there are enough
_ROWS = 4
#: blocks per multiprocessor. All blocks of a sum run at once; other passes have more, so that few multiprocessors idle at the end
_SUM_BLOCKS, _PASS_BLOCKS = 3, 32
_WARP = 32
#: bits of the argument `flags` of bn_backward_input: whether each gradient is wanted, and whether it is added to
_GRADIENT, _ADD_GRADIENT, _RESIDUAL, _ADD_RESIDUAL = 1, 2, 4, 8


@dataclass(frozen=True)
class ChannelBlocks:
    """The division of (rows, channels) into blocks of threads: packs of channels along x, rows along y.

    Attributes:
        width: number of elements in a pack.
        block: number of threads along x and y.
        sums: number of blocks along x and y for kernels that sum over rows.
        passes: number of blocks along x and y for kernels that write each row.
    """

    width: int
    block: Extent
    sums: Extent
    passes: Extent

    @classmethod
    def of(cls, rows: int, channels: int, dtype: str, multiprocessors: int) -> ChannelBlocks:
        """Return blocks at most as wide as a warp, which divide the packs of a row evenly, so that few threads are idle."""
        width = pack_width(item_bytes(dtype), channels)
        packs = channels // width
        tiles = -(-packs // _WARP)
        wide = -(-packs // tiles)
        high = THREADS // wide

        def grid(blocks: int, rows_of_a_thread: int) -> Extent:
            return (tiles, min(max(1, blocks * multiprocessors // tiles), -(-rows // (rows_of_a_thread * high))))

        return cls(width, (wide, high), grid(_SUM_BLOCKS, _ROWS), grid(_PASS_BLOCKS, 1))


class CudaBatchNorm(InPlace, CudaOperator):
    """Batch norm: y = gamma * (x - mean) / sqrt(var + epsilon) + beta, with the sum and the ReLU of a fused spec.

    Statistics and coefficients have the dtype of parameters, and are computed in float64 from sums over parts of the rows. Of the
    activations, backward reads only x and dy. It recomputes from x where a fused ReLU was zero. If a second input was added,
    forward saves the mask of the ReLU instead, one byte per pack of elements. `backward_parameters` computes coefficients that
    `backward_input` reads, so it comes first.
    """

    def __init__(self, spec: BatchNormSpec, *inputs: TensorSpec, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, inputs, training=training, runtime=runtime)
        self.norm = spec
        self.needs_inputs = (training, *(False for _ in inputs[1:]))
        channels, sums = spec.channels, parameter_dtype(self.dtype)
        self._rows = math.prod(inputs[0].shape[:-1])
        self._blocks = ChannelBlocks.of(self._rows, channels, self.dtype, runtime.device.multiprocessors)
        self._stores_mask = training and spec.relu and spec.add
        masks = self._rows * channels // self._blocks.width if self._stores_mask else 0
        coefficients = ((_COEFFICIENTS, channels), sums)
        partial = ((2, channels, self._blocks.sums[1]), sums)
        if training:
            self.declare(saved=[coefficients, ((masks,), "uint8")], scratch=[partial, *self.more_scratch(channels)])
        else:
            self.declare(scratch=[coefficients])

    def more_scratch(self, channels: int) -> Sequence[Request]:
        """Return the scratch arrays that an operator for training needs in addition to the sums over parts."""
        return ()

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        arrays = (*buffers.inputs, buffers.output, buffers.output_grad, *buffers.input_grads)
        held = [array for array in arrays if array is not None and array.size]
        assert all(array.pointer % (self._blocks.width * array.itemsize) == 0 for array in held), "activations are aligned"

    def forward(self, context: StepContext) -> None:
        if self.training and context.training and not self.norm.fixed:
            self._measure()
        else:
            statistics = self.buffers.statistics["running_mean"], self.buffers.statistics["running_var"]
            arguments = *statistics, *self._affine, self._coefficients, *self._channels, np.float64(self.norm.epsilon)
            self._launch_each_channel("bn_evaluation", *arguments)
        buffers = self.buffers
        residual = buffers.inputs[1] if self.norm.add else None
        mask = self._mask if context.training else None
        name = f"bn_apply{'_add' if self.norm.add else ''}{'_relu' if self.norm.relu else ''}"
        self._launch_packs(
            name, self._blocks.passes, buffers.inputs[0], residual, self._coefficients, buffers.output, mask, np.int64(self._rows)
        )

    def backward_parameters(self) -> None:
        gradients, blocks = self.buffers.gradients, self._blocks
        rows, partial = np.int64(self._rows), self.scratch[0]
        self._launch_packs(f"bn_backward_sums{self._kind}", blocks.sums, *self._read_backward(), partial, rows)
        self._finish_gradients(partial, gradients["weight"], gradients["bias"], np.int32(blocks.sums[1]))

    def _finish_gradients(self, partial: DeviceArray, d_gamma: DeviceArray, d_beta: DeviceArray, parts: np.int32) -> None:
        """Enqueue the parameters' gradients and the coefficients of the input's gradient, from the sums over `parts` parts."""
        rows = np.int64(self._rows)
        self._launch_channels("bn_backward_finish", partial, self._coefficients, d_gamma, d_beta, parts, rows, *self._channels)

    def backward_input(self) -> None:
        grad, residual = self.input_grad(0), self.input_grad(1)
        flags = _flags(grad, self.accumulates(0), _GRADIENT, _ADD_GRADIENT)
        flags |= _flags(residual, self.accumulates(1), _RESIDUAL, _ADD_RESIDUAL)
        if flags:
            name, passes = f"bn_backward_input{self._kind}", self._blocks.passes
            self._launch_packs(name, passes, *self._read_backward(), grad, residual, np.int32(flags), np.int64(self._rows))

    def _measure(self) -> None:
        """Enqueue the statistics of the batch, and the coefficients computed from them."""
        buffers, blocks, partial = self.buffers, self._blocks, self.scratch[0]
        x = buffers.inputs[0]
        rows, high = np.int64(self._rows), np.int64(blocks.block[1])
        self._launch_packs("bn_moments", blocks.sums, x, partial, rows)
        self._finish_moments(partial, x, np.int32(blocks.sums[1]), rows, high)

    def _finish_moments(self, partial: DeviceArray, x: DeviceArray, *sizes: np.generic) -> None:
        """Enqueue statistics and coefficients from the sums over parts.

        Args:
            sizes: number of parts, number of rows, and number of rows of a block.
        """
        constants = *self._channels, np.float64(self.norm.epsilon)
        arrays = *self._affine, self._coefficients, *self._batch_statistics
        self._launch_channels("bn_moments_finish", partial, x, *arrays, *sizes, *constants)

    @property
    def _coefficients(self) -> DeviceArray:
        return self.saved[0] if self.training else self.scratch[0]

    @property
    def _mask(self) -> DeviceArray | None:
        return self.saved[1] if self._stores_mask else None

    @property
    def _kind(self) -> str:
        """Suffix of backward kernels: "_mask" to read the saved mask, "_relu" to recompute the ReLU from x, otherwise ""."""
        return "_mask" if self._stores_mask else "_relu" if self.norm.relu else ""

    @property
    def _affine(self) -> tuple[DeviceArray, DeviceArray]:
        return self.buffers.parameters["weight"], self.buffers.parameters["bias"]

    @property
    def _batch_statistics(self) -> tuple[DeviceArray, DeviceArray]:
        return self.buffers.statistics["batch_mean"], self.buffers.statistics["batch_var"]

    @property
    def _channels(self) -> tuple[np.int32]:
        return (np.int32(self.norm.channels),)

    def _read_backward(self) -> tuple[Argument, ...]:
        return self.buffers.inputs[0], self.output_grad, self._mask, self._coefficients

    def _launch_packs(self, name: str, grid: Extent, *arguments: Argument) -> None:
        """Enqueue a kernel over packs of channels and rows, unless there are no rows."""
        blocks = self._blocks
        kernel = f"{name}_{self.tag}_w{blocks.width}"
        self.runtime.launch("batch_norm", kernel, grid, blocks.block, *arguments, *self._channels)

    def _launch_each_channel(self, name: str, *arguments: Argument) -> None:
        """Enqueue a kernel with one thread per channel."""
        grid = (-(-self.norm.channels // THREADS),)
        self.runtime.launch("batch_norm", f"{name}_{self.tag}", grid, (THREADS,), *arguments)

    def _launch_channels(self, name: str, *arguments: Argument) -> None:
        """Enqueue a kernel with one warp per channel."""
        grid, block = (-(-self.norm.channels * _WARP // THREADS),), (_WARP, THREADS // _WARP)
        self.runtime.launch("batch_norm", f"{name}_{self.tag}", grid, block, *arguments)


def _flags(grad: DeviceArray | None, accumulates: bool, asked: int, added: int) -> int:
    return 0 if grad is None else asked | (added if accumulates else 0)


class CudaSynchronisedBatchNorm(CallsHost, CudaBatchNorm):
    """`CudaBatchNorm` with moments and sums that the host merges over ranks. On a single rank, the results are the same.

    Collective over the merger's ranks: in training, unless the statistics are fixed, `forward` and `backward_input` (if an input
    gradient is wanted) call the merger once each and wait for it. Each copies (2, channels) in float64 to the host and back.
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
