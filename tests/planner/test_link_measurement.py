"""Measured points of virtual links: they say what the link does."""

from __future__ import annotations

import pytest

from hpctrain.comm.link import LinkModel
from hpctrain.planner import link_fit, link_measurement
from hpctrain.planner.link_measurement import LinkProbe, MessagePoint
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine

SIZES = (512, 16 << 10, 512 << 10)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time is exact, so once is enough; computation between polls costs real time."""
    for name in ("_REPEATS_SHORT", "_REPEATS_LONG", "_POLLED_REPEATS", "_MOST_PASSES"):
        monkeypatch.setattr(link_measurement, name, 1)
    monkeypatch.setattr(link_measurement, "_busy", lambda seconds: None)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_modelled_link_is_found_again_and_all_ranks_know_it(ranks: int) -> None:
    link = LinkModel(50e-6, 8e-9)

    def program(comm: ThreadCommunicator) -> list[MessagePoint]:
        pair = comm.split(0 if comm.rank < 2 else None, comm.rank, "pair")
        return LinkProbe(comm, pair, virtual_engine(comm)).measure(SIZES)

    results = run_virtual(ranks, program, link=link)
    assert all(points == results[0] for points in results)
    assert [point.n_bytes for point in results[0]] == list(SIZES)
    for point in results[0]:
        assert point.seconds == pytest.approx(50e-6 + 8e-9 * point.n_bytes, rel=0.01)
        assert point.polls == 0 or point.n_bytes >= 16 << 10
    assert link_fit.link(results[0]).message_seconds(100_000) == pytest.approx(50e-6 + 8e-9 * 100_000, rel=0.01)


def test_a_slow_link_is_left_at_the_size_that_takes_too_long() -> None:
    def program(comm: ThreadCommunicator) -> list[MessagePoint]:
        return LinkProbe(comm, comm.split(0, comm.rank, "pair"), virtual_engine(comm)).measure((512, 1024, 2 << 20, 4 << 20))

    points = run_virtual(2, program, link=LinkModel(1e-3, 1e-6))[0]
    assert [point.n_bytes for point in points] == [512, 1024, 2 << 20]
