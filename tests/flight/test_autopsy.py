"""Findings from records: who failed first, who posted something else, who was silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.flight.autopsy import autopsy, newest
from hpctrain.flight.ring import End
from tests.support.flight_records import SECOND, operation, record, waiting


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


def test_lines_of_the_program_are_told() -> None:
    posted = [operation(1, f"{name}.weight", line=f"averaging/{name}.py:7") for name in "aab"]
    found = autopsy([waiting(rank, each, ranks=3) for rank, each in enumerate(posted)])
    assert "elements for a.weight (averaging/a.py:7); rank 2 the reduce-scatter" in found.sentences[0]
    assert found.sentences[0].endswith("elements for b.weight (averaging/b.py:7).")


@pytest.mark.parametrize(("ranks", "because"), [((1,), ", because of rank 1"), ((0, 1, 2), "")])
def test_an_error_that_knows_its_ranks_blames_them(ranks: tuple[int, ...], because: str) -> None:
    failed = [record(rank, ranks=3, end=End.FAILED, sentence="other bits.", blamed=ranks) for rank in range(3)]
    found = autopsy(failed)
    assert found.blamed == ranks
    assert found.sentences == (f"Ranks 0-2 failed first{because}: other bits (a training step, step 812).",)


def test_a_rank_that_is_killed_after_a_deadline_is_not_the_cause() -> None:
    """The launcher ends the ranks of a job that one of them aborts."""
    awaited = operation(1, "x", queue="data of 0-2")
    gave_up = waiting(0, awaited, ranks=3, end=End.DEADLINE)
    killed = waiting(1, awaited, ranks=3, end=End.SIGNAL, signal=9, seen_ns=101 * SECOND)
    assert autopsy([gave_up, killed, record(2, ranks=3)]).blamed == (2,)
