"""Passes in shards: every way adds up the same gradients, and the table has a row for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import shards
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet
from hpctrain.models import catalogue
from hpctrain.nn.network import Network


@pytest.mark.parametrize("together", [False, True])
def test_shards_add_up_to_the_gradient_of_the_same_samples(together: bool) -> None:
    network = Network(catalogue.build("small", {"classes": 200, "channels_in": 3}), (64, 64, 3), OnednnKernelSet())
    gradient = network.groups["all"].grad
    step, _ = shards.stepping(network, 2, 1, together=True)
    step()
    whole = gradient.copy()
    step, adding = shards.stepping(network, 4, 2, together=together)  # twice the same two samples
    step()
    assert np.abs(gradient - whole).max() <= 1e-5 * np.abs(whole).max()
    assert adding.seconds > 0


def test_a_row_for_each_way() -> None:
    run: dict[str, Any] = {"samples": 8, "ways": {"all at once": {"step": [1.0, 2.0], "additions": [0.0, 0.0]}}}
    run["ways"]["4 shards side by side"] = {"step": [1.1, 2.2], "additions": [0.01, 0.02]}
    assert shards.markdown(run).splitlines()[2:] == [
        "| all at once | 1500 | 1.000 [1.000, 1.000] | 0 |",
        "| 4 shards side by side | 1650 | 1.100 [1.100, 1.100] | 15 |",
    ]
