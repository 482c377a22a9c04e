"""The progress mode that a run tells and records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.progress_mode import OverlapMeasurement, ProgressMode
from hpctrain.comm.single import SingleCommunicator
from hpctrain.errors import ConfigError
from hpctrain.experiment.progress import from_measurement, set_progress
from tests.support.late_kernels import LateKernelSet

NONE, TEST, THREAD = ProgressMode.NONE, ProgressMode.TEST, ProgressMode.THREAD


def _hiding(thread_seconds: float) -> OverlapMeasurement:
    return OverlapMeasurement(0.04, 0.04, 5e-3, 1 << 20, {TEST: (0.08,) * 9, NONE: (0.09,) * 9, THREAD: (thread_seconds,) * 9})


@pytest.mark.parametrize(
    ("thread_seconds", "line"),
    [
        (0.079, "progress test: messages move whenever a layer is done (the usual mode; no other was clearly faster here)"),
        (0.06, "progress thread: a thread moves messages while layers compute (measured: 25% less time than the usual mode)"),
    ],
)
def test_one_line_says_the_choice_in_words(thread_seconds: float, line: str) -> None:
    assert str(from_measurement(_hiding(thread_seconds), 2.0)) == line


def test_the_figures_are_kept_for_the_metrics() -> None:
    facts = from_measurement(_hiding(0.06), 2.0).facts()
    assert facts["mode"] == "thread"
    assert facts["rounds"] == 9
    assert facts["ratio_to_test"] == pytest.approx({"test": 1.0, "none": 1.125, "thread": 0.75})
    assert facts["ratio_to_test_limit"] == pytest.approx({"test": 1.0, "none": 1.125, "thread": 0.75})
    assert facts["hidden"] == pytest.approx({"test": 0.0, "none": -0.25, "thread": 0.5})


def _rank(*, may_communicate: bool = True) -> Any:
    world = SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None)
    library = "MPICH 5, level single"
    return SimpleNamespace(world=world, progress=engine, threads_may_communicate=may_communicate, mpi_library=library)


def test_on_one_rank_there_is_nothing_for_a_thread_to_post() -> None:
    rank = _rank()
    chosen = set_progress(rank, SimpleNamespace(), "posting", 1)  # type: ignore[arg-type]
    assert (chosen.mode, chosen.matters) == (TEST, False)
    with rank.progress.computing() as thread:
        assert thread is None


@pytest.mark.parametrize("mode", ["thread", "posting"])
def test_a_thread_that_may_not_call_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"progress is {mode}, but MPI has started at level single"):
        set_progress(_rank(may_communicate=False), SimpleNamespace(), mode, 1)  # type: ignore[arg-type]


def test_beside_a_device_one_thread_does_everything() -> None:
    rank = _rank()
    rank.world = SimpleNamespace(size=2)
    network: Any = SimpleNamespace(kernels=LateKernelSet())
    assert set_progress(rank, network, "auto", 1).mode is TEST
    assert set_progress(rank, network, "none", 1).mode is NONE
    for mode in ("thread", "posting"):
        with pytest.raises(ConfigError, match=f"^progress is {mode}, but one thread enqueues"):
            set_progress(rank, network, mode, 1)
