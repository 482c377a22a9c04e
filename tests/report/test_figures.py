"""Figures as SVG for a page and as pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra export)")

from hpctrain.errors import ConfigError
from hpctrain.report import figures
from hpctrain.report.figures import Drawing, Style


def _draw(figure: Any, style: Style) -> dict[str, Any]:
    axes = figure.add_subplot()
    (line,) = axes.plot([0, 10], [5, 7], color=style.colour("run1"))
    line.set_gid("run1-test")
    axes.set_xlabel("<epoch> & more")
    return {"curves": []}


DRAWING = Drawing("loss", "Loss", 'Of "a" & b < c', _draw)


def test_a_page_gets_an_svg_whose_names_are_its_own() -> None:
    page = figures.for_page(DRAWING)
    root = ElementTree.fromstring(page.svg)
    names = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(names) == len(set(names))
    assert all(name.startswith("loss-") for name in names if name)
    references = {element.get("clip-path") for element in root.iter()} - {None}
    assert all(reference is not None and reference.removeprefix("url(#").rstrip(")") in names for reference in references)
    assert [element.get("class") for element in root.iter() if element.get("id") == "loss-run1-test"] == ["run1"]
    assert root.get("aria-label") == DRAWING.words
    assert (root.get("width"), root.get("height")) == (None, None)
    assert root.get("viewBox")
    assert "var(--run1)" in page.svg
    assert "#0f" not in page.svg
    assert "&lt;epoch&gt; &amp; more" in page.svg


def test_the_place_of_the_axes_is_told_in_units_of_the_svg() -> None:
    """The line's ends, where its path has them."""
    page = figures.for_page(DRAWING)
    assert page.values is not None
    left, top, right, bottom = page.values["box"]
    (low, high), (least, most) = page.values["xlim"], page.values["ylim"]
    root = ElementTree.fromstring(page.svg)
    group = next(element for element in root.iter() if element.get("id") == "loss-run1-test")
    path = next(element for element in group.iter() if element.tag.endswith("path")).get("d", "").split()
    for k, (x, y) in enumerate(((0, 5), (10, 7))):
        assert float(path[3 * k + 1]) == pytest.approx(left + (x - low) / (high - low) * (right - left), abs=0.05)
        assert float(path[3 * k + 2]) == pytest.approx(bottom - (y - least) / (most - least) * (bottom - top), abs=0.05)


def test_a_figure_is_the_same_each_time() -> None:
    assert figures.for_page(DRAWING) == figures.for_page(DRAWING)


def test_a_picture_is_on_white(tmp_path: Path) -> None:
    from PIL import Image

    figures.write_png(DRAWING, tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size == (960, 500)
        assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_without_matplotlib_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "hpctrain\[export\]"'):
        figures.check_matplotlib()
