"""Scripts of jobs: every word reaches the training as it was; written and handed over."""

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.site import profile as profile_files
from hpctrain.site.job import JobFiles, JobRequest, Submission, job_files, plan_job, render, submit
from hpctrain.site.profile import ScratchFields, SetupFields, VariableFields
from hpctrain_testing.run import wait_until
from tests.run.test_saved_runs import DOUBLE_HOUR, clock
from tests.support import stand_ins
from tests.support.job_scripts import SITES

SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0\r\n", exclude_categories=("Zl", "Zp", "Cc", "Cf", "Cs"))
TEXTS = st.text(CHARACTERS, min_size=1, max_size=12)


def _script(site: str, train: tuple[str, ...] = ("a.yaml",), request: JobRequest | None = None) -> str:
    found = profile_files.read_site(site, {})
    request = request or JobRequest(1, account="mine" if found.profile.account else None)
    return render(found, plan_job(found, request, JobFiles("run", "jobs/run", "runs/jobs", "runs/jobs/run.log", train)))


@given(words=st.lists(TEXTS, min_size=1, max_size=3))
@settings(max_examples=50, deadline=None)
def test_words_come_through_the_shell_as_they_are(words: list[str]) -> None:
    (line,) = [line for line in _script("local", tuple(words)).split("\n") if line.startswith("TRAIN=(")]
    assert shlex.split(line.removeprefix("TRAIN=(").removesuffix(")")) == words


