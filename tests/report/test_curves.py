"""Curves from the metrics of runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.report.curves import MOST_POINTS, TEST, TRAINING, panels, thinned
from hpctrain.report.record import read_runs
from tests.support.written_runs import write_run


def test_training_is_the_mean_of_each_stretch_alone(tmp_path: Path) -> None:
    """Records have the mean over the epoch so far; here that of each stretch is 2 / its end."""
    loss = panels(read_runs([write_run(tmp_path, epochs=2, intervals=5).path]))[0]
    training = next(curve for curve in loss.curves if curve.part == TRAINING)
    assert training.xs == pytest.approx([0.2 * k for k in range(1, 11)])
    assert training.ys == pytest.approx([2 / x for x in training.xs])
    test = next(curve for curve in loss.curves if curve.part == TEST)
    assert (test.xs, test.ys) == ((1.0, 2.0), (3.0, 1.5))


def test_runs_share_panels(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path, epochs=epochs).path for epochs in (2, 3)])
    drawn = {panel.key: panel for panel in panels(runs)}
    assert list(drawn) == ["loss", "top1", "top5", "lr", "images_per_second"]
    assert {curve.run for curve in drawn["lr"].curves} == {0, 1}
    assert drawn["top1"].percent
    assert max(drawn["lr"].curves[1].xs) == 3.0


def test_averaged_weights_are_a_curve_of_their_own(tmp_path: Path) -> None:
    evaluation = {"kind": "evaluation", "time": 1.0, "epoch": 4, "step": 40, "loss": 1.0, "ema_loss": 0.5}
    loss = panels(read_runs([write_run(tmp_path, events=[evaluation]).path]))[0]
    assert [(curve.xs, curve.ys) for curve in loss.curves if curve.part == "test, averaged weights"] == [((4.0,), (0.5,))]


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    interval = {"kind": "interval", "time": 1.0, "epoch": 4, "step": 31, "images": 100, "loss": None, "lr": 0.5}
    loss, *_, lr, _ = panels(read_runs([write_run(tmp_path, events=[interval]).path]))
    assert max(loss.curves[0].xs) == 3.0
    assert (max(lr.curves[0].xs), lr.curves[0].ys[-1]) == (3.1, 0.5)


def test_steps_that_are_there_twice_count_once(tmp_path: Path) -> None:
    """The later record is that of the run that went on; a number that is none, from another program, is left out."""
    twice = {"kind": "evaluation", "time": 1.0, "epoch": 2, "step": 20, "loss": 0.25, "top1": float("nan")}
    loss, top1, *_ = panels(read_runs([write_run(tmp_path, events=[twice]).path]))
    curves = {curve.part: curve for curve in loss.curves}
    assert (curves[TEST].xs, curves[TEST].ys) == ((1.0, 2.0, 3.0), (3.0, 0.25, 1.0))
    assert next(curve for curve in top1.curves if curve.part == TEST).ys[1] == pytest.approx(2 / 3)


def test_a_run_without_metrics_has_no_curves(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    run.metrics_path.write_text("")
    assert panels(read_runs([run.path])) == ()


def test_metrics_of_older_runs_without_a_start_do(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    lines = run.metrics_path.read_text().splitlines(keepends=True)
    run.metrics_path.write_text("".join(lines[1:]))
    assert max(panels(read_runs([run.path]))[0].curves[0].xs) == 3.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(10, 500))
def test_thinned_curves_keep_their_ends_and_extremes(ys: list[float], most: int) -> None:
    xs = list(range(len(ys)))
    kept_xs, kept_ys = thinned(xs, ys, most)
    assert len(kept_xs) <= max(most, 2)
    assert list(kept_xs) == sorted(set(kept_xs))
    assert (kept_xs[0], kept_xs[-1]) == (0, len(ys) - 1)
    assert (min(kept_ys), max(kept_ys)) == (min(ys), max(ys))
    assert all(ys[int(x)] == y for x, y in zip(kept_xs, kept_ys, strict=True))
    assert MOST_POINTS >= 100
