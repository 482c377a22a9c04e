"""Facts from the system about a process and its job: memory, processor time, age, marks, schedulers; and exit codes."""

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.launch import process_end, processes, scheduler
from hpctrain.launch import processes as process_mark
from hpctrain.launch.control_groups import (
    MemoryGroup,
    available_bytes,
    cpu_quota,
    peak_resident_bytes,
    whole_quota,
)
from hpctrain.launch.processes import ProcessMark, ProcessStatus, WatchedProcess, launchers, status_of
from hpctrain.launch.scheduler import SchedulerJob, age_seconds, own_job, slurm_seconds_left
from hpctrain_testing.run import run_job, wait_until

MEMINFO = "MemTotal: 100 kB\nMemAvailable:      50 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_available_memory_is_read_from_meminfo(tmp_path: Path) -> None:
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
    assert cpu_quota(tmp_path) is None
    root = write(tmp_path, {"proc/self/cgroup": "0::/job/step\n", **files})
    assert (cpu_quota(root), whole_quota(root)) == (quota, None if quota is None else max(1, int(quota)))


@pytest.mark.parametrize(("job", "step", "quota"), [(-1, -1, None), (400000, -1, 4.0), (-1, 100000, 1.0), (300000, 900000, 3.0)])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_version_1(tmp_path: Path, job: int, step: int, quota: float | None, mount: str) -> None:
    files = {"proc/self/cgroup": "7:memory:/other\n4:cpu,cpuacct:/job/step\n"}
    for group, value in (("job", job), ("job/step", step)):
        folder = f"sys/fs/cgroup/{mount}/{group}"
        files |= {f"{folder}/cpu.cfs_quota_us": str(value), f"{folder}/cpu.cfs_period_us": "100000"}
    assert cpu_quota(write(tmp_path, files)) == quota


def test_the_end_of_the_slurm_job_is_read_from_the_environment() -> None:
    left = slurm_seconds_left({"SLURM_JOB_END_TIME": str(int(time.time()) + 100)})
    assert left is not None
    assert 98 <= left <= 101
    assert slurm_seconds_left({}) is None
    assert slurm_seconds_left({"SLURM_JOB_END_TIME": "Unknown"}) is None


def test_this_process_gets_older() -> None:
    first = age_seconds()
    time.sleep(0.05)
    assert 0.04 <= age_seconds() - first <= 5


@pytest.mark.job
@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_age_counts_from_the_process_that_was_started(switch: str) -> None:
    """The rank is forked from its keeper late here; its own age would be less than that."""
    program = """
import time
time.sleep(0.6)
from hpctrain.launch.keeper import keep
from hpctrain.launch.scheduler import age_seconds
keeper = keep(None, frozenset())
print(0.6 <= age_seconds() < 10)
keeper.finished()
"""
    outcome = run_job(0, ["-c", program], env={"HPCTRAIN_KEEPER": switch})
    assert (outcome.code, outcome.stdout) == (0, "True\n"), outcome.output


def test_a_mark_is_read_back_as_it_is_written() -> None:
    own = process_mark.own_mark()
    assert ProcessMark.parse(str(own)) == own
    assert ProcessMark.parse("old") is None
    assert ProcessMark.parse("12-34@") is None
    assert own.lives
    assert replace(own, begun="1").lives is False  # the number has come again
    assert replace(own, place="other").lives is None


@pytest.mark.job
def test_a_process_that_has_ended_is_dead_before_its_parent_asks() -> None:
    child = subprocess.Popen(["true"])
    begun = process_mark.start_ticks(child.pid) or "0"
    mark = ProcessMark(child.pid, begun, process_mark.process_place())
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert mark.lives is False
    child.wait()
    assert mark.lives is False


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_that_was_resident_is_remembered() -> None:
    before, peak_before = resident_bytes(), peak_resident_bytes()
    # Pages of its own: malloc may give memory that was freed before and is still resident.
    with mmap.mmap(-1, 64 << 20) as block:
        for _ in range(64):
            block.write(b"1" * (1 << 20))
        held = resident_bytes()
        assert held >= before + (32 << 20)
    assert peak_resident_bytes() >= max(held - (8 << 20), peak_before)


def test_the_status_of_this_process_and_of_none() -> None:
    status = status_of(os.getpid())
    assert (status.parent, status.group, status.stopped, status.dead) == (os.getppid(), os.getpgrp(), False, False)
    assert status_of(2**22 + 1) is None
    assert launchers(None) == ()


@pytest.mark.job
def test_a_process_is_watched_in_looks() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as child:
        watched = WatchedProcess(child.pid)
        child.send_signal(signal.SIGSTOP)
        _until(child.pid, "T")
        for _ in range(3):
            watched.look(1.0)
        assert (watched.gone, watched.stopped_seconds) == (False, 3.0)
        child.send_signal(signal.SIGCONT)
        _until(child.pid, "RS")
        watched.look(1.0)
        assert watched.stopped_seconds == 0.0
        child.kill()
        _until(child.pid, "Z")
        watched.look(1.0)
        assert watched.gone


