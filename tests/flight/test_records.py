"""Flight records: what is recorded when, the file, its start and end, the heartbeat, and lines of the program."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.progress import PostingQueue, ProgressEngine
from hpctrain.core.errors import DataError
from hpctrain.core.text import place
from hpctrain.flight import recorder as source_lines
from hpctrain.flight import start_records
from hpctrain.flight.autopsy import find_records
from hpctrain.flight.recorder import FlightNotes, FlightRecorder, Heartbeat, RunPhase, SourceLines
from hpctrain.flight.ring import (
    _NAME_BYTES,
    _NO_ROOM,
    SLOTS,
    Field,
    FlightRecord,
    RingWriter,
    Word,
    file_name,
    mark_end,
    read,
    record_at,
)
from hpctrain.flight.start_records import KEPT, RECORDS, latest, place_of_start, recorded, taken
from hpctrain.launch.keeper import Pulse
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.process_end import End
from hpctrain_testing.run import run_job
from tests.support.countdown import Countdown
from tests.support.recorded import line


def later(at_test: Callable[[], object] | None = None) -> Countdown:
    return Countdown(3, at_test, "allreduce of 5 float32 elements")


def kept(recorder: FlightRecorder, folder: Path) -> FlightRecord:
    recorder.keep_in(folder)
    return read(folder / file_name(0))


def test_operations_of_a_queue_go_through_three_instants(tmp_path: Path) -> None:
    ticks = count(1)
    recorder = FlightRecorder(lambda: next(ticks))
    queue = PostingQueue("gradients", flight=recorder, world_ranks=(0, 2))
    first = queue.post(later, "a.weight")
    queue.post(later, "b.weight", after=[first])
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


def test_the_latest_collective_phases_are_kept_by_number(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    for number in range(9):
        recorder.phase("data loading")  # which each rank does by itself, and which has no number
        recorder.phase(RunPhase.STEP if number % 2 else RunPhase.SAVE)
    kept = read(recorder.keep_in(tmp_path))
    names = {0: "a training step", 1: "a checkpoint"}
    assert kept.phases == tuple((number, names[number % 2]) for number in range(3, 10))
    assert kept.phase == "a checkpoint"


def test_the_first_end_stays(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    recorder.ended(End.FAILED, "ValueError: no such luck", (1, 2, 5))
    recorder.ended(End.DEADLINE, "what follows from it")
    found = kept(recorder, tmp_path)
    assert (found.end, found.sentence, found.blamed) == (End.FAILED, "ValueError: no such luck", (1, 2, 5))


def test_an_operation_has_the_line_that_queued_it(tmp_path: Path) -> None:
    """Not that of the queue, or of an engine that starts it later."""
    recorder = FlightRecorder()
    queue = PostingQueue("gradients", flight=recorder)
    first, at_first = queue.post(later, "a.weight"), line()
    at_second = line(1)
    queue.post(later, "b.weight", after=[first])
    for _ in range(4):
        queue.collect()
        queue.start_heads()
    lines = [each.line for each in kept(recorder, tmp_path).operations]
    assert lines == [f"{Path(__file__).parent}/{at}" for at in (at_first, at_second)]


def test_waits_of_an_engine_are_reported(tmp_path: Path) -> None:
    recorder, alone = FlightRecorder(), SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=alone.abort, flight=recorder)
    seen: list[str] = []

    def look() -> None:
        seen.append(kept(recorder, tmp_path).wait if not seen else read(tmp_path / file_name(0)).wait)

    before = recorder.beats
    engine.wait(engine.queue(alone).post(lambda: later(look), "a.weight"))
    engine.wait_handle(later(look), "objects")
    assert "a.weight" in seen
    assert "objects" in seen
    assert read(tmp_path / file_name(0)).wait == ""
    assert recorder.beats > before


def test_notes_reach_the_recorder() -> None:
    recorder = FlightRecorder()
    notes = FlightNotes(recorder)
    notes.alive()
    assert recorder.beats == 1
    notes.step(1, 4)
    assert recorder.doing == "a training step, step 4"
    notes.phase("evaluation")
    assert (recorder.doing, recorder.beats) == ("evaluation, step 4", 3)


def test_what_is_done_meanwhile_yields_to_what_was_done_before() -> None:
    """Also where it fails: the record of an error has the place of its cause."""
    recorder = FlightRecorder()
    notes = FlightNotes(recorder)
    notes.step(1, 4)
    with contextlib.suppress(ValueError), notes.meanwhile("a checkpoint"):
        assert recorder.doing == "a checkpoint, step 4"
        raise ValueError("no")
    assert recorder.doing == "a training step, step 4"


def test_without_a_recorder_nothing_happens() -> None:
    notes = FlightNotes(None)
    notes.alive()
    notes.step(1, 1)
    notes.phase("evaluation")
    with notes.waiting("a.weight", 3), notes.meanwhile("a checkpoint"):
        pass


def test_a_ring_moves_into_a_file_with_all_that_it_holds(tmp_path: Path) -> None:
    ring = RingWriter()
    ring.words[Word.RANK], ring.words[Word.STEP] = 3, 7
    ring.words[Word.PHASE] = ring.name("data loading")
    ring.move(tmp_path / "deep" / "x.flight")
    ring.words[Word.STEP] = 8
    ring.words[Word.WAIT] = ring.name("größer")
    found = read(tmp_path / "deep" / "x.flight")
    assert (found.rank, found.step, found.phase, found.wait, found.end) == (3, 8, "data loading", "größer", End.RUNNING)


def test_a_name_has_one_place_and_the_empty_one_is_nothing() -> None:
    ring = RingWriter()
    first = ring.name("a")
    assert ring.name("b") != first == ring.name("a")
    assert ring.name("") == 0


def test_a_full_table_of_names_says_so(tmp_path: Path) -> None:
    ring = RingWriter()
    for number in range(_NAME_BYTES // 16):
        ring.name(f"{number:8d}")
    ring.words[Word.PHASE] = ring.name("one more")
    for number in range(100):
        ring.name(f"and {number:1000d}")
    ring.move(tmp_path / "x.flight")
    assert read(tmp_path / "x.flight").phase == _NO_ROOM


def test_the_latest_operations_are_kept(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    queue = recorder.queue_of("world", (0, 1))
    for number in range(SLOTS + 10):
        assert recorder.queued(queue, f"p{number % 5}", number) == number + 1
    recorder.keep_in(tmp_path)
    found = read(tmp_path / file_name(0)).operations
    assert ([each.sequence for each in found], {each.queue for each in found}) == (list(range(10, SLOTS + 10)), {"world of 0-1"})


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    ring = RingWriter()
    ring.words[Word.POSTED] = 2
    ring.words[record_at(1) + Field.NUMBER] = 1
    ring.words[record_at(2) + Field.SEQUENCE] = 99  # its number was not written any more
    ring.move(tmp_path / "x.flight")
    assert [each.number for each in read(tmp_path / "x.flight").operations] == [1]


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(1 << 20)])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.flight").write_bytes(content)
    with pytest.raises(DataError, match=r"x.flight is not a flight record of this version"):
        read(tmp_path / "x.flight")


class _Refusing:
    def flush(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_a_disk_that_refuses_ends_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the heartbeat, which flushes, nor the report of an error, which ends a record."""
    recorder = FlightRecorder()
    path = recorder.keep_in(tmp_path)
    monkeypatch.setattr(recorder._ring, "_map", _Refusing())
    recorder.flush()
    monkeypatch.undo()
    recorder.ended(End.FAILED, "why")
    assert read(path).sentence == "why"


