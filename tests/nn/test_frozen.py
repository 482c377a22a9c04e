"""Frozen layers: gradients pass through them, they have none themselves, and their batch norms do not change."""

import numpy as np
import pytest

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.backend.operators import KernelSet, StepContext
from hpctrain.core.errors import ConfigError
from hpctrain.nn.compile.plan import Action
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import Network, frozen_layers, layer_of
from tests.support import nets

SHAPE, BATCH = (9, 7, 3), 4
LABELS = np.array([0, 3, 1, 4])
#: patterns by which the first layers, the last ones, some in between, and norms alone are frozen
CASES = {
    "residual first": (nets.residual, ("conv1", "bn1", "layer1.*")),
    "residual last": (nets.residual, ("fc", "layer2.*")),
    "residual norms": (nets.residual, ("*bn*", "layer2.downsample.1")),
    "plain first": (nets.plain, ("conv1", "conv2.weight")),
    "plain between": (nets.plain, ("conv2", "fc1")),
}


def layer_names(model: Layer) -> list[str]:
    return [name for name, layer in model.walk() if layer.parameters()]


def network_of(case: str, kernels: KernelSet, dtype: str, *, frozen: bool = True) -> Network:
    make, patterns = CASES[case]
    network = Network(make(), SHAPE, kernels, dtype=dtype, seed=2, frozen=patterns if frozen else ())
    random = np.random.default_rng(5)
    for name, view in network.statistics.views.items():
        view[...] = 0.5 + random.random(view.shape) if name.endswith("var") else 0.3 * random.standard_normal(view.shape)
    for parameter in network.parameters.values():
        parameter.data += 0.1 * random.standard_normal(parameter.data.shape)
    network.parameters_changed()
    return network


def loss_of(network: Network, x: np.ndarray) -> float:
    program = network.program(BATCH, training=True)
    program.set_input(x)
    program.forward(StepContext(sample_ids=np.arange(BATCH)))
    return float(program.loss(LABELS, BATCH).result().loss / BATCH)


def images(dtype: str) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((BATCH, *SHAPE)).astype(dtype)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_others_are_derivatives_of_the_loss(case: str) -> None:
    network, x = network_of(case, NumpyKernelSet(), "float64"), images("float64")
    loss_of(network, x)
    network.program(BATCH, training=True).backward()
    gradients = {name: network.parameters[name].grad.copy() for name in network.trained}
    random, step = np.random.default_rng(0), 1e-6
    for name, gradient in gradients.items():
        data = network.parameters[name].data
        direction = random.standard_normal(data.shape)
        direction /= np.linalg.norm(direction)
        kept = data.copy()
        data[...] = kept + step * direction
        above = loss_of(network, x)
        data[...] = kept - step * direction
        below = loss_of(network, x)
        data[...] = kept
        assert (above - below) / (2 * step) == pytest.approx(float((gradient * direction).sum()), rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("case", CASES)
def test_frozen_layers_have_no_gradients_and_keep_nothing(case: str) -> None:
    network, whole = (network_of(case, NumpyKernelSet(), "float64", frozen=frozen) for frozen in (True, False))
    assert network.frozen
    assert set(network.trained) == {name for group in network.groups.values() for name in group.parameters}
    assert {layer_of(name) for group in network.frozen_groups.values() for name in group.parameters} == network.frozen
    plan = network.program(BATCH, training=True).plan
    acting = {plan.steps[k].name for action, k in plan.backward if action in (Action.PARAMETERS, Action.FREE)}
    assert not acting & network.frozen
    assert acting | network.frozen == set(layer_names(network.model))
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
    network, x = network_of(case, NumpyKernelSet(), "float64"), images("float64")
    statistics = network.statistics
    frozen = {name: view.copy() for name, view in statistics.views.items() if layer_of(name) in network.frozen}
    assert frozen
    loss_of(network, x)
    statistics.blend(statistics.weighted(BATCH, BATCH, statistics.batch), BATCH)
    for name, before in frozen.items():
        np.testing.assert_array_equal(statistics.views[name], before)
    before = loss_of(network, x)
    statistics.views[next(iter(frozen))][...] += 0.5
    statistics.running_changed()
    assert loss_of(network, x) != before


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize("case", CASES)
def test_onednn_does_the_same(case: str) -> None:
    ours, reference = network_of(case, OnednnKernelSet(), "float32"), network_of(case, NumpyKernelSet(), "float32")
    x = images("float32")
    losses = []
    for network in (ours, reference):
        losses.append(loss_of(network, x))
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
