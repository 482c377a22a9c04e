"""The heartbeat: what moves is left alone, what does not is ended, with a place and all stacks."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from hpctrain.flight.heartbeat import Heartbeat
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import End, file_name, read
from hpctrain.launch.pulse import Pulse
from hpctrain.speaker import place
from tests.support.jobs import run_job


class _Ended(Exception):
    pass


def _heartbeat(recorder: FlightRecorder, stream: object = None, **more: object) -> Heartbeat:
    def abort(code: int) -> None:
        raise _Ended(code)

    return Heartbeat(recorder, deadline_seconds=4.0, abort=abort, rank=3, stream=stream, **more)  # type: ignore[arg-type]


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
        heartbeat = _heartbeat(recorder, stream, explain=lambda: ["autopsy: rank 1 held all up"])
        for _ in range(19):
            heartbeat.look()
        with pytest.raises(_Ended, match="124"):
            heartbeat.look()
        stream.seek(0)
        text = stream.read()
    assert text.startswith(f"{place(3)}nothing has moved for the deadline of 4 s, in data loading; stacks of all threads:\n")
    assert "test_one_that_stands_still" in text
    assert text.endswith(f"{place(3)}autopsy: rank 1 held all up\n")
    found = read(tmp_path / file_name(0))
    assert (found.end, found.sentence) == (End.DEADLINE, "nothing has moved for the deadline of 4 s, in data loading")


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


# The second holds the interpreter lock without end: PyDLL does not let go of it during a call.
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
        assert stream.read().startswith(f"{place(3)}the parent process of this rank was stopped, or hung")
    assert ended
    assert read(path).end is End.FAILED


@pytest.mark.job
@pytest.mark.parametrize("hang", ["time.sleep(60)", "ctypes.PyDLL(None).sleep(60)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_process_that_hangs_is_ended(hang: str) -> None:
    program = f"""
    import ctypes, faulthandler, os, signal, time
    from hpctrain.flight import heartbeat
    from hpctrain.flight.recorder import FlightRecorder
    from hpctrain.launch.keeper import keep
    from hpctrain.launch.signals import hold
    heartbeat._LATER_SECONDS = 1.0
    keeper = keep(2, hold())  # as a run does
    faulthandler.enable()

    def the_culprit():
        {hang}

    heartbeat.Heartbeat(FlightRecorder(), deadline_seconds=1.0, abort=os._exit, rank=2, pulse=keeper.pulse).start()
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
        assert f"hpctrain: {place(2)}the process is stopped, or hangs without letting go of Python's lock" in outcome.stderr


@pytest.mark.job
def test_a_closed_one_ends_nobody() -> None:
    program = """
    import os, time
    from hpctrain.flight.heartbeat import Heartbeat
    from hpctrain.flight.recorder import FlightRecorder
    heartbeat = Heartbeat(FlightRecorder(), deadline_seconds=0.3, abort=os._exit, rank=0).start()
    time.sleep(0.1)
    heartbeat.close()
    time.sleep(6)
    print("alive")
    """
    outcome = run_job(0, ["-c", textwrap.dedent(program)])
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "alive\n", "")
