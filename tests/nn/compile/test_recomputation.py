"""What is computed again in backward: halos, and the copies around them, never in evaluation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.nn.compile.recomputation import recompute_path, recomputed_tensors
from tests.support.wrong_plans import steps_of


def test_only_what_an_operator_can_make_again_is() -> None:
    steps = steps_of("split", NumpyKernelSet())
    able = {step.output for step in steps.steps if step.recomputes_output}
    assert able
    assert recomputed_tensors(steps) == able
    assert not recomputed_tensors(steps_of("residual", NumpyKernelSet()))
    assert not recomputed_tensors(replace(steps, training=False))


def test_a_path_begins_at_what_is_kept_and_ends_at_what_is_wanted() -> None:
    if (reason := available()) is not None:
        pytest.skip(reason)
    steps = steps_of("wide", OnednnKernelSet())
    recomputed = recomputed_tensors(steps)
    paths = [(tensor, recompute_path(steps, recomputed, tensor)) for tensor in recomputed]
    assert max(len(path) for _, path in paths) > 1  # a copy in another layout behind a halo
    for tensor, path in paths:
        assert steps.steps[path[-1]].output == tensor
        assert steps.steps[path[0]].inputs[0] not in recomputed
        for before, after in itertools.pairwise(path):
            assert steps.steps[after].inputs[0] == steps.steps[before].output
    assert recompute_path(steps, recomputed, 0) == ()
