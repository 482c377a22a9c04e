"""The picture of a step: its lengths are those of the trace, and it is a picture that pages can show."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.step_picture import StepPicture, picture, step_picture_lanes

SHOWN = Path(__file__).parents[2] / "docs" / "images" / "step.svg"


def _work(category: str, begin: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "pid": 0, "tid": 0, "name": category, "cat": category, "ts": begin * 1e6, "dur": length * 1e6}


def _operation(track: int, name: str, begin: float, end: float) -> list[dict[str, Any]]:
    shared = {"pid": 0, "tid": track, "name": name, "cat": "communication", "id": f"{track}.{name}"}
    return [{**shared, "ph": "b", "ts": begin * 1e6}, {**shared, "ph": "e", "ts": end * 1e6}]


def _trace() -> dict[str, Any]:
    """A step from 10 s to 20 s: 3 s forward, 4 s backward, 2 s waiting, 1 s update; a gather that began in the step before."""
    names = {0: "program", 1: "all gradients", 2: "all parameters", 3: "step message"}
    tracks = [{"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}} for tid, name in names.items()]
    work = [_work("step", 10, 10), _work("forward", 9, 4), _work("input", 13, 3), _work("parameters", 16, 1)]
    work += [_work("wait", 17, 2), _work("update", 19, 1), {**_work("wait", 12, 5), "pid": 1}]
    messages = [*_operation(1, "first", 14, 18), *_operation(1, "second", 17, 19), *_operation(2, "gather", 5, 11)]
    return {"traceEvents": [*tracks, *work, *messages, *_operation(3, "flags", 10, 20)]}


def test_lanes_are_what_the_first_process_did_in_its_step() -> None:
    step = step_picture_lanes(_trace())
    assert step.seconds == pytest.approx(10)
    assert step.waiting_seconds == pytest.approx(2)
    lengths = {kind: sum(end - begin for begin, end in spans) for kind, spans in step.lanes.items()}
    assert lengths == pytest.approx({"forward": 3, "backward": 4, "update": 1, "waiting": 2, "gradients": 5, "parameters": 1})
    assert len(step.lanes["gradients"]) == 1, "operations that overlap are one bar"


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no step"):
        step_picture_lanes({"traceEvents": [_work("forward", 0, 1)]})


def test_bars_have_one_scale() -> None:
    lanes = dict.fromkeys(("backward", "update", "waiting", "gradients", "parameters"), ())
    steps = {f"a<{seconds:g}": StepPicture(seconds, {**lanes, "forward": ((0.0, seconds),)}) for seconds in (1.0, 4.0)}
    root = ElementTree.fromstring(picture("one & two", steps))
    bars = [float(bar.get("width", 0)) for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("fill") == "#3f7fbf"]
    assert bars[1] == pytest.approx(4 * bars[0], rel=1e-3)
    assert bars[2] == 14, "the legend"


def test_the_picture_of_the_pages_is_small_and_has_its_own_ground() -> None:
    assert SHOWN.stat().st_size < 150_000
    root = ElementTree.fromstring(SHOWN.read_text(encoding="utf-8"))
    view = [float(number) for number in root.get("viewBox", "").split()]
    ground = next(iter(root.iter("{http://www.w3.org/2000/svg}rect")))
    assert [float(ground.get(side, 0)) for side in ("width", "height")] == view[2:]