@pytest.mark.parametrize("text", ["x-", "(name left out: the table is full)"])
def test_blamed_ranks_that_cannot_be_read_are_left_out(tmp_path: Path, text: str) -> None:
    ring = RingWriter()
    ring.words[Word.BLAMED] = ring.name(text)
    ring.move(tmp_path / "x.flight")
    assert read(tmp_path / "x.flight").blamed == ()


@pytest.mark.job
def test_a_flight_record_survives_a_kill(tmp_path: Path) -> None:
    program = f"""
    import os, signal
    from pathlib import Path
    from hpctrain.flight.recorder import FlightRecorder
    recorder = FlightRecorder()
    recorder.join(5, 8, 1, 30.0)
    recorder.keep_in(Path({str(tmp_path)!r}))
    number = recorder.queued(recorder.queue_of("data", range(8)), "conv.weight", 41)
    recorder.phase("a training step")
    recorder.started(number, "allreduce of 9 float32 elements")
    os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=dict(os.environ), timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    found = read(tmp_path / file_name(5))
    assert (found.ranks, found.phase, found.end) == (8, "a training step", End.RUNNING)
    (operation,) = found.operations
    assert (operation.queue, operation.purpose, operation.sequence) == ("data of 0-7", "conv.weight", 41)
    assert operation.operation == "allreduce of 9 float32 elements"
    assert operation.started_ns >= operation.posted_ns > operation.done_ns == 0


def test_a_record_that_another_process_has_mapped_is_replaced_and_never_cut(tmp_path: Path) -> None:
    """Of two processes in one run, neither reads or overwrites the record that the other has mapped, nor marks its end."""
    first, second = FlightRecorder(), FlightRecorder()
    first.phase("a training step")
    path = first.keep_in(tmp_path)
    before = path.stat().st_ino
    second.phase("evaluation")
    assert second.keep_in(tmp_path) == path
    assert path.stat().st_ino != before
    first.phase("a checkpoint")
    assert read(path).phase == "evaluation"
    mark_end(path, 9, process=os.getpid() + 1)
    assert read(path).end == End.RUNNING
    mark_end(path, 9, process=os.getpid())
    assert (read(path).end, list(tmp_path.iterdir())) == (End.SIGNAL, [path])


@pytest.mark.parametrize(("end", "number"), [(End.SIGNAL, 9), (End.EXITED, 0), (End.EXITED, 5)])
def test_an_end_is_marked_from_outside_unless_the_process_has_said_its_own(tmp_path: Path, end: End, number: int) -> None:
    recorder = FlightRecorder()
    path = recorder.keep_in(tmp_path)
    mark_end(path, number, end)
    assert (read(path).end, read(path).signal) == (end, number)
    recorder = FlightRecorder()
    path = recorder.keep_in(tmp_path)
    recorder.ended(End.FAILED, "why")
    mark_end(path, number, end)
    assert (read(path).end, read(path).sentence) == (End.FAILED, "why")


@pytest.mark.parametrize(
    ("end", "number", "stays"),
    [(End.SIGNAL, 9, False), (End.EXITED, 15, False), (End.EXITED, 0, True), (End.EXITED, 85, True), (End.LAUNCHER, 19, False)],
)
def test_a_run_that_has_finished_may_still_end_badly(tmp_path: Path, end: End, number: int, stays: bool) -> None:
    recorder = FlightRecorder()
    path = recorder.keep_in(tmp_path)
    recorder.ended(End.FINISHED)
    assert mark_end(path, number, end) is not stays
    assert read(path).end is (End.FINISHED if stays else end)


HERE = Path(__file__).parent


class _Names:
    """Return a number for each text, and count how often it was asked."""

    def __init__(self) -> None:
        self.texts = [""]

    def add(self, text: str) -> int:
        self.texts.append(text)
        return len(self.texts) - 1


def test_the_line_of_a_call_is_looked_up_once() -> None:
    names = _Names()
    lines = SourceLines(names.add)
    found, at = [], line(2)
    for _ in range(3):
        found.append(lines.place(sys._getframe()))
    assert (found, names.texts) == ([1, 1, 1], ["", f"{HERE}/{at}"])


def test_lines_of_one_function_are_different_places() -> None:
    names = _Names()
    lines = SourceLines(names.add)
    first = lines.place(sys._getframe())
    second = lines.place(sys._getframe())
    assert first != second
    assert names.texts[second] == f"{HERE}/{line(-2)}"


def test_code_of_the_packages_that_post_for_others_is_passed_over() -> None:
    names = _Names()
    lines = SourceLines(names.add)
    program = compile("def call(function):\n    return function()\n", SingleCommunicator.__init__.__code__.co_filename, "exec")
    inside: dict[str, object] = {}
    exec(program, inside)
    call = inside["call"]
    assert callable(call)
    place, at = call(lambda: lines.place(sys._getframe(1))), line()
    assert (names.texts[place], lines.place(None)) == (f"{HERE}/{at}", 0)


def test_a_file_of_the_package_is_named_from_there() -> None:
    names = _Names()
    package = Path(source_lines.__file__).parents[1]
    namespace: dict[str, object] = {"lines": SourceLines(names.add), "sys": sys}
    exec(compile("\n\nplace = lines.place(sys._getframe())", str(package / "training" / "evaluation.py"), "exec"), namespace)
    assert names.texts[1] == "training/evaluation.py:3"


def test_code_that_is_made_without_end_fills_no_record() -> None:
    names = _Names()
    namespace: dict[str, object] = {"lines": SourceLines(names.add), "sys": sys}
    for number in range(source_lines._MOST_PLACES + 50):
        exec(compile("place = lines.place(sys._getframe())", f"made-{number}.py", "exec"), namespace)
    assert (len(names.texts), namespace["place"]) == (source_lines._MOST_PLACES + 1, 0)


_RANK_1 = Launcher("MPICH hydra mpiexec", expected_size=3, rank=1)


def test_a_start_that_fails_leaves_its_end(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    path = place_of_start(environ, _RANK_1)
    for error in (ImportError("no such module"), SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)), recorded(path, _RANK_1):
            raise error
        record = read(path)
        assert (record.rank, record.ranks, record.end) == (1, 3, End.FAILED)
        assert (str(error) or type(error).__name__) in record.sentence
        assert latest(environ) == path.parent
        path.unlink()


@pytest.mark.parametrize("code", [None, 0, 85])
def test_one_that_finishes_leaves_nothing(tmp_path: Path, code: int | None) -> None:
    """Exit code 85, with which a training ends after a request to stop, is not a failure."""
    path = place_of_start({"TMPDIR": str(tmp_path)}, _RANK_1)
    try:
        with recorded(path, _RANK_1):
            assert path.is_file()
            if code is not None:
                raise SystemExit(code)
    except SystemExit:
        pass
    assert not path.parent.exists()


def test_a_run_directory_takes_the_record_over(tmp_path: Path) -> None:
    path = place_of_start({RECORDS: str(tmp_path / "shared")}, _RANK_1)
    assert path == tmp_path / "shared" / file_name(1)
    with recorded(path, _RANK_1):
        recorder = taken()
        assert taken() is not recorder
        recorder.phase("data loading")
        assert start_records.hint() == [f"`hpctrain autopsy {path.parent}` shows the flight records of this start"]
        recorder.keep_in(tmp_path / "flight")
        assert not path.parent.exists()
        assert start_records.hint() == []
        recorder.phase("a training step")
        assert read(tmp_path / "flight" / file_name(1)).phase == "a training step"
        recorder.keep_nowhere()
        recorder.phase("elsewhere")
    assert read(tmp_path / "flight" / file_name(1)).phase == "a training step"


def test_ranks_that_have_met_and_one_that_has_not_are_of_one_start(tmp_path: Path) -> None:
    for rank in range(2):
        launcher = Launcher("x", expected_size=2, rank=rank)
        recorder = start_records.begin(tmp_path / "start" / file_name(rank), launcher)
        if rank:
            recorder.join(rank, 2, 77, 30.0)
    assert [record.rank for record in find_records(tmp_path / "start").records] == [0, 1]


def test_the_latest_starts_stay_and_those_that_live(tmp_path: Path) -> None:
    own = tmp_path / f"hpctrain-{os.getuid()}"
    status = start_records.status_of(os.getpid())
    alive = own / f"start-{os.getpid()}-{status.begun}"
    for directory in (alive, *(own / f"start-{2**22 + number}-1" for number in range(1, KEPT + 4))):
        start_records.begin(directory / file_name(0), Launcher("none"))
    left = set(own.iterdir())
    assert alive in left
    assert len(left) == KEPT + 1


def test_a_start_whose_launcher_is_alive_is_the_latest_only_if_it_is_wanted(tmp_path: Path) -> None:
    """Would find an autopsy of another job that still runs."""
    environ, own = {"TMPDIR": str(tmp_path)}, tmp_path / f"hpctrain-{os.getuid()}"
    ended, alive = own / f"start-{2**22 + 1}-1", own / f"start-{os.getpid()}-{start_records.status_of(os.getpid()).begun}"
    for directory in (ended, alive):
        start_records.begin(directory / file_name(0), Launcher("none"))
    os.utime(alive, (1e9, 1e9))  # its time of change becomes the newest
    assert latest(environ) == alive
    assert latest(environ, ended=True) == ended


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    """The record is kept in memory instead."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"hpctrain-{os.getuid()}").symlink_to(tmp_path / "theirs")
    environ = {"TMPDIR": str(tmp_path)}
    with recorded(place_of_start(environ, _RANK_1), _RANK_1):
        assert not list((tmp_path / "theirs").iterdir())
        assert latest(environ) is None
    with pytest.raises(DataError, match="There is no directory"):
        find_records(place_of_start(environ, _RANK_1).parent)


