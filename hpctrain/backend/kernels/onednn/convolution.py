"""Convolution's primitives: which layout, which kernels, which weight formats. No memory yet."""

from __future__ import annotations

from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Descriptor, Engine, Primitive, Unimplemented
from hpctrain.backend.kernels.onednn.geometry import adjoint, convolution_geometry
from hpctrain.backend.onednn.operator import BLOCKS, NCHW, TAGS, blocked_layout, images, in_layout, vector
from hpctrain.backend.kernels.onednn.operator import BACKWARD_DATA, BACKWARD_WEIGHTS, FORWARD
from hpctrain.backend.kernels.onednn.tiling import Tiling
from hpctrain.backend.onednn.winograd import Product, WeightGradient
from hpctrain.backend.specs import NHWC, Conv2dSpec, TensorSpec

# What the direct kernels of 3x3 reach of the speed of those of 1x1: with AVX2 they measured 0.7 to 1.0, and 0.5 to 0.7.
_DIRECT_SPEED = 1.0
_DIRECT_WEIGHTS_SPEED = 0.7


def describe(spec: Conv2dSpec, x: TensorSpec) -> str:
    """For errors and reports."""
    kernel = "x".join(map(str, spec.window.kernel))
    return f"conv2d {spec.channels_in}->{spec.channels_out} {kernel} on {x.shape}"


