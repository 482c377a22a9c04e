"""The last layers of a classifier on a device: the fully connected layer, and softmax cross entropy.

The loss has label smoothing (Szegedy et al., CVPR 2016) and weights of classes, and counts top-1 and top-5 hits.
"""

from __future__ import annotations

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.device import DeviceArray, pack_width
from hpctrain.backend.cuda.operator import ColumnSums, CudaOperator, carve, check_images, row_launch, total_bytes
from hpctrain.backend.cuda.runtime import TAGS, CudaFetch, CudaRuntime, FetchBuffers, Staging
from hpctrain.backend.operators import (
    Buffers,
    LossOperator,
    LossSums,
    MixedLabels,
    Request,
    StepContext,
    SufficientFactors,
    checked_labels,
)
from hpctrain.backend.specs import LinearSpec, SoftmaxCrossEntropySpec, TensorSpec


class CudaLinear(SufficientFactors, CudaOperator):
    """Linear layer: y (N, out) = x (N, in) @ weight (in, out) + bias (out), with the weight in the dtype of activations.

    The bias and both parameter gradients have the dtype of parameters, in which all products are summed. With bfloat16 and a
    bias, the product is written to float32 scratch, so that it is rounded only once, after the bias is added.
    """

    def __init__(self, spec: LinearSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime, arithmetic: Arithmetic) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        self.linear = spec
        self.needs_inputs = (training,)
        self._arithmetic = arithmetic
        samples, outputs = self.output.shape
        check_images("linear", (samples, 1, 1, outputs))
        self._sums = ColumnSums(samples, outputs, self.dtype, runtime) if training and spec.bias else None
        separate = spec.bias and runtime.parameter_dtype != self.dtype
        nothing: Request = ((0,), runtime.parameter_dtype)
        self._product: Request = (self.output.shape, runtime.parameter_dtype) if separate else nothing
        self._partial: Request = nothing if self._sums is None else self._sums.scratch
        self.scratch_bytes = max(total_bytes([self._product]), total_bytes([self._partial]))
        self._weight: DeviceArray | None = None

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        weight = {**buffers.parameters, **buffers.shadows}["weight"]
        assert weight.dtype == self.dtype, f"the weight of a linear layer in {self.dtype} is {weight.dtype}"
        self._weight = weight

    def forward(self, context: StepContext) -> None:
        y = self.buffers.output
        if not y.size:
            return
        product = y
        if self._product[0] == y.shape:
            (product,) = carve(self.buffers.scratch, [self._product])
        assert self._weight is not None
        self.runtime.multiply(self.buffers.inputs[0], self._weight, product)
        if self.linear.bias:
            samples, outputs = y.shape
            width = pack_width(y.itemsize, outputs, (product, y))
            grid, block = row_launch(samples, outputs // width, self.runtime.device.multiprocessors)
            sizes = np.int32(outputs // width), np.int32(samples)
            kernel = f"add_bias_{self.tag}_w{width}"
            self.runtime.launch("linear", kernel, grid, block, product, self.buffers.parameters["bias"], y, *sizes)

    def backward_parameters(self) -> None:
        dy, gradient = self.output_grad, self.buffers.gradients["weight"]
        if dy.size:
            self.runtime.multiply(self.buffers.inputs[0], dy, gradient, transpose_a=True)
        else:
            self._arithmetic.fill(gradient, 0.0)
        if self._sums is not None:
            (partial,) = carve(self.buffers.scratch, [self._partial])
            self._sums.run(dy, self.buffers.gradients["bias"], partial)

    def backward_input(self) -> None:
        grad = self.input_grad()
        if grad is not None and grad.size:
            assert self._weight is not None
            self.runtime.multiply(self.output_grad, self._weight, grad, transpose_b=True, accumulate=self.accumulates())


_CLASSES_OF_A_WARP, _WARP, _MOST_THREADS = 128, 32, 256
_SUMS = 3  # loss, number of labels ranked first, number ranked among the first `top`


class CudaLossHandle:
    """Implementation of `LossHandle` for the sums of one batch of `count` samples; None: the batch is empty."""

    def __init__(self, sums: CudaFetch | None, count: int) -> None:
        self._sums, self._count = sums, count

    def result(self) -> LossSums:
        if self._sums is None:
            return LossSums(0.0, 0, 0, 0)
        loss, top1, top5 = self._sums.result().tolist()
        return LossSums(loss, int(top1), int(top5), self._count)


class _Rows:
    """Memory for the labels, losses and ranks of up to `capacity` rows."""

    def __init__(self, runtime: CudaRuntime, capacity: int) -> None:
        def memory(dtype: str, item_bytes: int) -> DeviceArray:
            return runtime.device.allocate(capacity * item_bytes).view(dtype)

        self.labels, self.ranks, self.losses = memory("int32", 4), memory("int32", 4), memory("float64", 8)
        self.staging = Staging(runtime, 4 * capacity, count=2)


class CudaSoftmaxCrossEntropy(LossOperator):
    """Loss over logits (N, classes) on the device and integer labels (N,) on the host.

    Losses are summed in float64 for every dtype of logits. Memory for rows is allocated once for each batch size, rounded up to a
    power of two.
    """

    def __init__(self, spec: SoftmaxCrossEntropySpec, runtime: CudaRuntime) -> None:
        self.spec, self._runtime = spec, runtime
        self._sums = runtime.device.allocate(8 * _SUMS).view("float64")
        self._fetches = FetchBuffers(runtime, self._sums.nbytes)
        self._rows: dict[int, _Rows] = {}
        self._weights: DeviceArray | None = None
        if spec.class_weights:
            self._weights = runtime.device.allocate(8 * len(spec.class_weights)).view("float64")
            Staging(runtime, self._weights.nbytes, count=1).upload(self._weights, np.array(spec.class_weights))
            runtime.stream.synchronize()  # before the pinned memory is freed

    def run(
        self,
        logits: DeviceArray,
        labels: np.ndarray | MixedLabels,
        global_count: int,
        d_logits: DeviceArray | None,
        class_scale: float | None = None,
    ) -> CudaLossHandle:
        assert not isinstance(labels, MixedLabels), "configurations that mix images are refused for this set"
        count, classes = logits.shape
        if count == 0:
            return CudaLossHandle(None, 0)
        capacity = 1 << (count - 1).bit_length()
        if capacity not in self._rows:
            self._rows[capacity] = _Rows(self._runtime, capacity)
        rows = self._rows[capacity]
        rows.staging.upload(rows.labels[:count], checked_labels(labels, classes))
        threads = min(_MOST_THREADS, -(-classes // _CLASSES_OF_A_WARP) * _WARP)
        weights, factor = (None, 1.0) if class_scale is None else (self._weights, class_scale)
        places = (logits, rows.labels, d_logits, rows.losses, rows.ranks, weights)
        scale = 0.0 if d_logits is None else 1.0 / global_count
        mean = 1.0 if weights is None else factor * float(np.mean(self.spec.class_weights))
        numbers = (np.float64(self.spec.smoothing), np.float64(factor), np.float64(mean), np.float64(scale))
        scalars = (np.int32(classes), *numbers)
        self._runtime.launch("loss", f"cross_entropy_{TAGS[logits.dtype]}", (count,), (threads,), *places, *scalars)
        arguments = (rows.losses, rows.ranks, self._sums, np.int32(self.spec.top), np.int64(count))
        self._runtime.launch("loss", "sum_losses", (1,), (_MOST_THREADS,), *arguments)
        return CudaLossHandle(self._fetches.fetch(self._sums), count)
