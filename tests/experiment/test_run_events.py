"""Events of a run in words, from whole records and from those that lack something."""

from __future__ import annotations

import pytest

from hpctrain.experiment.run_events import _WORDS, events_of


def test_events_are_told_in_their_order_and_numbers_of_steps_are_none() -> None:
    records = [
        {"kind": "start", "time": 1.0, "done_samples": 0},
        {"kind": "interval", "time": 2.0, "step": 1},
        {"kind": "skip", "time": 3.0, "step": 7, "layer": "fc", "held": "a gradient"},
        {"kind": "rollback", "time": 4.0, "from_step": 9, "step": 5, "error": "inf"},
        {"kind": "shrink", "time": 5.0, "step": 5, "lost": [1, 2], "ranks": 6},
        {"kind": "checkpoint", "time": 6.0, "step": 6, "warning": "no room"},
        {"kind": "image_size", "time": 6.5, "step": 6, "epoch": 3, "size": 32},
        {"kind": "resume", "time": 7.0, "step": 6, "changes": {"optimizer.lr": [1, 2]}},
        {"kind": "stop", "time": 8.0, "step": 8, "by": "SIGTERM"},
    ]
    events = events_of(records)
    assert [event.time for event in events] == [1.0, 3.0, 4.0, 5.0, 6.0, 6.5, 7.0, 8.0]
    assert [event.text for event in events] == [
        "training begins",
        "step 7 skipped: a gradient of fc not finite",
        "went back from step 9 to step 5: inf",
        "lost rank 1-2; went on with 6 from step 5",
        "no room",
        "images of 32 px from epoch 3",
        "resumed at step 6 with other optimizer.lr",
        "stopped by SIGTERM after step 8",
    ]


@pytest.mark.parametrize("kind", sorted(_WORDS))
def test_a_record_without_its_facts_is_told_as_far_as_it_goes(kind: str) -> None:
    (event,) = events_of([{"kind": kind}])
    assert event.text
