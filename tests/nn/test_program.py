"""Programs: gradients of whole networks, memory that is shared rightly, hooks in order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.kernels.base import Array, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import Shape
from hpctrain.errors import ShapeError
from hpctrain.nn.custom import ArrayLayer
from hpctrain.nn.hooks import StepHooks
from hpctrain.nn.initialise import constant
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.residual import Residual
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import Parameter, ParameterSpec
from tests.support import nets

SHAPE = (9, 7, 3)
NETS: dict[str, Callable[[], Layer]] = {
    "plain": nets.plain,
    "residual": nets.residual,
    "dropout": lambda: nets.plain(dropout=0.4),
}


def _network(model: Layer, **options: Any) -> Network:
    return Network(model, SHAPE, NumpyKernelSet(), dtype="float64", seed=5, **options)


def _data(n: int) -> tuple[np.ndarray, np.ndarray, StepContext]:
    random = np.random.default_rng(n)
    context = StepContext(step=4, sample_ids=np.arange(n, dtype=np.int64) * 3, global_count=n)
    return random.standard_normal((n, *SHAPE)), random.integers(0, 5, n), context


def _loss(network: Network, x: np.ndarray, y: np.ndarray, context: StepContext) -> float:
    program = network.program(len(y), training=True)
    program.x[...] = x
    program.forward(context)
    return program.loss(y, len(y)).loss / max(1, len(y))


def _check_gradients(model: Layer) -> None:
    """Directional derivatives of the loss by every parameter, against central differences."""
    network = _network(model, smoothing=0.1)
    x, y, context = _data(4)
    _loss(network, x, y, context)
    network.program(4, training=True).backward()
    random = np.random.default_rng(0)
    for parameter in network.parameters.values():
        direction = random.standard_normal(parameter.data.shape)
        expected = float((parameter.grad * direction).sum())
        step = 1e-6 / np.abs(direction).max()
        start = parameter.data.copy()
        losses = []
        for sign in (1, -1):
            parameter.data[...] = start + sign * step * direction
            losses.append(_loss(network, x, y, context))
        parameter.data[...] = start
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(expected, rel=1e-5, abs=1e-8), parameter.name


@pytest.mark.parametrize("name", NETS)
def test_every_gradient_equals_the_numerical_one(name: str) -> None:
    _check_gradients(NETS[name]())


@pytest.mark.parametrize("name", NETS)
def test_the_gradient_of_the_input_equals_the_numerical_one(name: str) -> None:
    network = _network(NETS[name]())
    x, y, context = _data(3)
    program = network.program(3, training=True, input_gradient=True)
    program.x[...] = x
    program.forward(context)
    program.loss(y, 3)
    program.backward()
    assert program.x_grad is not None
    direction = np.random.default_rng(1).standard_normal(x.shape)
    expected = float((program.x_grad * direction).sum())
    step = 1e-6
    slope = (_loss(network, x + step * direction, y, context) - _loss(network, x - step * direction, y, context)) / (2 * step)
    assert slope == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_a_second_step_gives_the_same_bits(name: str) -> None:
    network = _network(NETS[name]())
    x, y, context = _data(5)
    found = []
    for _ in range(2):
        loss = _loss(network, x, y, context)
        network.program(5, training=True).backward()
        found.append((loss, network.groups["all"].grad.copy()))
        network.program(2, training=False).forward(StepContext(training=False))  # shares the arena
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][1], found[1][1])


def test_poisoned_memory_changes_nothing() -> None:
    """Nothing is read that this step has not written."""
    network = _network(nets.residual())
    x, y, context = _data(3)
    _loss(network, x, y, context)
    program = network.program(3, training=True)
    program.backward()
    expected = network.groups["all"].grad.copy()
    network._arena.view("float64")[...] = np.nan
    network.groups["all"].grad[...] = np.nan
    _loss(network, x, y, context)
    program.backward()
    assert np.array_equal(network.groups["all"].grad, expected)


def test_a_batch_without_samples_has_zero_gradients() -> None:
    network = _network(nets.residual())
    x, y, context = _data(0)
    assert _loss(network, x, y, context) == 0
    network.groups["all"].grad[...] = np.nan
    network.program(0, training=True).backward()
    assert not network.groups["all"].grad.any()


class _Recorder(StepHooks):
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        self.events += [("before", parameter.name) for parameter in parameters]

    def grad_ready(self, parameter: Parameter) -> None:
        self.events.append(("ready", parameter.name))

    def data_free(self, parameter: Parameter) -> None:
        self.events.append(("free", parameter.name))


def test_gradients_are_announced_last_layer_first_and_once() -> None:
    network = _network(nets.residual())
    x, y, context = _data(2)
    program = network.program(2, training=True)
    program.x[...] = x
    recorder = _Recorder()
    program.forward(context, recorder)
    program.loss(y, 2)
    program.backward(recorder)
    names = list(network.parameters)
    assert [name for event, name in recorder.events if event == "before"] == names
    ready = [name for event, name in recorder.events if event == "ready"]
    assert ready == names[::-1]
    for name in names:
        assert recorder.events.index(("ready", name)) < recorder.events.index(("free", name))


def test_parameter_order_is_forward_order() -> None:
    network = _network(nets.residual())
    orders = [network.parameters[name].order for name in network.parameters]
    assert orders == sorted(orders)
    starts = [segment.start for segment in network.groups["all"].segments]
    assert starts == sorted(starts)
    assert network.groups["all"].segments[-1].stop == network.groups["all"].size


class _Scale(ArrayLayer):
    """y = scale * x^2, a user's own layer."""

    def parameters(self) -> Mapping[str, ParameterSpec]:
        return {"scale": ParameterSpec((), constant(1.5))}

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def forward(self, x: Array, parameters: Mapping[str, Array], context: StepContext, saved: dict[str, Any]) -> Array:
        saved["square"] = x * x
        return parameters["scale"] * saved["square"]

    def backward(
        self, x: Array, dy: Array, parameters: Mapping[str, Array], saved: dict[str, Any]
    ) -> tuple[Array, Mapping[str, Array]]:
        return 2 * parameters["scale"] * x * dy, {"scale": (dy * saved["square"]).sum()}


def test_a_users_layer_trains_like_any_other() -> None:
    _check_gradients(Sequential({"conv": Conv2d(3, 4, 3), "mine": _Scale(), "flatten": Flatten(), "fc": Linear(4 * 7 * 5, 5)}))


def test_a_tensor_read_twice_collects_both_gradients() -> None:
    """Identity shortcut of an identity body: y = relu(x + x)."""
    double = Residual({}, None, activation=ReLU())
    _check_gradients(Sequential({"conv": Conv2d(3, 4, 1), "double": double, "flatten": Flatten(), "fc": Linear(252, 5)}))


def test_a_model_that_ends_in_an_image_is_refused() -> None:
    with pytest.raises(ShapeError, match="flatten or pool"):
        _network(Sequential({"conv": Conv2d(3, 4, 3)}))


def test_a_layer_that_does_not_fit_is_named() -> None:
    with pytest.raises(ShapeError, match="Layer fc: linear was built"):
        _network(Sequential({"flatten": Flatten(), "fc": Linear(10, 5)}))


def test_a_layer_used_twice_is_refused() -> None:
    class Twice(Sequential):
        def lower(self, graph: Any, x: int, name: str) -> int:
            return super().lower(graph, super().lower(graph, x, name), name)

    with pytest.raises(ShapeError, match="used by 2 operations"):
        _network(Sequential({"twice": Twice({"conv": Conv2d(3, 3, 1)}), "flatten": Flatten(), "fc": Linear(189, 5)}))
