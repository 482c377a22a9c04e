"""Schedules of allreduces, without ranks."""

from __future__ import annotations

import pytest

from hpctrain.averaging import slice_sizes
from hpctrain.averaging.allreduce_strategy import AllreduceStrategy
from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.comm.link import LinkModel
from tests.support.averaging import make_group, planned

KINDS: dict[str, tuple[type[AllreduceStrategy], dict[str, object]]] = {
    "overlap": (Overlap, {}),
    "bucketed": (Bucketed, {"bucket_bytes": 100}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_element_is_summed_once_and_late_layers_go_first(kind: str) -> None:
    strategy, options = KINDS[kind]
    schedule = planned(strategy, make_group(), 3, **options).plan(None)
    assert schedule is not None
    assert {operation.kind for operation in schedule.operations} == {OperationKind.ALLREDUCE}
    assert [operation.slice for operation in schedule.operations] == list(reversed(range(len(schedule.slices))))
    covered = sorted((piece.start, piece.stop) for piece in schedule.slices)
    assert [i for start, stop in covered for i in range(start, stop)] == list(range(make_group().size))


def test_sizes_by_rule_follow_from_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_sizes, "_LEAST_BUCKET_BYTES", 64)
    slow, fast = LinkModel(1e-3, 1e-8), LinkModel(1e-9, 1e-8)
    by_rule, measured = planned(Bucketed, make_group(), 2), planned(Bucketed, make_group(), 2, sizes="measured")
    assert by_rule.plan(slow) == by_rule.plan(fast) == by_rule.plan(None)
    assert len(measured.plan(slow).slices) < len(measured.plan(fast).slices)  # type: ignore[union-attr]
    assert not by_rule.needs_link(None)
    assert measured.needs_link(None)
    assert not measured.needs_link(measured.plan(slow))
