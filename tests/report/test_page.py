"""Reports as pages: their parts and figures, well-formed and whole without anything else."""

from __future__ import annotations

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra export)")

from matplotlib.figure import Figure

from hpctrain.core.errors import ConfigError, DataError
from hpctrain.optim.schedules import Cosine
from hpctrain.report import figures
from hpctrain.report.figures import Drawing, layer_drawing, panel_drawing, read_steps, svg, timeline_drawing
from hpctrain.report.page import html, report_page, result_of
from hpctrain.run.evaluation import JudgedImage, Judgement
from hpctrain.runs.results import AVERAGED, MOST_POINTS, TEST, TRAINING, Curve, Panel, read_runs
from tests.support.runs import confusion_of, write_checkpoint, write_run, write_trace

MEGABYTES = 2.0


@pytest.mark.slow
def test_a_long_traced_run_of_eight_ranks_weighs_less_than_two_megabytes(tmp_path: Path) -> None:
    run = write_run(tmp_path, epochs=100, intervals=50)
    write_trace(run, ranks=8, operators=600)
    write_checkpoint(run, 1000, w=[1.0])
    page = report_page(read_runs([run.path]))
    assert [part.key for part in page.parts] == ["summary", "curves", "time", "events", "checkpoints", "settings"]
    assert sum(len(part.drawings) for part in page.parts) == 7
    assert len(html(page).encode()) < MEGABYTES * 1e6


def test_several_runs_are_next_to_each_other(tmp_path: Path) -> None:
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
    assert titles == ["Differences in configuration", "All values: configuration", "All values: versions"]
    assert [line.cells for line in parts["settings"].tables[0].lines] == [("batch", "8", "16")]
    assert [line.differs for line in parts["settings"].tables[1].lines] == [True, False]


def test_a_page_begins_with_the_best_accuracy_and_its_run(tmp_path: Path) -> None:
    """Several runs have their configured names, because names of directories are too wide for columns."""
    config = "name: {}\nmodel: {{name: small}}\nbatch: 100\noptimizer: {{name: sgd, lr: 0.1}}\n"
    first, second = (
        write_run(tmp_path, config=config.format("first"), epochs=1),
        write_run(tmp_path, config=config.format("second")),
    )
    page = report_page(read_runs([first.path, second.path]))
    assert page.headline.startswith("Best test accuracy 66.67% (second, epoch 2): small, batch 100, sgd, lr 0.1, ")
    assert page.names == ("first", "second")
    assert "Best test accuracy 66.67%" in html(page)
    alone = report_page(read_runs([second.path]))
    assert (alone.names, alone.headline[:36]) == ((second.path.name,), "Best test accuracy 66.67% (epoch 2):")
    second.metrics_path.write_text("")
    assert report_page(read_runs([second.path])).headline == ""


def test_a_part_without_content_is_left_out(tmp_path: Path) -> None:
    """Runs without traces and events have no parts on them."""
    first, second = write_run(tmp_path), write_run(tmp_path)
    first.metrics_path.write_text("")
    parts = {part.key: part for part in report_page(read_runs([first.path, second.path])).parts}
    assert "time" not in parts
    assert parts["settings"].sentences == ("All runs have the same configuration and versions.",)
    assert "checkpoints" not in parts
    alone = {part.key: part for part in report_page(read_runs([first.path])).parts}
    assert "curves" not in alone
    assert list(alone) == ["summary", "settings"]


def test_a_trace_that_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    write_trace(run)
    (run.path / "trace.json").write_text("{")
    (time,) = (part for part in report_page(read_runs([run.path])).parts if part.key == "time")
    assert len(time.drawings) == 1
    assert "Cannot read the trace" in time.sentences[0]


VOID = {"meta", "link", "img", "br", "input"}
EVIL = '</script><script>alert("x")</script>'


