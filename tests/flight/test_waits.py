"""Waits are followed to the rank that holds the others up: one that posts nothing, a circle, one that does not move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.flight.findings import Autopsy
from hpctrain.flight.ring import End, FlightRecord
from hpctrain.flight.waits import held_up
from tests.support.flight_records import SECOND, operation, record, waiting


def _held_up(records: list[FlightRecord]) -> Autopsy:
    found = held_up(records)
    assert found is not None
    return found


def test_a_rank_that_loads_data_holds_the_others_up() -> None:
    awaited = operation(3, "layer4.1.conv2.weight")
    done = operation(2, "layer4.2.conv1.weight", done=True)
    late = record(3, done, phase="data loading", phase_since_ns=39 * SECOND)
    found = _held_up([*(waiting(rank, awaited, done) for rank in range(3)), late])
    assert found.blamed == (3,)
    assert found.sentences == (
        "Rank 3 never posted the reduce-scatter of 64 float32 elements for layer4.1.conv2.weight, number 3 of all gradients "
        "of 0-3, for which rank 0 waited 60 s (a training step, step 812).",
        "Rank 3 was in data loading, step 812 for 61 s.",
    )


def test_what_is_queued_and_not_started_is_not_posted() -> None:
    awaited, queued = (operation(3, "a.weight", started=started, queue="all of 0-1") for started in (True, False))
    found = _held_up([waiting(0, awaited, ranks=2), record(1, queued, ranks=2)])
    assert found.blamed == (1,)


def test_a_wait_for_what_has_not_begun_is_for_what_is_in_flight() -> None:
    """A gather that comes after a sum, which the other rank has not posted."""
    sums, gather = operation(1, "x", queue="sums of 0-1"), operation(2, "x", started=False, queue="gathers of 0-1")
    behind = operation(3, "y", queue="sums of 0-1")
    found = _held_up([waiting(0, gather, sums, behind, ranks=2), record(1, ranks=2)])
    assert found.blamed == (1,)
    assert "number 1 of sums of 0-1" in found.sentences[0]
    alone = _held_up([waiting(0, gather, ranks=2), waiting(1, replace(gather, started_ns=1), ranks=2)])
    assert alone.blamed == (0,)
    assert alone.sentences[0].startswith("Rank 0 waits for what it has not posted itself: x, number 2")


def test_waits_are_followed_to_the_one_that_waits_for_nobody() -> None:
    """Rank 0 waits for 1 in one group, which waits for 2 in another."""
    first, second = operation(1, "rows", queue="split of 0-1"), operation(1, "columns", queue="data of 1-2")
    chain = [waiting(0, first, ranks=3), waiting(1, second, ranks=3), record(2, phase="evaluation", ranks=3)]
    found = _held_up(chain)
    assert found.blamed == (2,)
    assert "for columns, number 1 of data of 1-2, for which rank 1 waited" in found.sentences[0]


def test_ranks_that_wait_for_each_other() -> None:
    """Each has begun with another queue."""
    ours, theirs = operation(1, "x", queue="a of 0-1"), operation(1, "y", queue="b of 0-1")
    found = _held_up([waiting(0, ours, ranks=2), waiting(1, theirs, ranks=2)])
    assert found.blamed == (0, 1)
    assert found.sentences[0].startswith(
        "Ranks 0-1 wait for each other: rank 0 waits for the reduce-scatter of 64 float32 elements "
        "for x, number 1 of a of 0-1, which rank 1 has not posted; rank 1 waits for the reduce-scatter"
    )


def test_pieces_of_an_all_to_all_may_differ() -> None:
    parts = [operation(1, "x", operation=f"all-to-all of {rank} float32 elements") for rank in range(4)]
    found = _held_up([waiting(rank, each) for rank, each in enumerate(parts)])
    assert found.blamed == ()
    assert found.sentences[0].startswith(
        "All ranks posted what rank 0 waited 60 s for (a training step, step 812), the all-to-all"
    )


def test_a_wait_outside_the_queues_knows_its_ranks() -> None:
    text = "gathered objects (communicator data of ranks 1, 3)"
    of_group = [record(rank, wait=text if rank == 1 else "", wait_since_ns=SECOND) for rank in range(4)]
    assert _held_up(of_group).blamed == (3,)


def _all_posted(*states: dict[str, object]) -> list[FlightRecord]:
    """Rank 0 has waited for 60 of 100 seconds for what all have posted, and its heartbeat has seen it move."""
    first = operation(1, "x", queue="data of 0-2", line="averaging/some.py:7")
    return [
        waiting(0, first, alive_ns=100 * SECOND, ranks=3),
        *(record(rank, first, ranks=3, **state) for rank, state in enumerate(states, 1)),
    ]


MOVES = {"wait": "x", "wait_number": 1, "wait_since_ns": 41 * SECOND, "alive_ns": 99 * SECOND}


def test_where_all_have_posted_and_move_it_is_the_transport() -> None:
    found = _held_up(_all_posted(MOVES, {"alive_ns": 99 * SECOND, "phase": "evaluation"}))
    assert (found.blamed, found.sentences) == (
        (),
        (
            "All ranks posted what rank 0 waited 60 s for (a training step, step 812), the reduce-scatter of 64 float32 elements "
            "for x, number 1 of data of 0-2 (averaging/some.py:7): the transport has not moved it, as where a link is cut.",
        ),
    )


@pytest.mark.parametrize("other", ["its turn has come", "it waits for the next one"])
def test_a_turn_that_does_not_come_as_the_transport_moves_nothing_is_no_fault_of_a_rank(other: str) -> None:
    """Rank 1 waits for what comes after a sum, which all have posted; the other rank had its sum before the link was cut."""
    sums, gather = operation(1, "x", queue="sums of 0-1"), operation(2, "x", queue="gathers of 0-1")
    behind, next_one = replace(gather, started_ns=0), operation(4, "y", started=False, queue="gathers of 0-1")
    moves = {"alive_ns": 100 * SECOND, "ranks": 2}
    ahead = record(0, sums, gather, **moves)
    if other == "it waits for the next one":
        ahead = waiting(0, next_one, replace(sums, done_ns=2), gather, **{**moves, "wait_since_ns": 41 * SECOND})
    found = _held_up([ahead, waiting(1, behind, sums, **moves)])
    assert found.blamed == ()
    assert found.sentences[0].startswith("All ranks posted what rank 1 waited 60 s for")
    assert found.sentences[0].endswith("number 1 of sums of 0-1: the transport has not moved it, as where a link is cut.")


STOPPED = {"seen_ns": 41 * SECOND, "alive_ns": 41 * SECOND}


@pytest.mark.parametrize(
    ("state", "last"),
    [
        ({"alive_ns": 42 * SECOND}, "Rank 2 was in a training step, step 812 for 70 s."),
        (STOPPED, "Rank 2 was silent for 59 s at the end, last in a training step, step 812: ended, stopped, or its node lost."),
        (
            {**MOVES, **STOPPED},
            "Rank 2 was silent for 59 s at the end, last in a training step, step 812: ended, stopped, or its node lost.",
        ),
        ({**MOVES, "alive_ns": 41 * SECOND}, "Rank 2 was in a training step, step 812 for 70 s."),
    ],
    ids=["computes", "stopped", "stopped in a wait", "hangs in a wait"],
)
def test_a_rank_that_does_not_move_what_it_has_posted_is_to_blame(state: dict[str, object], last: str) -> None:
    """MPI moves a message only while both sides call it."""
    found = _held_up(_all_posted(MOVES, state))
    assert found.blamed == (2,)
    assert found.sentences[0].endswith("of data of 0-2 (averaging/some.py:7); rank 2 did not drive it any more.")
    assert found.sentences[1:] == (last,)


def test_without_heartbeats_nobody_who_waits_is_blamed() -> None:
    """Such records do not tell whether a wait goes on."""
    records = [replace(each, alive_ns=0, seen_ns=0) for each in _all_posted(MOVES, MOVES)]
    assert _held_up(records).blamed == ()


def test_a_short_deadline_has_a_short_silence() -> None:
    """Of ranks that were stopped two seconds before the end."""
    late = record(3, seen_ns=98 * SECOND, deadline_ns=3 * SECOND)
    assert "and was silent for 2 s at the end" in _held_up([waiting(0, operation(1, "x"), ranks=4), late]).sentences[-1]
    assert (
        "silent" not in _held_up([waiting(0, operation(1, "x"), ranks=4), replace(late, deadline_ns=60 * SECOND)]).sentences[-1]
    )


def test_nobody_waits() -> None:
    assert held_up([record(0, end=End.DEADLINE), record(1)]) is None
