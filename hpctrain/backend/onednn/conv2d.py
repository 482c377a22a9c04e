"""Convolution, with or without a ReLU after it: the choice of layout, kernels and weight formats, then the operator.

In float32, a convolution with few pixels and many weights is computed by im2col and the library's matrix products; in bfloat16,
only the gradient of its weights is. `Convolution` has the primitives of all other convolutions, not yet bound to memory.

The flat weights (KRSC) are copied to the kernels' blocked format. Training copies them at every forward and backward, since they
change every step and a cache would only take memory; evaluation copies them once after `parameters_changed`. Weight gradients are
copied back. If several programs run side by side, their operators read the copies of the first program's operators, provided that
their kernels read the same format.
"""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.numpy.conv2d import MANY_WEIGHTS, NumpyConv2d
from hpctrain.backend.numpy.windows import Columns
from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Descriptor, Engine, Primitive, Unimplemented
from hpctrain.backend.onednn.elementwise import GradientMask
from hpctrain.backend.onednn.operator import (
    BACKWARD_DATA,
    BACKWARD_WEIGHTS,
    BLOCKS,
    FORWARD,
    NCHW,
    Copy,
    LibraryOperator,
    Regions,
    adjoint,
    allocate,
    blocked_layout,
    convolution_geometry,
    images,
    in_layout,
    part,
    vector,
)
from hpctrain.backend.onednn.winograd import CallSequence, Product, Tiling, WeightGradient, Work
from hpctrain.backend.operators import (
    Accumulating,
    Array,
    Buffers,
    FollowsOperator,
    Operator,
    OutputReadOnce,
    ParameterCopies,
    Request,
    StepContext,
    aligned,
    carve,
    total_bytes,
)
from hpctrain.backend.rounded import BFLOAT16
from hpctrain.backend.specs import NHWC, Conv2dSpec, TensorSpec, WithRelu

# Speed of the direct 3x3 kernels relative to Winograd's products. Measured with AVX2, when these were 1x1 convolutions: 0.7 to
# 1.0, for weight gradients 0.5 to 0.7.
_DIRECT_SPEED = 1.0
_DIRECT_WEIGHTS_SPEED = 0.7


def describe(spec: Conv2dSpec, x: TensorSpec) -> str:
    """Return a description of a convolution, for errors and reports."""
    kernel = "x".join(map(str, spec.window.kernel))
    return f"conv2d {spec.channels_in}->{spec.channels_out} {kernel} on {x.shape}"


