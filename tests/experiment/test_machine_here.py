"""The machine of a started job, in haste: links are measured, rates are those that are known."""

from __future__ import annotations

import pytest

from hpctrain.comm.base import Communicator
from hpctrain.experiment import machine_here
from hpctrain.planner.machine import Machine, OperatorClass, OperatorRate
from hpctrain.virtual.run import run_virtual

RATES = {kind: OperatorRate(1e9 * (number + 1), 2e9, 1e-6) for number, kind in enumerate(OperatorClass)}


@pytest.mark.slow
def test_ranks_measure_their_links_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_here, "_HASTE_SECONDS", 0.5)

    def program(comm: Communicator) -> Machine:
        return machine_here.measured_in_haste(comm, lambda before: RATES, 60.0)

    first, second = run_virtual(2, program)
    assert first == second
    assert (first.nodes, first.ranks_per_node, first.name) == (1, 2, machine_here.NAME)
    assert first.rates == RATES
    assert first.within.segments[0].from_bytes == 0
    assert first.memory_bytes > 0
    assert first.cores_per_rank > 0
