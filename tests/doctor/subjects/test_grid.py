"""Grids on numbers of ranks, by the rules of a training."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.load import parse
from hpctrain.doctor.check import OwnPlace
from hpctrain.doctor.subjects import grid
from hpctrain.launch.launcher import Launcher
from tests.experiment.test_planned_shapes import SINGLE_VALUES_CONFIG as CONFIG
from tests.support.doctored import configuration, keys, view


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6))
def test_a_grid_fits_where_it_multiplies_to_the_ranks(ranks: int, rows: int, cols: int) -> None:
    config = configuration(f"grid.rows={rows}", f"grid.cols={cols}")
    [found] = grid.judge(view(ranks, config=config), [None] * ranks)
    assert found.key == ("" if rows * cols == ranks else "wrong-grid")
    if found.key:
        assert f"must be {ranks}, the nearest legal grid is" in found.mend


def test_a_batch_that_is_smaller_than_the_ranks_is_named() -> None:
    config = configuration("batch=2", "micro_batches=1")
    [found] = grid.judge(view(3, config=config), [None] * 3)
    assert found.key == "wrong-grid"
    assert "smallest batch is 3" in found.mend


@pytest.mark.parametrize("overrides", [["grid=auto"], ["plan=auto"]])
def test_what_is_chosen_at_the_start_is_no_fault(overrides: list[str]) -> None:
    assert keys(grid.judge(view(5, config=configuration(*overrides)), [None] * 5)) == [""]
    assert keys(grid.judge(view(5), [None] * 5)) == [""]


def test_where_each_rank_is_alone_the_grid_is_judged_by_what_was_asked_for() -> None:
    config = configuration("grid.rows=2", "grid.cols=2")
    alone = Launcher("Open MPI mpiexec", 4, 0)
    assert keys(grid.judge(view(1, launcher=alone, config=config), [None])) == [""]


@pytest.mark.parametrize(("batch", "key"), [(1, "single-value"), (39, "short-batch"), (4, "")])
def test_batch_norms_of_a_single_value_are_told(batch: int, key: str) -> None:
    config = parse(CONFIG, overrides=[f"batch={batch}"])[0]
    facts = grid.gather(OwnPlace(Launcher("none"), config, Path()))
    [found] = grid.judge(view(1, config=config), [facts])
    assert found.key == key
    assert ("layer4.0.bn1" in found.sentence) is bool(key)
