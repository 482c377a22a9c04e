"""Programs: gradients of whole networks, also with frozen layers, hooks in order, places in memory, and spans of actions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.backend.operators import Array, Buffers, FollowsOperator, KernelSet, Operator, StepContext
from hpctrain.backend.specs import Shape
from hpctrain.core.errors import ConfigError, ShapeError
from hpctrain.nn.captured_program import backward_spans, forward_spans
from hpctrain.nn.compile.plan import Action
from hpctrain.nn.custom import ArrayLayer
from hpctrain.nn.initialise import constant
from hpctrain.nn.layers import BatchNorm, Conv2d, Dropout, Flatten, Layer, Linear, ReLU, Residual, Sequential
from hpctrain.nn.network import Network, frozen_layers, layer_of
from hpctrain.nn.parameter import Parameter, ParameterSpec
from hpctrain.nn.program import Program, StepHooks
from tests.support import nets

SHAPE, BATCH = (9, 7, 3), 4

NETS: dict[str, Callable[[], Layer]] = {
    "plain": nets.plain,
    "residual": nets.residual,
    "dropout": lambda: nets.plain(dropout=0.4),
}


def _network(model: Layer, **options: Any) -> Network:
    return Network(model, SHAPE, NumpyKernelSet(), dtype="float64", seed=5, **options)


def _data(n: int) -> tuple[np.ndarray, np.ndarray, StepContext]:
    random = np.random.default_rng(n)
    context = StepContext(step=4, sample_ids=np.arange(n, dtype=np.int64) * 3)
    return random.standard_normal((n, *SHAPE)), random.integers(0, 5, n), context


def _loss(network: Network, x: np.ndarray, y: np.ndarray, context: StepContext) -> float:
    program = network.program(len(y), training=True)
    program.x[...] = x
    program.forward(context)
    return program.loss(y, len(y)).loss / max(1, len(y))


def _check_gradients(network: Network, names: Collection[str] | None = None) -> None:
    """Directional derivatives of the loss by these parameters, or by all, against central differences."""
    x, y, context = _data(BATCH)
    _loss(network, x, y, context)
    network.program(BATCH, training=True).backward()
    random = np.random.default_rng(0)
    for name in network.parameters if names is None else names:
        parameter = network.parameters[name]
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
    _check_gradients(_network(NETS[name](), smoothing=0.1))


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
    model = Sequential({"conv": Conv2d(3, 4, 3), "mine": _Scale(), "flatten": Flatten(), "fc": Linear(4 * 7 * 5, 5)})
    _check_gradients(_network(model, smoothing=0.1))


@pytest.mark.parametrize(
    ("method", "result", "words"),
    [
        (
            "forward",
            np.zeros((2, 5)),
            r"forward \(.*test_programs.py, line \d+\) returns y with shape \(2, 5\), but must return numbers of shape",
        ),
        ("forward", None, "returns y with the value None, but must return numbers of shape"),
        ("backward", np.zeros(3), r"backward .* returns array.*, but must return the gradient of the loss"),
        ("backward", (np.zeros((2, 5)), {"scale": 0.0}), r"returns dx with shape \(2, 5\), but .* follows from that of x"),
        ("backward", (0.0, {}), "returns the gradient of scale with the value None"),
        ("forward", "1.5", "returns y with the value '1.5', but must return numbers of shape"),
        ("forward", np.zeros((1, 7, 5, 4)), r"returns y with shape \(1, 7, 5, 4\), but must return numbers of shape"),
        ("forward", np.zeros((4, 7, 5, 4), complex), "returns y with .*, but must return numbers of shape"),
        ("output_shape", None, "returns None, but must return the shape of y for x of `shape`"),
        ("output_shape", "same", "returns 'same', but must return the shape of y"),
        ("parameters", {"scale": 1.0}, "returns .*, but must return the declared parameters by role"),
        ("parameters", None, "returns None, but must return the declared parameters by role"),
    ],
)
def test_wrong_results_of_a_users_layer_name_the_layer_the_method_and_the_shape(method: str, result: object, words: str) -> None:
    """NumPy's own error names neither the layer nor its file, and NumPy would convert None to nan without an error."""

    def returns(self: object, *arguments: object) -> object:
        return result

    wrong = type("Wrong", (_Scale,), {method: returns, "__module__": __name__})
    model = Sequential({"conv": Conv2d(3, 4, 3), "mine": wrong(), "flatten": Flatten(), "fc": Linear(4 * 7 * 5, 5)})
    with pytest.raises((ShapeError, ConfigError), match=f"Wrong.*{words}"):
        _check_gradients(_network(model))


