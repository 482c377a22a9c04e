"""Layers: single-process descriptions of a model, lowered into a graph of specs.

A layer declares its parameters and its operation; it holds no arrays and does not depend on ranks. A `Program` runs it with
operators of the chosen kernel set. Parallelism, fusion and memory layouts change the graph and never the layers.

The bases come first (`Layer`, `Leaf`), then the helpers for windows, then one class per layer, then the containers. User-defined
layers derive from `hpctrain.nn.custom.ArrayLayer`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, SupportsInt

from hpctrain.backend.graph import GraphBuilder
from hpctrain.backend.operators import AnyArrays, Operator, StepContext
from hpctrain.backend.specs import (
    AdaptiveAveragePoolSpec,
    AddSpec,
    BatchNormSpec,
    Conv2dSpec,
    DropoutSpec,
    Edges,
    FlattenSpec,
    LinearSpec,
    Pair,
    PoolSpec,
    ReluSpec,
    Spec,
    TensorSpec,
    Window,
)
from hpctrain.core.errors import ConfigError, ShapeError
from hpctrain.core.intervals import Box
from hpctrain.core.registry import Checked
from hpctrain.nn import initialise
from hpctrain.nn.parameter import Initializer, Interchange, ParameterSpec, StatisticSpec


def join(prefix: str, name: str) -> str:
    """Return the dotted name of a child. The name of the root is empty."""
    return f"{prefix}.{name}" if prefix else name


class Layer(Checked):
    """A differentiable function with parameters. Leaves implement `spec`; containers implement `children` and `lower`."""

    #: spatial window of the layer; None: pointwise or not spatial
    window: Window | None = None

    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Return the declared parameters by role ("weight", "bias"), in torchvision's order."""
        return {}

    def statistics(self) -> Mapping[str, StatisticSpec]:
        """Return the declared running statistics by role."""
        return {}

    def children(self) -> Mapping[str, Layer]:
        """Return the child layers by name, in forward order."""
        return {}

    @abstractmethod
    def lower(self, graph: GraphBuilder, x: int, name: str) -> int:
        """Append this layer's nodes for input tensor `x` and return the number of the output tensor.

        Raises:
            ShapeError: the input does not fit the layer; the message names the layer.
        """

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Layer]]:
        """Yield (dotted name, layer) of this layer and all layers below it, parents first, in forward order."""
        yield prefix, self
        for name, child in self.children().items():
            yield from child.walk(join(prefix, name))

    def output(self, x: TensorSpec) -> TensorSpec:
        """Return the spec of the output for an input with spec `x`. Raise a ShapeError if the input does not fit the layer."""
        graph = GraphBuilder(x)
        return graph.tensor(self.lower(graph, 0, type(self).__name__.lower()))

    def flops(self, x: TensorSpec) -> int:
        """Return the number of floating-point operations of one forward pass for an input with spec `x`."""
        builder = GraphBuilder(x)
        graph = builder.build(self.lower(builder, 0, type(self).__name__.lower()))
        return sum(node.spec.flops(*(graph.tensors[i] for i in node.inputs)) for node in graph.nodes)


class Leaf(Layer):
    """A layer that is one operation."""

    @abstractmethod
    def spec(self, name: str) -> Spec:
        """Return the operation of the layer with the dotted name `name`."""

    def lower(self, graph: GraphBuilder, x: int, name: str) -> int:
        return graph.emit(
            name,
            self.spec(name),
            (x,),
            parameters={role: join(name, role) for role in self.parameters()},
            statistics={role: join(name, role) for role in self.statistics()},
        )


PairLike = int | Pair
EdgesLike = int | Pair | Edges


def pair(value: PairLike, noun: str) -> Pair:
    """Return (rows, columns) from one number or a pair.

    Args:
        value: one number for both, or (rows, columns).
        noun: name of the value in the error message.

    Raises:
        ShapeError: a value is below 1.
    """
    rows, columns = (value, value) if isinstance(value, int) else _integers(value)
    if min(rows, columns) < 1:
        raise ShapeError(f"The {noun} is {(rows, columns)}, but both numbers must be at least 1.")
    return rows, columns


def _integers(value: Iterable[int] | SupportsInt) -> tuple[int, ...]:
    """Return the items of a sequence as integers; for a single integer of NumPy, return it twice."""
    return tuple(map(int, value)) if isinstance(value, Iterable) else (int(value), int(value))


