import numpy as np
import pytest

from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.errors import CheckpointError
from hpctrain.models import catalogue, interchange
from hpctrain.nn.network import Network
from hpctrain.testing.models import exported_shapes

MODELS = {
    "vgg11_bn": ({"width": 0.05, "classes": 5}, (37, 33, 3)),
    "resnet50": ({"width": 0.05, "classes": 5}, (33, 41, 3)),
    "resnet20": ({"width": 0.25, "classes": 5}, (9, 7, 3)),
    "small": ({"channels": (3, 5), "hidden": 7, "classes": 5}, (29, 28, 1)),
}


def make(name: str, *, seed: int = 0, dtype: str = "float64") -> Network:
    options, image_shape = MODELS[name]
    network = Network(catalogue.build(name, options), image_shape, NumpyKernelSet(), dtype=dtype, seed=seed)
    random = np.random.default_rng(seed)
    for parameter in network.parameters.values():
        parameter.data += 0.1 * random.standard_normal(parameter.data.shape)
    for view in network.statistics.views.values():
        view[...] = 0.5 + random.random(view.shape)
    return network


def evaluate(network: Network) -> np.ndarray:
    program = network.program(3, training=False)
    program.x[...] = np.random.default_rng(7).standard_normal(program.x.shape)
    logits: np.ndarray = program.forward(StepContext(training=False)).copy()
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_exact(name: str) -> None:
    source, target = make(name, seed=1), make(name, seed=2)
    expected = evaluate(source)
    assert not np.array_equal(evaluate(target), expected)
    state = interchange.export(source)
    assert {key: array.shape for key, array in state.items()} == exported_shapes(source.model)
    interchange.restore(target, state)
    for key, parameter in source.parameters.items():
        np.testing.assert_array_equal(target.parameters[key].data, parameter.data)
    np.testing.assert_array_equal(target.statistics.running, source.statistics.running)
    np.testing.assert_array_equal(evaluate(target), expected)


def test_exported_arrays_are_copies() -> None:
    network = make("small")
    state = interchange.export(network)
    for array in state.values():
        array[...] = 0.0
    assert all(parameter.data.any() for name, parameter in network.parameters.items() if name.endswith("weight"))
    assert network.statistics.running.all()


def test_precision_is_the_networks() -> None:
    state = interchange.export(make("small", dtype="float32"))
    assert {array.dtype for array in state.values()} == {np.dtype(np.float32)}
    double = make("small", seed=3)
    interchange.restore(double, state)
    assert double.parameters["stage1.conv.weight"].data.dtype == np.float64


def test_torch_counters_are_ignored() -> None:
    network = make("resnet20")
    state = interchange.export(network) | {"bn1.num_batches_tracked": np.array(5)}
    interchange.restore(network, state)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    network = make("small")
    before = {name: parameter.data.copy() for name, parameter in network.parameters.items()}
    good = interchange.export(make("small", seed=5))
    missing = {name: array for name, array in good.items() if name != "stage1.bn.running_var"}
    unknown = good | {"stage9.conv.weight": np.zeros(3)}
    shape = good | {"classifier.fc2.weight": good["classifier.fc2.weight"].T}
    for state, sentence in (
        (missing, r"lacks 1 of 14 arrays \(stage1\.bn\.running_var\)"),
        (unknown, r"has 1 that the model does not know \(stage9\.conv\.weight\)"),
        (shape, r"Array classifier\.fc2\.weight of the state has shape \(7, 5\), the model's has \(5, 7\)"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            interchange.restore(network, state)
    for name, parameter in network.parameters.items():
        np.testing.assert_array_equal(parameter.data, before[name])