class Checker(HTMLParser):
    """Collects elements that are not closed in order, and all names and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder, config=f"name: '{EVIL}'\nbatch: {batch}\n") for batch in (8, 16)]
    write_trace(runs[0])
    confusion = confusion_of([[5, 1], [0, 4]])
    image = JudgedImage(3, np.zeros((4, 5, 1), np.uint8), 0, 1, 0.75)
    judgement = Judgement(Path("checkpoint-00000001.h5"), "test", (EVIL, "dog & cat"), confusion, (), (image,))
    return html(report_page(read_runs([run.path for run in runs]), [result_of("quick", judgement)]))


@pytest.mark.slow
def test_elements_are_closed_and_names_are_there_once(text: str) -> None:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert (checker.faults, checker.open) == ([], [])
    assert len(checker.ids) == len(set(checker.ids))
    inside = {address[1:] for address in checker.addresses if address.startswith("#")}
    assert inside <= set(checker.ids)
    assert checker.tags.count("h1") == 1


def test_nothing_is_loaded_from_elsewhere(text: str) -> None:
    checker = Checker()
    checker.feed(text)
    assert all(address.startswith(("#", "data:")) for address in checker.addresses)
    assert not re.findall(r"https?://[^\s\"'<)]+", text)
    assert "@import" not in text
    assert "url(http" not in text


def test_texts_of_users_are_no_elements(text: str) -> None:
    assert EVIL not in text
    assert "alert(" in text
    assert "dog &amp; cat" in text


def _draw(figure: Any) -> None:
    axes = figure.add_subplot()
    axes.plot([0, 10], [5, 7])
    axes.set_xlabel("<epoch> & more")


DRAWING = Drawing("loss", "Loss", 'Of "a" & b < c', _draw)


def test_a_figure_is_the_same_svg_each_time() -> None:
    assert ElementTree.fromstring(svg(DRAWING)).get("viewBox")
    assert b"&lt;epoch&gt; &amp; more" in svg(DRAWING)
    assert svg(DRAWING) == svg(DRAWING)


def test_without_matplotlib_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "hpctrain\[export\]"'):
        figures.check_matplotlib()


CURVES = (
    Curve(0, TRAINING, (0.5, 1.0), (0.25, 0.5)),
    Curve(1, TEST, (1.0,), (0.75,)),
    Curve(1, TEST + AVERAGED, tuple(float(x) for x in range(60)), (0.5,) * 60),
)


@pytest.mark.parametrize("follows", [True, False])
def test_the_learning_rate_is_drawn_from_the_schedule_that_the_run_followed(tmp_path: Path, *, follows: bool) -> None:
    """Would find a curve with a single point per epoch, and the curve of a schedule that the run did not follow."""
    config = "model: {name: small}\ndata: {train: a.h5, test: b.h5}\nbatch: 10\nepochs: 4\n"
    config += "optimizer: {name: sgd, lr: 0.1}\nschedule: {name: cosine, warmup_epochs: 1}\n"
    run = write_run(tmp_path, epochs=0, config=config)
    schedule = Cosine(base_lr=0.1, epochs=4, steps_per_epoch=10, warmup_epochs=1)
    rates = [schedule.lr(10 * epoch - 1) for epoch in (1, 2, 3)]
    lines = [{"kind": "start", "time": 0.0, "epochs": 4, "samples": 95, "done_samples": 0}]
    lines += [
        {"kind": "epoch", "time": 1.0, "epoch": epoch, "step": 10 * epoch, "images": 95, "lr": rate if follows else 0.07}
        for epoch, rate in enumerate(rates, 1)
    ]
    run.metrics_path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    parts = report_page(read_runs([run.path])).parts
    (drawing,) = [drawing for part in parts for drawing in part.drawings if drawing.key == "lr"]
    figure = Figure()
    drawing.draw(figure)
    xs, ys = figure.axes[0].lines[0].get_data()
    if follows:
        assert (len(xs), ys[0], ys[-1]) == (MOST_POINTS, pytest.approx(0.01), pytest.approx(schedule.lr(30)))
        assert max(ys) == pytest.approx(0.1, rel=1e-3)
    else:
        assert list(ys) == [0.07] * 3


def test_words_tell_the_ends_of_all_curves() -> None:
    words = panel_drawing(Panel("top1", "Top-1 accuracy", CURVES, percent=True), ("a", "b")).words
    assert "a, training: 50.00% at epoch 1;" in words
    assert "b, test: 75.00% at epoch 1;" in words


def test_validation_and_test_are_drawn_in_different_ways() -> None:
    """Each set has its own marker and kind of line, so that a legend can tell the sets apart."""
    marks = [(style.get("marker"), style.get("linestyle")) for part, style in figures._STYLES.items() if part != TRAINING]
    assert len(set(marks)) == len({mark for mark, _ in marks}) == 4


def test_several_runs_and_kinds_of_lines_have_legends() -> None:
    several = svg(panel_drawing(Panel("loss", "Loss", CURVES), ("first run", "second run")))
    for words in (b">first run<", b">second run<", b">training<", b">test, averaged weights<"):
        assert words in several
    one = svg(panel_drawing(Panel("lr", "Learning rate", CURVES[:1]), ("a",)))
    assert b">training<" not in one
    assert b">a<" not in one


def test_layers_that_took_most_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    write_trace(run, operators=23)
    drawing = layer_drawing(read_runs([run.path])[0].tables[0], "0", "quick")
    assert "and 3 more that are not shown. Waits for messages are 10.0% of a step." in drawing.words
    assert svg(drawing).count(b"conv<") == 20


@pytest.mark.slow
def test_the_last_step_has_two_lanes_for_each_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    write_trace(run, ranks=18)
    drawing = timeline_drawing(read_steps(run.path / "trace.json"), "0", "quick")
    assert drawing.words.endswith("waits for messages between 1 and 1 ms. The first 16 of 18 ranks.")
    drawn = svg(drawing)
    assert (drawn.count(b">rank 15<"), drawn.count(b">rank 16<")) == (1, 0)
    for kind in ("forward", "backward", "waiting", "messages"):
        assert figures.COLOURS[kind].encode() in drawn


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    for text in ("{", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": [3]}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"Cannot read the trace .*trace\.json"):
            read_steps(path)
    monkeypatch.setattr(figures, "LARGEST_TRACE_BYTES", 3)
    with pytest.raises(DataError, match="trace fewer steps"):
        read_steps(path)