def _heartbeat(recorder: FlightRecorder, stream: object = None, **more: object) -> Heartbeat:
    def abort(code: int) -> None:
        raise InterruptedError(code)

    return Heartbeat(recorder, deadline_seconds=4.0, abort=abort, rank=3, stream=stream, **more)


def test_a_process_that_moves_lives(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    heartbeat = _heartbeat(recorder)
    for _ in range(100):
        recorder.beats += 1
        heartbeat.look()
        for _ in range(18):
            heartbeat.look()
    recorder.keep_in(tmp_path)
    found = read(tmp_path / file_name(0))
    assert found.seen_ns >= found.alive_ns > found.begun_ns
    assert found.end is End.RUNNING


def test_one_that_stands_still_is_ended_with_its_place(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    recorder.phase("data loading")
    recorder.keep_in(tmp_path)
    with open(tmp_path / "said", "w+") as stream:
        heartbeat = _heartbeat(recorder, stream)
        for _ in range(19):
            heartbeat.look()
        with pytest.raises(InterruptedError, match="124"):
            heartbeat.look()
        stream.seek(0)
        text = stream.read()
    assert text.startswith(f"{place(3)}no progress within the deadline of 4 s, in data loading; stacks of all threads:\n")
    assert "test_one_that_stands_still" in text
    assert f"{place(3)}autopsy: " in text.splitlines(keepends=True)[-1]
    found = read(tmp_path / file_name(0))
    assert (found.end, found.sentence) == (End.DEADLINE, "no progress within the deadline of 4 s, in data loading")


def test_what_others_need_to_know_is_written_at_half_the_deadline(tmp_path: Path) -> None:
    """On other nodes: of a process that stands still, and of one that waits, which moves."""
    flushed: list[int] = []

    class Counting(FlightRecorder):
        def flush(self) -> None:
            flushed.append(self.beats)

    recorder = Counting()
    heartbeat = _heartbeat(recorder)
    for wait in ("a.weight", "b.weight", "c.weight"):  # the first two are shorter
        with recorder.waiting(wait):
            for _ in range(9 if wait != "c.weight" else 15):
                recorder.beats += 1
                heartbeat.look()
        recorder.beats += 1
        heartbeat.look()
    assert len(flushed) == 1
    for _ in range(12):
        heartbeat.look()
    assert len(flushed) == 2


def test_a_keeper_that_stands_still_is_ended(tmp_path: Path) -> None:
    recorder, pulse, ended = FlightRecorder(), Pulse(), []
    pulse.keep()
    pulse.watch(4.0)
    path = recorder.keep_in(tmp_path)
    with open(tmp_path / "said", "w+") as stream:
        heartbeat = _heartbeat(recorder, stream, pulse=pulse, end_keeper=lambda: ended.append(True))
        for _ in range(21):
            assert not ended
            recorder.beats += 1
            heartbeat.look()
        stream.seek(0)
        assert stream.read().startswith(f"{place(3)}the parent process of this rank was stopped or hung")
    assert ended
    assert read(path).end is End.FAILED


# The second holds the interpreter lock without end: PyDLL does not let go of it during a call.
@pytest.mark.job
@pytest.mark.parametrize("hang", ["time.sleep(60)", "ctypes.PyDLL(None).sleep(60)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_process_that_hangs_is_ended(hang: str) -> None:
    program = f"""
    import ctypes, faulthandler, os, signal, time
    from hpctrain.flight import recorder
    from hpctrain.launch.keeper import keep
    from hpctrain.launch.signals import hold
    recorder._LATER_SECONDS = 1.0
    keeper = keep(2, hold())  # as a run does
    faulthandler.enable()

    def the_culprit():
        {hang}

    flight = recorder.FlightRecorder()
    recorder.Heartbeat(flight, deadline_seconds=1.0, abort=os._exit, rank=2, pulse=keeper.pulse).start()
    time.sleep(0.3)
    the_culprit()
    time.sleep(60)
    """
    outcome = run_job(0, ["-c", textwrap.dedent(program)])
    assert outcome.code == 124, outcome.output
    assert outcome.seconds < 30
    if "SIGSTOP" not in hang:
        assert "in the_culprit" in outcome.stderr
    if "time.sleep" not in hang:
        assert f"hpctrain: {place(2)}the process is stopped, or hangs without releasing Python's lock" in outcome.stderr


@pytest.mark.job
def test_a_closed_one_ends_no_process() -> None:
    program = """
    import os, time
    from hpctrain.flight.recorder import Heartbeat
    from hpctrain.flight.recorder import FlightRecorder
    heartbeat = Heartbeat(FlightRecorder(), deadline_seconds=0.3, abort=os._exit, rank=0).start()
    time.sleep(0.1)
    heartbeat.close()
    time.sleep(6)
    print("alive")
    """
    outcome = run_job(0, ["-c", textwrap.dedent(program)])
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "alive\n", "")
