"""Allreduces that overlap: updates come when a parameter is next used, and very large slices travel in parts."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.averaging import slice_sizes
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategy import Strategy
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import averaged, make_group, one_step


def test_a_parameter_is_updated_when_it_is_next_used_and_not_before() -> None:
    def program(comm: ThreadCommunicator) -> None:
        averager = averaged(Overlap, make_group(), Sgd(), comm, virtual_engine(comm))
        group = averager.group
        before = group.data.copy()
        one_step(averager, 0)
        averager.begin_step(0.1)
        np.testing.assert_array_equal(group.data, before)
        averager.before_forward([group.parameters["a.weight"]])
        changed = group.data != before
        segment = group.segment("a.weight")
        assert changed[segment.start : segment.stop].any()
        assert not changed[segment.stop :].any()
        with pytest.raises(AssertionError, match="was used before it was waited for"):
            averager.grad_ready(group.parameters["b.weight"])
        averager.end_backward()
        averager.drain()

    run_virtual(2, program)


@pytest.mark.parametrize(("kind", "in_parts"), [(Bucketed, True), (Overlap, False)])
def test_very_large_slices_travel_in_parts_unless_each_parameter_is_to_be_a_message(
    kind: type[Strategy], in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LARGEST_BYTES", "_LEAST_PART_BYTES"):
        monkeypatch.setattr(slice_sizes, name, 8)

    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        counters = Counters()
        averager = averaged(kind, make_group(), Sgd(), CountingCommunicator(comm, counters), virtual_engine(comm))
        one_step(averager, 0)
        averager.drain()
        assert averager.schedule is not None
        return counters.total(operation="iallreduce").operations, len(averager.schedule.operations)

    for sent, planned in run_virtual(2, program):
        assert (sent > planned) == in_parts
        assert sent >= planned
