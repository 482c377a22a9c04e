"""Tables of the engine's bench."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hpctrain.bench.engine import Measurement, layer_table, measure
from hpctrain.bench.engine_step import workload


@pytest.fixture(scope="module")
def measured_engine() -> Measurement:
    return measure(workload("resnet20", 1, 8, {"width": 0.125}), "numpy", 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 130])
@pytest.mark.parametrize("slower", [1.0, 60.0, 4e3, 1e5])
def test_names_and_figures_of_operators_are_whole_in_a_narrow_terminal(
    measured_engine: Measurement, columns: int, slower: float
) -> None:
    measured = measured_engine
    names = ("forward_seconds", "parameters_seconds", "input_seconds")
    layers = [replace(layer, **{name: slower * getattr(layer, name) for name in names}) for layer in measured.layers]
    measured = replace(measured, layers=layers)
    text = io.StringIO()
    Console(file=text, width=columns).print(layer_table(measured))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert "\N{HORIZONTAL ELLIPSIS}" not in text.getvalue()
    shares = [line.split()[-1] for line in lines if line.rstrip().endswith("%")]
    assert len(shares) == len(measured.layers)
    if columns == 130:
        assert all(layer.name in text.getvalue() for layer in measured.layers)
    else:
        assert all(layer.name[:20] in text.getvalue() for layer in measured.layers)
