"""Kept times: what was put is given back, between neighbours the line between them, and nothing from foreign files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.planner.operator_key import OperatorKey
from hpctrain.planner.operator_times import REACH, OperatorTimes, Setting, cache_file, interpolated

SETTING = Setting("processor", "numpy 2", 1, 2)


def _key(n: int, h: int = 4, w: int = 4, family: str = "conv", details: str = "") -> OperatorKey:
    return OperatorKey(family, (n, h, w), details)


def test_measured_times_come_back_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "times.json"
    times = OperatorTimes(SETTING, path)
    times.put(_key(2), 0.5)
    times.put(_key(2, details="padded"), 0.25)
    times.save()
    again = OperatorTimes(SETTING, path)
    assert (len(again), again.seconds(_key(2)), again.seconds(_key(2, details="padded"))) == (2, 0.5, 0.25)
    assert again.measured(_key(2))
    assert again.measured(_key(2, details="other"))
    assert again.seconds(_key(2, details="other")) in (0.5, 0.25)
    assert not again.measured(_key(3))


@pytest.mark.parametrize(
    "change",
    [{"processor": "q"}, {"kernels": "numpy 3"}, {"threads": 2}, {"concurrency": 1}],
    ids=lambda change: next(iter(change)),
)
def test_times_hold_in_their_setting_alone_and_settings_share_a_file(tmp_path: Path, change: dict[str, Any]) -> None:
    path, other = tmp_path / "times.json", replace(SETTING, **change)
    for setting, seconds in ((SETTING, 1.0), (other, 2.0)):
        assert len(OperatorTimes(setting, path)) == 0
        times = OperatorTimes(setting, path)
        times.put(_key(1), seconds)
        times.save()
    assert [OperatorTimes(setting, path).seconds(_key(1)) for setting in (SETTING, other)] == [1.0, 2.0]


def test_saving_keeps_what_others_have_written_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    first, second = OperatorTimes(SETTING, path), OperatorTimes(SETTING, path)
    first.put(_key(1), 1.0)
    second.put(_key(2), 2.0)
    first.save()
    second.save()
    assert len(OperatorTimes(SETTING, path)) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99, "times": {}}', '{"format": 1, "times": []}'])
def test_a_file_of_others_is_left_out_with_a_note(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "times.json"
    path.write_text(content)
    times = OperatorTimes(SETTING, path)
    assert len(times) == 0
    times.put(_key(1), 1.0)
    times.save()
    assert OperatorTimes(SETTING, path).seconds(_key(1)) == 1.0


def test_damaged_entries_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    entries = [
        ["conv", [1, 4, 4], "", 1.0],
        ["conv", [2, 4], "", 1.0],
        ["conv", [3, 4, 4], "", -1.0],
        7,
        ["conv", [4, 4, 4], "", "x"],
    ]
    path.write_text(json.dumps({"format": 1, "times": {str(SETTING): entries}}))
    times = OperatorTimes(SETTING, path)
    assert len(times) == 1
    assert times.seconds(_key(1)) == 1.0


@pytest.mark.parametrize("dim", range(3))
def test_between_two_sizes_of_one_dim_it_is_interpolated(dim: int) -> None:
    times = OperatorTimes(SETTING)
    for size in (4, 8):
        extents = [4, 4, 4]
        extents[dim] = size
        times.put(_key(*extents), 1.0 + size)
    wanted = [4, 4, 4]
    wanted[dim] = 6
    assert times.seconds(_key(*wanted)) == pytest.approx(7.0)
    wanted[(dim + 1) % 3] = 5
    assert times.seconds(_key(*wanted)) is None
    assert times.seconds(_key(6, family="other")) is None


def test_outside_the_points_the_rate_holds_up_to_its_reach() -> None:
    assert interpolated([(8, 2.0)], 16) == pytest.approx(4.0)
    assert interpolated([(8, 2.0)], 4) == pytest.approx(1.0)
    assert interpolated([(8, 2.0)], int(8 * REACH) + 1) is None
    assert interpolated([(8, 2.0)], 3) is None
    assert interpolated([], 3) is None
    assert interpolated([(8, 2.0)], 0) is None


def test_beyond_two_points_a_call_keeps_its_own_cost() -> None:
    points = [(4, 1.4), (8, 1.8)]  # 1 s a call and 0.1 s a sample
    assert interpolated(points, 16) == pytest.approx(2.6)
    assert interpolated(points, 2) == pytest.approx(1.2)
    assert interpolated([(4, 2.0), (8, 1.0)], 16) == pytest.approx(1.0)  # noise: no less than the last


def test_the_file_lies_in_the_cache_directory_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_file({"XDG_CACHE_HOME": str(tmp_path)}).parent == tmp_path / "hpctrain"
    assert cache_file({}).is_relative_to(Path.home() / ".cache")
    assert cache_file({"XDG_CACHE_HOME": "not/absolute"}) == cache_file({})
    monkeypatch.setattr("hpctrain.paths.pwd.getpwuid", lambda uid: {}[uid])
    assert cache_file({}) is None


def test_of_two_measurements_the_less_counts() -> None:
    first, second, third = (_key(n) for n in (8, 16, 32))
    times, others = OperatorTimes(SETTING), OperatorTimes(SETTING)
    for key, seconds in ((first, 2.0), (second, 1.0)):
        times.put(key, seconds)
    for key, seconds in ((first, 1.5), (second, 3.0), (third, 4.0)):
        others.put(key, seconds)
    times.take_less(others)
    assert [times.seconds(key) for key in (first, second, third)] == [1.5, 1.0, 4.0]
