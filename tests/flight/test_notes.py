"""Notes reach a recorder, and nobody where there is none."""

from __future__ import annotations

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


def test_without_a_recorder_nothing_happens() -> None:
    notes = FlightNotes(None)
    notes.alive()
    notes.step(1, 1)
    notes.phase("evaluation")
    with notes.waiting("a.weight", 3):
        pass
