"""The account of waits for data: mean and slowest rank, by epoch and over all, and silence where nothing was trained."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpctrain.comm.base import Communicator
from hpctrain.experiment.data_account import DataAccount, WaitsOfRanks
from hpctrain.train.data_waits import DataWait
from hpctrain.train.metrics import Reporter
from hpctrain.train.snapshot import Position
from hpctrain.virtual.run import run_virtual, virtual_engine


class _Heard(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[Mapping[str, Any]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        assert kind == "data"
        self.records.append(values)


class _Told:
    """Waits that are told one after another."""

    def __init__(self, waits: list[DataWait]) -> None:
        self._waits = iter(waits)

    def take(self) -> DataWait:
        return next(self._waits)


def _heard(*of_ranks: list[DataWait]) -> list[_Heard]:
    """What every rank would say; the last of its waits is that of an epoch that has not ended."""

    def rank(comm: Communicator) -> _Heard:
        session: Any = SimpleNamespace(world=comm, groups=SimpleNamespace(all_ranks=comm), progress=virtual_engine(comm))
        heard = _Heard()
        account = DataAccount(session, heard)
        *epochs, rest = of_ranks[comm.rank]
        account.waits = _Told([*epochs, rest])  # type: ignore[assignment]
        for number in range(1, len(epochs) + 1):
            account.tell(Position(epoch=number, global_step=10 * number))
        account.finish(Position(epoch=len(epochs), global_step=10 * len(epochs) + rest.steps))
        return heard

    return run_virtual(len(of_ranks), rank)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_epoch_has_the_mean_and_the_slowest_rank_and_the_end_all_of_them(ranks: int) -> None:
    of_ranks = [[DataWait(10, 8.0, 1.0 + rank), DataWait(10, 8.0, 0.0), DataWait(3, 4.0, 0.5)] for rank in range(ranks)]
    for heard in _heard(*of_ranks):
        assert [(record["epoch"], record["step"], record["steps"]) for record in heard.records] == [
            (1, 10, 10),
            (2, 20, 10),
            (3, 23, 3),
        ]
        first = heard.records[0]
        mean = 1.0 + (ranks - 1) / 2
        assert (first["seconds"], first["waited_seconds"], first["share"]) == (8.0, mean, mean / 8.0)
        assert (first["most_waited_seconds"], first["most_share"], first["rank"]) == (float(ranks), ranks / 8.0, ranks - 1)
        assert heard.lines[0].startswith(f"steps waited for data {(mean + 0.5) / 20:.1%} of the time")
        assert (f"rank {ranks - 1} {(ranks + 0.5) / 20:.1%}" in heard.lines[0]) == (ranks > 1)


def test_a_run_that_trains_nothing_says_nothing() -> None:
    (heard,) = _heard([DataWait()])
    assert (heard.lines, heard.records) == ([], [])


def test_lines_fit_80_columns_and_name_the_measurement_where_data_are_slow() -> None:
    quick = WaitsOfRanks.of(np.array([[4095, 1000, 100.0, 0.4], [7, 1000, 100.0, 0.2]]))
    assert quick.lines(2) == ["steps waited for data 0.3% of the time (mean of the ranks; rank 4095 0.4%)"]
    slow = WaitsOfRanks.of(np.array([[4095, 1000, 100.0, 99.4], [7, 1000, 100.0, 0.2]]))
    assert slow.lines(2) == [
        "steps waited for data 49.8% of the time (mean of the ranks; rank 4095 99.4%);",
        "  `hpctrain bench data` tells what limits the data",
    ]
    assert max(map(len, slow.lines(2))) <= 80
