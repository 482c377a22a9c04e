import pytest

from hpctrain.errors import ShapeError
from hpctrain.nn.windows import edges, pair, window


def test_short_forms_mean_what_torch_means() -> None:
    assert pair(3, "kernel") == pair((3, 3), "kernel") == (3, 3)
    assert edges(1) == edges((1, 1)) == edges((1, 1, 1, 1)) == (1, 1, 1, 1)
    assert edges((1, 2)) == (1, 1, 2, 2)
    made = window((3, 5), 2, (1, 2, 3, 4), (2, 1))
    assert (made.kernel, made.stride, made.padding, made.dilation) == ((3, 5), (2, 2), (1, 2, 3, 4), (2, 1))
    assert made.extent == (5, 5)


def test_lists_from_a_configuration_become_tuples() -> None:
    assert pair([3, 5], "kernel") == (3, 5)  # type: ignore[arg-type]
    assert edges([1, 2]) == (1, 1, 2, 2)  # type: ignore[arg-type]


def test_values_that_cannot_be_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"A stride of \(2, 0\) is below 1; the nearest legal one is \(2, 1\)\."):
        pair((2, 0), "stride")
    with pytest.raises(ShapeError, match=r"\(1, 1, -2, -2\) has a negative edge; the nearest legal one is \(1, 1, 0, 0\)"):
        edges((1, -2))
    with pytest.raises(ShapeError, match="of 3 values"):
        edges((1, 2, 3))  # type: ignore[arg-type]
