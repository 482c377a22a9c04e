"""The parts of a report, and how much they weigh."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra export)")

from hpctrain.report.contents import report_page
from hpctrain.report.page import html
from hpctrain.report.record import read_runs
from tests.support.written_runs import write_checkpoint, write_run, write_trace

MEGABYTES = 2.0


@pytest.mark.slow
def test_a_long_traced_run_of_eight_ranks_weighs_less_than_two_megabytes(tmp_path: Path) -> None:
    run = write_run(tmp_path, epochs=100, intervals=50)
    write_trace(run, ranks=8, operators=600)
    write_checkpoint(run, 1000, w=[1.0])
    page = report_page(read_runs([run.path]))
    assert [part.key for part in page.parts] == ["summary", "curves", "time", "events", "checkpoints", "settings"]
    assert len(page.drawings) == 7
    assert len(html(page).encode()) < MEGABYTES * 1e6


def test_several_runs_are_beside_each_other(tmp_path: Path) -> None:
    skip = {"kind": "skip", "time": 5.0, "step": 7, "layer": "conv1", "held": "gradient"}
    runs = [
        write_run(tmp_path, config="batch: 8\nname: a\n", events=[skip]),
        write_run(tmp_path, config="batch: 16\nname: a\n", epochs=1),
    ]
    page = report_page(read_runs([run.path for run in runs]))
    parts = {part.key: part for part in page.parts}
    assert page.names == tuple(run.path.name for run in runs)
    (summary,) = parts["summary"].tables
    assert summary.headings[1:] == page.names
    (events,) = parts["events"].tables
    assert [line.cells[1:] for line in events.lines if "skipped" in line.cells[2]] == [
        (page.names[0], "step 7 skipped: gradient of conv1 not finite")
    ]
    titles = [table.title for table in parts["settings"].tables]
    assert titles == ["Differences of configuration", "All of configuration", "All of versions"]
    assert [line.cells for line in parts["settings"].tables[0].lines] == [("batch", "8", "16")]
    assert [line.differs for line in parts["settings"].tables[1].lines] == [True, False]


def test_what_is_lacking_is_said(tmp_path: Path) -> None:
    first, second = write_run(tmp_path), write_run(tmp_path)
    first.metrics_path.write_text("")
    parts = {part.key: part for part in report_page(read_runs([first.path, second.path])).parts}
    assert "trace=true" in parts["time"].sentences[0]
    assert parts["settings"].sentences == ("All runs have the same.",)
    assert "checkpoints" not in parts
    alone = {part.key: part for part in report_page(read_runs([first.path])).parts}
    assert "curves" not in alone
    assert alone["events"].sentences


def test_a_trace_that_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    write_trace(run)
    (run.path / "trace.json").write_text("{")
    (time,) = (part for part in report_page(read_runs([run.path])).parts if part.key == "time")
    assert len(time.drawings) == 1
    assert "no trace that can be read" in time.sentences[0]