WRITES: dict[str, Callable[[Array], object]] = {
    "clip": lambda array: np.clip(array, 0, 6, out=array),
    "multiply": lambda array: np.multiply(array, 2, out=array),
    "assign": lambda array: array.__setitem__(..., 1.0),
    "fill": lambda array: array.fill(0.0),
    "flat": lambda array: array.reshape(-1).__setitem__(slice(None), 3.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", [NumpyKernelSet, OnednnKernelSet])
@pytest.mark.parametrize("place", ["forward x", "forward scale", "backward x", "backward scale", "backward dy"])
def test_a_users_layer_cannot_write_to_arrays_that_others_read(place: str, make: Callable[[], KernelSet], write: str) -> None:
    """NumPy refuses the write, so that the result depends on no kernel set's use of memory."""
    if make is OnednnKernelSet and (reason := available()) is not None:
        pytest.skip(reason)

    class Writes(_Scale):
        def forward(self, x: Array, parameters: Mapping[str, Array], context: StepContext, saved: dict[str, Any]) -> Array:
            arrays = {"forward x": x, "forward scale": parameters["scale"]}
            if place in arrays:
                WRITES[write](arrays[place])
            return super().forward(x, parameters, context, saved)

        def backward(
            self, x: Array, dy: Array, parameters: Mapping[str, Array], saved: dict[str, Any]
        ) -> tuple[Array, Mapping[str, Array]]:
            arrays = {"backward x": x, "backward dy": dy, "backward scale": parameters["scale"]}
            if place in arrays:
                WRITES[write](arrays[place])
            return super().backward(x, dy, parameters, saved)

    model = Sequential({"conv": Conv2d(3, 4, 3), "mine": Writes(), "flatten": Flatten(), "fc": Linear(4 * 7 * 5, 5)})
    network = Network(model, SHAPE, make(), dtype="float32", seed=5)

    def step() -> None:
        _loss(network, *_data(4))
        network.program(4, training=True).backward()

    with pytest.raises(ValueError, match=r"read-only|readonly"):
        step()


@pytest.mark.parametrize("seed", range(12))
def test_one_layer_object_in_two_places_is_refused_if_it_has_parameters(seed: int) -> None:
    """It would become two layers with parameters of their own. A layer without parameters may occur in several places."""
    random = np.random.default_rng(seed)
    shared: Layer = [Conv2d(3, 3, 1), BatchNorm(3), Sequential([Conv2d(3, 3, 1)]), _Scale(), ReLU(), Dropout(0.5)][seed % 6]
    places = set(random.choice(4, 2, replace=False).tolist())
    parts = [shared if number in places else Conv2d(3, 3, 1) for number in range(4)]
    model = Sequential(
        {
            "first": Sequential([parts[0]]),
            "block": Residual({"a": parts[1], "b": Conv2d(3, 3, 1)}, shortcut=parts[2]),
            "last": parts[3],
            "flatten": Flatten(),
            "fc": Linear(189, 5),
        }
    )
    if isinstance(shared, ReLU | Dropout):
        _network(model)
        return
    with pytest.raises(ShapeError, match="are one object, but layers share no parameters; create one for each"):
        _network(model)


def test_a_layer_used_twice_is_refused() -> None:
    class Twice(Sequential):
        def lower(self, graph: Any, x: int, name: str) -> int:
            return super().lower(graph, super().lower(graph, x, name), name)

    with pytest.raises(ShapeError, match="used by 2 operations"):
        _network(Sequential({"twice": Twice({"conv": Conv2d(3, 3, 1)}), "flatten": Flatten(), "fc": Linear(189, 5)}))


def _program(kernels: KernelSet, **options: object) -> tuple[Network, Program]:
    network = Network(nets.residual(synchronised=False), SHAPE, kernels, **options)  # type: ignore[arg-type]
    return network, network.program(3, training=True)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("kernels", [NumpyKernelSet, OnednnKernelSet])
def test_a_reader_gets_the_array_that_its_input_was_written_to(kernels: type[KernelSet]) -> None:
    _, program = _program(kernels())
    written = {0: _address(program.x)}
    for planned, bound in zip(program.plan.steps, program.steps, strict=True):
        buffers = bound.operator.buffers
        assert [_address(x) for x in buffers.inputs] == [written[tensor] for tensor in planned.inputs]
        written[planned.output] = _address(buffers.output)
    assert written[program.plan.output] == _address(program.logits)


def test_operators_have_the_parameters_and_gradients_of_their_groups() -> None:
    network, program = _program(NumpyKernelSet())
    seen = set()
    for planned, bound in zip(program.plan.steps, program.steps, strict=True):
        for role, name in planned.node.parameters.items() if planned.node else ():
            parameter = network.parameters[name]
            assert bound.operator.buffers.parameters[role] is parameter.data
            assert bound.operator.buffers.gradients[role] is parameter.grad
            seen.add(name)
    assert seen == set(network.parameters)


def test_a_frozen_layers_gradient_is_nobodys() -> None:
    network, program = _program(NumpyKernelSet(), frozen=("conv1",))
    (frozen,) = (bound for bound in program.steps if bound.name == "conv1")
    assert frozen.parameters == ()
    assert not any(
        np.shares_memory(frozen.operator.buffers.gradients.get("weight", np.zeros(1)), group.grad)
        for group in network.groups.values()
    )


def test_followers_hear_of_their_leader_before_they_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, Operator]] = []

    class _Following(FollowsOperator):
        def follow(self, first: Operator) -> None:
            heard.append(("follow", first))

    @cache  # plans of operators of other types have no leader
    def kind(plain: type[Operator]) -> type[Operator]:
        return type("Following", (_Following, plain), {})

    kernels = NumpyKernelSet()
    make = kernels.make

    def following(*arguments: object, **options: object) -> Operator:
        operator = make(*arguments, **options)  # type: ignore[arg-type]
        bind = operator.bind

        def bound(buffers: Buffers) -> None:
            heard.append(("bind", operator))
            bind(buffers)

        operator.__class__ = kind(type(operator))
        operator.bind = bound  # type: ignore[method-assign]
        return operator

    monkeypatch.setattr(kernels, "make", following)
    network = Network(nets.plain(), SHAPE, kernels)
    heard.clear()
    first, second = network.side_by_side([(2,), (3,)])
    led = [operator for what, operator in heard[len(first.steps) :] if what == "follow"]
    assert [what for what, _ in heard] == ["bind"] * len(first.steps) + ["follow", "bind"] * len(second.steps)
    assert led == [step.operator for step in first.steps]


