"""Clocks that are apart: made up, and on virtual ranks with clocks of their own."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.comm.clock import Offset
from hpctrain.comm.progress import ProgressEngine
from hpctrain.doctor.subjects import clocks
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support.doctored import view

_SECOND = 10**9


@pytest.mark.parametrize(
    ("offset_ns", "error_ns", "skewed", "words"),
    [
        (0, 10**6, False, "Clocks of 2 nodes are at most 1.0 ms apart."),
        (3 * _SECOND, 10**6, True, "The clock of nid1 is 3.0 s ahead of that of nid0 (ranks 1)."),
        (-3 * _SECOND, 10**6, True, "The clock of nid1 is 3.0 s behind that of nid0 (ranks 1)."),
        (3 * _SECOND, 3 * _SECOND, False, "at most 6,000.0 ms"),  # a slow message proves nothing
    ],
)
def test_clocks_that_are_surely_apart_are_named(offset_ns: int, error_ns: int, skewed: bool, words: str) -> None:
    [found] = clocks.judge(view(1, 1), [Offset(0, 0, 0), Offset(0, offset_ns, error_ns)])
    assert found.key == ("clock-skew" if skewed else "")
    assert words.replace(",", "") in found.sentence.replace(",", "")
    if skewed:
        assert found.mend.startswith("srun --exclude=nid1 ...")


def test_a_node_whose_clock_is_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(comm: ThreadCommunicator) -> Offset:
        progress = ProgressEngine(rank=comm.rank, deadline_seconds=30, abort=comm.abort)
        late = 2 * _SECOND if comm.rank == 2 else 0
        place: Any = SimpleNamespace(world=comm, progress=progress)
        from hpctrain.comm.clock import measure_offset

        return measure_offset(place.world, progress.wait_handle, clock_ns=lambda: time.time_ns() - late, rounds=5)

    [found] = clocks.judge(view(1, 1, 1), run_virtual(3, program))
    assert found.key == "clock-skew"
    assert "The clock of nid2 is 2.0 s behind that of nid0" in found.sentence


def test_ranks_of_one_machine_are_not_apart() -> None:
    def program(comm: ThreadCommunicator) -> Offset:
        place: Any = SimpleNamespace(world=comm, progress=ProgressEngine(rank=comm.rank, deadline_seconds=30, abort=comm.abort))
        return clocks.gather(place)

    assert clocks.judge(view(3), run_virtual(3, program))[0].key == ""
