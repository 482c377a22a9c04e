"""The recorder: operations, phases, waits and ends, at the instants at which they happen."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from hpctrain.comm.posting_queue import PostingQueue
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import SLOTS, End, FlightRecord, file_name, read
from tests.support.source_lines import line


class Later:
    """An operation that is complete at the third look."""

    def __init__(self) -> None:
        self.left = 2

    def test(self) -> bool:
        self.left -= 1
        return self.left < 0

    def __str__(self) -> str:
        return "allreduce of 5 float32 elements"


def kept(recorder: FlightRecorder, folder: Path) -> FlightRecord:
    recorder.keep_in(folder)
    return read(folder / file_name(0))


def test_operations_of_a_queue_go_through_three_instants(tmp_path: Path) -> None:
    ticks = count(1)
    recorder = FlightRecorder(lambda: next(ticks))
    queue = PostingQueue("gradients", flight=recorder, world_ranks=(0, 2))
    first = queue.post(Later, "a.weight")
    queue.post(Later, "b.weight", after=[first])
    before = kept(recorder, tmp_path).operations
    assert [(each.purpose, each.started_ns > 0, each.done_ns) for each in before] == [
        ("a.weight", True, 0),
        ("b.weight", False, 0),
    ]
    for _ in range(4):
        queue.collect()
        queue.start_heads()
    after = read(tmp_path / file_name(0)).operations
    assert [(each.queue, each.sequence, each.operation) for each in after] == [
        ("gradients of 0, 2", 0, "allreduce of 5 float32 elements"),
        ("gradients of 0, 2", 1, "allreduce of 5 float32 elements"),
    ]
    assert all(0 < each.posted_ns < each.started_ns < each.done_ns for each in after)


def test_an_operation_that_is_complete_at_once_is_done(tmp_path: Path) -> None:
    recorder, alone = FlightRecorder(), SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=alone.abort, flight=recorder)
    engine.wait(engine.queue(alone).post(alone.ibarrier, "all"))
    (operation,) = kept(recorder, tmp_path).operations
    assert operation.done_ns >= operation.started_ns > 0


def test_a_record_that_the_ring_has_used_again_is_left_alone(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    number = recorder.queued(recorder.queue_of("q", (0,)), "old", 0)
    for sequence in range(1, SLOTS + 1):
        recorder.queued(recorder.queue_of("q", (0,)), "new", sequence)
    recorder.started(number, "late")
    recorder.done(number)
    assert all(each.started_ns == each.done_ns == 0 for each in kept(recorder, tmp_path).operations)


def test_phases_steps_and_waits(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    assert recorder.doing == "its start"
    recorder.phase("evaluation")
    assert recorder.doing == "evaluation"
    recorder.step(2, 31)
    recorder.phase("a training step")
    assert recorder.doing == "a training step, step 31"
    with recorder.waiting("conv.weight", 4):
        during = kept(recorder, tmp_path)
    after = read(tmp_path / file_name(0))
    assert (during.epoch, during.step, during.wait, during.wait_number) == (2, 31, "conv.weight", 4)
    assert during.wait_since_ns >= during.phase_since_ns >= during.begun_ns
    assert after.wait == ""


def test_the_first_end_stays(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    recorder.ended(End.FAILED, "ValueError: no such luck")
    recorder.ended(End.DEADLINE, "what follows from it")
    found = kept(recorder, tmp_path)
    assert (found.end, found.sentence, found.blamed) == (End.FAILED, "ValueError: no such luck", ())


def test_an_end_has_the_ranks_that_it_comes_from(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    recorder.ended(End.FAILED, "other bits", (1, 2, 5))
    assert kept(recorder, tmp_path).blamed == (1, 2, 5)


def test_an_operation_has_the_line_that_queued_it(tmp_path: Path) -> None:
    """Not that of the queue, or of an engine that starts it later."""
    recorder = FlightRecorder()
    queue = PostingQueue("gradients", flight=recorder)
    first, at_first = queue.post(Later, "a.weight"), line()
    at_second = line(1)
    queue.post(Later, "b.weight", after=[first])
    for _ in range(4):
        queue.collect()
        queue.start_heads()
    lines = [each.line for each in kept(recorder, tmp_path).operations]
    assert lines == [f"{Path(__file__).parent}/{at}" for at in (at_first, at_second)]


def test_waits_of_an_engine_are_told(tmp_path: Path) -> None:
    recorder, alone = FlightRecorder(), SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=alone.abort, flight=recorder)
    seen: list[str] = []

    class Looking(Later):
        def test(self) -> bool:
            seen.append(kept(recorder, tmp_path).wait if not seen else read(tmp_path / file_name(0)).wait)
            return super().test()

    before = recorder.beats
    engine.wait(engine.queue(alone).post(Looking, "a.weight"))
    engine.wait_handle(Looking(), "objects")
    assert "a.weight" in seen
    assert "objects" in seen
    assert read(tmp_path / file_name(0)).wait == ""
    assert recorder.beats > before
