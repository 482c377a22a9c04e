"""Efficiency, and what is never quoted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.bench import scaling
from hpctrain.bench.scaling import Point, ScalingStudy, with_efficiency
from hpctrain.errors import LaunchError


def _point(ranks: int, seconds: float, oversubscribed: bool = False) -> Point:
    return Point(ranks, 1, 32 * ranks, seconds, 0.8 * seconds, 0.3 * seconds, 0.1 * seconds, 0.9 * seconds, oversubscribed, {})


def test_weak_efficiency_compares_times_and_strong_efficiency_times_of_all_ranks() -> None:
    points = [_point(2, 0.10), _point(4, 0.08), _point(8, 0.05)]
    assert [each.efficiency for each in with_efficiency(points, "weak")] == pytest.approx([1.0, 1.25, 2.0])
    assert [each.efficiency for each in with_efficiency(points, "strong")] == pytest.approx([1.0, 0.625, 0.5])


def test_ranks_that_share_cores_have_no_efficiency() -> None:
    points = with_efficiency([_point(1, 0.1), _point(2, 0.1), _point(4, 0.3, oversubscribed=True)], "weak")
    assert [each.efficiency for each in points] == [1.0, 1.0, None]
    alone = with_efficiency([_point(4, 0.1, oversubscribed=True), _point(8, 0.1)], "weak")
    assert [each.efficiency for each in alone] == [None, None]
    text = scaling.lines(points, "weak")
    assert "oversubscribed" in text[3]
    assert "%" not in text[3]
    assert "share cores" in text[-1]


def test_the_report_is_json_with_the_machine(tmp_path: Path) -> None:
    points = with_efficiency([_point(1, 0.1)], "strong")
    scaling.write(tmp_path / "s.json", ScalingStudy(Path("x.yaml"), mode="strong"), points)
    content = json.loads((tmp_path / "s.json").read_text())
    assert content["points"][0]["efficiency"] == 1.0
    assert content["points"][0]["images_per_second"] == pytest.approx(320)
    assert content["machine"]["cores"] >= 1


@pytest.mark.job  # where fonts have not been listed before, Matplotlib asks fc-list
def test_the_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = with_efficiency([_point(1, 0.1), _point(2, 0.2, oversubscribed=True)], "weak")
    path = scaling.plot(tmp_path / "s.png", points, "weak")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.job
@pytest.mark.parametrize(
    ("launcher", "words"),
    [("srun -n 4", "where the number goes"), ("no-such-launcher {ranks}", "cannot be started"), ("false {ranks}", "exit code 1")],
)
def test_a_launcher_that_does_not_do_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    with pytest.raises(LaunchError, match=words):
        scaling.run(ScalingStudy(quickstart, launcher=launcher), [2], say=lambda text: None)
    assert list(tmp_path.iterdir()) == []