def _until(process: int, states: str) -> None:
    wait_until(lambda: (status := status_of(process)) is None or status.state in states)


@pytest.mark.parametrize(
    ("terminal", "foreground", "leader", "suspended"),
    [(5, 77, "T", True), (0, -1, "T", False), (5, 10, "T", False), (5, 77, "S", False)],
)
def test_one_that_a_person_has_suspended_differs_from_one_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch, terminal: int, foreground: int, leader: str, suspended: bool
) -> None:
    monkeypatch.setattr(processes, "status_of", lambda process: ProcessStatus(leader, 1, 10, terminal, foreground, 0))
    assert processes._is_suspended_at_terminal(ProcessStatus("T", 10, 10, terminal, foreground, 0)) == suspended


def test_one_that_the_system_hides_is_never_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "status_of", lambda process: None)
    watched = WatchedProcess(1)
    watched.look(1.0)
    assert not watched.gone


_V1 = "9:name=systemd:/\n4:cpu,memory:/batch/job7\n"
_V2 = "0::/batch/job7\n"


def place(root: Path, listing: str, folder: str, counts: str, limit: str, value: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(listing)
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
    group = MemoryGroup.own(tmp_path)
    assert (
        group.hint() == " (not by the kernel: since the start, it has ended no process of this control group for lack of memory)"
    )
    path.write_text("oom 1\nunder_oom 0\noom_kill 4\n")
    assert group.hint() == " (by the kernel, as memory ran out: the job's limit here is 250 MB)"


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_limit_is_none(tmp_path: Path, limit: str) -> None:
    path = place(tmp_path, _V2, "batch/job7", "memory.events", "memory.max", limit)
    group = MemoryGroup.own(tmp_path)
    path.write_text("oom_kill 4\n")
    assert group.hint() == " (by the kernel, as memory ran out)"


@pytest.mark.parametrize("listing", ["", "what\n", _V1, _V2])
def test_without_counts_it_is_a_guess(tmp_path: Path, listing: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(listing)
    assert MemoryGroup.own(tmp_path).hint() == " (as the kernel does if memory runs out)"
    assert MemoryGroup.own(tmp_path / "nowhere").hint() == " (as the kernel does if memory runs out)"


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
    assert "was ended by SIGKILL (by the kernel, as memory ran out: the job's limit here is 200 MB)" in outcome.stderr


def test_a_job_is_the_same_one_however_often_it_is_queued() -> None:
    first = own_job({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "a"})
    again = own_job({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "a", "SLURM_RESTART_COUNT": "1"})
    assert (first.restart, again.restart, str(again)) == (0, 1, "Slurm job 7")
    assert again.follows(first)
    assert not first.follows(again)
    assert not again.follows(again)
    assert not again.follows(own_job({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "b"}))
    begun = own_job({"PBS_JOBID": "12.host"})
    submitted = own_job({"PBS_JOBID": "15.host", "HPCTRAIN_RESTARTS": "1", "HPCTRAIN_FIRST_JOB": "12.host"})
    assert submitted.follows(begun)
    assert (own_job({"PBS_JOBID": "15.host", "HPCTRAIN_RESTARTS": "x"}).restart, own_job({})) == (0, SchedulerJob())
    assert not own_job({}).follows(own_job({}))
    assert own_job({}).lives() is None


@pytest.mark.parametrize(
    ("code", "out", "err", "lives"),
    [
        (0, "RUNNING\n", "", None),
        (0, "COMPLETING\n", "", None),
        (0, "SUSPENDED\n", "", True),
        (0, "COMPLETED\n", "", False),
        (0, "PENDING\n", "", False),
        (0, "", "", None),
        (1, "", "slurm_load_jobs error: Invalid job id specified", False),
        (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", None),
    ],
)
def test_answers_of_slurm(code: int, out: str, err: str, lives: bool | None) -> None:
    assert scheduler._slurm_answer(subprocess.CompletedProcess([], code, out, err)) is lives


@pytest.mark.parametrize(
    ("code", "out", "err", "lives"),
    [
        (0, "12.host  run  user  0 R batch", "", None),
        (153, "", "qstat: Unknown Job Id 12.host", False),
        (35, "", "qstat: 12.host Job has finished, use -x or -H to obtain historical job information", False),
        (111, "", "Connection refused", None),
    ],
)
def test_answers_of_pbs(code: int, out: str, err: str, lives: bool | None) -> None:
    assert scheduler._pbs_answer(subprocess.CompletedProcess([], code, out, err)) is lives


CODES = {name: value for name, value in vars(process_end).items() if name.isupper() and name[0] != "_"}


def test_each_code_means_one_thing_and_none_can_be_a_signal() -> None:
    assert len(set(CODES.values())) == len(CODES)
    below = [code for name, code in CODES.items() if name != "SIGNALLED"]
    assert all(0 <= code < process_end.SIGNALLED for code in below)
    assert not {126, 127} & set(below), "the shell says with these that there is no such command"


def test_the_page_lists_every_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "signals.md").read_text()
    for name, code in CODES.items():
        assert f"| {'128 + n' if name == 'SIGNALLED' else code} |" in page, name
