"""The memory that a node still has: what the machine says, less where a control group around the process allows less."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.launch.available_memory import available_bytes

MEMINFO = "MemTotal: 100 kB\nMemAvailable:      50 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_machine_says_it(tmp_path: Path) -> None:
    assert available_bytes(write(tmp_path, {"proc/meminfo": MEMINFO})) == 50 * 1024
    assert available_bytes(tmp_path / "none") is None
    here = available_bytes()
    assert here is not None
    assert here > 1 << 20


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"job": ("9000", "3000"), "job/step": ("max", "2000")}, 6000 + 500),
        ({"job": ("max", "3000"), "job/step": ("4000", "2000")}, 2000 + 500),
        ({"job": ("max", "3000"), "job/step": ("max", "2000")}, 50 * 1024),
        ({"": ("1000", "3000")}, 0),
    ],
)
def test_the_narrowest_control_group_counts(tmp_path: Path, limits: dict[str, tuple[str, str]], expected: int) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/job/step\n"}
    for group, (limit, used) in limits.items():
        folder = f"sys/fs/cgroup/{group}"
        files |= {f"{folder}/memory.max": limit, f"{folder}/memory.current": used}
        files[f"{folder}/memory.stat"] = "anon 100\ninactive_file 500\n"
    assert available_bytes(write(tmp_path, files)) == expected


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/job"
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "3:cpu:/\n5:memory:/job\n", f"{folder}/memory.limit_in_bytes": "9000"}
    files |= {f"{folder}/memory.usage_in_bytes": "8000", f"{folder}/memory.stat": "total_inactive_file 10\n"}
    assert available_bytes(write(tmp_path, files)) == 1010
