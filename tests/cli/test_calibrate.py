"""`hpctrain calibrate` as users start it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.planner import machine_file
from tests.support.jobs import Outcome


@pytest.mark.slow
@pytest.mark.job
def test_two_ranks_measure_the_link_between_them(job: Callable[..., Outcome], tmp_path: Path) -> None:
    out = tmp_path / "here.yaml"
    done = job(2, ["-m", "hpctrain", "calibrate", "--seconds", "8", "--threads", "1", "--out", str(out)])
    assert done.code == 0, done.output
    machine = machine_file.read(out)
    assert machine.ranks_per_node == 2
    assert machine.sources["within.segments"].startswith("measured on ")
    assert machine.sources["between.segments"].startswith("not measured: one node")
    assert machine.within.message_seconds(1 << 20) > machine.within.message_seconds(1 << 10) > 0
