"""Findings from records: who held the others up, who failed first, who posted something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpctrain.flight.autopsy import autopsy, newest
from hpctrain.flight.ring import End, FlightRecord, RecordedOperation

SECOND = 1_000_000_000
ALL = "all gradients of 0-3"


def operation(number: int, purpose: str, *, started: bool = True, done: bool = False, **more: Any) -> RecordedOperation:
    """Queued one second after the other; number and sequence are the same here."""
    at = number * SECOND
    text = more.pop("operation", "reduce-scatter of 64 float32 elements" if started else "")
    return RecordedOperation(number, more.pop("queue", ALL), purpose, number, text, at, at if started else 0, at if done else 0)


def record(rank: int, *operations: RecordedOperation, ranks: int = 4, **more: Any) -> FlightRecord:
    values = {
        "job": 1,
        "rank": rank,
        "ranks": ranks,
        "process": 100 + rank,
        "host": "node",
        "end": End.RUNNING,
        "signal": 0,
        "wall_offset_ns": 0,
        "begun_ns": 0,
        "seen_ns": 100 * SECOND,
        "alive_ns": 0,
        "phase": "a training step",
        "phase_since_ns": 30 * SECOND,
        "epoch": 1,
        "step": 812,
        "wait": "",
        "wait_since_ns": 0,
        "wait_number": 0,
        "sentence": "",
        "blamed": (),
        "deadline_ns": 60 * SECOND,
        "operations": operations,
    }
    return FlightRecord(**{**values, **more})


def waiting(rank: int, awaited: RecordedOperation, *before: RecordedOperation, **more: Any) -> FlightRecord:
    """Since the 40th second, for an operation of its queue."""
    given = {"wait": awaited.purpose, "wait_number": awaited.number, "wait_since_ns": 40 * SECOND, **more}
    return record(rank, *before, awaited, **given)


def test_a_rank_that_loads_data_holds_the_others_up() -> None:
    awaited = operation(3, "layer4.1.conv2.weight")
    done = operation(2, "layer4.2.conv1.weight", done=True)
    late = record(3, done, phase="data loading", phase_since_ns=39 * SECOND)
    found = autopsy([*(waiting(rank, awaited, done) for rank in range(3)), late])
    assert found.blamed == (3,)
    assert found.sentences == (
        "Rank 3 never posted the reduce-scatter of 64 float32 elements for layer4.1.conv2.weight, number 3 of all gradients "
        "of 0-3, for which rank 0 waited 60 s (a training step, step 812).",
        "Rank 3 was in data loading, step 812 for 61 s.",
    )


def test_what_is_queued_and_not_started_is_not_posted() -> None:
    awaited, queued = (operation(3, "a.weight", started=started, queue="all of 0-1") for started in (True, False))
    found = autopsy([waiting(0, awaited, ranks=2), record(1, queued, ranks=2)])
    assert found.blamed == (1,)


def test_a_wait_for_what_has_not_begun_is_for_what_is_in_flight() -> None:
    """A gather that comes after a sum, which the other rank has not posted."""
    sums, gather = operation(1, "x", queue="sums of 0-1"), operation(2, "x", started=False, queue="gathers of 0-1")
    behind = operation(3, "y", queue="sums of 0-1")
    found = autopsy([waiting(0, gather, sums, behind, ranks=2), record(1, ranks=2)])
    assert found.blamed == (1,)
    assert "number 1 of sums of 0-1" in found.sentences[0]
    alone = autopsy([waiting(0, gather, ranks=2), waiting(1, replace(gather, started_ns=1), ranks=2)])
    assert alone.blamed == (0,)
    assert alone.sentences[0].startswith("Rank 0 waits for what it has not posted itself: x, number 2")


def test_waits_are_followed_to_the_one_that_waits_for_nobody() -> None:
    """Rank 0 waits for 1 in one group, which waits for 2 in another."""
    first, second = operation(1, "rows", queue="split of 0-1"), operation(1, "columns", queue="data of 1-2")
    chain = [waiting(0, first, ranks=3), waiting(1, second, ranks=3), record(2, phase="evaluation", ranks=3)]
    found = autopsy(chain)
    assert found.blamed == (2,)
    assert "for columns, number 1 of data of 1-2, for which rank 1 waited" in found.sentences[0]


def test_ranks_that_wait_for_each_other() -> None:
    """Each has begun with another queue."""
    ours, theirs = operation(1, "x", queue="a of 0-1"), operation(1, "y", queue="b of 0-1")
    found = autopsy([waiting(0, ours, ranks=2), waiting(1, theirs, ranks=2)])
    assert found.blamed == (0, 1)
    assert found.sentences[0].startswith(
        "Ranks 0-1 wait for each other: rank 0 waits for the reduce-scatter of 64 float32 elements "
        "for x, number 1 of a of 0-1, which rank 1 has not posted; rank 1 waits for the reduce-scatter"
    )


def test_different_operations_are_named_with_the_few_to_blame() -> None:
    same, other = operation(1, "a.weight"), operation(1, "b.weight")
    found = autopsy([waiting(0, same), waiting(1, same), waiting(2, other), waiting(3, same)])
    assert found.blamed == (2,)
    assert "number 1 of all gradients of 0-3: ranks 0-1, 3 the reduce-scatter" in found.sentences[0]


@pytest.mark.parametrize("other", ["8 float32", "9 float64"])
def test_another_count_or_dtype_is_another_operation(other: str) -> None:
    texts = ["9 float32", "9 float32", "9 float32", other]
    posted = [operation(1, "a.weight", operation=f"allreduce of {text} elements") for text in texts]
    found = autopsy([waiting(rank, each) for rank, each in enumerate(posted)])
    assert found.blamed == (3,)
    assert f"rank 3 the allreduce of {other} elements for a.weight" in found.sentences[0]


def test_pieces_of_an_all_to_all_may_differ() -> None:
    parts = [operation(1, "x", operation=f"all-to-all of {rank} float32 elements") for rank in range(4)]
    found = autopsy([waiting(rank, each) for rank, each in enumerate(parts)])
    assert found.blamed == ()
    assert found.sentences[0].startswith(
        "All ranks posted what rank 0 waited 60 s for (a training step, step 812), the all-to-all"
    )


def test_the_first_that_failed_is_the_cause() -> None:
    awaited = operation(1, "x")
    failed = record(2, end=End.FAILED, sentence="ValueError: no such luck", seen_ns=50 * SECOND)
    later = waiting(0, awaited, end=End.DEADLINE, sentence="no completion")
    found = autopsy([later, waiting(1, awaited), failed, waiting(3, awaited)])
    assert (found.blamed, found.sentences) == (
        (2,),
        ("Rank 2 failed first: ValueError: no such luck (a training step, step 812).",),
    )


def test_ranks_that_failed_alike_are_named_together() -> None:
    failed = [record(rank, ranks=2, end=End.FAILED, sentence="no data") for rank in range(2)]
    assert autopsy(failed).sentences[0].startswith("Ranks 0-1 failed first: no data")


def test_clocks_of_nodes_are_brought_together() -> None:
    """The clock of rank 1 is an hour ahead, so that it seems to have failed later."""
    first = record(1, ranks=2, end=End.FAILED, sentence="cause", seen_ns=3650 * SECOND, wall_offset_ns=3600 * SECOND)
    then = record(0, ranks=2, end=End.FAILED, sentence="consequence", seen_ns=60 * SECOND)
    assert autopsy([then, first]).blamed == (1,)


def test_a_rank_that_is_gone_was_silent() -> None:
    awaited = operation(1, "x")
    found = autopsy([*(waiting(rank, awaited) for rank in range(3)), record(3, seen_ns=35 * SECOND)])
    assert found.blamed == (3,)
    assert found.sentences[1].endswith("and was silent for 65 s at the end: ended, stopped, or its node lost.")
    alone = autopsy([record(0, ranks=2), record(1, ranks=2, seen_ns=35 * SECOND)])
    assert alone.sentences == (
        "Rank 1 was silent for 65 s at the end, last in a training step, step 812: ended, stopped, or its node lost.",
    )


def test_all_stuck_alike() -> None:
    stuck = [record(rank, ranks=2, end=End.DEADLINE, phase="evaluation", step=0) for rank in range(2)]
    found = autopsy(stuck)
    assert (found.blamed, found.sentences) == ((0, 1), ("Ranks 0-1 were in evaluation for 70 s.",))


def test_a_wait_outside_the_queues_knows_its_ranks() -> None:
    text = "gathered objects (communicator data of ranks 1, 3)"
    of_group = [record(rank, wait=text if rank == 1 else "", wait_since_ns=SECOND) for rank in range(4)]
    assert autopsy(of_group).blamed == (3,)


def test_ranks_without_a_record_are_named() -> None:
    awaited = operation(1, "x")
    found = autopsy([waiting(rank, awaited) for rank in range(3)])
    assert found.blamed == (3,)
    assert found.sentences[-1].startswith("Rank 3 left no record here")


def test_a_job_that_finished() -> None:
    done = [record(rank, ranks=2, end=End.FINISHED) for rank in range(2)]
    assert autopsy(done).sentences == ("The job finished: ranks 0-1 ended in good order.",)
    assert autopsy([]).sentences == ("No rank has left a record.",)


def test_records_of_an_earlier_start_do_not_count() -> None:
    assert [each.rank for each in newest([record(1, job=5), record(0, job=5), replace(record(2), job=4)])] == [0, 1]


@pytest.mark.parametrize("end", [End.FINISHED, End.SIGNAL])
def test_different_operations_come_before_how_the_ranks_ended(end: End) -> None:
    """An MPI may go on with other numbers after them, or end the rank itself."""
    posted = [operation(1, "a.weight", operation=f"allreduce of 9 {dtype} elements") for dtype in ("float32", "float64")]
    records = [replace(waiting(rank, each), end=end, signal=6 * (end is End.SIGNAL)) for rank, each in enumerate(posted)]
    found = autopsy(records)
    assert found.blamed == (1,)
    assert found.sentences[0].startswith("Ranks posted different operations as number 1 of all gradients")
