"""Whether the kernel has ended a process for lack of memory, as its control group says."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from hpctrain.launch.memory_group import MemoryGroup
from tests.support.jobs import run_job

_V1 = "9:name=systemd:/\n4:cpu,memory:/batch/job7\n"
_V2 = "0::/batch/job7\n"


def place(root: Path, listing: str, folder: str, counts: str, limit: str, value: str) -> Path:
    (root / "cgroup").write_text(listing)
    group = root / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    (group / limit).write_text(f"{value}\n")
    (group / counts).write_text("oom 1\nunder_oom 0\noom_kill 3\n")
    return group / counts


@pytest.mark.parametrize(
    ("listing", "folder", "counts", "limit"),
    [
        (_V1, "memory/batch/job7", "memory.oom_control", "memory.limit_in_bytes"),
        (_V1, "memory", "memory.oom_control", "memory.limit_in_bytes"),
        (_V2, "batch/job7", "memory.events", "memory.max"),
        (_V2, "", "memory.events", "memory.max"),
    ],
)
def test_a_kill_since_the_start_is_said_surely(tmp_path: Path, listing: str, folder: str, counts: str, limit: str) -> None:
    path = place(tmp_path, listing, folder, counts, limit, "250000000")
    group = MemoryGroup.own(tmp_path / "cgroup", tmp_path)
    assert group.hint() == " (not by the kernel for lack of memory in this control group, which has counted none)"
    path.write_text("oom 1\nunder_oom 0\noom_kill 4\n")
    assert group.hint() == " (by the kernel, as memory ran out: the job's limit here is 0.250 GB)"


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_limit_is_none(tmp_path: Path, limit: str) -> None:
    path = place(tmp_path, _V2, "batch/job7", "memory.events", "memory.max", limit)
    group = MemoryGroup.own(tmp_path / "cgroup", tmp_path)
    path.write_text("oom_kill 4\n")
    assert group.hint() == " (by the kernel, as memory ran out)"


@pytest.mark.parametrize("listing", ["", "what\n", _V1, _V2])
def test_without_counts_it_is_a_guess(tmp_path: Path, listing: str) -> None:
    (tmp_path / "cgroup").write_text(listing)
    assert MemoryGroup.own(tmp_path / "cgroup", tmp_path).hint() == " (as the kernel does where memory runs out)"
    assert MemoryGroup.own(tmp_path / "nowhere", tmp_path).hint() == " (as the kernel does where memory runs out)"


@pytest.fixture
def small_group():
    """A control group of 200 MB; skips where this user may make none."""
    version_1 = Path("/sys/fs/cgroup/memory")
    group = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / f"hpctrain-test-{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if version_1.is_dir() else "memory.max")
    try:
        group.mkdir()
        limit.write_text("200000000")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here ({error.strerror})")
    yield group
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:  # a process of it has not quite ended
            time.sleep(0.1)


@pytest.mark.job
def test_the_kernels_own_kill_is_named(small_group: Path) -> None:
    program = f"""
import os, signal
open({str(small_group / "cgroup.procs")!r}, "w").write(str(os.getpid()))
from hpctrain.launch.signals import hold
from hpctrain.launch.keeper import keep
keep(None, hold())
kept = [bytearray(b"x") * 10_000_000 for _ in range(60)]
"""
    outcome = run_job(0, ["-c", program])
    assert outcome.code == -signal.SIGKILL
    assert "was ended by SIGKILL (by the kernel, as memory ran out: the job's limit here is 0.200 GB)" in outcome.stderr
