"""Steps of models against PyTorch's: loss, logits and every gradient, with layers frozen or dropped; LAMB against timm's.

torchvision's ResNets have their full width; VGG-16, whose linear layers alone hold 123 million numbers, and networks for small
images that would be slow are narrower. Parameters have the same names in both.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")

import torch

from hpctrain.backend.counter_random import keep_mask, key
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import StepContext
from hpctrain.models import catalogue
from hpctrain.nn.network import Network, layer_of
from hpctrain.optim.optimizers import Lamb
from hpctrain_testing.torch_parity import MODELS, compare, gradient_median, make_batch, torch_module
from tests.optim.test_optimizers import gradients, make_group, run
from tests.support import network_state

pytestmark = pytest.mark.torch

PIXELS = {"vgg16": 45, "resnet18": 65, "resnet50": 63, "resnet20": 17, "resnet9": 19, "resnext50_32x4d": 33}
PIXELS |= {"preact_resnet18": 15, "wrn_16_8": 9, "vgg_small": 19}
WIDTHS = {"vgg16": 0.25, "preact_resnet18": 0.25, "wrn_16_8": 0.25, "vgg_small": 0.25}
CLASSES, LAST, SEED, STEP = 7, 0.6, 3, 5
IDS = np.array([4, 0, 17, 3, 9, 2])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_step_equals_torch(name: str) -> None:
    width = WIDTHS.get(name, 1.0)
    seeds = [compare(name, pixels=PIXELS[name], samples=4, classes=10, seed=seed, width=width) for seed in range(3)]
    distance, worst = max(seed.worst for seed in seeds)
    assert distance <= 1e-8, f"{worst} differs from torch by {distance:.2e} in float64"
    ours = gradient_median(*(seed.float32 for seed in seeds))
    theirs = gradient_median(*(seed.torch_float32 for seed in seeds))
    assert ours <= 2.0 * theirs, f"median distance to float64 {ours:.2e} in float32, torch's own {theirs:.2e}"


def assert_a_step_is_torchs(network: Network, module: Any, ids: np.ndarray, pixels: int) -> None:
    """Logits and gradients of one step in float64; of parameters that are trained in both, and in no other."""
    count = len(ids)
    batch = make_batch(count, pixels, CLASSES, seed=2)
    logits = module(torch.from_numpy(np.ascontiguousarray(batch.x.transpose(0, 3, 1, 2)).astype(np.float64)))
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch.labels)).backward()
    program = network.program(count, training=True)
    program.set_input(batch.x)
    ours = program.forward(StepContext(step=STEP, sample_ids=ids)).copy()
    np.testing.assert_allclose(ours, logits.detach().numpy(), rtol=1e-9, atol=1e-10)
    program.loss(batch.labels, count).result()
    program.backward()
    trained = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert trained.keys() == set(network.trained)
    for name, gradient in trained.items():
        parameter = network.parameters[name]
        own, scale = parameter.spec.interchange.export(parameter.grad), float(gradient.abs().max())
        np.testing.assert_allclose(own, gradient.numpy(), rtol=1e-6, atol=1e-8 * max(scale, 1e-12), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pixels"), [("resnet20", 9), ("resnet18", 33), ("resnet50", 33)])
def test_stochastic_depth_equals_torch_with_the_same_masks(name: str, pixels: int) -> None:
    options = {"classes": CLASSES, "stochastic_depth": LAST, "seed": SEED}
    network = Network(catalogue.build(name, options), (pixels, pixels, 3), NumpyKernelSet(), dtype="float64", seed=1)
    module = torch_module(name, 1.0, network_state.export(network), "float64")
    blocks = [child for child, part in module.named_modules() if hasattr(part, "bn2")]
    dropped = 0
    for block, rate in zip(blocks, np.linspace(0.0, LAST, len(blocks)).tolist(), strict=True):  # timm's rule
        factor = keep_mask(key("dropout", SEED, STEP, f"{block}.stochastic_depth"), IDS, range(1), rate) / (1.0 - rate)
        dropped += int((factor == 0).sum())
        factors = torch.from_numpy(factor.reshape(-1, 1, 1, 1))
        last = "bn3" if hasattr(module.get_submodule(block), "bn3") else "bn2"
        module.get_submodule(f"{block}.{last}").register_forward_hook(lambda _, __, y, f=factors: y * f)
    assert 0 < dropped < len(IDS) * len(blocks)
    module.train()
    assert_a_step_is_torchs(network, module, IDS, pixels)


def test_names_and_evaluation_are_those_without_stochastic_depth() -> None:
    logits, names = [], []
    for last in (0.0, LAST):
        model = catalogue.build("resnet20", {"classes": CLASSES, "seed": SEED, "stochastic_depth": last})
        network = Network(model, (9, 9, 3), NumpyKernelSet(), dtype="float64", seed=1)
        program = network.program(2, training=False)
        program.set_input(np.random.default_rng(0).standard_normal((2, 9, 9, 3)))
        logits.append(program.forward(StepContext(training=False)).copy())
        names.append(list(network_state.export(network)))
    np.testing.assert_array_equal(*logits)
    assert names[0] == names[1]


def test_frozen_layers_train_as_in_torch() -> None:
    """Parameters without gradients, batch norms in evaluation mode, the rest in training."""
    model = catalogue.build("resnet20", {"classes": CLASSES})
    frozen = ("conv1", "bn1", "layer1.*", "layer3.*")
    network = Network(model, (17, 17, 3), NumpyKernelSet(), dtype="float64", seed=6, frozen=frozen)
    for name, view in network.statistics.views.items():
        view[...] = 0.5 + np.random.default_rng(len(name)).random(view.shape)
    module = torch_module("resnet20", 1.0, network_state.export(network), "float64")
    module.train()
    for name, child in module.named_modules():
        if name in network.frozen:
            child.eval()
            for parameter in child.parameters(recurse=False):
                parameter.requires_grad_(False)
    assert_a_step_is_torchs(network, module, np.arange(4), 17)
    network.statistics.blend(network.statistics.weighted(4, 4, network.statistics.batch), 4)
    for name, buffer in module.named_buffers():
        if "running" in name:
            np.testing.assert_allclose(network.statistics.views[name], buffer.numpy(), rtol=1e-9, err_msg=name)
    assert {layer_of(name) for name in network.parameters} > network.frozen


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_updates_of_lamb_are_timms(decay: float, foreach: bool) -> None:
    """Without timm's clipping of the whole gradient, which is its default, and without that of ratios, which is not."""
    if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torchvision") is None:
        pytest.skip("timm is not installed (pip install --no-deps timm, next to torch and torchvision)")
    from hpctrain_testing import torchvision_models

    assert torchvision_models.models  # timm imports torchvision, whose operators have to be known first
    from timm.optim.lamb import Lamb as Theirs

    group = make_group("float64")
    grads, rates = gradients(group, 50), [0.02 * (1 + step % 5) for step in range(50)]
    tensors = {one.parameter: torch.tensor(group.data[one.start : one.stop].copy()) for one in group.segments}
    # Ours scales steps of weights by their ratio whatever the decay; timm those of parameters that decay, or of all.
    theirs = []
    for decays in (True, False):
        part = {
            "params": [tensors[one.parameter] for one in group.segments if one.decay == decays],
            "weight_decay": decay * decays,
        }
        common = {"betas": (0.9, 0.99), "eps": 1e-6, "max_grad_norm": None}
        theirs.append(Theirs([part], always_adapt=decays, foreach=foreach, **common))
    for grad, rate in zip(grads, rates, strict=True):
        for one in group.segments:
            tensors[one.parameter].grad = torch.tensor(grad[one.start : one.stop].copy())
        for optimizer in theirs:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    ours = run(Lamb(beta1=0.9, beta2=0.99, weight_decay=decay), group, grads, rates)
    wanted = np.concatenate([tensors[one.parameter].numpy() for one in group.segments])
    assert np.linalg.norm(ours - wanted) <= 1e-12 * np.linalg.norm(wanted)
