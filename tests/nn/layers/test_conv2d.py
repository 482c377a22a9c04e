import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ShapeError
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.testing.layer_gradients import check_gradients, head_network

CASES = {
    "3x3": (Conv2d(4, 5, 3, padding=1), (7, 9, 4)),
    "1x1": (Conv2d(4, 5, 1), (5, 7, 4)),
    "1x1 stride 2": (Conv2d(4, 5, 1, 2, bias=False), (7, 9, 4)),
    "7x7 stride 2": (Conv2d(3, 4, 7, 2, padding=3, bias=False), (15, 11, 3)),
    "2x3 not square": (Conv2d(3, 4, (2, 3), (2, 1), padding=(1, 0)), (9, 7, 3)),
    "four edges": (Conv2d(3, 4, (3, 2), (1, 2), padding=(2, 0, 1, 3)), (5, 7, 3)),
    "dilated": (Conv2d(3, 4, (3, 2), 1, padding=2, dilation=(2, 3)), (9, 7, 3)),
    "two groups": (Conv2d(4, 6, 3, 2, padding=1, groups=2), (7, 9, 4)),
    "depthwise": (Conv2d(5, 10, 3, padding=1, groups=5), (7, 5, 5)),
    "all of it": (Conv2d(4, 6, (3, 2), (2, 1), (1, 0, 2, 1), (1, 2), 2), (9, 7, 4)),
    "rows unread at the end": (Conv2d(2, 3, 2, 3), (7, 9, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    layer, image_shape = CASES[case]
    check_gradients(layer, image_shape)


def test_one_sample_has_the_gradients_of_its_part_of_a_batch() -> None:
    check_gradients(Conv2d(3, 4, 3, 2, padding=1), (7, 9, 3), batch=1)


@given(
    height=st.integers(1, 40),
    kernel=st.integers(1, 7),
    stride=st.integers(1, 4),
    before=st.integers(0, 5),
    after=st.integers(0, 5),
    dilation=st.integers(1, 3),
)
def test_output_counts_the_windows_that_fit(
    height: int, kernel: int, stride: int, before: int, after: int, dilation: int
) -> None:
    layer = Conv2d(1, 2, (kernel, 1), (stride, 1), (before, after, 0, 0), (dilation, 1))
    reach = dilation * (kernel - 1)
    starts = [row for row in range(0, before + height + after, stride) if row + reach < before + height + after]
    x = TensorSpec((3, height, 5, 1))
    if not starts:
        with pytest.raises(ShapeError, match=f"the smallest height that fits is {reach + 1 - before - after}"):
            layer.output(x)
    else:
        assert layer.output(x).shape == (3, len(starts), 5, 2)


def test_flops_count_each_multiply_add_twice() -> None:
    layer = Conv2d(4, 6, (3, 2), 2, padding=1, groups=2)
    n, ho, wo, k = layer.output(TensorSpec((5, 9, 7, 4))).shape
    taps = 3 * 2 * (4 // 2)
    assert layer.flops(TensorSpec((5, 9, 7, 4))) == 2 * n * ho * wo * k * taps


def test_weight_is_krsc_and_exported_as_kcrs() -> None:
    layer = Conv2d(4, 6, (3, 2), groups=2)
    spec = layer.parameters()["weight"]
    assert spec.shape == (6, 3, 2, 2)
    weight = np.random.default_rng(0).standard_normal(spec.shape)
    exported = spec.interchange.export(weight)
    assert exported.shape == (6, 2, 3, 2)
    assert exported[5, 1, 2, 0] == weight[5, 2, 0, 1]
    np.testing.assert_array_equal(spec.interchange.restore(exported, spec.shape), weight)


def test_weights_start_with_he_deviation_over_fan_out_and_the_bias_at_zero() -> None:
    network = head_network(Conv2d(32, 64, (5, 3)), (7, 7, 32))
    weight = network.parameters["layer.weight"].data
    assert weight.std() == pytest.approx(math.sqrt(2 / (64 * 15)), rel=0.03)
    assert abs(weight.mean()) < 1e-3
    assert not network.parameters["layer.bias"].data.any()


def test_decay_applies_to_the_weight_only() -> None:
    assert {role: spec.decay for role, spec in Conv2d(1, 2, 3).parameters().items()} == {"weight": True, "bias": False}
    assert list(Conv2d(1, 2, 3, bias=False).parameters()) == ["weight"]


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"kernel of \(0, 3\).*nearest legal one is \(1, 3\)"):
        Conv2d(1, 2, (0, 3))
    with pytest.raises(ShapeError, match="3 groups do not divide 4 channels in and 6 out; groups must divide 2"):
        Conv2d(4, 6, 3, groups=3)
    with pytest.raises(ShapeError, match="negative edge"):
        Conv2d(1, 2, 3, padding=-1)
    with pytest.raises(ShapeError, match="Layer conv2d: conv2d was built for 3 channels, its input has 4"):
        Conv2d(3, 2, 3).output(TensorSpec((1, 5, 5, 4)))
