"""Quotas of processor time of control groups, versions 1 and 2: the smallest one counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.launch.cpu_quota import cpu_quota, whole_quota
from tests.launch.test_available_memory import write


@pytest.mark.parametrize(
    ("groups", "quota"),
    [
        ({"job": "200000 100000"}, 2.0),
        ({"job": "150000 100000", "job/step": "max 100000"}, 1.5),
        ({"job": "max 100000", "job/step": "50000 100000"}, 0.5),
        ({"job": "300000 100000", "job/step": "700000 100000"}, 3.0),
        ({"": "100000 50000"}, 2.0),  # as a container sees its own group
        ({"job": "max 100000"}, None),
        ({"job": "nonsense"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("mount", ["sys/fs/cgroup", "sys/fs/cgroup/unified"])
def test_version_2(tmp_path: Path, groups: dict[str, str], quota: float | None, mount: str) -> None:
    files = {f"{mount}/{group}/cpu.max": text for group, text in groups.items()}
    root = write(tmp_path, {"proc/self/cgroup": "0::/job/step\n", **files})
    assert cpu_quota(root) == quota
    assert whole_quota(root) == (None if quota is None else max(1, int(quota)))


@pytest.mark.parametrize(("job", "step", "quota"), [(-1, -1, None), (400000, -1, 4.0), (-1, 100000, 1.0), (300000, 900000, 3.0)])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_version_1(tmp_path: Path, job: int, step: int, quota: float | None, mount: str) -> None:
    files = {"proc/self/cgroup": "7:memory:/other\n4:cpu,cpuacct:/job/step\n"}
    for group, value in (("job", job), ("job/step", step)):
        folder = f"sys/fs/cgroup/{mount}/{group}"
        files |= {f"{folder}/cpu.cfs_quota_us": str(value), f"{folder}/cpu.cfs_period_us": "100000"}
    assert cpu_quota(write(tmp_path, files)) == quota


def test_where_nothing_tells_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
