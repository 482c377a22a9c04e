"""Operations as data: tensors, operations on tensors, and their dtypes, with shapes and costs.

A spec does not state how an operation is computed; a kernel set turns it into an operator. Letters: N batch, H W image, C
channels in, K channels out, R S kernel, Ho Wo output. All shapes are logical NHWC, weights KRSC, linear weights (in, out).

Dtypes are strings, since NumPy alone does not have bfloat16. `WithRelu` is made only by fusion (`graph.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from hpctrain.core.errors import ShapeError

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1}


def item_bytes(dtype: str) -> int:
    """Return the size of one element in bytes."""
    return ITEM_BYTES[dtype]


def parameter_dtype(dtype: str) -> str:
    """Return the dtype of parameters, gradients and statistics for activations of `dtype`: at least float32."""
    return "float32" if dtype == "bfloat16" else dtype


Shape = tuple[int, ...]
Pair = tuple[int, int]
Edges = tuple[int, int, int, int]  # top, bottom, left, right

NHWC = "NHWC"


@dataclass(frozen=True)
class TensorSpec:
    """Description of a tensor: logical shape, name of the dtype, and layout.

    Attributes:
        layout: "NHWC" for plain row-major memory of the logical shape, whatever its number of dims; otherwise an opaque token of
            the kernel set that chose the layout.
        padded_size: number of elements in the buffer, padding included; None in plain memory.
    """

    shape: Shape
    dtype: str = "float32"
    layout: str = NHWC
    padded_size: int | None = None

    @property
    def size(self) -> int:
        """Number of elements in the buffer."""
        return math.prod(self.shape) if self.padded_size is None else self.padded_size

    @property
    def item_bytes(self) -> int:
        return item_bytes(self.dtype)

    @property
    def bytes(self) -> int:
        return self.size * self.item_bytes

    def with_shape(self, shape: Shape) -> TensorSpec:
        """Return a tensor of another shape and the same dtype, in plain memory."""
        return TensorSpec(shape, self.dtype)

    def plain(self) -> TensorSpec:
        """Return the same tensor in plain NHWC memory."""
        return replace(self, layout=NHWC, padded_size=None)


@dataclass(frozen=True)
class Window:
    """A sliding window: output row o reads input rows [o*stride - padding_top, ... + extent)."""

    kernel: Pair
    stride: Pair
    padding: Edges
    dilation: Pair = (1, 1)

    @property
    def extent(self) -> Pair:
        """Rows and columns from the first to the last tap, dilation included."""
        (rows, columns), (dilation_rows, dilation_columns) = self.kernel, self.dilation
        return dilation_rows * (rows - 1) + 1, dilation_columns * (columns - 1) + 1

    def output_size(self, size: Pair, *, ceil_mode: bool = False) -> Pair:
        """Return (Ho, Wo) for an input of (H, W). A dim of size 0 stays 0.

        Raises:
            ShapeError: the input is not empty but smaller than the window (in ceil mode, by a stride or more).
        """
        out = []
        for dim in (0, 1):
            before, after = self.padding[2 * dim], self.padding[2 * dim + 1]
            if size[dim] == 0:
                out.append(0)
                continue
            room = size[dim] + before + after - self.extent[dim]
            if room < 0 and not (ceil_mode and room > -self.stride[dim]):
                name = ("height", "width")[dim]
                least = size[dim] - room - (self.stride[dim] - 1 if ceil_mode else 0)
                raise ShapeError(
                    f"An input of {name} {size[dim]} with padding {before}+{after} is smaller than the window of "
                    f"{self.extent[dim]}; the smallest {name} that fits is {least}."
                )
            count = (-(-room // self.stride[dim]) if ceil_mode else room // self.stride[dim]) + 1
            # Ceil mode drops a last window that starts beyond the input and its leading padding, as in torch.
            if ceil_mode and (count - 1) * self.stride[dim] >= size[dim] + before:
                count -= 1
            out.append(count)
        return out[0], out[1]


@runtime_checkable
class Spec(Protocol):
    """One operation: its output for given inputs (one TensorSpec each), and its cost.

    The keyword arguments below declare to the type checker that the number of inputs varies; no spec takes keywords.
    """

    def output(self, *inputs: Any, **none: Any) -> TensorSpec:
        """Return the spec of the output, in plain memory."""

    def flops(self, *inputs: Any, **none: Any) -> int:
        """Return the number of floating-point operations of one forward pass (a multiply-add counts two)."""


def _nhwc(x: TensorSpec, channels: int, name: str) -> tuple[int, int, int, int]:
    if len(x.shape) != 4:
        raise ShapeError(f"{name} needs images of shape (N, H, W, C), not {x.shape}.")
    if x.shape[3] != channels:
        raise ShapeError(
            f"{name} expects {channels} channels, but its input has {x.shape[3]}; set its input channels to {x.shape[3]}."
        )
    return x.shape


@dataclass(frozen=True)
class Conv2dSpec:
    """Convolution: y (N, Ho, Wo, K) = x (N, H, W, C) * weight (K, R, S, C / groups) + bias (K)."""

    channels_in: int
    channels_out: int
    window: Window
    groups: int = 1
    bias: bool = True

    def __post_init__(self) -> None:
        if self.groups < 1 or self.channels_in % self.groups or self.channels_out % self.groups:
            legal = math.gcd(self.channels_in, self.channels_out)
            raise ShapeError(
                f"groups is {self.groups}, which does not divide {self.channels_in} input and {self.channels_out} output "
                f"channels; it must divide {legal}."
            )

    @property
    def weight_shape(self) -> Shape:
        return (self.channels_out, *self.window.kernel, self.channels_in // self.groups)

    def with_window(self, window: Window) -> Conv2dSpec:
        """Return the same convolution with another window."""
        return replace(self, window=window)

    def output(self, x: TensorSpec) -> TensorSpec:
        n, h, w, _ = _nhwc(x, self.channels_in, "conv2d")
        ho, wo = self.window.output_size((h, w))
        return x.with_shape((n, ho, wo, self.channels_out))

    def flops(self, x: TensorSpec) -> int:
        n, ho, wo, _ = self.output(x).shape
        return 2 * n * ho * wo * math.prod(self.weight_shape)


@dataclass(frozen=True)
class LinearSpec:
    """Linear layer: y (N, out) = x (N, in) @ weight (in, out) + bias (out)."""

    features_in: int
    features_out: int
    bias: bool = True

    @property
    def weight_shape(self) -> Shape:
        return (self.features_in, self.features_out)

    def output(self, x: TensorSpec) -> TensorSpec:
        if len(x.shape) != 2 or x.shape[1] != self.features_in:
            features = math.prod(x.shape[1:])
            raise ShapeError(
                f"linear expects inputs of shape (N, {self.features_in}), not {x.shape}; set its input features to {features}"
                f"{'' if len(x.shape) == 2 else ', and flatten the input'}."
            )
        return x.with_shape((x.shape[0], self.features_out))

    def flops(self, x: TensorSpec) -> int:
        return 2 * x.shape[0] * self.features_in * self.features_out


@dataclass(frozen=True)
class BatchNormSpec:
    """Batch norm: y = gamma * (x - mean) / sqrt(var + epsilon) + beta per channel (the last dim).

    Training uses the batch's mean and biased variance, and writes the mean and the *unbiased* variance to the operator's
    statistics `batch_mean` and `batch_var`. Evaluation uses `running_mean` and `running_var`.

    Attributes:
        synchronised: whether the statistics are merged over all ranks of the group `merge`, by its `StatisticsMerger`.
        merge: name of the group: "all" ranks that share the step, "data" for ranks that hold the same channels, or "split" for
            ranks that hold parts of the same images.
        relu: whether a ReLU follows, after the addition if `add` is set; set only by fusion.
        add: whether a second input of the same shape is added before the ReLU; set only by fusion.
        fixed: whether training also uses the running statistics, and leaves them unchanged.
    """

    channels: int
    epsilon: float = 1e-5
    synchronised: bool = False
    merge: str = "all"
    relu: bool = False
    add: bool = False
    fixed: bool = False

    def output(self, x: TensorSpec, *rest: TensorSpec) -> TensorSpec:
        if x.shape[-1] != self.channels:
            channels = x.shape[-1]
            raise ShapeError(
                f"batch norm expects {self.channels} channels, but its input has {channels}; set its channels to {channels}."
            )
        return x.plain()

    def flops(self, x: TensorSpec, *rest: TensorSpec) -> int:
        return 5 * math.prod(x.shape)


@dataclass(frozen=True)
class PoolSpec:
    """Max pooling (padding counts as -inf) or average pooling (`ceil_mode` and `count_include_pad` as in torch)."""

    kind: Literal["max", "average"]
    window: Window
    ceil_mode: bool = False
    count_include_pad: bool = True

    def __post_init__(self) -> None:
        for dim, kernel in enumerate(self.window.kernel):
            worst = max(self.window.padding[2 * dim : 2 * dim + 2])
            if 2 * worst > kernel:
                raise ShapeError(
                    f"Pool padding {worst} is more than half of the kernel {kernel}; at most {kernel // 2} is allowed."
                )

    def with_window(self, window: Window) -> PoolSpec:
        """Return the same pooling with another window."""
        return replace(self, window=window)

    def output(self, x: TensorSpec) -> TensorSpec:
        n, h, w, c = _nhwc(x, x.shape[-1], f"{self.kind} pooling")
        ho, wo = self.window.output_size((h, w), ceil_mode=self.ceil_mode)
        return x.with_shape((n, ho, wo, c))

    def flops(self, x: TensorSpec) -> int:
        return math.prod(self.output(x).shape) * math.prod(self.window.kernel)


@dataclass(frozen=True)
class AdaptiveAveragePoolSpec:
    """Adaptive average pooling: means over windows [floor(i H / Ho), ceil((i + 1) H / Ho)). (1, 1) is global pooling.

    The output has four dims.
    """

    size: Pair

    def output(self, x: TensorSpec) -> TensorSpec:
        n, _, _, c = _nhwc(x, x.shape[-1], "adaptive average pooling")
        return x.with_shape((n, *self.size, c))

    def flops(self, x: TensorSpec) -> int:
        return math.prod(x.shape)


@dataclass(frozen=True)
class ReluSpec:
    """Rectified linear unit: y = max(x, 0); the gradient at 0 is 0."""

    def output(self, x: TensorSpec) -> TensorSpec:
        return x.plain()

    def flops(self, x: TensorSpec) -> int:
        return math.prod(x.shape)


@dataclass(frozen=True)
class AddSpec:
    """Residual sum: y = a + b, then ReLU if `relu` is set (only by fusion)."""

    relu: bool = False

    def output(self, a: TensorSpec, b: TensorSpec) -> TensorSpec:
        if a.shape != b.shape:
            raise ShapeError(f"A residual sum needs two inputs of the same shape, not {a.shape} and {b.shape}.")
        return a.plain()

    def flops(self, a: TensorSpec, b: TensorSpec) -> int:
        return math.prod(a.shape)


@dataclass(frozen=True)
class DropoutSpec:
    """Dropout: y = x * keep / (1 - rate); identity in evaluation.

    keep = f(seed, step, layer name, sample id, index in the unsplit activation of one sample), so that any split of batch,
    channels or rows draws its part of one mask.

    Attributes:
        unsplit_shape: shape of the unsplit activation of one sample (without N); None if the activation is not split.
        origin: index of this part's first element in the unsplit activation; empty if the activation is not split.
        first_sample: position of this part's first sample among the samples of the step's context.
        per_sample: whether all elements of a sample are kept or dropped together, by the number drawn for index 0 (stochastic
            depth, Huang et al. 2016).
    """

    rate: float
    layer: str
    seed: int = 0
    unsplit_shape: Shape | None = None
    origin: Shape = ()
    first_sample: int = 0
    per_sample: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate < 1.0:
            raise ShapeError(f"A dropout rate of {self.rate} is outside [0, 1); the default is 0.5.")

    def output(self, x: TensorSpec) -> TensorSpec:
        return x.plain()

    def flops(self, x: TensorSpec) -> int:
        return math.prod(x.shape)


@dataclass(frozen=True)
class FlattenSpec:
    """Flatten: (N, H, W, C) -> (N, H*W*C), in that order; no data moves."""

    def output(self, x: TensorSpec) -> TensorSpec:
        return x.with_shape((x.shape[0], math.prod(x.shape[1:])))

    def flops(self, x: TensorSpec) -> int:
        return 0


@dataclass(frozen=True)
class SoftmaxCrossEntropySpec:
    """Softmax cross entropy: sum over the samples of -sum_c q_c log softmax(logits)_c, divided by the step's global count.

    q = (1 - smoothing) onehot(label) + smoothing / classes. Its operator is a `LossOperator`.
    """

    smoothing: float = 0.0
    #: weight of each class, above 0, as in torch.nn.CrossEntropyLoss(weight=...); empty: all are 1
    class_weights: tuple[float, ...] = ()
    #: k of the second accuracy (top-k)
    top: ClassVar[int] = 5


@dataclass(frozen=True)
class WithRelu:
    """A convolution or linear layer with a ReLU after it."""

    inner: Conv2dSpec | LinearSpec

    def output(self, x: TensorSpec) -> TensorSpec:
        return self.inner.output(x)

    def flops(self, x: TensorSpec) -> int:
        return self.inner.flops(x)
