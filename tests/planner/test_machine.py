"""The machine as data: what a message costs, and what-if machines."""

import pytest

from hpctrain.planner.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate

LINK = Link((LinkSegment(0, 2e-6, 4e-9), LinkSegment(8192, 10e-6, 1e-9)), operation_seconds=3e-6, byte_seconds=1e-10)
MACHINE = Machine(
    "test",
    4,
    8,
    1.0,
    1 << 30,
    LINK,
    LINK,
    8,
    {OperatorClass.CONVOLUTION: OperatorRate(2e10, 8e9, 5e-6)},
    sources={"all": "made up"},
)


@pytest.mark.parametrize(
    ("n_bytes", "expected"), [(0, 2e-6), (8191, 2e-6 + 8191 * 4e-9), (8192, 10e-6 + 8192e-9), (1e6, 1.01e-3)]
)
def test_a_message_costs_what_the_segment_of_its_size_says(n_bytes: float, expected: float) -> None:
    assert LINK.message_seconds(n_bytes) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (8, 1), (9, 2), (32, 4), (33, 5)])
def test_ranks_fill_nodes(ranks: int, nodes: int) -> None:
    assert MACHINE.nodes_of(ranks) == nodes


def test_a_scaled_machine_differs_in_what_was_asked_for_alone() -> None:
    fast = MACHINE.scaled(bandwidth=2, latency=0.5, compute=4)
    assert [segment.alpha_seconds for segment in fast.between.segments] == [1e-6, 5e-6]
    assert [segment.beta_seconds_per_byte for segment in fast.within.segments] == [2e-9, 0.5e-9]
    rate = fast.rates[OperatorClass.CONVOLUTION]
    assert (rate.flops_per_second, rate.bytes_per_second) == (8e10, 3.2e10)
    assert rate.call_seconds == pytest.approx(1.25e-6)
    assert fast.between.operation_seconds == 3e-6
    assert (fast.nodes, fast.memory_bytes, fast.sources) == (MACHINE.nodes, MACHINE.memory_bytes, MACHINE.sources)


def test_messages_that_are_longer_than_those_that_move_in_chunks_are_passed() -> None:
    eager, chunked = LinkSegment(0, 1e-6, 1e-9), LinkSegment(1 << 16, 1e-6, 1e-9, unattended_bytes=1 << 16, polls=1)
    long = LinkSegment(1 << 22, 1e-6, 1e-9, polls=3)
    link = Link((eager, chunked, long))
    assert [link.is_passed(one) for one in link.segments] == [False, False, True]
    assert not Link((eager, long)).is_passed(long)  # none of them moves in chunks
