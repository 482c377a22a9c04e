"""The catalogue of models: all names build, gradients add up over parts of a batch, and options are checked."""

from pathlib import Path

import numpy as np
import pytest

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import StepContext
from hpctrain.backend.specs import TensorSpec
from hpctrain.core.errors import ConfigError
from hpctrain.models import catalogue
from hpctrain.nn.network import Network


def test_every_name_builds_at_its_own_image_size() -> None:
    for name in catalogue.names():
        model = catalogue.build(name, {"classes": 7, "width": 0.05})
        assert model.output(TensorSpec((2, *catalogue.image_shape(name)))).shape == (2, 7), name


@pytest.mark.parametrize("name", ["vgg11", "vgg11_bn", "resnet18", "resnet50", "resnet20", "preact_resnet18", "small"])
def test_a_rank_without_samples_has_zero_gradients(name: str) -> None:
    rows, columns, channels = catalogue.image_shape(name)
    shape = (min(rows, 33), min(columns, 35), channels)
    network = Network(catalogue.build(name, {"classes": 7, "width": 0.05}), shape, NumpyKernelSet())
    program = network.program(0, training=True)
    for parameter in network.parameters.values():
        parameter.grad[...] = np.nan
    assert program.forward(StepContext()).shape == (0, 7)
    assert program.loss(np.zeros(0, np.int64), 5).count == 0
    program.backward()
    for parameter_name, parameter in network.parameters.items():
        assert not parameter.grad.any(), parameter_name


@pytest.mark.parametrize("name", ["vgg11", "small"])
def test_gradients_of_a_batch_are_sums_over_its_parts(name: str) -> None:
    """Without batch norm, which couples samples; with dropout, whose masks follow the samples."""
    rows, columns, channels = catalogue.image_shape(name)
    shape = (min(rows, 33), min(columns, 35), channels)
    options = {"classes": 7, "width": 0.05, "batch_norm": False, "dropout": 0.5}
    network = Network(catalogue.build(name, options), shape, NumpyKernelSet(), dtype="float64")
    random = np.random.default_rng(0)
    x, labels = random.standard_normal((5, *shape)), random.integers(0, 7, 5)

    def gradient(part: slice) -> np.ndarray:
        program = network.program(len(labels[part]), training=True)
        program.x[...] = x[part]
        program.forward(StepContext(sample_ids=np.arange(5)[part]))
        program.loss(labels[part], 5)
        program.backward()
        return network.groups["all"].grad.copy()

    whole, parts = gradient(slice(0, 5)), [gradient(slice(0, 2)), gradient(slice(2, 5))]
    np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=1e-9, atol=1e-15)


def test_check_returns_all_options_with_values_of_their_types() -> None:
    checked = catalogue.check("resnet50", {"width": 2, "synchronised": True})
    assert isinstance(checked["width"], float)
    assert checked["synchronised"] is True
    assert checked["depth"] == 50
    assert checked.keys() == catalogue.options("resnet50").keys()


@pytest.mark.parametrize(("line", "channels"), [("IMAGE_SHAPE = (9, 8, 1)", 1), ("", 3)])
def test_a_users_model_is_built_for_its_images_without_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, channels: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one_layer.py").write_text(
        f"{line}\nfrom hpctrain.nn.layers import Conv2d\n"
        "def layer(classes: int, channels_in: int, seed: int = 5): return Conv2d(channels_in, classes, 3)\n"
    )
    name = "one_layer.py:layer"
    assert catalogue.check(name, {}) == {"classes": 10, "channels_in": channels, "seed": 5}
    assert catalogue.check(name, {"classes": 4, "channels_in": 2}) == {"classes": 4, "channels_in": 2, "seed": 5}
    if line:
        assert catalogue.image_shape(name) == (9, 8, 1)
    else:
        with pytest.raises(ConfigError, match="does not declare the size of its images; add a line such as IMAGE_SHAPE"):
            catalogue.image_shape(name)


@pytest.mark.parametrize("name", catalogue.names())
def test_a_name_may_be_given_what_it_stands_for(name: str) -> None:
    everything = catalogue.check(name, catalogue.options(name))
    assert catalogue.check(name, everything) == everything
