import pytest

from hpctrain.backend.kernels.graph import GraphBuilder
from hpctrain.backend.kernels.specs import AddSpec, TensorSpec
from hpctrain.errors import ConfigError, ShapeError
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.batch_norm import BatchNorm
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.residual import Residual
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.testing.layer_gradients import check_gradients


def body(channels: int = 3, stride: int = 1) -> dict[str, Layer]:
    return {
        "conv1": Conv2d(3, channels, 3, stride, padding=1, bias=False),
        "bn1": BatchNorm(channels),
        "relu1": ReLU(),
        "conv2": Conv2d(channels, channels, 3, padding=1, bias=False),
        "bn2": BatchNorm(channels),
    }


CASES = {
    "identity": Residual(body(), activation=ReLU()),
    "identity without activation": Residual(body()),
    "projection": Residual(body(5, 2), Sequential([Conv2d(3, 5, 1, 2, bias=False), BatchNorm(5)]), activation=ReLU()),
    "empty body doubles": Residual({}),
    "nested": Residual({"inner": Residual({"conv": Conv2d(3, 3, 3, padding=1)}, activation=ReLU())}, activation=ReLU()),
    "body that works in place": Residual({"relu": ReLU(), "conv": Conv2d(3, 3, 1)}),
    "shortcut that works in place": Residual({"conv": Conv2d(3, 3, 1)}, ReLU(), activation=ReLU()),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    check_gradients(CASES[case], (7, 5, 3))


@pytest.mark.parametrize("case", CASES)
def test_gradients_behind_a_layer(case: str) -> None:
    check_gradients(Sequential([Conv2d(2, 3, 1), CASES[case]]), (7, 5, 2))


def test_names_and_order() -> None:
    shortcut = Sequential([Conv2d(3, 5, 1, 2), BatchNorm(5)])
    block = Residual(body(5, 2), shortcut, activation=ReLU(), activation_name="relu2")
    builder = GraphBuilder(TensorSpec((2, 7, 9, 3)))
    graph = builder.build(block.lower(builder, 0, "layer1.0"))
    expected = ["conv1", "bn1", "relu1", "conv2", "bn2", "downsample.0", "downsample.1", "add", "relu2"]
    assert [node.name for node in graph.nodes] == [f"layer1.0.{name}" for name in expected]
    total = graph.nodes[-2]
    assert total.spec == AddSpec()
    assert total.inputs == (graph.nodes[4].output, graph.nodes[6].output)
    named = ["", *expected[:5], "downsample", *expected[5:7], "relu2"]
    assert [name for name, _ in block.walk()] == named


def test_branches_of_different_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"residual\.add: A residual sum needs two inputs of one shape"):
        Residual(body(5)).output(TensorSpec((2, 7, 9, 3)))


@pytest.mark.parametrize("name", ["add", "relu", "downsample"])
def test_a_name_that_occurs_twice_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"two parts named '{name}'"):
        Residual({name: ReLU()}, ReLU(), activation=ReLU())


def test_a_dotted_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a_b'"):
        Residual({"a.b": ReLU()})