class Convolution:
    """The three primitives of one convolution between images in given layouts.

    Attributes:
        forward, backward_data, backward_weights: the latter two None in evaluation, the second where nobody asks for the
            input's gradient.
        weights: the format that `forward` reads, as `backward_data_weights` in backward, and `diff_weights` that is written.
        adding: computes the input's gradient as a convolution of the output's and adds it; None where there is no such kernel.
        winograd, winograd_data, winograd_weights: take the place of the three in training where they are faster; else None.
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
        self._engine, self.spec, self.what = engine, spec, describe(spec, x)
        self.x, self.y = in_layout(x.plain(), layouts[0]), in_layout(spec.output(x), layouts[1])
        # Memory that is plain as well is still described by the name that the kernels look for.
        self.source, self.destination = images(engine, self.x, layouts[0]), images(engine, self.y, layouts[1])
        self.bias = vector(engine, spec.channels_out) if spec.bias else None
        self.plain_weights = self._plain_weights()
        self._geometry = convolution_geometry(spec.window)
        self._own = Attributes(engine)
        kind = c.FORWARD_TRAINING if training else c.FORWARD_INFERENCE
        self.forward = self._forward(kind, Attributes(engine, relu=relu))
        self.weights = self.forward.descriptor(c.QUERY_WEIGHTS_MD)
        self.backward_data: Primitive | None = None
        self.backward_weights: Primitive | None = None
        self.adding: Primitive | None = None
        if training:
            self.backward_weights = self._backward_weights()
            self.diff_weights = self.backward_weights.descriptor(c.QUERY_DIFF_WEIGHTS_MD)
        if training and input_gradient:
            self.backward_data = self._backward_data()
            self.backward_data_weights = self.backward_data.descriptor(c.QUERY_WEIGHTS_MD)
            self._make_adding()
        self.winograd: Product | None = None
        self.winograd_data: Product | None = None
        self.winograd_weights: WeightGradient | None = None
        if training:
            self._make_winograd(relu, input_gradient)

    @property
    def primitives(self) -> tuple[Primitive, ...]:
        """Those that exist."""
        every = (self.forward, self.backward_data, self.backward_weights, self.adding)
        return tuple(primitive for primitive in every if primitive is not None)

    @property
    def phases(self) -> dict[str, Primitive | None]:
        """The primitive that computes each phase; None where nobody asks for it, or Winograd takes its place."""
        return {
            FORWARD: None if self.winograd is not None else self.forward,
            BACKWARD_DATA: None if self.winograd_data is not None else self.backward_data,
            BACKWARD_WEIGHTS: None if self.winograd_weights is not None else self.backward_weights,
        }

    @property
    def penalty(self) -> int:
        """How many phases fell to oneDNN's plain loops, which are slow."""
        return sum(primitive.is_plain for primitive in self.phases.values() if primitive is not None)

    def _weight_dims(self) -> tuple[int, ...]:
        spec = self.spec
        shape = (spec.channels_out // spec.groups, spec.channels_in // spec.groups, *spec.window.kernel)
        return shape if spec.groups == 1 else (spec.groups, *shape)

    def _plain_weights(self) -> Descriptor:
        """KRSC memory under oneDNN's dims (groups, K, C, R, S)."""
        _, r, s, channels = self.spec.weight_shape
        strides: tuple[int, ...] = (r * s * channels, 1, s * channels, channels)
        grouped = self._weight_dims()
        if len(grouped) == 5:
            strides = (grouped[1] * r * s * channels, *strides)
        return Descriptor.strided(self._engine, grouped, strides)

    def _any_weights(self) -> Descriptor:
        return Descriptor.tagged(self._engine, self._weight_dims(), "any")

    def _forward(self, kind: int, attributes: Attributes) -> Primitive:
        formats = (self.source, self._any_weights(), self.bias, self.destination)
        what = f"{self.what} forward"
        arguments = (kind, c.CONVOLUTION_DIRECT, *formats, *self._geometry, attributes)
        return Primitive(self._engine, "convolution_forward", what, *arguments)

    def _hint(self) -> Primitive:
        return self._forward(c.FORWARD_TRAINING, self._own)

    def _backward_data(self) -> Primitive:
        formats = (self.source, self._any_weights(), self.destination)
        what = f"{self.what} backward data"
        arguments = (c.CONVOLUTION_DIRECT, *formats, *self._geometry, self._hint(), self._own)
        return Primitive(self._engine, "convolution_backward_data", what, *arguments)

    def _backward_weights(self) -> Primitive:
        formats = (self.source, self._any_weights(), self.bias, self.destination)
        what = f"{self.what} backward weights"
        arguments = (c.CONVOLUTION_DIRECT, *formats, *self._geometry, self._hint(), self._own)
        return Primitive(self._engine, "convolution_backward_weights", what, *arguments)

    def _make_adding(self) -> None:
        """dx += conv(dy, turned and transposed weights): oneDNN's backward kernels cannot add, its forward kernels can."""
        window = adjoint(self.spec.window)
        if window is None or self.spec.groups != 1:
            return
        k, r, s, channels = self.spec.weight_shape
        shape = (channels, k, r, s)
        formats = (self.destination, Descriptor.tagged(self._engine, shape, "any"), None, self.source)
        kind = (c.FORWARD_TRAINING, c.CONVOLUTION_DIRECT)
        rest = (*convolution_geometry(window), Attributes(self._engine, accumulate=True))
        what = f"{self.what} backward data, adding"
        try:
            made = Primitive(self._engine, "convolution_forward", what, *kind, *formats, *rest)
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
        tag = TAGS[self.y.layout]
        images, outputs = self.x.shape, self.y.shape
        forward = Tiling(images[0], (images[1], images[2]), channels, k, window.padding, block, tag)
        backward = Tiling(images[0], (outputs[1], outputs[2]), k, channels, turned.padding, block, tag)
        taps = ((9 * channels, 1), 0, channels)
        if forward.pays(_DIRECT_SPEED):
            self.winograd = Product(self._engine, self.what, forward, *taps, bias=spec.bias, relu=relu)
        if input_gradient and backward.pays(_DIRECT_SPEED):
            what = f"{self.what} backward data"
            self.winograd_data = Product(self._engine, what, backward, (1, 9 * channels), 8 * channels, -channels)
        if forward.pays(_DIRECT_WEIGHTS_SPEED):
            self.winograd_weights = WeightGradient(self._engine, self.what, forward, *taps, bias=spec.bias)


def choose(
    engine: Engine, spec: Conv2dSpec, x: TensorSpec, *, training: bool, relu: bool, input_gradient: bool = True
) -> Convolution:
    """The first layout without slow kernels, of those that oneDNN has fast ones for; else the one with the fewest.

    Raises:
        Unimplemented: no layout at all can be computed.
    """
    blocked = blocked_layout(engine)
    few = spec.channels_in // spec.groups < engine.block
    candidates = [(NCHW, blocked), (blocked, blocked)] if few and spec.groups == 1 else [(blocked, blocked)]
    candidates += [(NHWC, NHWC), (NCHW, NCHW)]
    best: Convolution | None = None
    refusal: Unimplemented | None = None
    for layouts in candidates:
        try:
            found = Convolution(engine, spec, x, layouts, training=training, relu=relu, input_gradient=input_gradient)
        except Unimplemented as error:
            refusal = error
            continue
        if found.penalty == 0:
            return found
        if best is None or found.penalty < best.penalty:
            best = found
    if best is None:
        assert refusal is not None
        raise refusal
    return best
