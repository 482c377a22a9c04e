"""Notes reach a recorder, and nobody where there is none."""

from __future__ import annotations

import contextlib

from hpctrain.flight.notes import FlightNotes
from hpctrain.flight.recorder import FlightRecorder


def test_notes_reach_the_recorder() -> None:
    recorder = FlightRecorder()
    notes = FlightNotes(recorder)
    notes.alive()
    assert recorder.beats == 1
    notes.step(1, 4)
    assert recorder.doing == "a training step, step 4"
    notes.phase("evaluation")
    assert recorder.doing == "evaluation, step 4"
    assert recorder.beats == 3


def test_what_is_done_meanwhile_gives_way_to_what_was_done_before() -> None:
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