class Convolution:
    """The primitives of one convolution between images in given layouts.

    Attributes:
        forward: primitive of forward.
        backward_data: primitive of the input's gradient; None in evaluation, or if the gradient is not wanted.
        backward_weights: primitive of the weights' gradient; None in evaluation.
        weights: weight format that `forward` reads.
        backward_data_weights: weight format that `backward_data` reads.
        diff_weights: format in which the weights' gradient is written.
        adding: primitive that adds to the input's gradient, as a convolution of the output's gradient; None if oneDNN has no such
            kernel.
        winograd: replacement of `forward` in training, if faster; otherwise None.
        winograd_data: replacement of `backward_data`, if faster; otherwise None.
        weight_gradient: replacement of `backward_weights`, if faster: by Winograd in float32, by one product in bfloat16;
            otherwise None.
    """

    def __init__(
        self,
        engine: Engine,
        spec: Conv2dSpec,
        x: TensorSpec,
        layouts: tuple[str, str],
        *,
        training: bool,
        relu: bool,
        input_gradient: bool = True,
    ) -> None:
        self._engine, self.spec, self.label = engine, spec, describe(spec, x)
        self.x, self.y = in_layout(x.plain(), layouts[0]), in_layout(spec.output(x), layouts[1])
        # The descriptors keep the requested layout even if the memory is also plain, since oneDNN chooses kernels by the layout.
        self.source, self.destination = images(engine, self.x, layouts[0]), images(engine, self.y, layouts[1])
        self.bias = vector(engine, spec.channels_out) if spec.bias else None
        self.plain_weights = self._plain_weights()
        self._geometry = convolution_geometry(spec.window)
        self._defaults = Attributes(engine)
        kind = c.FORWARD_TRAINING if training else c.FORWARD_INFERENCE
        self.forward = self._forward(kind, Attributes(engine, relu=relu))
        self.weights = self.forward.descriptor(c.QUERY_WEIGHTS_MD)
        self.backward_data: Primitive | None = None
        self.backward_weights: Primitive | None = None
        self.adding: Primitive | None = None
        if training:
            formats = (self.source, self._any_weights("float32"), self.bias, self.destination)
            self.backward_weights = self._backward("weights", *formats)
            self.diff_weights = self.backward_weights.descriptor(c.QUERY_DIFF_WEIGHTS_MD)
        if training and input_gradient:
            self.backward_data = self._backward("data", self.source, self._any_weights(), self.destination)
            self.backward_data_weights = self.backward_data.descriptor(c.QUERY_WEIGHTS_MD)
            self._make_adding()
        self.winograd: Product | None = None
        self.winograd_data: Product | None = None
        self.weight_gradient: WeightGradient | ProductWeightGradient | None = None
        if training and self.x.dtype == "float32":  # in bfloat16, the direct kernels are faster than Winograd's
            self._make_winograd(relu, input_gradient)
        elif training and copies_are_slow(spec, self.x):
            self.weight_gradient = ProductWeightGradient(self)

    @property
    def primitives(self) -> tuple[Primitive, ...]:
        """All primitives that are not None."""
        every = (self.forward, self.backward_data, self.backward_weights, self.adding)
        return tuple(primitive for primitive in every if primitive is not None)

    @property
    def phases(self) -> dict[str, Primitive | None]:
        """Primitive of each phase; None if the phase is not wanted, or if another computation replaces the primitive."""
        return {
            FORWARD: None if self.winograd is not None else self.forward,
            BACKWARD_DATA: None if self.winograd_data is not None else self.backward_data,
            BACKWARD_WEIGHTS: None if self.weight_gradient is not None else self.backward_weights,
        }

    @property
    def winograd_shares(self) -> tuple[float | None, float | None, float | None]:
        """Operations of each phase by Winograd relative to those of the spec; see `Operator.winograd_shares`."""
        gradient = self.weight_gradient
        return (
            None if self.winograd is None else self.winograd.operation_share,
            gradient.operation_share if isinstance(gradient, WeightGradient) else None,
            None if self.winograd_data is None else self.winograd_data.operation_share,
        )

    @property
    def copied_bytes(self) -> tuple[int, int, int]:
        """Bytes that each phase of a training step copies between formats; see `Operator.copied_bytes`.

        Winograd's transforms of weights are not included, because they count as operations.
        """

        def copied(form: Descriptor | None, replacement: object) -> int:
            if form is None or replacement is not None or form.equals(self.plain_weights):
                return 0
            return self.plain_weights.size_bytes + form.size_bytes

        return (
            copied(self.weights, self.winograd),
            copied(self.diff_weights if self.backward_weights is not None else None, self.weight_gradient),
            copied(self.backward_data_weights if self.backward_data is not None else None, self.winograd_data),
        )

    @property
    def penalty(self) -> int:
        """Number of phases for which oneDNN has only its slow plain loops."""
        return sum(primitive.is_plain for primitive in self.phases.values() if primitive is not None)

    def _weight_dims(self) -> tuple[int, ...]:
        spec = self.spec
        shape = (spec.channels_out // spec.groups, spec.channels_in // spec.groups, *spec.window.kernel)
        return shape if spec.groups == 1 else (spec.groups, *shape)

    def _plain_weights(self) -> Descriptor:
        """Return the descriptor of KRSC memory in oneDNN's dims (groups, K, C, R, S)."""
        _, r, s, channels = self.spec.weight_shape
        strides: tuple[int, ...] = (r * s * channels, 1, s * channels, channels)
        grouped = self._weight_dims()
        if len(grouped) == 5:
            strides = (grouped[1] * r * s * channels, *strides)
        return Descriptor.strided(self._engine, grouped, strides)

    def _any_weights(self, dtype: str | None = None) -> Descriptor:
        """Return the descriptor of weights in a format that the primitive chooses. Default dtype: that of the images."""
        return Descriptor.tagged(self._engine, self._weight_dims(), "any", dtype or self.x.dtype)

    def _forward(self, kind: int, attributes: Attributes) -> Primitive:
        formats = (self.source, self._any_weights(), self.bias, self.destination)
        label = f"{self.label} forward"
        arguments = (kind, c.CONVOLUTION_DIRECT, *formats, *self._geometry, attributes)
        return Primitive(self._engine, "convolution_forward", label, *arguments)

    def _backward(self, gradient: str, *formats: Descriptor | None) -> Primitive:
        hint = self._forward(c.FORWARD_TRAINING, self._defaults)
        arguments = (c.CONVOLUTION_DIRECT, *formats, *self._geometry, hint, self._defaults)
        return Primitive(self._engine, f"convolution_backward_{gradient}", f"{self.label} backward {gradient}", *arguments)

    def _make_adding(self) -> None:
        """Create the primitive of dx += conv(dy, flipped and transposed weights), since oneDNN's backward kernels cannot add."""
        window = adjoint(self.spec.window)
        if window is None or self.spec.groups != 1:
            return
        k, r, s, channels = self.spec.weight_shape
        shape = (channels, k, r, s)
        formats = (self.destination, Descriptor.tagged(self._engine, shape, "any", self.x.dtype), None, self.source)
        kind = (c.FORWARD_TRAINING, c.CONVOLUTION_DIRECT)
        rest = (*convolution_geometry(window), Attributes(self._engine, kept=1.0))
        label = f"{self.label} backward data, adding"
        try:
            made = Primitive(self._engine, "convolution_forward", label, *kind, *formats, *rest)
        except Unimplemented:
            return
        if made.is_plain:
            return
        self.adding = made
        self.adding_weights = made.descriptor(c.QUERY_WEIGHTS_MD)
        self.transposed_weights = Descriptor.strided(self._engine, shape, (1, r * s * channels, s * channels, channels))

    def _make_winograd(self, relu: bool, input_gradient: bool) -> None:
        spec, block = self.spec, BLOCKS.get(self.y.layout, 0)
        channels, k, window = spec.channels_in, spec.channels_out, spec.window
        turned = adjoint(window)
        plain = window.kernel == (3, 3) and window.dilation == (1, 1) and spec.groups == 1
        if self.x.layout != self.y.layout or not block or channels % block or k % block or turned is None or not plain:
            return
        images, outputs = self.x.shape, self.y.shape
        forward = Tiling(images[0], (images[1], images[2]), channels, k, window.padding, block)
        backward = Tiling(images[0], (outputs[1], outputs[2]), k, channels, turned.padding, block)
        strides = (channels, 9 * channels, 1)
        if forward.pays(_DIRECT_SPEED):
            self.winograd = Product(self._engine, self.label, forward, strides, bias=spec.bias, relu=relu)
        if input_gradient and backward.pays(_DIRECT_SPEED):
            label = f"{self.label} backward data"
            self.winograd_data = Product(self._engine, label, backward, (channels, 1, 9 * channels), flipped=True)
        if forward.pays(_DIRECT_WEIGHTS_SPEED):
            self.weight_gradient = WeightGradient(self._engine, self.label, forward, strides, bias=spec.bias)


def choose(
    engine: Engine, spec: Conv2dSpec, x: TensorSpec, *, training: bool, relu: bool, input_gradient: bool = True
) -> Convolution:
    """Return the convolution in the first layout without slow kernels, otherwise in the layout with the fewest of them.

    Raises:
        Unimplemented: oneDNN has no kernels in any layout.
    """
    blocked = blocked_layout(engine)
    few = spec.channels_in // spec.groups < engine.block
    candidates = [(NCHW, blocked), (blocked, blocked)] if few and spec.groups == 1 else [(blocked, blocked)]
    candidates += [(NHWC, NHWC), (NCHW, NCHW)]
    best: Convolution | None = None
    refusal: Unimplemented | None = None
    for layouts in candidates:
        try:
            candidate = Convolution(engine, spec, x, layouts, training=training, relu=relu, input_gradient=input_gradient)
        except Unimplemented as error:
            refusal = error
            continue
        if candidate.penalty == 0:
            return candidate
        if best is None or candidate.penalty < best.penalty:
            best = candidate
    if best is None:
        assert refusal is not None
        raise refusal
    return best


# Maximum number of output pixels, over all images, for which matrix products are faster. They read or write the weights once,
# without a copy; the library's convolutions copy them to blocks, and their gradient back, in every step.
_FEW_PIXELS = 128


def copies_are_slow(spec: Conv2dSpec, x: TensorSpec) -> bool:
    """Return whether copies of the weights take about as long as the kernels: with few pixels, many weights and one group.

    The rule is fixed rather than measured at run time, so that all ranks choose alike.
    """
    pixels = math.prod(spec.output(x.plain()).shape[:3])
    return spec.groups == 1 and pixels <= _FEW_PIXELS and math.prod(spec.weight_shape) >= MANY_WEIGHTS


def products_pay(spec: Conv2dSpec, x: TensorSpec) -> bool:
    """Return whether im2col and matrix products are faster than the library's kernels in all phases of training.

    In bfloat16 they are faster only for the gradient of the weights (`ProductWeightGradient`): 1.1 to 3.3 times. The library's
    kernels for forward and the input's gradient take 0.9 to 1.0 of the time of the products (ResNet-34 on 48 pixels).
    """
    return x.dtype == "float32" and math.prod(spec.window.kernel) > 1 and copies_are_slow(spec, x)


class ProductWeightGradient:
    """Gradients of a convolution's weights, and of its bias if there is one, from bfloat16 images by one matrix product.

    The product of dy and the windows of x writes the weights' gradient in float32 to plain memory (KRSC). oneDNN's convolution
    would write blocks, and the copy to plain memory would take about as long as the kernel.
    """

    def __init__(self, plan: Convolution) -> None:
        engine, spec, x, y = plan.source.engine, plan.spec, plan.x.plain(), plan.y.plain()
        self._x, self._y = x, y
        (count, height, width, k), depth = y.shape, math.prod(spec.weight_shape[1:])
        pixels, label = count * height * width, f"{plan.label} backward weights"
        self._load_x = Copy(engine, label, plan.source, images(engine, x))
        self._load_y = Copy(engine, label, plan.destination, images(engine, y))
        # NumPy copies 16-bit integers faster than the numbers of ml_dtypes.
        self._columns = Columns(x.shape, "uint16", spec.window, (height, width), column_bytes=2 * pixels * depth)
        self._product = _MatrixProduct(engine, label, ((k, pixels), "ba"), ((pixels, depth), "ab"))
        bias = ((1, pixels), "ab"), ((pixels, k), "ab")
        self._sum = _MatrixProduct(engine, f"{label}, bias", *bias) if spec.bias else None
        library_bytes = [each.scratchpad_bytes for each in (self._load_x, self._load_y, self._product, self._sum) if each]
        sizes = [((max(library_bytes),), "uint8"), ((x.size,), "uint16"), ((y.size,), "uint16")]
        self._requests: list[Request] = [*sizes, *self._columns.scratch]
        self.scratch_bytes = total_bytes(self._requests)

    def bind(self, x: Array, dy: Array, weight: Array, bias: Array | None, buffer: Array) -> Work:
        """Return the call that writes the gradients to `weight` and `bias` (None: no bias), with `buffer` as scratch."""
        library, plain_x, plain_y, column, padded = carve(buffer, self._requests)
        (chunk,) = self._columns.bind(plain_x.reshape(self._x.shape), column, padded)
        works: list[Work] = [self._load_x.bind(x, plain_x, library), self._load_y.bind(dy, plain_y, library), chunk.fill]
        works.append(self._product.bind(plain_y, chunk.matrix, weight, library))
        if self._sum is not None:
            ones = np.ones(plain_y.size // self._y.shape[-1], BFLOAT16)
            works.append(self._sum.bind(ones, plain_y, bias, library))
        return CallSequence(works)


class _MatrixProduct:
    """The float32 product of two bfloat16 matrices.

    Args:
        factors: shape and format tag of each matrix.
    """

    def __init__(self, engine: Engine, label: str, *factors: tuple[tuple[int, int], str]) -> None:
        (rows, _), (_, columns) = (shape for shape, _ in factors)
        left, right = (Descriptor.tagged(engine, shape, tag, "bfloat16") for shape, tag in factors)
        target = Descriptor.tagged(engine, (rows, columns), "ab")
        self._formats = dict(zip((c.ARG_SRC, c.ARG_WEIGHTS, c.ARG_DST), (left, right, target), strict=True))
        self._primitive = Primitive(engine, "matmul", label, left, right, None, target, Attributes(engine))
        self.scratchpad_bytes = self._primitive.scratchpad_bytes

    def bind(self, left: Array, right: Array, target: Array, library: Array) -> Work:
        memories = zip(self._formats.items(), (left, right, target), strict=True)
        return self._primitive.bind({number: (form, array) for (number, form), array in memories}, library)


class ProductConv2d(NumpyConv2d):
    """A convolution by im2col and the library's matrix products.

    The library's products use its own thread pool; NumPy's would start a second one. The forward product is computed transposed,
    since dnnl_sgemm is slow if the result has few rows and many columns.
    """

    def __init__(self, engine: Engine, spec: Conv2dSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, x, training=training, multiply=engine.multiply)
        regions = Regions(aligned(self.scratch_bytes))
        self._transposed = regions.add(spec.channels_out * self.columns.largest * self.inputs[0].item_bytes)
        self.scratch_bytes = regions.total_bytes

    def forward(self, context: StepContext) -> None:
        k = self.conv.channels_out
        flat, room = self.buffers.output.reshape(-1, k), part(self.buffers.scratch, self._transposed).view(self.dtype)
        for chunk in self.chunks:
            chunk.fill()
            transposed = room[: k * (chunk.stop - chunk.start)].reshape(1, k, -1)
            self.multiply(self.weight, chunk.matrix.transpose(0, 2, 1), transposed)
            if self.conv.bias:
                np.add(transposed[0].T, self.buffers.parameters["bias"], out=flat[chunk.pixels])
            else:
                np.copyto(flat[chunk.pixels], transposed[0].T)


_ADDING = "backward data, adding"


def make_conv2d(
    engine: Engine, spec: Conv2dSpec | WithRelu, x: TensorSpec, *, training: bool, input_gradient: bool = True
) -> Conv2dOperator:
    """Return the convolution operator for images of the shape of `x`, in the layout that `choose` selects."""
    inner = spec.inner if isinstance(spec, WithRelu) else spec
    assert isinstance(inner, Conv2dSpec)
    relu = isinstance(spec, WithRelu)
    plan = choose(engine, inner, x, training=training, relu=relu, input_gradient=input_gradient)
    kind = Conv2dOperator if plan.adding is None else AddingConv2dOperator
    return kind(engine, spec, plan, training=training)


class Conv2dOperator(OutputReadOnce, ParameterCopies, FollowsOperator, LibraryOperator):
    """Convolution: y = x * weight + bias, then ReLU if the spec is a `WithRelu`."""

    needs_inputs = (True,)

    def __init__(self, engine: Engine, spec: Conv2dSpec | WithRelu, plan: Convolution, *, training: bool) -> None:
        self.spec, self._engine, self._plan, self._training = spec, engine, plan, training
        relu = isinstance(spec, WithRelu)
        self.primitives = plan.phases
        self._label = plan.label
        flips = plan.spec.window.kernel != (1, 1)
        # Copying tap by tap needs no flipped kernel in scratch, and is faster if there are many weights.
        self._flips_taps = flips and math.prod(plan.spec.weight_shape) >= MANY_WEIGHTS
        self._flips_whole = flips and not self._flips_taps
        self.inputs, self.output = (plan.x,), plan.y
        self.needs_output = relu
        self.winograd_shares = plan.winograd_shares
        self.copied_bytes = plan.copied_bytes if training else (0, 0, 0)
        self._mask = GradientMask(engine, self._label, plan.y) if relu and training else None
        self._first: Conv2dOperator | None = None
        self._place_memory()

    def _place_memory(self) -> None:
        """Divide the scratch into the library's scratchpad, blocked weights or their gradient, and the flipped kernel."""
        plan = self._plan
        formats = [plan.weights]
        flipped_bytes = 0
        if self._training:
            if plan.weight_gradient is None:
                formats.append(plan.diff_weights)
            if plan.backward_data is not None:
                formats.append(plan.backward_data_weights)
            if plan.adding is not None:
                formats.append(plan.adding_weights)
                flipped_bytes = plan.plain_weights.size_bytes if self._flips_whole else 0
        regions = Regions()
        self._library_part = regions.add(max(primitive.scratchpad_bytes for primitive in plan.primitives))
        self._weights_part = regions.add(max(each.size_bytes for each in formats))
        self._flipped_part = regions.add(flipped_bytes)
        others = (plan.winograd, plan.winograd_data, plan.weight_gradient)
        self.scratch_bytes = max(regions.total_bytes, *(0 if other is None else other.scratch_bytes for other in others))

    def follow(self, first: Operator) -> None:
        self._first = first if isinstance(first, Conv2dOperator) and self._training else None

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        plan, scratch = self._plan, buffers.scratch
        library = part(scratch, self._library_part)
        blocked = part(scratch, self._weights_part) if self._training else allocate(plan.weights.size_bytes)
        self._stale = True
        self._copied: dict[str, tuple[Descriptor, Array]] = {}  # formats and arrays of the copies made here, by use
        self._load: Work | None = None
        self._forward: Work = self._bind_forward(buffers, library, blocked)
        self._load_backward: Work | None = None
        self._backward_data: Work | None = None
        self._flip: tuple[Array, Array] | None = None  # flipped kernel, and the view of the weights that is copied to it
        if buffers.gradients:
            self._bind_weights(buffers, library, blocked)
        if buffers.input_grads and buffers.input_grads[0] is not None:
            self._bind_input(buffers, library, blocked)
        if self._mask is not None:
            self._mask.bind(buffers)

    def _bind_forward(self, buffers: Buffers, library: Array, blocked: Array) -> Work:
        plan, weight = self._plan, buffers.parameters["weight"]
        if plan.winograd is not None:
            x, y, first = buffers.inputs[0], buffers.output, self._first
            leader = None if first is None else first._leading(first._plan.winograd)
            return plan.winograd.bind(x, weight, buffers.parameters.get("bias"), y, buffers.scratch, leader=leader)
        self._load, weights = self._prepare(FORWARD, plan.plain_weights, weight, plan.weights, blocked)
        memories = {
            c.ARG_SRC: (plan.source, buffers.inputs[0]),
            c.ARG_WEIGHTS: (plan.weights, weights),
            c.ARG_DST: (plan.destination, buffers.output),
        }
        if plan.bias is not None:
            memories[c.ARG_BIAS] = (plan.bias, buffers.parameters["bias"])
        return plan.forward.bind(memories, library)

    def _prepare(self, use: str, source: Descriptor, plain: Array, target: Descriptor, room: Array) -> tuple[Work | None, Array]:
        """Return (copy of weights `plain` to format `target` in `room`, array to read). It flips the kernel if `use` requires it.

        The copy is None if both formats are the same and no kernel is flipped, or if `self._first` has already made one.
        """
        flips = use == _ADDING and self._flips_taps
        if source.equals(target) and not flips:
            return None, plain
        copied = None if self._first is None else self._first._copied.get(use)
        if copied is not None and copied[0].equals(target):
            return None, copied[1]
        self._copied[use] = target, room
        label = f"{self._label} weights"
        if not flips:
            return Copy(self._engine, label, source, target).bind(plain, room), room
        k, r, s, channels = self._plan.spec.weight_shape
        works, tap = [], (channels, k, 1, 1)
        for i, j in np.ndindex(r, s):
            formats = source.part(tap, (0, 0, i, j)), target.part(tap, (0, 0, r - 1 - i, s - 1 - j))
            works.append(Copy(self._engine, label, *formats).bind(plain, room))
        return CallSequence(works), room

    def _leading(self, product: Product | None) -> tuple[Product, Array] | None:
        """Return (product, scratch that holds its weights), for a product of this operator's plan."""
        return None if product is None else (product, self.buffers.scratch)

    def _bind_weights(self, buffers: Buffers, library: Array, blocked: Array) -> None:
        plan = self._plan
        assert plan.backward_weights is not None
        self._store: Work | None = None
        if plan.weight_gradient is not None:
            x, dy, gradients = buffers.inputs[0], buffers.output_grad, buffers.gradients
            bound = plan.weight_gradient.bind(x, dy, gradients["weight"], gradients.get("bias"), buffers.scratch)
            self._backward_weights: Work = bound
            return
        direct = plan.diff_weights.equals(plan.plain_weights)
        diff_weights = buffers.gradients["weight"] if direct else blocked
        memories = {
            c.ARG_SRC: (plan.source, buffers.inputs[0]),
            c.ARG_DIFF_DST: (plan.destination, buffers.output_grad),
            c.ARG_DIFF_WEIGHTS: (plan.diff_weights, diff_weights),
        }
        if plan.bias is not None:
            memories[c.ARG_DIFF_BIAS] = (plan.bias, buffers.gradients["bias"])
        self._backward_weights = plan.backward_weights.bind(memories, library)
        store = Copy(self._engine, f"{self._label} weight gradient", plan.diff_weights, plan.plain_weights)
        self._store = None if direct else store.bind(blocked, buffers.gradients["weight"])

    def _bind_input(self, buffers: Buffers, library: Array, blocked: Array) -> None:
        plan = self._plan
        weight, dx, first = buffers.parameters["weight"], buffers.input_grads[0], self._first
        if plan.winograd_data is not None:
            adds = buffers.accumulate[0]
            dy = buffers.output_grad
            leader = None if first is None else first._leading(first._plan.winograd_data)
            self._backward_data = plan.winograd_data.bind(dy, weight, None, dx, buffers.scratch, accumulate=adds, leader=leader)
            return
        if buffers.accumulate[0]:
            assert plan.adding is not None
            if self._flips_whole:
                flipped = part(buffers.scratch, self._flipped_part).view(weight.dtype).reshape(weight.shape)
                self._flip = (flipped, weight[:, ::-1, ::-1])
                weight = flipped
            self._load_backward, weights = self._prepare(_ADDING, plan.transposed_weights, weight, plan.adding_weights, blocked)
            if self._load_backward is None and weights is not weight:
                self._flip = None  # another operator has flipped them
            self._backward_data = plan.adding.bind(
                {
                    c.ARG_SRC: (plan.destination, buffers.output_grad),
                    c.ARG_WEIGHTS: (plan.adding_weights, weights),
                    c.ARG_DST: (plan.source, dx),
                },
                library,
            )
            return
        assert plan.backward_data is not None
        source, target = plan.plain_weights, plan.backward_data_weights
        self._load_backward, weights = self._prepare(BACKWARD_DATA, source, weight, target, blocked)
        self._backward_data = plan.backward_data.bind(
            {
                c.ARG_DIFF_DST: (plan.destination, buffers.output_grad),
                c.ARG_WEIGHTS: (plan.backward_data_weights, weights),
                c.ARG_DIFF_SRC: (plan.source, dx),
            },
            library,
        )

    def forward(self, context: StepContext) -> None:
        if self._load is not None and (self._training or self._stale):
            self._load()
            self._stale = False
        self._forward()
        if self._mask is not None:
            self._mask.begin_forward()

    def _mask_gradient(self) -> None:
        if self._mask is not None:
            self._mask.apply()

    def backward_parameters(self) -> None:
        self._mask_gradient()
        self._backward_weights()
        if self._store is not None:
            self._store()

    def backward_input(self) -> None:
        if self._backward_data is None:
            return
        self._mask_gradient()
        if self._flip is not None:
            np.copyto(*self._flip)
        if self._load_backward is not None:
            self._load_backward()
        self._backward_data()

    def parameters_changed(self) -> None:
        self._stale = True


class AddingConv2dOperator(Accumulating, Conv2dOperator):
    """A convolution that can add to its input's gradient."""
