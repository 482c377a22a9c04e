import pytest

from hpctrain.backend.kernels.graph import GraphBuilder
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ConfigError, ShapeError
from hpctrain.nn.layers.average_pool import AveragePool
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.testing.layer_gradients import check_gradients


def test_gradients() -> None:
    check_gradients(Sequential([Conv2d(3, 4, 3), ReLU(), Sequential({"pool": AveragePool(2)})]), (7, 9, 3))


def test_names_nest_with_dots_and_count_from_zero() -> None:
    model = Sequential({"features": Sequential([Conv2d(3, 4, 3), ReLU()]), "top": Conv2d(4, 2, 1)})
    assert [name for name, _ in model.walk()] == ["", "features", "features.0", "features.1", "top"]
    builder = GraphBuilder(TensorSpec((2, 7, 9, 3)))
    graph = builder.build(model.lower(builder, 0, ""))
    assert [node.name for node in graph.nodes] == ["features.0", "features.1", "top"]
    assert graph.nodes[2].parameters == {"weight": "top.weight", "bias": "top.bias"}


def test_an_empty_one_is_the_identity() -> None:
    x = TensorSpec((2, 3, 4, 5))
    assert Sequential([]).output(x) == x
    assert Sequential([]).flops(x) == 0


def test_costs_add_up() -> None:
    first, second, x = Conv2d(3, 4, 3), Conv2d(4, 2, 1), TensorSpec((2, 7, 9, 3))
    assert Sequential([first, second]).flops(x) == first.flops(x) + second.flops(first.output(x))


def test_an_error_names_the_layer() -> None:
    with pytest.raises(ShapeError, match=r"Layer sequential\.body\.1: conv2d was built for 5 channels, its input has 4"):
        Sequential({"body": Sequential([Conv2d(3, 4, 3), Conv2d(5, 2, 1)])}).output(TensorSpec((2, 7, 9, 3)))


@pytest.mark.parametrize(("name", "nearest"), [("", "'0'"), ("a.b", "'a_b'")])
def test_names_that_cannot_be_joined_are_refused(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest):
        Sequential({name: ReLU()})
