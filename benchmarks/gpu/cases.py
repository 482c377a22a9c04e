"""Operations that the kernels of a device are checked with: every operation, with packs of 16 bytes and without, at odd sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.cuda.device import bfloat16_bits, bfloat16_values
from hpctrain.backend.specs import (
    AdaptiveAveragePoolSpec,
    AddSpec,
    BatchNormSpec,
    Conv2dSpec,
    DropoutSpec,
    FlattenSpec,
    LinearSpec,
    PoolSpec,
    ReluSpec,
    Spec,
    Window,
)
from hpctrain.testing.operators import default_parameters


@dataclass(frozen=True)
class Case:
    """library: cuDNN or cuBLAS computes it, not a kernel of our own."""

    name: str
    spec: Spec
    shapes: tuple[tuple[int, ...], ...]
    library: bool = False

    def inputs(self, fine: bool = False) -> list[np.ndarray]:
        """Return the inputs in float64, rounded by `exact`."""
        random = np.random.default_rng(7)
        return [exact(random.standard_normal(shape), fine) for shape in self.shapes]

    def parameters(self, fine: bool = False) -> Mapping[str, np.ndarray]:
        """Return the parameters by role in float64, rounded by `exact`."""
        return {role: exact(value, fine) for role, value in default_parameters(self.spec, "float64", seed=8).items()}

    def terms(self, array: str, output: tuple[int, ...]) -> int:
        """Return the number of products that cuDNN or cuBLAS sums for each element of a result; 1 for other operators.

        Args:
            array: name of the result. output: shape of the operator's output.
        """
        spec = self.spec
        if isinstance(spec, Conv2dSpec):
            window, rows = int(np.prod(spec.window.kernel)), int(np.prod(output[:3]))
            channels_in, channels_out = spec.channels_in // spec.groups, spec.channels_out // spec.groups
        elif isinstance(spec, LinearSpec):
            window, rows, channels_in, channels_out = 1, output[0], self.shapes[0][1], output[1]
        else:
            return 1
        return {"output": window * channels_in, "d input 0": window * channels_out}.get(array, rows)


def exact(values: np.ndarray, fine: bool = False) -> np.ndarray:
    """Return values rounded to bfloat16, which every dtype holds; `fine`: to float32, which has more bits than TF32."""
    if fine:
        return values.astype(np.float32).astype(np.float64)
    return bfloat16_values(bfloat16_bits(values)).astype(np.float64).reshape(values.shape)


def _window(kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> Window:
    return Window((kernel, kernel), (stride, stride), (padding,) * 4, (dilation, dilation))


def _case(name: str, spec: Spec, *shapes: tuple[int, ...], library: bool = False) -> Case:
    return Case(f"{name} {'x'.join(map(str, shapes[0]))}", spec, shapes, library)


def cases(*, small: bool) -> tuple[Case, ...]:
    """Return all cases; `small`: in sizes that the emulated device computes in seconds."""
    n, side, wide = (2, 9, 16) if small else (16, 28, 128)
    image, odd = (n, side, side, wide), (3, 7, 5, 13)
    blocks = []
    for shape in (image, odd):
        channels = shape[-1]
        blocks += [
            _case("relu", ReluSpec(), shape),
            _case("add", AddSpec(), shape, shape),
            _case("add relu", AddSpec(relu=True), shape, shape),
            _case("batch norm", BatchNormSpec(channels), shape),
            _case("batch norm relu", BatchNormSpec(channels, relu=True), shape),
            _case("batch norm add relu", BatchNormSpec(channels, relu=True, add=True), shape, shape),
            _case("max pool", PoolSpec("max", _window(3, 2, 1)), shape),
            _case("average pool", PoolSpec("average", _window(2, 2)), shape),
            _case("global pool", AdaptiveAveragePoolSpec((1, 1)), shape),
            _case("adaptive pool", AdaptiveAveragePoolSpec((3, 2)), shape),
            _case("flatten", FlattenSpec(), shape),
            _case("dropout", DropoutSpec(0.5, "drop", seed=4), shape),
            _case("stochastic depth", DropoutSpec(0.5, "drop", seed=4, per_sample=True), shape),
        ]
    return (*blocks, *_products(n, side, wide))


def _products(n: int, side: int, wide: int) -> tuple[Case, ...]:
    def convolution(name: str, inside: int, outside: int, window: Window, *, groups: int = 1, bias: bool = False) -> Case:
        return _case(name, Conv2dSpec(inside, outside, window, groups, bias), (n, side, side, inside), library=True)

    return (
        convolution("1x1", wide, 2 * wide, _window(1)),
        convolution("1x1 strided", wide, wide, _window(1, 2)),
        convolution("3x3", wide, wide, _window(3, 1, 1)),
        convolution("3x3 strided, bias", wide, wide, _window(3, 2, 1), bias=True),
        convolution("7x7 stem", 3, wide, _window(7, 2, 3)),
        convolution("3x3 dilated", wide, wide, _window(3, 1, 2, 2)),
        convolution("3x3 groups", wide, wide, _window(3, 1, 1), groups=4),
        convolution("3x3 odd, bias", 13, 19, _window(3, 1, 1), bias=True),
        _case("linear", LinearSpec(4 * wide, 40), (n, 4 * wide), library=True),
        _case("linear odd", LinearSpec(13, 7), (5, 13), library=True),
    )
