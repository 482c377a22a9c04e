"""Calibration on virtual ranks: links, cards and what could not be measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from hpctrain.comm.link import LinkModel
from hpctrain.planner import calibration, link_measurement, machine_file
from hpctrain.planner.calibration import RankFacts, calibrate
from hpctrain.planner.link_measurement import MessagePoint
from hpctrain.planner.machine import Machine, OperatorClass, OperatorRate
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine

LINK = LinkModel(30e-6, 2e-9)


pytestmark = pytest.mark.usefixtures("few_sizes")


@pytest.fixture
def few_sizes(few_messages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SIZES", (512, 16 << 10, 256 << 10))


def _rates(rank: int) -> Callable[[Callable[[], None]], Mapping[OperatorClass, OperatorRate]]:
    def measure(before: Callable[[], None]) -> Mapping[OperatorClass, OperatorRate]:
        before()
        return {kind: OperatorRate(1e10 + rank, 1e9 + rank, 1e-6 * (1 + rank)) for kind in OperatorClass}

    return measure


def _machine(ranks: int, per_node: int) -> Machine:
    def program(comm: ThreadCommunicator) -> Machine:
        facts = RankFacts(frozenset({comm.rank % per_node // 2}), 8 << 30, "a processor")
        return calibrate(comm, virtual_engine(comm), facts, _rates(comm.rank), name="virtual", when="2026-01-01")

    machines = run_virtual(ranks, program, link=LINK, ranks_per_node=per_node)
    assert all(machine == machines[0] for machine in machines)
    return machines[0]


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (2, 1), (4, 2), (3, 2)])
def test_what_is_there_is_measured_and_the_rest_says_so(ranks: int, per_node: int) -> None:
    machine = _machine(ranks, per_node)
    nodes = -(-ranks // per_node)
    assert (machine.nodes, machine.ranks_per_node) == (nodes, per_node)
    assert machine.cores_per_rank == -(-per_node // 2) / per_node
    assert machine.memory_bytes == (8 << 30) // per_node
    measured = "measured on 2026-01-01, a processor"
    for link, there in ((machine.within, per_node > 1), (machine.between, nodes > 1)):
        source = machine.sources["within.segments" if link is machine.within else "between.segments"]
        assert source.startswith(measured if there else "not measured: one ")
        if there:
            assert link.message_seconds(1 << 20) == pytest.approx(30e-6 + 2e-9 * (1 << 20), rel=0.02)
    rate = machine.rates[OperatorClass.CONVOLUTION]
    assert (rate.flops_per_second, rate.call_seconds) == (1e10, 1e-6 * ranks)  # of the slowest rank
    assert machine_file.parse(machine_file.text(machine)) == machine


@pytest.mark.parametrize(("slowed", "ranks", "sharing"), [(1.0, 4, 1), (2.1, 4, 2), (3.6, 4, 4), (9.0, 4, 4), (2.4, 6, 2)])
def test_ranks_share_as_many_cards_as_their_slowdown_says(slowed: float, ranks: int, sharing: int) -> None:
    alone = [MessagePoint(1 << 20, 1.0, 1.0, 0, 1.0, 0.0, 0.0)]
    at_once = [MessagePoint(1 << 20, slowed, slowed, 0, 1.0, 0.0, 0.0)]
    assert calibration._sharing(alone, at_once, ranks) == sharing
