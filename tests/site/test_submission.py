"""Scripts that are written and handed over: the job's number, how to follow it, and schedulers that refuse."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from hpctrain.site import profile_files
from hpctrain.site.job import JobRequest, plan_job
from hpctrain.site.script import render
from hpctrain.site.submission import Submission, job_files, submit
from tests.experiment.test_saved_runs import DOUBLE_HOUR, clock
from tests.support import stand_ins

pytestmark = pytest.mark.job


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with stand-ins for schedulers."""
    for name, value in stand_ins.install(tmp_path).items():
        if name in ("PATH", "CALLS", "HOME"):
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _submit(site: str, request: JobRequest) -> tuple[Submission, Path]:
    found = profile_files.read(site, {})
    job = plan_job(found, request, job_files(found, "a run", Path("out"), ("a.yaml", "batch=8")))
    submission = submit(found, job)
    script = Path(job.script)
    assert script.read_text() == render(found, job)
    assert re.fullmatch(r"out/jobs/a-run-\d{8}-\d{6}\.(sbatch|pbs|sh)", job.script)
    return submission, script


def test_slurm_gives_a_number(folder: Path) -> None:
    submission, script = _submit("slurm", JobRequest(2))
    assert submission.number == "12345"
    assert stand_ins.calls(folder) == (("sbatch", "--parsable", str(script)),)
    _, queue, tail, _, stop = submission.lines
    assert (queue, tail) == ("  squeue --jobs=12345", f"  tail -F {script.with_suffix('')}-12345.log")
    assert stop == "  scontrol update JobId=12345 Requeue=0; scancel --signal=USR1 12345"
    assert f"#SBATCH --output={script.with_suffix('')}-%j.log\n" in script.read_text()


def test_two_submissions_of_one_second_have_a_script_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form, *when: "20260101-000000")
    found = profile_files.read("polaris", {})
    scripts = set()
    both = {batch: job_files(found, "a run", Path("out"), ("a.yaml", f"batch={batch}")) for batch in ("8", "9")}
    for batch, files in both.items():
        submission = submit(found, plan_job(found, JobRequest(10, account="mine"), files))
        text = Path(submission.script).read_text()
        assert f"batch={batch}" in text
        assert f"exec >>{Path(submission.script).with_suffix('.log')} " in text
        assert submission.lines[2] == f"  tail -F {Path(submission.script).with_suffix('.log')}"
        scripts.add(submission.script)
    assert scripts == {"out/jobs/a-run-20260101-000000.pbs", "out/jobs/a-run-20260101-000000-2.pbs"}


def test_pbs_gives_a_number(folder: Path) -> None:
    submission, script = _submit("polaris", JobRequest(10, account="mine"))
    assert submission.number == "77.pbs-01"
    assert stand_ins.calls(folder) == (("qsub", str(script)),)
    _, queue, tail, _, stop = submission.lines
    assert (queue, tail) == ("  qstat 77.pbs-01", f"  tail -F {script.with_suffix('.log')}")
    assert stop == "  touch out/jobs/no-restart; qsig -s USR1 77.pbs-01"


@pytest.mark.parametrize(("site", "command"), [("slurm", "sbatch"), ("polaris", "qsub")])
def test_a_scheduler_that_refuses_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch, site: str, command: str) -> None:
    monkeypatch.setenv("SUBMIT_STATUS", "1")
    with pytest.raises(LaunchError, match=rf"^{command} refuses out/jobs/\S+: error: Invalid account\.$"):
        _submit(site, JobRequest(1, account="mine"))


@pytest.mark.parametrize(("site", "command"), [("slurm", "sbatch"), ("polaris", "qsub")])
def test_a_machine_without_the_scheduler_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, site: str, command: str
) -> None:
    monkeypatch.setenv("PATH", str(folder / "nowhere"))
    with pytest.raises(LaunchError, match=rf"There is no {command} on PATH; submit on a login node"):
        _submit(site, JobRequest(1, account="mine"))


def _wait(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


@pytest.mark.parametrize("status", [0, 85])
def test_without_a_scheduler_it_runs_in_the_background(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setenv("TRAIN_STATUS", str(status))
    monkeypatch.setattr("hpctrain.site.submission._environment", lambda: "")
    submission, script = _submit("local", JobRequest(1, 2))
    _wait(lambda: not _runs(int(submission.number)))
    assert [call[0] for call in stand_ins.calls(folder)] == ["mpiexec", "python", "python"] * 2
    log = script.with_suffix(".log")
    commands = (f"  tail -F {log}", f"  kill -USR1 {submission.number}")
    assert submission.lines == ("follow it:", commands[0], "stop it with a checkpoint:", commands[1])
    assert ("start it again to go on" in log.read_text()) == (status == 85)


def test_it_has_a_session_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCTOR_SLEEPS", "50")
    monkeypatch.setattr("hpctrain.site.submission._environment", lambda: "")
    submission, _ = _submit("local", JobRequest(1, 1))
    process = int(submission.number)
    try:
        _wait(lambda: os.getsid(process) == process)
    finally:
        os.kill(process, signal.SIGKILL)
        for call in Path("/proc").glob("[0-9]*/stat"):  # what it has started is of that session, too
            with contextlib.suppress(OSError, ValueError, IndexError):
                if call.read_text().rpartition(")")[2].split()[3] == submission.number:
                    os.kill(int(call.parent.name), signal.SIGKILL)


def test_the_environment_of_this_python_is_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = profile_files.read("slurm", {})
    conda = str(tmp_path)
    (tmp_path / "conda-meta").mkdir()
    for prefix, base, used in (("/v", "/usr", "/v"), ("/usr", "/usr", ""), (conda, conda, conda)):
        monkeypatch.setattr("sys.prefix", prefix)
        monkeypatch.setattr("sys.base_prefix", base)
        assert job_files(site, "run", Path("out"), ()).environment == used


def test_no_script_of_another_job_is_replaced(tmp_path: Path) -> None:
    """Two jobs may start in one second, or in the hour that comes twice when summer time ends."""
    site, names = profile_files.read("slurm", {}), []
    for seconds in (DOUBLE_HOUR, DOUBLE_HOUR, DOUBLE_HOUR + 3600):
        with clock(seconds, "Europe/Berlin"):
            files = job_files(site, "run", tmp_path, ())
        names.append(Path(files.script).name)
        Path(files.script).parent.mkdir(exist_ok=True)
        Path(files.script).write_text("")
    assert names == ["run-20251026-003000.sbatch", "run-20251026-003000-2.sbatch", "run-20251026-013000.sbatch"]
