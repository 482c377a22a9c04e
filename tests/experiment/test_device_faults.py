"""Options that backend cuda does not take: refused where a configuration names it, and where auto has taken a GPU."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.config.load import parse
from hpctrain.errors import ConfigError
from hpctrain.experiment.device_faults import check_device, device_faults
from tests.support.late_kernels import LateKernelSet

CONFIG = """
model: small
data: {train: train.h5}
batch: 8
epochs: 1
optimizer: {name: sgd, lr: 0.1}
schedule: constant
"""
FAULTS = {
    "data.mixing.mixup=0.2": r"^data\.mixing mixes the labels of images, which the loss of backend cuda does not take",
    "progress=thread": r"^progress is thread, but one thread enqueues .*; set progress to auto or test, or",
    "progress=posting": r"^progress is posting, but one thread enqueues",
    "averager={name: sharded, wire_parameters: float16}": r"^averager\.wire_parameters is float16, but .*; set it to float32, or",
}


@pytest.mark.parametrize("override", FAULTS)
def test_an_option_is_refused_with_a_sentence(override: str) -> None:
    for backend in ("cuda", "auto"):
        config, _ = parse(CONFIG, overrides=(override, f"backend={backend}"))
        assert len(list(device_faults(config))) == (backend == "cuda")
        check_device(config, NumpyKernelSet())
        with pytest.raises(ConfigError, match=FAULTS[override]):
            check_device(config, LateKernelSet())


@pytest.mark.parametrize(
    "override", ["progress=none", "averager={name: sharded, wire: bfloat16}", "averager=lazy", "grid.rows=2"]
)
def test_others_are_taken(override: str) -> None:
    config, _ = parse(CONFIG, overrides=(override, "backend=cuda"))
    assert list(device_faults(config)) == []
    check_device(config, LateKernelSet())
