"""Batch normalisation (Ioffe and Szegedy, ICML 2015), with statistics of one rank or of several."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.numpy.operator import NumpyOperator, RowBlocks
from hpctrain.backend.operators import Buffers, InPlace, StepContext
from hpctrain.backend.specs import BatchNormSpec, TensorSpec


class NumpyBatchNorm(InPlace, NumpyOperator):
    """Batch norm: y = gamma * (x - mean) / sqrt(var + epsilon) + beta, with the sum and the ReLU of a fused spec.

    Collective over the merger's ranks if the spec has `synchronised` set: in training, unless the statistics are fixed, `forward`
    and `backward_input` (if an input gradient is wanted) call the merger once each. `backward_parameters` computes the sums that
    `backward_input` reads, so it comes first.
    """

    def __init__(self, spec: BatchNormSpec, *inputs: TensorSpec, training: bool) -> None:
        super().__init__(spec, inputs, training=training)
        self.norm = spec
        self.blocks = RowBlocks(inputs[0].shape)
        self.needs_inputs = (training and not spec.fixed, *(False for _ in inputs[1:]))
        self.needs_output = training and spec.relu
        block = ((self.blocks.largest,), self.dtype)
        mask = ((self.blocks.largest if spec.relu else 0,), "bool")
        saved = [((2, spec.channels), "float64"), ((2, spec.channels), "float64")] if training else []
        self.declare(saved=saved, scratch=[block, block, mask])

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        blocks = self.blocks
        self.x = blocks.views(buffers.inputs[0])
        self.y = blocks.views(buffers.output)
        self.residual = blocks.views(buffers.inputs[1]) if self.norm.add else []
        self.work = [self.scratch[0][: view.size].reshape(view.shape) for view in self.x]
        self.spare = [self.scratch[1][: view.size].reshape(view.shape) for view in self.x]
        self.ones = np.ones(blocks.height, self.dtype)
        self.zeros = np.zeros(blocks.width, self.dtype)
        self.count = 0
        if not self.training:
            return
        self.moments, self.sums = self.saved
        if buffers.output_grad is not None:
            self.dy = blocks.views(buffers.output_grad)
            self.masks = [self.scratch[2][: view.size].reshape(view.shape) for view in self.x] if self.norm.relu else []
            self.grads = [None if grad is None else blocks.views(grad) for grad in buffers.input_grads]

    def forward(self, context: StepContext) -> None:
        if self.training and context.training and not self.norm.fixed:
            self._measure()
            mean, deviation = self.moments
        else:
            mean = self.buffers.statistics["running_mean"].astype(np.float64)
            deviation = self._running_deviation()
        self._normalise(mean, deviation)

    def _running_deviation(self) -> np.ndarray:
        """Return 1 / standard deviation from the running statistics."""
        return np.asarray(1.0 / np.sqrt(self.buffers.statistics["running_var"].astype(np.float64) + self.norm.epsilon))

    def _measure(self) -> None:
        """Compute mean, 1 / standard deviation and the batch statistics.

        Deviations are computed relative to the mean of the first block, which lies within sqrt(b) standard deviations of the true
        mean if there are b blocks. Correcting for the difference therefore loses no significant digits. Blocks are summed in
        float64.
        """
        count, merged = self.blocks.rows, self.blocks.rows
        mean, m2 = np.zeros((2, self.norm.channels), np.float64)
        if count:
            first = self.x[0]
            shift = self.blocks.fold(self._column_sums(first)) / (first.size // self.norm.channels)
            shift = shift.astype(self.dtype).astype(np.float64)
            total, squares = self._deviations(self.blocks.tile(shift, self.dtype))
            mean[:] = shift + total / count
            m2[:] = np.maximum(squares - total * total / count, 0.0)
        if self.norm.synchronised:
            merged = self.buffers.merger.merge(count, mean, m2)
        self.count = merged
        self.moments[0] = mean
        self.moments[1] = 1.0 / np.sqrt(m2 / max(merged, 1) + self.norm.epsilon)
        self.buffers.statistics["batch_mean"][...] = mean
        self.buffers.statistics["batch_var"][...] = m2 / max(merged - 1, 1)

    def _deviations(self, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums of x - shift and of its square, per channel, float64."""
        total, squares = self.blocks.sums(), self.blocks.sums()
        for x, work in zip(self.x, self.work, strict=True):
            np.subtract(x, shift[: x.shape[1]], out=work)
            self._add_columns(work, total)
            np.multiply(work, work, out=work)
            self._add_columns(work, squares)
        return self.blocks.fold(total), self.blocks.fold(squares)

    def _add_columns(self, block: np.ndarray, sums: np.ndarray) -> None:
        """Add the column sums of a block, computed in its dtype, to the float64 `sums`."""
        part = sums[: block.shape[1]]
        np.add(part, self._column_sums(block), out=part)

    def _column_sums(self, block: np.ndarray) -> np.ndarray:
        # The product with a vector of ones is the fastest reduction over several rows.
        return np.asarray(self.ones[: block.shape[0]] @ block if block.shape[0] > 1 else block[0])

    def _normalise(self, mean: np.ndarray, deviation: np.ndarray) -> None:
        gamma, beta = self.buffers.parameters["weight"], self.buffers.parameters["bias"]
        tile, dtype = self.blocks.tile, self.dtype
        # Subtracting first keeps the digits that x * scale + shift loses if the mean is large.
        centre, scale, offset = tile(mean, dtype), tile(gamma * deviation, dtype), tile(beta, dtype)
        for i, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            width = x.shape[1]
            work = self.work[i] if self.norm.add else y
            np.subtract(x, centre[:width], out=work)
            np.multiply(work, scale[:width], out=work)
            np.add(work, offset[:width], out=work)
            if self.norm.add:
                np.add(work, self.residual[i], out=y)
            if self.norm.relu:
                np.maximum(y, self.zeros[:width], out=y)

    def _masked(self, i: int) -> np.ndarray:
        """Return block i of dy, with zeros where the ReLU was inactive."""
        if not self.norm.relu:
            return self.dy[i]
        np.greater(self.y[i], 0, out=self.masks[i])
        np.multiply(self.dy[i], self.masks[i], out=self.spare[i])
        return self.spare[i]

    def backward_parameters(self) -> None:
        mean, deviation = self.moments
        centre = self.blocks.tile(mean, self.dtype)
        d_gamma, d_beta = self.blocks.sums(), self.blocks.sums()
        for i, (x, work) in enumerate(zip(self.x, self.work, strict=True)):
            dy = self._masked(i)
            np.subtract(x, centre[: x.shape[1]], out=work)
            np.multiply(work, dy, out=work)
            self._add_columns(work, d_gamma)
            self._add_columns(dy, d_beta)
        self.sums[0] = self.blocks.fold(d_gamma) * deviation
        self.sums[1] = self.blocks.fold(d_beta)
        self.buffers.gradients["weight"][...] = self.sums[0]
        self.buffers.gradients["bias"][...] = self.sums[1]

    def backward_input(self) -> None:
        if all(grad is None for grad in self.grads):
            return
        if self.norm.fixed:
            self._scale_gradient()
            return
        mean, deviation = self.moments
        sums = self.sums.copy()
        if self.norm.synchronised:
            self.buffers.merger.sum(sums.reshape(-1))
        sums /= max(self.count, 1)
        tile, dtype = self.blocks.tile, self.dtype
        centre, slope, offset = tile(mean, dtype), tile(deviation * sums[0], dtype), tile(sums[1], dtype)
        scale = tile(self.buffers.parameters["weight"] * deviation, dtype)
        for i, (x, work) in enumerate(zip(self.x, self.work, strict=True)):
            width = x.shape[1]
            dy = self._masked(i)
            np.subtract(x, centre[:width], out=work)
            np.multiply(work, slope[:width], out=work)
            np.subtract(dy, work, out=work)
            np.subtract(work, offset[:width], out=work)
            if len(self.grads) > 1:
                # The residual's gradient is dy itself. Write it first: the gradient of x may share the buffer of dy.
                self._store_gradient(1, i, dy)
            dx = self.grads[0]
            if dx is not None and not self.accumulates():
                np.multiply(work, scale[:width], out=dx[i])
            else:
                np.multiply(work, scale[:width], out=work)
                self._store_gradient(0, i, work)

    def _scale_gradient(self) -> None:
        """Write the input's gradient for constant mean and deviation, which do not depend on the input."""
        scale = self.blocks.tile(self.buffers.parameters["weight"] * self._running_deviation(), self.dtype)
        for i, (x, work) in enumerate(zip(self.x, self.work, strict=True)):
            dy = self._masked(i)
            if len(self.grads) > 1:
                self._store_gradient(1, i, dy)
            np.multiply(dy, scale[: x.shape[1]], out=work)
            self._store_gradient(0, i, work)

    def _store_gradient(self, j: int, i: int, values: np.ndarray) -> None:
        """Write `values` to block i of the gradient of input j, or add them."""
        views = self.grads[j]
        if views is None:
            return
        if self.accumulates(j):
            np.add(views[i], values, out=views[i])
        else:
            np.copyto(views[i], values)
