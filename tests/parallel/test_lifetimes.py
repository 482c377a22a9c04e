"""Split networks read nothing that their plan calls unused: halos, copies around them, interiors and edges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.parallel.parallel_plan import ParallelPlan
from tests.support.grid_matrix import NETS, on_virtual_ranks, plan_of
from tests.support.poison import overwritten_share, poisoned


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [NumpyKernelSet, OnednnKernelSet])
@pytest.mark.parametrize(
    ("net", "grid", "kind"),
    [
        ("vgg16", (3, 1), "domain"),
        ("vgg16", (2, 2), "overlapped"),
        ("vgg16_bn", (2, 1), "mixed"),
        ("resnet18", (2, 1), "domain"),
        ("resnet18", (4, 1), "tiles"),
        ("resnet20", (3, 1), "mixed"),
        ("resnet50", (2, 1), "model"),
    ],
    ids=str,
)
def test_nobody_reads_what_is_not_in_use(net: str, grid: tuple[int, int], kind: str, kernels: type[KernelSet]) -> None:
    if kernels is OnednnKernelSet and available() is not None:
        pytest.skip(str(available()))
    plan: ParallelPlan | None = plan_of(NETS[net], "domain" if kind == "overlapped" else kind, *grid)
    assert plan is not None
    if kind == "overlapped":
        plan = replace(plan, overlapped=frozenset(f"features.{k}" for k in range(40)))
    task = replace(NETS[net].task(plan, kernels(), "float32"), steps=2)
    expected = on_virtual_ranks(task)
    with poisoned() as poisoners:
        found = on_virtual_ranks(task)
    assert overwritten_share(poisoners) > 1
    for ours, theirs in zip(found, expected, strict=True):
        for name, values in theirs.parameters.items():
            np.testing.assert_array_equal(ours.parameters[name], values, err_msg=name)
