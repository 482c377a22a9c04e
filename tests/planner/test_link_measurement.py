"""Measured points of virtual links: they say what the link does."""

from __future__ import annotations

import pytest

from hpctrain.comm.link import LinkModel
from hpctrain.planner import link_fit, link_measurement
from hpctrain.planner.link_measurement import LinkProbe, MessagePoint
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine

SIZES = (512, 16 << 10, 512 << 10)


pytestmark = pytest.mark.usefixtures("few_messages")


@pytest.fixture
def few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("ranks", [4, 5])
def test_pairs_that_measure_at_once_begin_together(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begins: list[tuple[int, float]] = []

    def program(comm: ThreadCommunicator) -> list[MessagePoint]:
        late = comm.rank // 2  # the second pair comes to everything later
        engine = virtual_engine(comm)
        pair = comm.split(comm.rank // 2 if comm.rank < 4 else None, comm.rank, "pair")
        together = comm.split(0 if comm.rank < 4 else None, comm.rank, "together")
        probe = LinkProbe(comm, pair, engine, together)
        if pair is not None:
            meet = probe._meet

            def met() -> None:
                if late:
                    engine.wait_handle(pair.ibarrier(), "delay")
                meet()
                begins.append((comm.rank, engine.now()))

            monkeypatch.setattr(probe, "_meet", met)
        return probe.measure(SIZES, polls=False)

    results = run_virtual(ranks, program, link=LinkModel(50e-6, 8e-9))
    assert all(points == results[0] for points in results)
    of_rank = [[now for rank, now in begins if rank == one] for one in range(4)]
    assert of_rank[0]
    assert all(times == pytest.approx(of_rank[0]) for times in of_rank)