def edges(padding: EdgesLike) -> Edges:
    """Return (top, bottom, left, right) from one number, from (rows, columns) as in torch, or from four edges.

    Raises:
        ShapeError: an edge is negative, or the number of values is not 1, 2 or 4.
    """
    values = (padding, padding) if isinstance(padding, int) else _integers(padding)
    if len(values) == 2:
        values = (values[0], values[0], values[1], values[1])
    if len(values) != 4:
        raise ShapeError(
            f"Padding {values} has {len(values)} values; use one number, (rows, columns) or (top, bottom, left, right)."
        )
    if min(values) < 0:
        raise ShapeError(f"The padding is {values}, but each edge must be at least 0.")
    return values


def window(kernel: PairLike, stride: PairLike, padding: EdgesLike, dilation: PairLike = 1) -> Window:
    """Return the window of a convolution or pool.

    Raises:
        ShapeError: a kernel, stride or dilation is below 1, or the padding is negative.
    """
    return Window(pair(kernel, "kernel"), pair(stride, "stride"), edges(padding), pair(dilation, "dilation"))


class Conv2d(Leaf):
    """2-D convolution: y (N, Ho, Wo, K) from x (N, H, W, C) with weight (K, R, S, C / groups) and bias (K).

    Args:
        channels_in, channels_out: C and K.
        kernel, stride, dilation: one number or (rows, columns).
        padding: zeros around the image: one number, (rows, columns) or (top, bottom, left, right).
        groups: number of groups, which divides C and K; C for a depthwise convolution.
        bias: whether a bias is added; leave it out before a batch norm, which cancels it.
        weight_values, bias_values: initial values; default: He's normal distribution with fan out, and 0.

    Raises:
        ShapeError: a size is below 1, the padding is negative, or the groups do not divide the channels.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: PairLike,
        stride: PairLike = 1,
        padding: EdgesLike = 0,
        dilation: PairLike = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        weight_values: Initializer | None = None,
        bias_values: Initializer | None = None,
    ) -> None:
        if min(channels_in, channels_out) < 1:
            raise ShapeError(f"A convolution from {channels_in} to {channels_out} channels is empty; both must be at least 1.")
        self.window = window(kernel, stride, padding, dilation)
        self._spec = Conv2dSpec(channels_in, channels_out, self.window, groups, bias)
        fan_out = channels_out * math.prod(self.window.kernel)
        self._weight_values = initialise.kaiming_normal(fan_out) if weight_values is None else weight_values
        self._bias_values = initialise.constant(0.0) if bias_values is None else bias_values

    def spec(self, name: str) -> Conv2dSpec:
        return self._spec

    def parameters(self) -> Mapping[str, ParameterSpec]:
        weight = ParameterSpec(self._spec.weight_shape, self._weight_values, interchange=Interchange(axes=(0, 3, 1, 2)))
        if not self._spec.bias:
            return {"weight": weight}
        bias = ParameterSpec((self._spec.channels_out,), self._bias_values, decay=False)
        return {"weight": weight, "bias": bias}


class Linear(Leaf):
    """Linear layer: y (N, out) = x (N, in) @ weight (in, out) + bias (out).

    Args:
        features_in, features_out: number of features of a sample in the input and in the output.
        bias: whether a bias is added.
        image_shape: (H, W, C) of the image if the input is a flattened image. torchvision flattens (C, H, W), so the weight's
            rows are reordered when they are exported or imported.
        weight_values, bias_values: initial values; default: uniform in +-1/sqrt(in).

    Raises:
        ShapeError: a size is below 1, or the image has another size than the input.
    """

    def __init__(
        self,
        features_in: int,
        features_out: int,
        bias: bool = True,
        *,
        image_shape: tuple[int, int, int] | None = None,
        weight_values: Initializer | None = None,
        bias_values: Initializer | None = None,
    ) -> None:
        if min(features_in, features_out) < 1:
            raise ShapeError(f"A linear layer from {features_in} to {features_out} features is empty; both must be at least 1.")
        if image_shape is not None and math.prod(image_shape) != features_in:
            raise ShapeError(
                f"An image of shape {image_shape} has {math.prod(image_shape)} elements, but the layer has {features_in} inputs."
            )
        self._spec = LinearSpec(features_in, features_out, bias)
        default = initialise.uniform(1.0 / math.sqrt(features_in))
        self._weight_values = default if weight_values is None else weight_values
        self._bias_values = default if bias_values is None else bias_values
        if image_shape is None:
            self._interchange = Interchange(axes=(1, 0))
        else:
            self._interchange = Interchange((*image_shape, features_out), (3, 2, 0, 1), (features_out, features_in))

    def spec(self, name: str) -> LinearSpec:
        return self._spec

    def parameters(self) -> Mapping[str, ParameterSpec]:
        weight = ParameterSpec(
            self._spec.weight_shape, self._weight_values, interchange=self._interchange, sufficient_factors=True
        )
        if not self._spec.bias:
            return {"weight": weight}
        return {
            "weight": weight,
            "bias": ParameterSpec((self._spec.features_out,), self._bias_values, decay=False, sufficient_factors=True),
        }


class BatchNorm(Leaf):
    """Batch norm: y = weight * (x - mean) / sqrt(var + epsilon) + bias for each channel, the last dimension.

    Ioffe and Szegedy 2015, algorithm 1. The number of batches, which torchvision stores next to the running statistics, is not
    stored, because nothing depends on it with a fixed momentum.

    Args:
        epsilon: number added to the variance.
        momentum: weight of the newest batch in the running mean and variance, in [0, 1].
        synchronised: whether the statistics are computed over all ranks of the step instead of this rank's samples.
        weight: initial value of every element of the weight (gamma); 0 makes a residual block start as the identity.

    Raises:
        ShapeError: channels is below 1, momentum is outside [0, 1], or epsilon is not positive.
    """

    def __init__(
        self, channels: int, epsilon: float = 1e-5, momentum: float = 0.1, synchronised: bool = False, *, weight: float = 1.0
    ) -> None:
        if channels < 1:
            raise ShapeError(f"Batch norm over {channels} channels is empty; it needs at least 1.")
        if not 0.0 <= momentum <= 1.0:
            raise ShapeError(f"A batch norm momentum of {momentum} is outside [0, 1]; the default is 0.1.")
        if not epsilon > 0.0:
            raise ShapeError(f"A batch norm epsilon of {epsilon} is not positive; the default is 1e-05.")
        self._spec = BatchNormSpec(channels, epsilon, synchronised)
        self._momentum = momentum
        self._weight = weight

    def spec(self, name: str) -> BatchNormSpec:
        return self._spec

    def parameters(self) -> Mapping[str, ParameterSpec]:
        shape = (self._spec.channels,)
        return {
            "weight": ParameterSpec(shape, initialise.constant(self._weight), decay=False),
            "bias": ParameterSpec(shape, initialise.constant(0.0), decay=False, norm_bias=True),
        }

    def statistics(self) -> Mapping[str, StatisticSpec]:
        shape = (self._spec.channels,)
        return {
            "running_mean": StatisticSpec(shape, 0.0, self._momentum),
            "running_var": StatisticSpec(shape, 1.0, self._momentum),
        }


class ReLU(Leaf):
    """Rectifier: y = max(x, 0) for each element; the gradient at 0 is 0."""

    def spec(self, name: str) -> ReluSpec:
        return ReluSpec()


class MaxPool(Leaf):
    """Max pooling: y (N, Ho, Wo, C) is the maximum of each window of x (N, H, W, C). Padding counts as -inf.

    Args:
        kernel, dilation: one number or (rows, columns).
        stride: one number or (rows, columns); default: the kernel.
        padding: one number, (rows, columns) or (top, bottom, left, right); at most half the kernel.
        ceil_mode: whether the output size is rounded up, so that a last window may extend beyond the padded image.

    Raises:
        ShapeError: a size is below 1, or the padding is negative or more than half the kernel.
    """

    def __init__(
        self,
        kernel: PairLike,
        stride: PairLike | None = None,
        padding: EdgesLike = 0,
        dilation: PairLike = 1,
        ceil_mode: bool = False,
    ) -> None:
        self.window = window(kernel, kernel if stride is None else stride, padding, dilation)
        self._spec = PoolSpec("max", self.window, ceil_mode)

    def spec(self, name: str) -> PoolSpec:
        return self._spec


class AveragePool(Leaf):
    """Average pooling: y (N, Ho, Wo, C) is the mean of each window of x (N, H, W, C).

    Args:
        kernel, stride, padding, ceil_mode: see `MaxPool`.
        count_include_pad: whether padding elements count in the mean's divisor (the default of torch).

    Raises:
        ShapeError: a size is below 1, or the padding is negative or more than half the kernel.
    """

    def __init__(
        self,
        kernel: PairLike,
        stride: PairLike | None = None,
        padding: EdgesLike = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        self.window = window(kernel, kernel if stride is None else stride, padding)
        self._spec = PoolSpec("average", self.window, ceil_mode, count_include_pad)

    def spec(self, name: str) -> PoolSpec:
        return self._spec


class AdaptiveAveragePool(Leaf):
    """Adaptive average pooling to a fixed output size: y (N, Ho, Wo, C) from x (N, H, W, C).

    Output (i, j) is the mean of rows [floor(i H / Ho), ceil((i + 1) H / Ho)), and of columns by the same rule.

    Args:
        size: (Ho, Wo), or one number for both; 1 is global pooling. It may exceed the image's size.

    Raises:
        ShapeError: a size is below 1.
    """

    def __init__(self, size: PairLike = 1) -> None:
        self._spec = AdaptiveAveragePoolSpec(pair(size, "pooled image size"))

    def spec(self, name: str) -> AdaptiveAveragePoolSpec:
        return self._spec


class Flatten(Leaf):
    """Flattening of (N, H, W, C) to (N, H*W*C), in that order, without moving data."""

    def spec(self, name: str) -> FlattenSpec:
        return FlattenSpec()


class Dropout(Leaf):
    """Dropout: y = x * keep / (1 - rate) in training, y = x in evaluation (Srivastava et al. 2014, inverted form).

    The mask `keep` is a pure function of (seed, step, layer name, sample id, index in the sample), so it is the same on any grid
    of ranks.

    Args:
        rate: probability that an element is dropped, in [0, 1).
        seed: seed of the mask.

    Raises:
        ShapeError: the rate is outside [0, 1).
    """

    def __init__(self, rate: float = 0.5, seed: int = 0) -> None:
        if not 0.0 <= rate < 1.0:
            raise ShapeError(f"A dropout rate of {rate} is outside [0, 1); the default is 0.5.")
        self._rate, self._seed = rate, seed

    def spec(self, name: str) -> DropoutSpec:
        return DropoutSpec(self._rate, name, self._seed)


class StochasticDepth(Leaf):
    """Stochastic depth: y = x * keep / (1 - rate) with one keep per sample in training, y = x in evaluation.

    Huang et al., ECCV 2016; torchvision.ops.StochasticDepth in mode "row". At the end of a residual block's body, the layer drops
    the whole body for a sample. `keep` is a pure function of (seed, step, layer name, sample id), so it is the same on any grid
    of ranks.

    Args:
        rate: probability that a sample is dropped, in [0, 1).

    Raises:
        ShapeError: the rate is outside [0, 1).
    """

    def __init__(self, rate: float, seed: int = 0) -> None:
        if not 0.0 <= rate < 1.0:
            raise ShapeError(f"A stochastic depth of {rate} is outside [0, 1); 0 switches it off.")
        self._rate, self._seed = rate, seed

    def spec(self, name: str) -> DropoutSpec:
        return DropoutSpec(self._rate, name, self._seed, per_sample=True)


class PadChannels(Leaf):
    """Channel padding: y (N, H, W, before + C + after) is x (N, H, W, C) between channels of zeros (He et al. 2016, option A).

    Args:
        before, after: number of zero channels on each side, at least 0.

    Raises:
        ShapeError: a number of channels is negative.
    """

    def __init__(self, before: int, after: int) -> None:
        if min(before, after) < 0:
            raise ShapeError(f"before and after are {(before, after)}, but both must be at least 0.")
        self._spec = PadChannelsSpec(before, after)

    def spec(self, name: str) -> PadChannelsSpec:
        return self._spec


@dataclass(frozen=True)
class PadChannelsSpec:
    """Operation of `PadChannels`. Its operator computes with the arithmetic service of any kernel set."""

    before: int
    after: int
    any_arrays: ClassVar[bool] = True
    window: ClassVar[Window] = Window((1, 1), (1, 1), (0, 0, 0, 0))  # each pixel separately

    def with_window(self, window: Window) -> PadChannelsSpec:
        """Return this spec, because a window of one pixel has no padding that could change."""
        return self

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        return x.with_shape((*x.shape[:-1], self.before + x.shape[-1] + self.after))

    def flops(self, *inputs: TensorSpec) -> int:
        return 0

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return PadChannelsOperator(self, inputs[0])


class PadChannelsOperator(AnyArrays, Operator):
    """Operator that copies the input into the middle channels; backward copies the gradient out of them."""

    def __init__(self, spec: PadChannelsSpec, x: TensorSpec) -> None:
        self.spec, self.inputs, self.output = spec, (x,), spec.output(x)
        self._all: Box = tuple((0, size) for size in x.shape)
        self._middle: Box = (*self._all[:-1], (spec.before, spec.before + x.shape[-1]))

    def forward(self, context: StepContext) -> None:
        self.arithmetic.fill(self.buffers.output, 0.0)
        self.arithmetic.copy_box(self.buffers.output, self._middle, self.buffers.inputs[0], self._all)

    def backward_input(self) -> None:
        target, dy = self.buffers.input_grads[0], self.buffers.output_grad
        assert target is not None
        assert dy is not None
        self.arithmetic.copy_box(target, self._all, dy, self._middle)


def _chain(layers: Mapping[str, Layer], graph: GraphBuilder, x: int, name: str) -> int:
    """Lower layers one after another and return the number of the output tensor."""
    for child_name, child in layers.items():
        x = child.lower(graph, x, join(name, child_name))
    return x


class Sequential(Layer):
    """Composition of its children, first to last.

    Args:
        layers: layers by name; the layers of a plain sequence are named "0", "1", ... An empty sequence is the identity.

    Raises:
        ConfigError: a name is empty or contains a dot.
    """

    def __init__(self, layers: Mapping[str, Layer] | Sequence[Layer]) -> None:
        named = layers if isinstance(layers, Mapping) else {str(i): layer for i, layer in enumerate(layers)}
        check_names(named)
        self._children = dict(named)

    def children(self) -> Mapping[str, Layer]:
        return self._children

    def lower(self, graph: GraphBuilder, x: int, name: str) -> int:
        return _chain(self._children, graph, x, name)


def check_names(layers: Mapping[str, Layer]) -> None:
    """Raise a ConfigError unless every name can be a component of a dotted name: not empty, and without a dot."""
    for name in layers:
        if not name or "." in name:
            nearest = name.replace(".", "_") or "0"
            raise ConfigError(f"A layer cannot be named {name!r}: a name must not be empty or contain a dot; use {nearest!r}.")


_SUM = "add"


class Residual(Layer):
    """Residual block: y = activation(body(x) + shortcut(x)) (He et al. 2016, eq. 1 and 2).

    Its children are the layers before both paths, the body, the shortcut and the activation.

    Args:
        body: layers by name, applied one after another.
        shortcut: layer of the shortcut; None: the identity.
        before: layers by name, applied to the block's input; body and shortcut both read their result.
        shortcut_name: name of the shortcut; torchvision's is "downsample".
        activation: layer applied to the sum; None: there is none.
        activation_name: name of the activation.

    Raises:
        ConfigError: a name is empty, contains a dot, occurs twice, or is "add", the name of the sum.
    """

    def __init__(
        self,
        body: Mapping[str, Layer],
        shortcut: Layer | None = None,
        *,
        before: Mapping[str, Layer] | None = None,
        shortcut_name: str = "downsample",
        activation: ReLU | None = None,
        activation_name: str = "relu",
    ) -> None:
        self._before, self._body = dict(before or {}), dict(body)
        self._shortcut = {} if shortcut is None else {shortcut_name: shortcut}
        self._activation = {} if activation is None else {activation_name: activation}
        names = [*self._before, *self._body, *self._shortcut, *self._activation, _SUM]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"A residual block has two parts named {twice!r}; call one of them '{twice}_1'.")
        check_names(self.children())

    def children(self) -> Mapping[str, Layer]:
        return {**self._before, **self._body, **self._shortcut, **self._activation}

    def lower(self, graph: GraphBuilder, x: int, name: str) -> int:
        x = _chain(self._before, graph, x, name)
        body = _chain(self._body, graph, x, name)
        shortcut = _chain(self._shortcut, graph, x, name)
        total = graph.emit(join(name, _SUM), AddSpec(), (body, shortcut))
        return _chain(self._activation, graph, total, name)