NAMES = [f"p{i}" for i in range(8)]

Needs = list[list[str]]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Needs, dict[str, list[int]]]:
    """Actions that use each parameter once, in order, and the slices of some parameters."""
    actions: Needs = [[] for _ in range(draw(st.integers(1, 12)))]
    places = sorted(draw(st.lists(st.integers(0, len(actions) - 1), min_size=len(NAMES), max_size=len(NAMES))))
    for name, place in zip(NAMES, places, strict=True):
        actions[place].append(name)
    carried = draw(st.lists(st.sampled_from(NAMES), unique=True))
    return actions, {name: draw(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True)) for name in carried}


def _cover(spans: list[range], actions: Needs) -> None:
    assert [position for span in spans for position in span] == list(range(len(actions)))
    assert all(len(span) for span in spans)


@given(programs())
def test_a_forward_span_needs_no_slice_that_its_first_needing_action_does_not(
    program: tuple[Needs, dict[str, list[int]]],
) -> None:
    actions, slices = program
    spans = forward_spans(actions, slices)
    _cover(spans, actions)
    needed: set[int] = set()
    for span in spans:
        new = [{k for name in actions[position] for k in slices.get(name, ())} - needed for position in span]
        first = next((more for more in new if more), set())
        assert set().union(*new) == first
        needed |= first


@given(programs())
def test_a_backward_span_ends_where_slices_are_complete_and_only_there(program: tuple[Needs, dict[str, list[int]]]) -> None:
    actions, slices = program
    spans = backward_spans(actions, slices)
    _cover(spans, actions)
    last = {k: max(p for p, names in enumerate(actions) for n in names if k in slices.get(n, ())) for k in _all(slices)}
    assert {span[-1] for span in spans} == set(last.values()) | {len(actions) - 1}


def _all(slices: dict[str, list[int]]) -> set[int]:
    return {k for held in slices.values() for k in held}


@given(programs())
def test_without_messages_a_pass_is_one_span(program: tuple[Needs, dict[str, list[int]]]) -> None:
    actions, _ = program
    assert forward_spans(actions, {}) == backward_spans(actions, {}) == [range(len(actions))]


#: patterns by which the first layers, the last ones, some in between, and norms alone are frozen
FROZEN = {
    "residual first": (nets.residual, ("conv1", "bn1", "layer1.*")),
    "residual last": (nets.residual, ("fc", "layer2.*")),
    "residual norms": (nets.residual, ("*bn*", "layer2.downsample.1")),
    "plain first": (nets.plain, ("conv1", "conv2.weight")),
    "plain between": (nets.plain, ("conv2", "fc1")),
}


