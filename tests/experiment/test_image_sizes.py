"""Sizes by epoch in a configuration: order, what models take, the largest one."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.config.load import parse
from hpctrain.config.schema import Config
from hpctrain.data.pipeline import Pipeline
from hpctrain.errors import ConfigError, ShapeError
from hpctrain.experiment.check import check_names
from hpctrain.experiment.image_sizes import check_image_shapes, image_sizes, of_largest, size_faults
from hpctrain.nn.network import Network
from tests.support import nets

TEXT = """
model: {model}
data:
  train: nowhere.h5
  augment: [{{name: random_resized_crop, size: 224}}]
  sizes: {sizes}
batch: 8
epochs: 6
optimizer: {{name: sgd, lr: 0.1}}
schedule: constant
"""


def config_of(sizes: str, model: str = "resnet50") -> Config:
    return parse(TEXT.format(sizes=sizes, model=model))[0]


@pytest.mark.parametrize(
    ("sizes", "model", "place", "sentence"),
    [
        (
            "[{from_epoch: 2, size: 32}]",
            "resnet50",
            (0,),
            "data.sizes.0 begins at epoch 2, but images need a size from the first",
        ),
        ("[{size: 32}, {size: 64}]", "resnet50", (1,), "data.sizes.1 begins at epoch 0, but .*; the smallest value is 1."),
        (
            "[{size: 224}, {from_epoch: 3, size: 20}]",
            "vgg16",
            (1, "size"),
            "data.sizes.1.size is 20, which the model vgg16 does not take: Layer features.30: .* The smallest .* legal is 32.",
        ),
        ("[{size: 20}]", "alexnet", (0, "size"), "does not take: .* The smallest size that is legal is 67."),
    ],
)
def test_a_fault_has_its_place_and_the_nearest_legal_value(
    sizes: str, model: str, place: tuple[object, ...], sentence: str
) -> None:
    ((path, told),) = size_faults(config_of(sizes, model))
    assert path == ("data", "sizes", *place)
    config, source = parse(TEXT.format(sizes=sizes, model=model))
    with pytest.raises(ConfigError, match=sentence):
        check_names(config, source)
    assert told in str(source.error(path, told))


@pytest.mark.parametrize("model", ["resnet50", "vgg16", "alexnet", "resnet9", "resnet20", "small"])
def test_models_take_several_sizes(model: str) -> None:
    assert not list(size_faults(config_of("[{size: 96}, {from_epoch: 1, size: 128}, {from_epoch: 3, size: 72}]", model)))


def test_a_model_with_a_fault_of_its_own_is_not_asked() -> None:
    assert not list(size_faults(config_of("[{size: 2}]", "{name: vgg16, depth: 5}")))


@pytest.mark.parametrize(("epochs", "side"), [(1, 96), (3, 128), (9, 160)])
def test_the_largest_size_is_that_which_the_training_comes_to(epochs: int, side: int) -> None:
    sizes = "[{size: 96}, {from_epoch: 1, size: 128}, {from_epoch: 3, size: 72}, {from_epoch: 4, size: 160}]"
    config = config_of(sizes).model_copy(update={"epochs": epochs})
    pipeline = Pipeline([("random_resized_crop", {"size": 224})], 0, np.zeros(3), np.ones(3))
    assert of_largest(config, pipeline).output_shape(256, 256, 3) == (side, side, 3)
    plain = config_of("[]")
    assert image_sizes(plain) is None
    assert of_largest(plain, pipeline) is pipeline


def test_a_network_that_does_not_take_a_shape_is_told_with_the_layer() -> None:
    network = Network(nets.plain(), (9, 7, 3), NumpyKernelSet())
    check_image_shapes(network, [(9, 7, 3), (10, 8, 3)])
    with pytest.raises(ShapeError, match=r"images of \(9, 7, 3\) .*, but not those of \(16, 16, 3\), another size .*: Layer fc1"):
        check_image_shapes(network, [(9, 7, 3), (16, 16, 3)])