@pytest.mark.job
@pytest.mark.parametrize("site", SITES)
def test_scripts_for_a_configuration_are_sound(site: str, tmp_path: Path) -> None:
    assert SHELLCHECK is not None, "requirements-dev.txt brings shellcheck"
    (tmp_path / "environment.tar").touch()
    profile = profile_files.read_site(site, {}).profile
    account = "mine" if profile.account else None
    stage = tmp_path / "environment.tar" if profile.scratch else None
    for number, request in enumerate(
        (
            JobRequest(1, account=account),
            JobRequest(1, 1, 1, "10m", account, "q" if profile.queue else None, None, stage, 0, doctor=False),
        )
    ):
        text = _script(site, ("configs/a.yaml", "name=it's a 'run'", "--steps", "3"), request)
        path = tmp_path / f"{number}.sh"
        path.write_text(text)
        subprocess.run(["bash", "-n", path], check=True)
        done = subprocess.run([SHELLCHECK, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        assert "<--" not in text  # nothing is left to edit
        assert all(line == line.rstrip() for line in text.split("\n"))


def test_commands_of_a_profile_come_first() -> None:
    found = profile_files.read_site("slurm", {})
    step = SetupFields(command="module load cray-python", why="the site's Python", source="the site's guide")
    profile = found.profile.model_copy(update={"setup": (step,)})
    site = profile_files.Site("slurm", found.path, profile)
    text = render(site, plan_job(site, JobRequest(1), JobFiles("run", "jobs/run")))
    head, tail = text.split("# the site's Python (the site's guide)\nmodule load cray-python\n")
    assert "set -eo pipefail" in head  # modules read variables that are not set
    assert tail.startswith("set -u\n")
    assert "srun" not in head


@pytest.mark.parametrize("text", ["extends: slurm\n", None], ids=["extended", "copied"])
def test_only_an_installed_profile_is_called_tested(text: str | None, tmp_path: Path) -> None:
    """The tests of an installed profile are not claimed for a profile that a user derived from it."""
    own = tmp_path / "hpctrain" / "sites" / "ours.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(text or (profile_files.INSTALLED / "slurm.yaml").read_text())
    ours = profile_files.read_site("ours", {"XDG_CONFIG_HOME": str(tmp_path)})
    job = plan_job(ours, JobRequest(1), JobFiles("run", "jobs/run"))
    assert "# Site profile ours, a profile of your own. Guide: https://slurm.schedmd.com" in render(ours, job)
    assert "tested" not in render(ours, job)
    assert f"# Site profile slurm, tested {ours.profile.tested}. Guide: " in render(_site("slurm"), job)


#: what ends a line, a quote or a word, and what a shell or a scheduler would run, expand or read as an option
PIECES = st.sampled_from(
    [
        "\n", "\r", "\r\n", "\x0b", "\x0c", "\x1b[2J", "\x7f", "\x85", "\u2028", "\u202e", "\u200b", "\0", "'", '"', "`",
        "\\", "$(touch RAN)", "`touch RAN`", "${X:=touch}", ";touch RAN;", "&& touch RAN", "| touch RAN", "\ntouch RAN\n",
        "'; touch RAN; '", '"; touch RAN; "', "#", " #", "%j", "%", "{{ 1 }}", "{% raw %}", "(", ")", "<", ">", "!", "*", "~",
        " ",        "\t",
        "-", "--wrap=touch", "=", "a", "é", "日本", "END", "\nEND\n",
    ]
)  # fmt: skip
TRICKS = st.lists(PIECES, min_size=1, max_size=6).map("".join)
FIELDS = ("account", "queue", "train", "log", "name", "environment", "hostfile", "stage")
_site = functools.cache(lambda name: profile_files.read_site(name, {}))


def _with_field(site: str, field: str, text: str, folder: Path) -> str | None:
    """Return the script of a site with a text in one field, or None if the field or the text is refused."""
    found = _site(site)
    account = "mine" if found.profile.account else None
    request = JobRequest(1, account=text if field == "account" else account, queue=text if field == "queue" else None)
    logs = Path(text) / "jobs" if field == "log" else Path("runs/jobs")
    try:
        files = job_files(
            found, text if field == "name" else "run", logs.parent, ("a.yaml", text) if field == "train" else ("a.yaml",)
        )
        job = plan_job(found, request, files)
        if field in ("environment", "hostfile", "stage"):
            job = replace(job, **{field: text})
        return render(found, job)
    except ConfigError:
        return None


@pytest.mark.job
@pytest.mark.parametrize("site", SITES)
@settings(max_examples=8, deadline=None)
@given(texts=st.lists(TRICKS, min_size=len(FIELDS), max_size=len(FIELDS)))
def test_no_field_of_a_job_is_more_than_its_text(site: str, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """With any text in a field, the shell runs the same commands as with a plain word: it reads nothing of the field as code."""
    folder = tmp_path_factory.mktemp("site")
    scripts = [_with_field(site, field, text, folder) for field, text in zip(FIELDS, texts, strict=True)]
    plain = [_with_field(site, field, "plain", folder) for field in FIELDS]
    for script, usual in zip(scripts, plain, strict=True):
        if script is not None:
            assert script.count("\n") in range(usual.count("\n") - 1, usual.count("\n") + 3)  # comments move above long lines
    whole = "\n".join(f"function script_{number} {{\n{script}\n}}" for number, script in enumerate(scripts) if script is not None)
    (folder / "all.sh").write_text(whole)
    subprocess.run(["bash", "-n", folder / "all.sh"], check=True)


@pytest.mark.parametrize("field", ["account", "queue", "train", "log", "environment", "hostfile", "stage"])
@pytest.mark.parametrize("site", SITES)
def test_controls_are_refused_in_every_field(site: str, field: str, tmp_path: Path) -> None:
    for text in ("a\ntouch RAN\n", "a\rb", "a\u202eb", "a\u2028b", "a\x1b[2J", "a\x85b", "a\0b"):
        assert _with_field(site, field, text, tmp_path) is None


@pytest.mark.parametrize(
    "value", ["$(id)", "`id`", "${X:=$(id)}", "${X@P}", "$((1))", "${X[$(id)]}", '"', "\\", "a\nb", "$", "${!X}"]
)
def test_values_of_a_profile_run_nothing(value: str) -> None:
    with pytest.raises(ValidationError):
        VariableFields(value=value, why="w")
    with pytest.raises(ValidationError):
        ScratchFields(directory=value)


@pytest.mark.parametrize("value", ["", "1", "$USER", "/a b/${USER}", "${TMPDIR:-/tmp}", "${A-$B}/c", "50%", "a'b"])
def test_values_of_a_profile_may_name_variables(value: str) -> None:
    assert VariableFields(value=value, why="w").value == value


def test_slurm_reads_the_name_of_the_log_as_it_was(tmp_path: Path) -> None:
    found = profile_files.read_site("slurm", {})
    text = render(found, plan_job(found, JobRequest(1), job_files(found, "run", Path("it's 50%A #1"), ("a.yaml",))))
    (line,) = [line for line in text.split("\n") if line.startswith("#SBATCH --output=")]
    (word,) = shlex.split(line.removeprefix("#SBATCH "))
    assert re.fullmatch(r"--output=it's 50%%A #1/jobs/run-[\d-]+-%j\.log", word)
    with pytest.raises(ConfigError, match="Slurm removes backslashes; choose a directory without one"):
        render(found, plan_job(found, JobRequest(1), job_files(found, "run", Path("a\\b"), ("a.yaml",))))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with stand-ins for schedulers."""
    for name, value in stand_ins.install(tmp_path).items():
        if name in ("PATH", "CALLS", "HOME"):
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _submit(site: str, request: JobRequest) -> tuple[Submission, Path]:
    found = profile_files.read_site(site, {})
    job = plan_job(found, request, job_files(found, "a run", Path("out"), ("a.yaml", "batch=8")))
    submission = submit(found, job)
    script = Path(job.script)
    assert script.read_text() == render(found, job)
    assert re.fullmatch(r"out/jobs/a-run-\d{8}-\d{6}\.(sbatch|pbs|sh)", job.script)
    return submission, script


@pytest.mark.job
def test_slurm_returns_a_number(folder: Path) -> None:
    submission, script = _submit("slurm", JobRequest(2))
    assert submission.number == "12345"
    assert stand_ins.calls(folder) == (("sbatch", "--parsable", str(script)),)
    _, queue, tail, _, stop = submission.lines
    assert (queue, tail) == ("  squeue --jobs=12345", f"  tail -F {script.with_suffix('')}-12345.log")
    assert stop == "  scontrol update JobId=12345 Requeue=0; scancel --signal=USR1 12345"
    assert f"#SBATCH --output={script.with_suffix('')}-%j.log\n" in script.read_text()


@pytest.mark.job
@pytest.mark.parametrize(
    "printed", ["12345", "12345;cluster", " 12345\\r", "Submitted batch job 12345", "Submitted batch job 12345 on cluster a"]
)
@pytest.mark.parametrize("banner", ["", "Welcome to X!\\n\\n", "Quota: 7 of 99\\n2026-11-28\\n**\\n", "\\377\\376 caf\\351\\n"])
def test_the_number_is_found_after_a_banner(folder: Path, monkeypatch: pytest.MonkeyPatch, banner: str, printed: str) -> None:
    monkeypatch.setenv("BANNER", banner)
    monkeypatch.setenv("NUMBER", printed)
    assert _submit("slurm", JobRequest(2))[0].number == "12345"


@pytest.mark.job
def test_two_submissions_of_one_second_have_a_script_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form, *when: "20260101-000000")
    found = profile_files.read_site("polaris", {})
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


@pytest.mark.job
def test_pbs_returns_a_number(folder: Path) -> None:
    submission, script = _submit("polaris", JobRequest(10, account="mine"))
    assert submission.number == "77.pbs-01"
    assert stand_ins.calls(folder) == (("qsub", str(script)),)
    _, queue, tail, _, stop = submission.lines
    assert (queue, tail) == ("  qstat 77.pbs-01", f"  tail -F {script.with_suffix('.log')}")
    assert stop == "  touch out/jobs/no-restart; qsig -s USR1 77.pbs-01"


@pytest.mark.job
@pytest.mark.parametrize(("site", "command"), [("slurm", "sbatch"), ("polaris", "qsub")])
def test_a_scheduler_that_refuses_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch, site: str, command: str) -> None:
    monkeypatch.setenv("SUBMIT_STATUS", "1")
    with pytest.raises(LaunchError, match=rf"^{command} has rejected out/jobs/\S+: error: Invalid account\.$"):
        _submit(site, JobRequest(1, account="mine"))


@pytest.mark.job
@pytest.mark.parametrize(("site", "command"), [("slurm", "sbatch"), ("polaris", "qsub")])
def test_a_machine_without_the_scheduler_is_one_sentence(folder: Path, monkeypatch, site: str, command: str) -> None:
    monkeypatch.setenv("PATH", str(folder / "nowhere"))
    with pytest.raises(LaunchError, match=rf"{command} is not on PATH; submit on a login node"):
        _submit(site, JobRequest(1, account="mine"))


def _runs(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


@pytest.mark.job
@pytest.mark.parametrize("status", [0, 85])
def test_without_a_scheduler_it_runs_in_the_background(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setenv("TRAIN_STATUS", str(status))
    monkeypatch.setattr("hpctrain.site.job._python_environment", lambda: "")
    submission, script = _submit("local", JobRequest(1, 2))
    wait_until(lambda: not _runs(int(submission.number)))
    assert [call[0] for call in stand_ins.calls(folder)] == ["mpiexec", "python", "python"] * 2
    log = script.with_suffix(".log")
    commands = (f"  tail -F {log}", f"  kill -USR1 {submission.number}")
    assert submission.lines == ("follow it:", commands[0], "stop it with a checkpoint:", commands[1])
    assert ("start it again to continue" in log.read_text()) == (status == 85)


@pytest.mark.job
def test_a_submitted_job_has_a_session_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCTOR_SLEEPS", "50")
    monkeypatch.setattr("hpctrain.site.job._python_environment", lambda: "")
    submission, _ = _submit("local", JobRequest(1, 1))
    process = int(submission.number)
    try:
        wait_until(lambda: os.getsid(process) == process)
    finally:
        os.kill(process, signal.SIGKILL)
        for call in Path("/proc").glob("[0-9]*/stat"):  # what it has started is of that session, too
            with contextlib.suppress(OSError, ValueError, IndexError):
                if call.read_text().rpartition(")")[2].split()[3] == submission.number:
                    os.kill(int(call.parent.name), signal.SIGKILL)


@pytest.mark.job
def test_the_environment_of_this_python_is_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = profile_files.read_site("slurm", {})
    conda = str(tmp_path)
    (tmp_path / "conda-meta").mkdir()
    for prefix, base, used in (("/v", "/usr", "/v"), ("/usr", "/usr", ""), (conda, conda, conda)):
        monkeypatch.setattr("sys.prefix", prefix)
        monkeypatch.setattr("sys.base_prefix", base)
        assert job_files(site, "run", Path("out"), ()).environment == used


@pytest.mark.job
def test_scripts_are_named_by_the_time_in_utc() -> None:
    """The hour that comes twice when summer time ends has two names."""
    site, names = profile_files.read_site("slurm", {}), []
    for seconds in (DOUBLE_HOUR, DOUBLE_HOUR + 3600):
        with clock(seconds, "Europe/Berlin"):
            names.append(Path(job_files(site, "run", Path("out"), ()).script).name)
    assert names == ["run-20251026-003000.sbatch", "run-20251026-013000.sbatch"]
