"""Autopsies from flight records: which rank failed first, which one held up the others, and the wording."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.core.errors import DataError
from hpctrain.flight import ring
from hpctrain.flight.autopsy import (
    Autopsy,
    autopsy,
    autopsy_json,
    explanation,
    latest_seconds,
    newest,
    rank_table,
    records_in,
    silent_seconds,
    waited_for,
)
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import FlightRecord
from hpctrain.launch.process_end import End
from tests.support.recorded import SECOND, operation, record, waiting


def test_different_operations_are_named_with_the_few_to_blame() -> None:
    same, other = operation(1, "a.weight"), operation(1, "b.weight")
    found = autopsy([waiting(0, same), waiting(1, same), waiting(2, other), waiting(3, same)])
    assert found.blamed == (2,)
    assert 'operation 1 of the queue "all gradients of 0-3": ranks 0-1, 3 the reduce-scatter' in found.sentences[0]


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


def test_clocks_of_nodes_are_brought_together() -> None:
    """The clock of rank 1 is an hour ahead, so that it seems to have failed later."""
    first = record(1, ranks=2, end=End.FAILED, sentence="cause", seen_ns=3650 * SECOND, wall_offset_ns=3600 * SECOND)
    then = record(0, ranks=2, end=End.FAILED, sentence="consequence", seen_ns=60 * SECOND)
    assert autopsy([then, first]).blamed == (1,)


def test_ranks_that_entered_different_phases_are_named_before_all_else() -> None:
    """Whatever they post then differs, too, and one of them may fail for it."""
    phases = ((6, "a training step"), (7, "a checkpoint"))
    others = [record(rank, phases=phases) for rank in (0, 1, 3)]
    odd = record(2, phases=((7, "evaluation"), (8, "a checkpoint")), end=End.FAILED, sentence="It failed.")
    found = autopsy([*others[:2], odd, others[2]])
    assert found.sentences == ("Ranks entered different phases of the run: ranks 0-1, 3 a checkpoint; rank 2 evaluation.",)
    assert found.blamed == (2,)


def test_a_phase_that_only_some_ranks_entered_is_reported_after_who_waits() -> None:
    entered = [record(rank, phases=((6, "a training step"), (7, "a checkpoint")), phase="a checkpoint") for rank in (0, 1, 3)]
    late = record(2, phases=((6, "a training step"),), phase="data loading")
    found = autopsy([*entered[:2], late, entered[2]])
    assert found.sentences[-1] == "Only ranks 0-1, 3 entered a checkpoint; rank 2 was in data loading, step 812."


def test_a_rank_that_is_gone_was_silent() -> None:
    awaited = operation(1, "x")
    found = autopsy([*(waiting(rank, awaited) for rank in range(3)), record(3, seen_ns=35 * SECOND)])
    assert found.blamed == (3,)
    assert found.sentences[1].endswith("and wrote nothing for the last 65 s: it ended, was stopped, or its node failed.")
    alone = autopsy([record(0, ranks=2), record(1, ranks=2, seen_ns=35 * SECOND)])
    assert alone.sentences == (
        "Rank 1 wrote nothing for the last 65 s, after a training step, step 812: it ended, was stopped, or its node failed.",
    )


@pytest.mark.parametrize(("ranks", "subject", "its"), [(1, "Rank 0", "its"), (2, "Ranks 0-1", "their")])
def test_ranks_that_are_gone_without_a_record_were_probably_killed(ranks: int, subject: str, its: str) -> None:
    """Their last phase "for 0 s" explains nothing; nor does a wait that has just begun."""
    gone = [record(rank, ranks=ranks, gone=True) for rank in range(ranks)]
    gone[1:] = [replace(each, wait="x", wait_since_ns=99 * SECOND) for each in gone[1:]]
    found = autopsy(gone)
    assert (found.blamed, found.sentences) == (
        (),
        (
            f"{subject} ended without a record of {its} end, probably killed by SIGKILL, as by the kernel if memory runs out "
            "(a training step, step 812).",
        ),
    )
    assert rank_table(gone)[1][2] == "unrecorded"
    assert "killed" not in autopsy([*gone[:-1], replace(gone[-1], gone=False)]).sentences[0], "a rank is alive"
    waited = replace(gone[-1], wait="x", wait_since_ns=40 * SECOND)
    assert "killed" not in autopsy([*gone[:-1], waited]).sentences[0], "a job that hung, and was then killed"


def test_only_a_process_that_is_gone_and_silent_counts_as_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FlightRecorder()
    recorder.join(0, 1, 1, 0.0)
    recorder.keep_in(tmp_path)
    now = time.time()
    monkeypatch.setattr(ring.time, "time", lambda: now + 10)
    assert not ring.read(tmp_path / ring.file_name(0)).gone, "the process lives, though no heartbeat ticks"
    monkeypatch.setattr(ring.processes, "status_of", lambda process: None)
    assert ring.read(tmp_path / ring.file_name(0)).gone
    monkeypatch.setattr(ring.time, "time", lambda: now)
    assert not ring.read(tmp_path / ring.file_name(0)).gone, "a process of another container, whose heartbeat ticks"


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
    assert autopsy(done).sentences == ("The job finished: ranks 0-1 ended normally.",)
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
    assert found.sentences[0].startswith('Ranks posted different operations as operation 1 of the queue "all gradients')


def test_lines_of_the_program_are_reported() -> None:
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


@pytest.mark.parametrize(
    ("deadline", "seconds", "silent"),
    [(0, 3, 0), (0, 4, 4), (300, 3, 0), (300, 4, 4), (3, 1, 0), (3, 2, 2)],
    ids=["no deadline", "no deadline, longer", "long", "long, longer", "short", "short, longer"],
)
def test_a_silence_is_long_in_proportion_to_the_deadline(deadline: int, seconds: int, silent: int) -> None:
    ended = record(0, seen_ns=(100 - seconds) * SECOND, deadline_ns=deadline * SECOND)
    latest = latest_seconds([ended, record(1)])
    assert (silent_seconds(ended, latest), silent_seconds(record(1), latest)) == (pytest.approx(silent), 0)


def _held_up(records: list[FlightRecord]) -> Autopsy:
    found = waited_for(records)
    assert found is not None
    return found


def test_a_rank_that_loads_data_holds_the_others_up() -> None:
    awaited = operation(3, "layer4.1.conv2.weight")
    done = operation(2, "layer4.2.conv1.weight", done=True)
    late = record(3, done, phase="data loading", phase_since_ns=39 * SECOND)
    found = _held_up([*(waiting(rank, awaited, done) for rank in range(3)), late])
    assert found.blamed == (3,)
    assert found.sentences == (
        'Rank 3 never posted the reduce-scatter of 64 float32 elements for layer4.1.conv2.weight, operation 3 of the queue "all '
        'gradients of 0-3", for which rank 0 waited 60 s (a training step, step 812).',
        "Rank 3 was in data loading, step 812 for 61 s.",
    )


def test_what_is_queued_and_not_started_is_not_posted() -> None:
    awaited, queued = (operation(3, "a.weight", started=started, queue="all of 0-1") for started in (True, False))
    found = _held_up([waiting(0, awaited, ranks=2), record(1, queued, ranks=2)])
    assert found.blamed == (1,)


def test_a_wait_for_what_has_not_begun_is_for_what_is_in_flight() -> None:
    """A gather that comes after a sum, which the other rank has not posted."""
    sums, gather = operation(1, "x", queue="sums of 0-1"), operation(2, "x", started=False, queue="gathers of 0-1")
    later = operation(3, "y", queue="sums of 0-1")
    found = _held_up([waiting(0, gather, sums, later, ranks=2), record(1, ranks=2)])
    assert found.blamed == (1,)
    assert 'operation 1 of the queue "sums of 0-1"' in found.sentences[0]
    alone = _held_up([waiting(0, gather, ranks=2), waiting(1, replace(gather, started_ns=1), ranks=2)])
    assert alone.blamed == (0,)
    assert alone.sentences[0].startswith("Rank 0 waits for an operation that it has not posted: x, operation 2")


def test_waits_are_followed_to_the_one_that_does_not_wait() -> None:
    """Rank 0 waits for 1 in one group, which waits for 2 in another."""
    first, second = operation(1, "rows", queue="split of 0-1"), operation(1, "columns", queue="data of 1-2")
    chain = [waiting(0, first, ranks=3), waiting(1, second, ranks=3), record(2, phase="evaluation", ranks=3)]
    found = _held_up(chain)
    assert found.blamed == (2,)
    assert 'for columns, operation 1 of the queue "data of 1-2", for which rank 1 waited' in found.sentences[0]


def test_ranks_that_wait_for_each_other() -> None:
    """Each has begun with another queue."""
    ours, theirs = operation(1, "x", queue="a of 0-1"), operation(1, "y", queue="b of 0-1")
    found = _held_up([waiting(0, ours, ranks=2), waiting(1, theirs, ranks=2)])
    assert found.blamed == (0, 1)
    assert found.sentences[0].startswith(
        "Ranks 0-1 wait for each other: rank 0 waits for the reduce-scatter of 64 float32 elements "
        'for x, operation 1 of the queue "a of 0-1", which rank 1 has not posted; rank 1 waits for the reduce-scatter'
    )


def test_pieces_of_an_all_to_all_may_differ() -> None:
    parts = [operation(1, "x", operation=f"all-to-all of {rank} float32 elements") for rank in range(4)]
    found = _held_up([waiting(rank, each) for rank, each in enumerate(parts)])
    assert found.blamed == ()
    assert found.sentences[0].startswith(
        "All ranks posted the operation that rank 0 waited 60 s for (a training step, step 812), the all-to-all"
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
            "All ranks posted the operation that rank 0 waited 60 s for (a training step, step 812), "
            "the reduce-scatter of 64 float32 elements "
            'for x, operation 1 of the queue "data of 0-2" (averaging/some.py:7): the transport did not complete it; '
            "a link may be broken.",
        ),
    )


@pytest.mark.parametrize("other", ["its turn has come", "it waits for the next one"])
def test_a_turn_that_does_not_come_as_the_transport_moves_nothing_is_no_fault_of_a_rank(other: str) -> None:
    """Rank 1 waits for what comes after a sum, which all have posted; the other rank had its sum before the link was cut."""
    sums, gather = operation(1, "x", queue="sums of 0-1"), operation(2, "x", queue="gathers of 0-1")
    posted, next_one = replace(gather, started_ns=0), operation(4, "y", started=False, queue="gathers of 0-1")
    moves = {"alive_ns": 100 * SECOND, "ranks": 2}
    ahead = record(0, sums, gather, **moves)
    if other == "it waits for the next one":
        ahead = waiting(0, next_one, replace(sums, done_ns=2), gather, **{**moves, "wait_since_ns": 41 * SECOND})
    found = _held_up([ahead, waiting(1, posted, sums, **moves)])
    assert found.blamed == ()
    assert found.sentences[0].startswith("All ranks posted the operation that rank 1 waited 60 s for")
    assert found.sentences[0].endswith(
        'operation 1 of the queue "sums of 0-1": the transport did not complete it; a link may be broken.'
    )


STOPPED = {"seen_ns": 41 * SECOND, "alive_ns": 41 * SECOND}


@pytest.mark.parametrize(
    ("state", "last"),
    [
        ({"alive_ns": 42 * SECOND}, "Rank 2 was in a training step, step 812 for 70 s."),
        (
            STOPPED,
            "Rank 2 wrote nothing for the last 59 s, after a training step, step 812: it ended, was stopped, or its node failed.",
        ),
        (
            {**MOVES, **STOPPED},
            "Rank 2 wrote nothing for the last 59 s, after a training step, step 812: it ended, was stopped, or its node failed.",
        ),
        ({**MOVES, "alive_ns": 41 * SECOND}, "Rank 2 was in a training step, step 812 for 70 s."),
    ],
    ids=["computes", "stopped", "stopped in a wait", "hangs in a wait"],
)
def test_a_rank_that_does_not_move_what_it_has_posted_is_to_blame(state: dict[str, object], last: str) -> None:
    """MPI moves a message only while both sides call it."""
    found = _held_up(_all_posted(MOVES, state))
    assert found.blamed == (2,)
    assert found.sentences[0].endswith('of the queue "data of 0-2" (averaging/some.py:7); rank 2 stopped making progress.')
    assert found.sentences[1:] == (last,)


def test_without_heartbeats_no_waiting_rank_is_blamed() -> None:
    """Such records do not tell whether a wait goes on."""
    records = [replace(each, alive_ns=0, seen_ns=0) for each in _all_posted(MOVES, MOVES)]
    assert _held_up(records).blamed == ()


def test_no_rank_waits() -> None:
    assert waited_for([record(0, end=End.DEADLINE), record(1)]) is None


def _post(recorder: FlightRecorder, queue: int) -> int:
    return recorder.queued(queue, "a.weight", 0)


_POSTED_AT = f"{__file__}:{_post.__code__.co_firstlineno + 1}"


def _write(folder: Path, rank: int, job: int = 1, *, posts: bool = True) -> None:
    recorder = FlightRecorder()
    recorder.join(rank, 2, job, 30.0)
    recorder.step(1, 5)
    recorder.phase("a training step" if posts else "data loading")
    queue = recorder.queue_of("gradients", (0, 1))
    number = _post(recorder, queue)
    if posts:
        recorder.started(number, "allreduce of 8 float32 elements")
        recorder.wait("a.weight", number)
        recorder.ended(End.DEADLINE, "no completion")
    recorder.keep_in(folder)


def test_a_directory_tells_its_latest_start(tmp_path: Path) -> None:
    _write(tmp_path, 0)
    _write(tmp_path, 1, posts=False)
    _write(tmp_path, 2, job=0)  # of an earlier start, on more ranks
    records = records_in(tmp_path)
    assert [each.rank for each in records] == [0, 1]
    first, *_ = explanation(tmp_path)
    assert first.startswith("autopsy: Rank 1 never posted the allreduce of 8 float32 elements for a.weight")
    head, *rows = rank_table(records)
    assert [dict(zip(head, row, strict=True))["end"] for row in rows] == ["deadline", "unknown"]
    values = json.loads(json.dumps(autopsy_json(records)))
    assert values["blamed"] == [1]
    assert values["ranks"][0]["unfinished"][0] == {
        "queue": "gradients of 0-1",
        "number": 0,
        "purpose": "a.weight",
        "operation": "allreduce of 8 float32 elements",
        "line": _POSTED_AT,
    }


def test_a_directory_without_records(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no flight records"):
        records_in(tmp_path)
    with pytest.raises(DataError, match=r"There is no directory .*x"):
        records_in(tmp_path / "x")
    with pytest.raises(DataError, match=r"^'x+' cannot be read \(File name too long\); give the directory of a run\.$"):
        records_in(Path("x" * 300))
    assert explanation(None) == []
    assert explanation(tmp_path)[0].startswith("autopsy: ")
