"""Stochastic depth against PyTorch with the same masks: logits, loss and every gradient, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")

import torch

from hpctrain.backend.counter_random import keep_mask, key
from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.models import catalogue, interchange
from hpctrain.nn.network import Network
from tests.support.torch_parity import make_batch, torch_module

pytestmark = pytest.mark.torch

SAMPLES, CLASSES, LAST, SEED, STEP = 6, 7, 0.6, 3, 5
IDS = np.array([4, 0, 17, 3, 9, 2])


def _blocks(module: Any) -> list[str]:
    """The names of the residual blocks, in order."""
    return [name for name, child in module.named_modules() if hasattr(child, "bn2")]


@pytest.mark.parametrize(("name", "pixels", "width"), [("resnet20", 9, 1.0), ("resnet18", 33, 0.25), ("resnet50", 33, 0.125)])
def test_a_step_is_torchs_with_the_same_masks(name: str, pixels: int, width: float) -> None:
    options = {"classes": CLASSES, "width": width, "stochastic_depth": LAST, "seed": SEED}
    network = Network(catalogue.build(name, options), (pixels, pixels, 3), NumpyKernelSet(), dtype="float64", seed=1)
    module = torch_module(name, width, interchange.export(network), "float64")
    blocks = _blocks(module)
    rates = np.linspace(0.0, LAST, len(blocks))  # timm's rule
    factors = {}
    for block, rate in zip(blocks, rates.tolist(), strict=True):
        stream = key("dropout", SEED, STEP, f"{block}.stochastic_depth")
        factor = keep_mask(stream, IDS, range(1), rate) / (1.0 - rate)
        factors[block] = torch.from_numpy(factor.reshape(-1, 1, 1, 1))
        last = "bn3" if hasattr(module.get_submodule(block), "bn3") else "bn2"
        module.get_submodule(f"{block}.{last}").register_forward_hook(lambda _, __, y, f=factors[block]: y * f)
    dropped = sum(int((factor == 0).sum()) for factor in factors.values())
    assert 0 < dropped < SAMPLES * len(blocks)
    module.train()
    batch = make_batch(SAMPLES, pixels, CLASSES, seed=2)
    logits = module(torch.from_numpy(np.ascontiguousarray(batch.x.transpose(0, 3, 1, 2)).astype(np.float64)))
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch.labels)).backward()
    program = network.program(SAMPLES, training=True)
    program.set_input(batch.x)
    ours = program.forward(StepContext(step=STEP, sample_ids=IDS, global_count=SAMPLES)).copy()
    np.testing.assert_allclose(ours, logits.detach().numpy(), rtol=1e-9, atol=1e-10)
    program.loss(batch.labels, SAMPLES).result()
    program.backward()
    for full, gradient in ((full, parameter.grad) for full, parameter in module.named_parameters()):
        parameter = network.parameters[full]
        exported = parameter.spec.interchange.export(parameter.grad)
        scale = float(gradient.abs().max())
        np.testing.assert_allclose(exported, gradient.numpy(), rtol=1e-6, atol=1e-8 * max(scale, 1e-12), err_msg=full)


def test_names_and_evaluation_are_those_without_it() -> None:
    options = {"classes": CLASSES, "seed": SEED}
    plain, deep = (catalogue.build("resnet20", {**options, "stochastic_depth": last}) for last in (0.0, LAST))
    logits = []
    x = np.random.default_rng(0).standard_normal((2, 9, 9, 3))
    for model in (plain, deep):
        network = Network(model, (9, 9, 3), NumpyKernelSet(), dtype="float64", seed=1)
        program = network.program(2, training=False)
        program.set_input(x)
        logits.append(program.forward(StepContext(training=False)).copy())
        assert list(interchange.export(network)) == list(interchange.export(Network(plain, (9, 9, 3), NumpyKernelSet())))
    np.testing.assert_array_equal(*logits)
