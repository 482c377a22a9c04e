"""A run with shards goes on with what it was computed with, and all of its ranks compute with the same."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.experiment.exact_promise import META, check_alike, check_kept, promise
from hpctrain.launch.threads import ThreadPlan
from hpctrain.virtual.run import run_virtual

OWN = {"kernels": "numpy", "numpy": "2.0", "threads": "2"}


def test_it_names_kernels_libraries_and_threads() -> None:
    kernels = OnednnKernelSet()
    assert promise(kernels, ThreadPlan(3, 4, "asked for"))["kernels"] == f"onednn {kernels.version}"
    found = promise(NumpyKernelSet(), ThreadPlan(3, 4, "asked for"))
    assert (found["kernels"], found["threads"]) == ("numpy", "3")


@pytest.mark.parametrize("name", OWN)
def test_ranks_that_differ_are_refused_on_all_of_them(name: str) -> None:
    with pytest.raises(ConfigError, match=f"same {name}, but rank 0 has {OWN[name]} and rank 2 has other; give all ranks"):
        run_virtual(3, lambda comm: check_alike(comm, {**OWN, name: "other"} if comm.rank == 2 else OWN))
    run_virtual(3, lambda comm: check_alike(comm, OWN))


@pytest.mark.parametrize("name", OWN)
def test_a_resume_with_something_else_is_refused(name: str) -> None:
    meta = {META: {**OWN, name: "other"}}
    with pytest.raises(CheckpointError, match=f"cannot go on from there with {name}: other -> {OWN[name]}, as its bits"):
        run_virtual(2, lambda comm: check_kept(comm, meta, OWN, "there"))
    run_virtual(2, lambda comm: check_kept(comm, {META: OWN}, OWN, "there"))
    with pytest.raises(CheckpointError, match=f"{name}: not told -> {OWN[name]}"):
        run_virtual(2, lambda comm: check_kept(comm, {META: {key: OWN[key] for key in OWN if key != name}}, OWN, "there"))
