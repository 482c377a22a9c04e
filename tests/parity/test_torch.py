"""Loss, logits and every gradient of the models against PyTorch, on small images.

The ResNets have their full width; VGG-16, whose linear layers alone hold 123 million numbers, a quarter of it.
"""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")

from tests.support.torch_parity import MODELS, compare, gradient_median

pytestmark = pytest.mark.torch

PIXELS = {"vgg16": 45, "resnet18": 65, "resnet50": 63, "resnet20": 17, "resnet9": 19}
WIDTH = {"vgg16": 0.25}


@pytest.mark.parametrize("name", MODELS)
def test_step_equals_torch(name: str) -> None:
    seeds = [
        compare(name, pixels=PIXELS[name], samples=4, classes=10, seed=seed, width=WIDTH.get(name, 1.0)) for seed in range(3)
    ]
    distance, worst = max(seed.worst for seed in seeds)
    assert distance <= 1e-8, f"{worst} differs from torch by {distance:.2e} in float64"
    ours = gradient_median(*(seed.float32 for seed in seeds))
    theirs = gradient_median(*(seed.torch_float32 for seed in seeds))
    assert ours <= 2.0 * theirs, f"median distance to float64 {ours:.2e} in float32, torch's own {theirs:.2e}"
