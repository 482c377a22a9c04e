"""Panels become an image; what goes wrong while they are drawn leaves none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import plots


def test_panels_are_one_image_in_a_directory_of_its_own(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    with plots.panels(tmp_path / "new" / "two.png", 2, 3, 2) as (left, right):
        left.plot([1, 2])
        right.plot([2, 1])
    image = (tmp_path / "new" / "two.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert int.from_bytes(image[16:20], "big") > 2 * int.from_bytes(image[20:24], "big")  # width and height
    assert not pyplot.get_fignums()


def test_an_error_leaves_no_image_and_no_figure(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    with pytest.raises(ZeroDivisionError), plots.panels(tmp_path / "one.png", 1, 3, 2):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    assert not pyplot.get_fignums()


def test_without_matplotlib_the_sentence_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"), plots.panels(tmp_path / "one.png", 1, 3, 2):
        pass
