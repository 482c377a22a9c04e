"""Figures of traced runs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra export)")

from hpctrain.errors import DataError
from hpctrain.report import trace_figures
from hpctrain.report.figures import for_page
from hpctrain.report.record import read_runs
from hpctrain.report.trace_figures import layer_drawing, read_steps, timeline_drawing
from tests.support.written_runs import write_run, write_trace


def test_layers_that_took_most_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    write_trace(run, operators=23)
    drawing = layer_drawing(read_runs([run.path])[0].tables[0], "0", "quick")
    assert "and 3 more that are not shown. Waits for messages are 10.0% of a step." in drawing.words
    assert for_page(drawing).svg.count("conv<") == 20


def test_the_last_step_has_two_lanes_for_each_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    write_trace(run, ranks=18)
    drawing = timeline_drawing(read_steps(run.path / "trace.json"), "0", "quick")
    assert drawing.words.endswith("waits for messages between 1 and 1 ms. The first 16 of 18 ranks.")
    svg = for_page(drawing).svg
    assert (svg.count(">rank 15<"), svg.count(">rank 16<")) == (1, 0)
    for kind in ("forward", "backward", "waiting", "messages"):
        assert f"var(--{kind})" in svg


def test_pieces_that_nobody_sees_are_joined() -> None:
    many = [(k * 1e-6, (k + 0.5) * 1e-6) for k in range(1000)]
    assert trace_figures._coarse(many, 1e-4) == [(0.0, pytest.approx(999.5e-6))]
    assert trace_figures._coarse([(0.0, 1e-6), (0.5, 0.6)], 1e-2) == [(0.5, 0.6)]


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    for text in ("{", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": [3]}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"trace\.json is no trace that can be read"):
            read_steps(path)
    monkeypatch.setattr(trace_figures, "LARGEST_TRACE_BYTES", 3)
    with pytest.raises(DataError, match="trace fewer steps"):
        read_steps(path)
