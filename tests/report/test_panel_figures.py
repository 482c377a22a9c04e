"""Figures of curves."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra export)")

from hpctrain.report.curves import AVERAGED, TEST, TRAINING, Curve, Panel
from hpctrain.report.figures import for_page
from hpctrain.report.panel_figures import panel_drawing

CURVES = (
    Curve(0, TRAINING, (0.5, 1.0), (0.25, 0.5)),
    Curve(1, TEST, (1.0,), (0.75,)),
    Curve(1, AVERAGED, tuple(float(x) for x in range(60)), (0.5,) * 60),
)


def test_words_tell_the_ends_of_all_curves() -> None:
    words = panel_drawing(Panel("top1", "Top-1 accuracy", CURVES, percent=True), ("a", "b")).words
    assert "a, training: 50.00% at epoch 1;" in words
    assert "b, test: 75.00% at epoch 1;" in words


def test_each_curve_is_a_part_of_its_run_and_of_the_values() -> None:
    page = for_page(panel_drawing(Panel("loss", "Loss", CURVES), ("a", "b")))
    for name in ("run0-training", "run1-test", "run1-test-averaged-weights"):
        assert f'id="loss-{name}"' in page.svg
    assert page.values is not None
    assert [(curve["run"], curve["part"], len(curve["xs"])) for curve in page.values["curves"]] == [
        (0, TRAINING, 2),
        (1, TEST, 1),
        (1, AVERAGED, 60),
    ]
    assert not page.values["percent"]
    assert ">test, averaged weights<" in page.svg


def test_runs_are_named_where_no_buttons_are(tmp_path: Path) -> None:
    """Pictures have a legend below the axes, which pages do not need."""
    from hpctrain.report import figures

    drawing = panel_drawing(Panel("loss", "Loss", CURVES), ("first run", "second run"))
    assert "first run<" not in for_page(drawing).svg
    with figures._drawn(drawing, figures.Style(lambda name: "#000000", alone=True)) as (figure, _):
        named = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert named[-2:] == ["first run", "second run"]


def test_one_kind_of_lines_needs_no_legend() -> None:
    assert ">training<" not in for_page(panel_drawing(Panel("lr", "Learning rate", CURVES[:1]), ("a",))).svg
