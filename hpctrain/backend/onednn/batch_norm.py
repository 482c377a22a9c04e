"""Batch normalisation (Ioffe and Szegedy 2015), alone, or followed by a ReLU or by a residual sum and a ReLU.

oneDNN has no kernel for the residual sum, so it is a second primitive: y = bn(x), then y = max(y + r, 0) in place. In bfloat16
this would round twice. The second primitive is therefore y = max(scale * x + shift + r, 0), and only the statistics of the first
one are used. Backward writes dy, masked by y, to the gradient of r, from which batch norm's backward reads it.
"""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Call, Descriptor, Engine, Primitive
from hpctrain.backend.onednn.elementwise import Addition, ReluMask
from hpctrain.backend.onednn.operator import (
    BACKWARD,
    BLOCKS,
    FORWARD,
    NCHW,
    LibraryOperator,
    Regions,
    elements,
    images,
    part,
    rows,
    vector,
)
from hpctrain.backend.operators import Array, Buffers, InPlace, JointBackward, StepContext
from hpctrain.backend.specs import BatchNormSpec, TensorSpec


class ScaledSum:
    """Batch norm and the residual sum in one pass: y = max(scale * x + shift + r, 0), which rounds once.

    Scale and shift are repeated to the size of one image, since the library has no kernel that broadcasts them over pixels of
    blocked channels.

    Attributes:
        factors_bytes: size of the repeated scale and shift in bytes.
    """

    def __init__(self, engine: Engine, label: str, x: TensorSpec, epsilon: float) -> None:
        self._spec, self._epsilon = x, epsilon
        self._elements = x.size // x.shape[0]
        self.factors_bytes = 2 * 4 * self._elements
        self._values = Descriptor.tagged(engine, (x.shape[0], self._elements), "ab", x.dtype)
        self._factor = Descriptor.tagged(engine, (1, self._elements), "ab")
        attributes = Attributes(engine, then=[(c.BINARY_ADD, self._factor), (c.BINARY_ADD, self._values)], relu=True)
        values, factor = self._values, self._factor
        self.primitive = Primitive(engine, "binary", f"{label}, sum", c.BINARY_MUL, values, factor, values, attributes)
        assert self.primitive.scratchpad_bytes == 0, label
        self._scale: Array = None
        self._shift: Array = None
        self._channel_factors: Array = None  # scale and shift per channel, float64
        self._statistics: tuple[Array, Array] = (None, None)
        self._parameters: tuple[Array, Array] = (None, None)
        self._call: Call | None = None

    def bind(self, buffers: Buffers, factors: Array, mean: Array, var: Array) -> None:
        """Prepare the call.

        Args:
            factors: scratch for scale and shift.
            mean, var: statistics (C,), which must be complete before each call.
        """
        scale, shift = factors.view(np.float32).reshape(2, self._elements)
        self._scale, self._shift = self._by_channel(scale), self._by_channel(shift)
        self._statistics = mean, var
        self._parameters = buffers.parameters["weight"], buffers.parameters["bias"]
        self._channel_factors = np.zeros((2, math.prod(self._scale.shape[::2])))  # channels of padding stay 0
        memories = {
            c.ARG_SRC: (self._values, buffers.inputs[0]),
            c.ARG_SRC_1: (self._factor, scale),
            c.ARG_DST: (self._values, buffers.output),
            c.post_operand(0): (self._factor, shift),
            c.post_operand(1): (self._values, buffers.inputs[1]),
        }
        self._call = self.primitive.bind(memories)

    def _by_channel(self, image: Array) -> Array:
        """Return a view (blocks of channels, pixels, channels per block) of the elements of one image."""
        layout, channels = self._spec.layout, self._spec.shape[-1]
        width = BLOCKS.get(layout, 1 if layout == NCHW else channels)
        blocks = -(-channels // width)
        return image.reshape(blocks, -1, width)

    def __call__(self) -> None:
        """Compute scale and shift from the statistics and parameters, then run the primitive."""
        (mean, var), (gamma, beta) = self._statistics, self._parameters
        scale, shift = (factors[: len(mean)] for factors in self._channel_factors)
        np.add(var, self._epsilon, out=scale)
        np.sqrt(scale, out=scale)
        np.divide(gamma, scale, out=scale)
        np.multiply(mean, scale, out=shift)
        np.subtract(beta, shift, out=shift)
        for values, factors in zip((self._scale, self._shift), self._channel_factors, strict=True):
            np.copyto(values, factors.reshape(values.shape[0], 1, values.shape[2]), casting="same_kind")
        assert self._call is not None, "the sum is not bound"
        self._call()


class BatchNormOperator(InPlace, JointBackward, LibraryOperator):
    """Batch norm: y = gamma (x - mean) / sqrt(var + epsilon) + beta, in x's layout.

    Training writes the batch's mean and unbiased variance to the statistics "batch_mean" and "batch_var". The biased variance,
    which backward needs, is saved. With a single value per channel, the biased variance 0 replaces the undefined unbiased one.
    """

    def __init__(self, engine: Engine, spec: BatchNormSpec, x: TensorSpec, *, training: bool) -> None:
        self.spec, self._training = spec, training
        self.inputs = (x, x) if spec.add else (x,)
        self.output = x
        self.needs_inputs = (True, False) if spec.add else (True,)
        self.needs_output = spec.add
        count = int(np.prod(x.shape[:-1]))
        self._unbias = count / (count - 1) if count > 1 else 1.0
        label = f"batch norm of {x.shape}"
        self._values = images(engine, x) if len(x.shape) == 4 else rows(engine, x)
        self._channels = vector(engine, spec.channels)
        self._make_primitives(engine, label)
        self._add = Addition(engine, label, elements(engine, x), relu=True) if spec.add and x.dtype == "float32" else None
        self._scaled_sum = ScaledSum(engine, label, x, spec.epsilon) if spec.add and self._add is None else None
        self._mask = ReluMask(engine, f"{label} backward", elements(engine, x)) if spec.add and training else None
        saved = Regions()
        self._mean_part, self._var_part = saved.add(4 * spec.channels), saved.add(4 * spec.channels)
        workspace_bytes = self._workspace.size_bytes if self._fused_relu and training else 0
        self._workspace_part = saved.add(workspace_bytes)
        self.saved_bytes = saved.total_bytes if training else 0
        scratch = Regions()
        self._library_part = scratch.add(self._scratchpad_bytes)
        if self._scaled_sum is not None:
            self.primitives = {**self.primitives, "forward, sum": self._scaled_sum.primitive}
            self._factors_part = scratch.add(self._scaled_sum.factors_bytes)
        self.scratch_bytes = scratch.total_bytes

    @property
    def _fused_relu(self) -> bool:
        assert isinstance(self.spec, BatchNormSpec)
        return self.spec.relu and not self.spec.add

    def _make_primitives(self, engine: Engine, label: str) -> None:
        spec = self.spec
        assert isinstance(spec, BatchNormSpec)
        values, defaults = self._values, Attributes(engine)
        flags = c.USE_SCALE | c.USE_SHIFT | (c.FUSE_NORM_RELU if self._fused_relu else 0)
        forward = "batch_normalization_forward"
        if not self._training:
            flags |= c.USE_GLOBAL_STATS
            kind = (c.FORWARD_INFERENCE, values, values, spec.epsilon, flags, defaults)
            self._forward_primitive = Primitive(engine, forward, f"{label} forward", *kind)
            self._scratchpad_bytes = self._forward_primitive.scratchpad_bytes
            self.primitives = {FORWARD: self._forward_primitive}
            return
        kind = (c.FORWARD_TRAINING, values, values, spec.epsilon, flags, defaults)
        self._forward_primitive = Primitive(engine, forward, f"{label} forward", *kind)
        self._backward_primitive = Primitive(
            engine,
            "batch_normalization_backward",
            f"{label} backward",
            c.BACKWARD,
            values,
            values,
            values,
            spec.epsilon,
            flags,
            self._forward_primitive,
            defaults,
        )
        self.primitives = {FORWARD: self._forward_primitive, BACKWARD: self._backward_primitive}
        self._workspace = self._forward_primitive.descriptor(c.QUERY_WORKSPACE_MD)
        self._scratchpad_bytes = max(self._forward_primitive.scratchpad_bytes, self._backward_primitive.scratchpad_bytes)

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        saved, library = buffers.saved, part(buffers.scratch, self._library_part)
        if self._training:
            self._mean = part(saved, self._mean_part).view(np.float32)
            self._var = part(saved, self._var_part).view(np.float32)
        else:
            self._mean, self._var = buffers.statistics["running_mean"], buffers.statistics["running_var"]
        memories = self._common(buffers)
        memories[c.ARG_DST] = (self._values, buffers.output)
        memories[c.ARG_SHIFT] = (self._channels, buffers.parameters["bias"])
        self._forward = self._forward_primitive.bind(memories, library)
        if self._add is not None:
            self._forward_sum = self._add.bind(buffers.output, buffers.inputs[1], buffers.output)
        if self._scaled_sum is not None:
            self._scaled_sum.bind(buffers, part(buffers.scratch, self._factors_part), self._mean, self._var)
        if self._training and buffers.gradients:
            self._bind_backward(buffers, library)

    def _common(self, buffers: Buffers) -> dict[int, tuple[Descriptor, Array]]:
        memories = {
            c.ARG_SRC: (self._values, buffers.inputs[0]),
            c.ARG_MEAN: (self._channels, self._mean),
            c.ARG_VARIANCE: (self._channels, self._var),
            c.ARG_SCALE: (self._channels, buffers.parameters["weight"]),
        }
        if self._training and self._fused_relu:
            memories[c.ARG_WORKSPACE] = (self._workspace, part(buffers.saved, self._workspace_part))
        return memories

    def _bind_backward(self, buffers: Buffers, library: Array) -> None:
        gradient = buffers.output_grad
        self._apply_mask: Call | None = None
        if self._mask is not None:
            residual = buffers.input_grads[1]
            masked = gradient if residual is None else residual
            self._apply_mask = self._mask.bind(buffers.output, gradient, masked)
            gradient = masked
        target = buffers.input_grads[0]
        memories = self._common(buffers)
        memories[c.ARG_DIFF_DST] = (self._values, gradient)
        # oneDNN always writes the input's gradient. If it is not wanted, it overwrites the output's, which has no other reader.
        memories[c.ARG_DIFF_SRC] = (self._values, gradient if target is None else target)
        memories[c.ARG_DIFF_SCALE] = (self._channels, buffers.gradients["weight"])
        memories[c.ARG_DIFF_SHIFT] = (self._channels, buffers.gradients["bias"])
        self._backward = self._backward_primitive.bind(memories, library)

    def forward(self, context: StepContext) -> None:
        if self._training or self._scaled_sum is None:
            self._forward()
        if self._add is not None:
            self._forward_sum()
        if self._scaled_sum is not None:
            self._scaled_sum()
        self._backward_done = False
        if self._training:
            statistics = self.buffers.statistics
            np.copyto(statistics["batch_mean"], self._mean)
            np.multiply(self._var, self._unbias, out=statistics["batch_var"])

    def backward_parameters(self) -> None:
        self._run_backward()

    def backward_input(self) -> None:
        self._run_backward()

    def _run_backward(self) -> None:
        """Compute all gradients in the first half of backward, since they share their passes over memory."""
        if self._backward_done:
            return
        if self._apply_mask is not None:
            self._apply_mask()
        self._backward()
        self._backward_done = True
