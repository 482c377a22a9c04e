"""Plots of benchmarks: a figure of some panels, written as an image where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def panels(path: Path, count: int, width: float, height: float) -> Iterator[list[Any]]:
    """The axes of `count` panels side by side, to be drawn on; after the block the image is at `path`.

    Args:
        width, height: of a panel, in inches.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("The plot needs matplotlib: pip install matplotlib.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, count, figsize=(count * width, height), squeeze=False)
    try:
        yield list(grid[0])
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
