"""A posted operation: its end, its text, and what it tells of lost ranks. Its request is scripted."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from hpctrain.comm.lost_ranks import LostRanks
from hpctrain.comm.mpi_handle import MpiHandle
from hpctrain.errors import RankLostError


class Request:
    """Ends at the last of its tests, or fails there."""

    def __init__(self, *results: bool | Exception) -> None:
        self._results = list(results)

    def Test(self) -> bool:
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


class Ledger:
    """Stands in for `LostRanks`."""

    error = OSError

    def __init__(self, *, knows: bool = False) -> None:
        self.calls: list[str] = []
        self._knows = knows

    def begun(self, handle: MpiHandle) -> None:
        self.calls.append("begun")

    def ended(self, handle: MpiHandle) -> None:
        self.calls.append("ended")

    def polled(self) -> None:
        self.calls.append("polled")

    def check(self, error: Exception) -> None:
        if self._knows:
            raise RankLostError("Rank 1 of 3 was lost.")


def test_it_is_complete_when_its_request_is() -> None:
    handle = MpiHandle(Request(False, True), "barrier")
    assert [handle.test(), handle.test()] == [False, True]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8", "uint16"])
def test_its_text_has_elements_and_dtype(dtype: str) -> None:
    assert str(MpiHandle(Request(), "allreduce", np.zeros((2, 3), dtype))) == f"allreduce of 6 {dtype} elements"
    assert str(MpiHandle(Request(), "barrier")) == "barrier"


def test_who_watches_for_lost_ranks_hears_of_begin_polls_and_end() -> None:
    ledger = Ledger()
    handle = MpiHandle(Request(False, True), "barrier", None, cast(LostRanks, ledger))
    assert [handle.test(), handle.test()] == [False, True]
    assert ledger.calls == ["begun", "polled", "ended"]


@pytest.mark.parametrize(("knows", "raised"), [(True, RankLostError), (False, OSError)])
def test_an_error_is_one_of_a_lost_rank_where_one_is_known(knows: bool, raised: Any) -> None:
    ledger = Ledger(knows=knows)
    handle = MpiHandle(Request(OSError("MPI_ERR_OTHER")), "barrier", None, cast(LostRanks, ledger))
    with pytest.raises(raised):
        handle.test()
    assert ledger.calls == ["begun", "ended"]