def network_of(case: str, kernels: KernelSet, dtype: str, *, frozen: bool = True) -> Network:
    make, patterns = FROZEN[case]
    network = Network(make(), SHAPE, kernels, dtype=dtype, seed=2, frozen=patterns if frozen else ())
    random = np.random.default_rng(5)
    for name, view in network.statistics.views.items():
        view[...] = 0.5 + random.random(view.shape) if name.endswith("var") else 0.3 * random.standard_normal(view.shape)
    for parameter in network.parameters.values():
        parameter.data += 0.1 * random.standard_normal(parameter.data.shape)
    network.parameters_changed()
    return network


@pytest.mark.parametrize("case", FROZEN)
def test_gradients_of_trained_layers_are_derivatives_of_the_loss(case: str) -> None:
    network = network_of(case, NumpyKernelSet(), "float64")
    _check_gradients(network, network.trained)


@pytest.mark.parametrize("case", FROZEN)
def test_frozen_layers_have_no_gradients_and_keep_nothing(case: str) -> None:
    network, whole = (network_of(case, NumpyKernelSet(), "float64", frozen=frozen) for frozen in (True, False))
    assert network.frozen
    assert set(network.trained) == {name for group in network.groups.values() for name in group.parameters}
    assert {layer_of(name) for group in network.frozen_groups.values() for name in group.parameters} == network.frozen
    plan = network.program(BATCH, training=True).plan
    acting = {plan.steps[k].name for action, k in plan.backward if action in (Action.PARAMETERS, Action.FREE)}
    assert not acting & network.frozen
    assert acting | network.frozen == {name for name, layer in network.model.walk() if layer.parameters()}
    assert plan.arena_bytes <= whole.program(BATCH, training=True).plan.arena_bytes


def test_nothing_goes_back_to_where_nothing_is_trained() -> None:
    network = network_of("residual first", NumpyKernelSet(), "float64")
    plan = network.program(BATCH, training=True).plan
    first = min(k for k, step in enumerate(plan.steps) if step.has_parameters)
    assert first > 0
    assert {k for action, k in plan.backward if action is Action.INPUT} <= set(range(first + 1, len(plan.steps)))
    assert plan.arena_bytes < network_of("residual first", NumpyKernelSet(), "float64", frozen=False).arena_bytes(
        BATCH, training=True
    )


@pytest.mark.parametrize("case", ["residual first", "residual norms"])
def test_statistics_of_frozen_norms_are_used_and_stay(case: str) -> None:
    network, data = network_of(case, NumpyKernelSet(), "float64"), _data(BATCH)
    statistics = network.statistics
    frozen = {name: view.copy() for name, view in statistics.views.items() if layer_of(name) in network.frozen}
    assert frozen
    _loss(network, *data)
    statistics.blend(statistics.weighted(BATCH, BATCH, statistics.batch), BATCH)
    for name, before in frozen.items():
        np.testing.assert_array_equal(statistics.views[name], before)
    before = _loss(network, *data)
    statistics.views[next(iter(frozen))][...] += 0.5
    statistics.running_changed()
    assert _loss(network, *data) != before


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize("case", FROZEN)
def test_onednn_does_the_same(case: str) -> None:
    ours, reference = network_of(case, OnednnKernelSet(), "float32"), network_of(case, NumpyKernelSet(), "float32")
    losses = []
    for network in (ours, reference):
        losses.append(_loss(network, *_data(BATCH)))
        network.program(BATCH, training=True).backward()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name in reference.trained:
        wanted = reference.parameters[name].grad
        np.testing.assert_allclose(ours.parameters[name].grad, wanted, rtol=1e-3, atol=1e-4 * float(np.abs(wanted).max()) + 1e-6)


def test_patterns_that_do_not_fit_are_sentences() -> None:
    model = nets.plain()
    with pytest.raises(
        ConfigError, match=r'"conv3" of frozen layers matches no layer with parameters; the nearest layer is conv'
    ):
        frozen_layers(model, ["conv1", "conv3"])
    with pytest.raises(
        ConfigError, match=r"match all 4 layers with parameters, so nothing would be trained; exclude at least fc2"
    ):
        frozen_layers(model, ["conv*", "fc*"])
    assert frozen_layers(model, []) == frozenset()
    assert frozen_layers(model, ["fc1.bias", "conv*"]) == {"fc1", "conv1", "conv2"}
