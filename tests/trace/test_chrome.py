"""The file is JSON that a viewer understands: processes, nested events, asynchronous pairs."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.trace.chrome import ChromeTrace
from hpctrain.trace.tracer import Category, Tracer


def _events(shift: int) -> Tracer:
    tracer = Tracer(9)
    tracer.add(Category.FORWARD, 'a "quoted" layer', 1000 + shift, 3500 + shift)
    tracer.add(Category.COMMUNICATION, "fc.weight", 2000 + shift, 9000 + shift, "column", 4)
    tracer.add(Category.COMMUNICATION, "fc.bias", 2500 + shift, 8000 + shift, "column", 5)
    tracer.add(Category.WAIT, "fc.weight", 4000 + shift, 9000 + shift, "column", 4)
    tracer.add(Category.STEP, "step", 0 + shift, 10000 + shift, "", 3)
    return tracer


def test_all_ranks_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTrace(path, base_ns=1000) as file:
        for rank in range(3):
            file.add_rank(rank, _events(rank * 100).events())
        file.describe({"clock_error_seconds": 1e-6, "ranks": 3})
    content = json.loads(path.read_text())
    assert content["otherData"] == {"clock_error_seconds": 1e-6, "ranks": 3}
    events = content["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1", "rank 2"}
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 1}
    assert tracks == {0: "program", 1: "column"}
    whole = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert {(event["name"], event["cat"], event["ts"], event["dur"]) for event in whole} == {
        ('a "quoted" layer', "forward", 0.1, 2.5),
        ("fc.weight", "wait", 3.1, 5.0),
        ("step", "step", -0.9, 10.0),
    }
    begins = {event["id"]: event for event in events if event["ph"] == "b"}
    ends = {event["id"]: event for event in events if event["ph"] == "e"}
    assert len(begins) == len(ends) == 6  # each operation of each rank has an id of its own
    for key, begin in begins.items():
        assert ends[key]["ts"] > begin["ts"]
        assert (ends[key]["name"], ends[key]["pid"], ends[key]["tid"]) == (begin["name"], begin["pid"], 1)


def test_a_rank_without_events_is_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTrace(path, base_ns=0) as file:
        file.add_rank(0, Tracer(1).events())
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["rank 0"]


def test_a_rank_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTrace(path, base_ns=0) as file:
        file.add_rank(0, _events(0).events(), name="ranks 0 to 7")
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["ranks 0 to 7"]
    assert 'a "quoted" layer' in {event["name"] for event in events}
