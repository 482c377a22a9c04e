"""The scripts in jobs/, with stand-ins for the commands of their sites: what is called in which order and with which variables,
and how each way to end is answered. `make slurm` runs one of them on a real Slurm.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tarfile
from pathlib import Path

import click
import pytest

from hpctrain.cli.main import cli
from hpctrain.site import profile as profile_files
from hpctrain.site.job import JobFiles, JobRequest, plan_job, render
from hpctrain.site.profile import SiteProfile
from hpctrain_testing.run import wait_until
from tests.support.job_scripts import JOBS, SITES, path_of, require_sound, script_of
from tests.support.stand_ins import JOB, RANKS, ScriptOutcome, edited, install, run_script

pytestmark = pytest.mark.job

BY_SCHEDULER = {site: profile_files.read_site(site, {}).profile.scheduler for site in SITES}
SLURM = [site for site in SITES if BY_SCHEDULER[site] == "slurm"]
# One of each set of templates.
EACH = ["slurm", "polaris", "hostfile", "local"]
GIVEN = ("tiny.yaml", "batch=8", "name=a b")


def _profile(site: str) -> SiteProfile:
    return profile_files.read_site(site, {}).profile


def _run(folder: Path, site: str, *given: str, settings: dict[str, str] | None = None, **environ: str) -> ScriptOutcome:
    """The shipped script with a configuration and overrides, passed as its scheduler passes them."""
    given = given or GIVEN
    text = edited(path_of(site).read_text(), **(settings or {}))
    if BY_SCHEDULER[site] == "pbs":
        words = " ".join(f"'{word}'" for word in given)
        text = _with_train(text, words)
        given = ()
    return run_script(folder, text, *given, **environ)


def _with_train(text: str, words: str) -> str:
    line = "TRAIN=(configs/imagenet-resnet50.yaml)"
    assert text.count(line) == 1
    return text.replace(line, f"TRAIN=({words})")


def _launches(outcome: ScriptOutcome, word: str) -> list[tuple[str, ...]]:
    return [call for call in outcome.calls if call[0] in ("srun", "mpiexec") and word in call]


# -- as they are shipped -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", SITES)
def test_the_script_is_what_the_profile_and_the_templates_give(site: str) -> None:
    assert path_of(site).read_text() == script_of(site), "make docs writes jobs/ again"


def test_no_script_is_left_over() -> None:
    assert {path for path in JOBS.iterdir() if path.suffix in (".sbatch", ".pbs", ".sh")} == {path_of(site) for site in SITES}


@pytest.mark.parametrize("site", SITES)
def test_the_script_is_sound(site: str) -> None:
    subprocess.run(["bash", "-n", path_of(site)], check=True)
    require_sound(path_of(site).read_text())


@pytest.mark.parametrize("site", SITES)
def test_the_head_asks_for_what_the_profile_says(site: str) -> None:
    profile, text = _profile(site), path_of(site).read_text()
    word = {"slurm": "#SBATCH ", "pbs": "#PBS "}.get(profile.scheduler)
    assert (word is None) == (not profile.directives and profile.queue is None)
    for option in profile.directives:
        assert re.search(rf"^{word}{re.escape(option)}( |$)", text, re.MULTILINE), option
    if profile.scheduler == "slurm":
        for line in (f"--signal=USR1@{profile.signal_seconds}", "--requeue", "--open-mode=append"):
            assert f"#SBATCH {line}" in text
        cpus = profile.node.cores // profile.node.ranks * profile.node.cpus_per_core
        assert f"#SBATCH --cpus-per-task={cpus} " in text
    if profile.account is not None and profile.account.needed:
        assert "PROJECT" in text


# -- what is called ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", SITES)
def test_the_doctor_looks_before_the_training_and_both_start_alike(tmp_path: Path, site: str) -> None:
    outcome = _run(tmp_path, site, "tiny.yaml", "batch=8", "name=a b", "--steps", "3")
    assert outcome.code == 0, outcome.said
    doctor, train = (call for call in outcome.calls if call[0] in ("srun", "mpiexec") and call[1:] != ("--version",))
    cut = doctor.index("-m")
    assert doctor[: cut + 1] == train[: cut + 1]
    assert doctor[cut:] == ("-m", "mpi4py", "-m", "hpctrain", "doctor", "tiny.yaml", "batch=8", "name=a b", "--strict")
    limit = [word for word in train if word.startswith("max_time=")]
    assert len(limit) == (BY_SCHEDULER[site] == "pbs")
    stopped = train[train.index("--stopped-file") + 1]
    begin = ("-m", "mpi4py", "-m", "hpctrain", "train", "tiny.yaml", "--resume", "auto", "--stopped-file", stopped)
    assert train[cut:] == (*begin, *limit, "batch=8", "name=a b", "--steps", "3")
    assert not (tmp_path / stopped).exists()


@pytest.mark.parametrize("site", SITES)
def test_hpctrain_takes_the_words(tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _run(tmp_path, site, "tiny.yaml", "batch=8")
    for call in (call for call in outcome.calls if call[0] == "python"):
        name, *words = call[call.index("hpctrain") + 1 :]
        command = cli.get_command(click.Context(cli), name)
        if name == "doctor" and command is None:
            continue
        assert command is not None
        command.make_context(name, words)


@pytest.mark.parametrize("site", SLURM)
def test_srun_binds_and_ends_all_ranks_with_one(tmp_path: Path, site: str) -> None:
    outcome = _run(tmp_path, site)
    (train,) = _launches(outcome, "train")
    assert train[1] == "--kill-on-bad-exit=1"
    assert any(word.startswith("--cpu-bind=") for word in train)
    assert set(_profile(site).launch.options) <= set(train)
    assert outcome.environments[0]["SRUN_CPUS_PER_TASK"] == "6"
    (train,) = _launches(_run(tmp_path, site, settings={"MPI": "pmi2"}), "train")
    assert train[1:3] == ("--mpi=pmi2", "--kill-on-bad-exit=1")


def test_mpiexec_receives_ranks_and_cores(tmp_path: Path) -> None:
    settings = {"RANKS_PER_NODE": "8", "CORES_PER_RANK": "4"}
    (train,) = _launches(_run(tmp_path, "polaris", settings=settings), "train")
    nodes = 2  # that the stand-in for PBS names
    assert train[1:9] == ("-n", str(8 * nodes), "--ppn", "8", "--depth", "4", "--cpu-bind", "depth")
    (train,) = _launches(_run(tmp_path, "hostfile", settings={"NODES": "3", "HOSTFILE": "nodes"}), "train")
    assert train[1:7] == ("-hostfile", "nodes", "-n", "12", "-ppn", "4")
    settings = {"NODES": "3", "HOSTFILE": "nodes"}
    (train,) = _launches(_run(tmp_path, "hostfile", settings=settings, MPIEXEC_VERSION="mpiexec (Open MPI) 5.0.11"), "train")
    cut = train.index("-n")
    assert train[1:5] == ("-hostfile", "nodes", "--bind-to", "none")
    assert {train[at + 1] for at, word in enumerate(train[:cut]) if word == "-x"} == {
        "TERM=dumb",
        "PATH",
        "HDF5_USE_FILE_LOCKING",
    }
    assert train[cut : cut + 4] == ("-n", "12", "--map-by", "ppr:4:node")
    (train,) = _launches(_run(tmp_path, "local", settings={"RANKS_PER_NODE": "3"}), "train")
    assert train[1:3] == ("-n", "3")


@pytest.mark.parametrize("site", SITES)
def test_ranks_see_the_variables_and_their_own_gpu(tmp_path: Path, site: str) -> None:
    profile = _profile(site)
    outcome = _run(tmp_path, site, OMP_NUM_THREADS="1")
    assert sorted(outcome.environments) == list(range(RANKS))
    for rank, environment in outcome.environments.items():
        assert environment["HDF5_USE_FILE_LOCKING"] == "FALSE"
        assert "OMP_NUM_THREADS" not in environment
        for name, variable in profile.environment.items():
            assert environment[name] == variable.value
        if profile.gpu is not None:
            assert environment[profile.gpu.variable] == str(profile.gpu.order[rank])


@pytest.mark.parametrize("site", ["slurm", "hostfile", "local"])
def test_a_configuration_must_be_given(tmp_path: Path, site: str) -> None:
    outcome = run_script(tmp_path, path_of(site).read_text())
    assert outcome.code == 2
    assert re.search(rf"usage: \w+ jobs/{path_of(site).name} CONFIG \[OVERRIDE ...\]", outcome.said)
    assert not outcome.calls


# -- how it ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, 2, 124, 137])
@pytest.mark.parametrize("site", EACH)
def test_the_job_ends_as_the_training_does(tmp_path: Path, site: str, status: int) -> None:
    outcome = _run(tmp_path, site, TRAIN_STATUS=str(status))
    assert outcome.code == status, outcome.said
    assert not outcome.of("scontrol")
    assert not outcome.of("qsub")


@pytest.mark.parametrize("restarts", [0, 1, 2, 3])
@pytest.mark.parametrize("site", SLURM)
def test_a_stopped_job_is_queued_again_up_to_the_limit(tmp_path: Path, site: str, restarts: int) -> None:
    count = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    outcome = _run(tmp_path, site, settings={"MOST_RESTARTS": "2"}, TRAIN_STATUS="85", **count)
    assert outcome.code == 85
    assert outcome.of("scontrol") == ([("scontrol", "requeue", JOB)] if restarts < 2 else [])
    assert ("submit it again to continue" in outcome.said) == (restarts >= 2)
    assert not list(tmp_path.glob(".stopped*"))


@pytest.mark.parametrize("restarts", [0, 1, 2, 3])
def test_under_pbs_it_submits_itself_up_to_the_limit(tmp_path: Path, restarts: int) -> None:
    count = {"HPCTRAIN_RESTARTS": str(restarts)} if restarts else {}
    outcome = _run(tmp_path, "polaris", settings={"MOST_RESTARTS": "2"}, TRAIN_STATUS="85", **count)
    assert outcome.code == 85
    again = [("qsub", "-v", f"HPCTRAIN_RESTARTS={restarts + 1},HPCTRAIN_FIRST_JOB={JOB}", "jobs/polaris.pbs")]
    assert outcome.of("qsub") == (again if restarts < 2 else [])
    (tmp_path / "no-restart").touch()
    assert not _run(tmp_path, "polaris", TRAIN_STATUS="85").of("qsub")


@pytest.mark.parametrize("site", ["hostfile", "local"])
def test_without_a_scheduler_a_stopped_training_is_not_started_again(tmp_path: Path, site: str) -> None:
    outcome = _run(tmp_path, site, TRAIN_STATUS="85")
    assert (outcome.code, len(_launches(outcome, "train"))) == (85, 1)
    assert "start it again to continue" in outcome.said


def test_a_queue_that_refuses_is_said(tmp_path: Path) -> None:
    outcome = _run(tmp_path, "slurm", TRAIN_STATUS="85", SCONTROL_STATUS="1")
    assert outcome.code == 85
    assert "scontrol could not requeue the job; submit it again to continue" in outcome.said
    outcome = _run(tmp_path, "polaris", TRAIN_STATUS="85", SUBMIT_STATUS="1")
    assert outcome.code == 85
    assert "qsub could not submit the job again" in outcome.said


@pytest.mark.parametrize("site", SITES)
def test_a_doctor_that_fails_ends_the_job_before_the_training(tmp_path: Path, site: str) -> None:
    outcome = _run(tmp_path, site, DOCTOR_STATUS="2", TRAIN_STATUS="85")
    assert outcome.code == 2
    assert len(_launches(outcome, "doctor")) == 1
    assert not _launches(outcome, "train")
    assert not outcome.of("scontrol") + outcome.of("qsub")
    assert "the doctor ended with code 2" in outcome.said


@pytest.mark.parametrize("site", EACH)
def test_a_doctor_that_hangs_is_ended(tmp_path: Path, site: str) -> None:
    outcome = _run(tmp_path, site, settings={"DOCTOR_SECONDS": "1"}, DOCTOR_SLEEPS="50", timeout_seconds=30)  # type: ignore[arg-type]
    assert outcome.code == 124
    other = "; 255: ssh cannot reach a host in hosts" if site == "hostfile" else ""
    assert f"the doctor ended with code 124 (124: not within 1 s{other}), so no training was started" in outcome.said


@pytest.mark.parametrize("site", EACH)
def test_the_doctor_can_be_left_out_or_its_warnings_let_pass(tmp_path: Path, site: str) -> None:
    outcome = _run(tmp_path, site, settings={"DOCTOR_SECONDS": "0"}, DOCTOR_STATUS="2")
    assert (outcome.code, len(_launches(outcome, "train"))) == (0, 1)
    (doctor,) = _launches(_run(tmp_path, site, settings={"STRICT": ""}), "doctor")
    assert doctor[-3:] == ("tiny.yaml", "batch=8", "name=a b")


_STARTS = """#!/bin/bash
[ "$*" != --version ] || exit 0
while [ "$1" != python ]; do shift; done
exec "$@"
"""
_LISTENS = """#!/bin/bash
trap 'echo "asked to stop"; while [ "$1" != --stopped-file ]; do shift; done; : >"$2"; exit 0' USR1
echo "trains"
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("site", ["hostfile", "local"])
def test_a_request_to_stop_reaches_the_training(tmp_path: Path, site: str, number: signal.Signals) -> None:
    environment = install(tmp_path)
    (tmp_path / "bin" / "mpiexec").write_text(_STARTS)
    (tmp_path / "bin" / "python").write_text(_LISTENS)
    (tmp_path / "script").write_text(edited(path_of(site).read_text(), DOCTOR_SECONDS="0"))
    log = tmp_path / "hpctrain.log"
    command = ["bash", "script", "tiny.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            wait_until(lambda: log.exists() and "trains" in log.read_text())
            process.send_signal(number)
            assert process.wait(timeout=30) == 85
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert log.read_text() == "trains\nasked to stop\njob script: stopped with a checkpoint; start it again to continue\n"


# -- the environment on the nodes' own disks ---------------------------------------------------------------------------------


def _packed(folder: Path) -> str:
    """A tar of an environment whose python says that it is this one, and that writes down that it was put right."""
    packed = folder / "packed" / "bin"
    packed.mkdir(parents=True)
    python = 'echo "python of $(dirname "$0")"\n[ "${1##*/}" = conda-unpack ] && bash "$1"\nexit 0\n'
    (packed / "python").write_text(f"#!/bin/bash\n{python}")
    (packed / "conda-unpack").write_text('echo "put right in $(dirname "$0")"\n')
    for file in packed.iterdir():
        file.chmod(0o755)
    with tarfile.open(folder / "environment.tar", "w") as tar:
        tar.add(folder / "packed", ".")
    return "environment.tar"


STAGED = [site for site in SITES if _profile(site).scratch is not None]


@pytest.mark.parametrize("site", STAGED)
def test_the_environment_is_unpacked_on_the_nodes_and_used(tmp_path: Path, site: str) -> None:
    node = tmp_path / "node"
    node.mkdir()
    outcome = _run(tmp_path, site, settings={"STAGE": _packed(tmp_path), "ON_NODE": str(node / "hpctrain")})
    assert outcome.code == 0, outcome.said
    first = next(call for call in outcome.calls if call[1:] != ("--version",))
    assert first[0] == ("sbcast" if site in SLURM else "mpiexec")
    assert f"put right in {node}/hpctrain/bin" in outcome.said
    assert outcome.said.count(f"python of {node}/hpctrain/bin") >= 2 * RANKS
    assert not list(node.iterdir())  # nothing is left


@pytest.mark.parametrize("site", SLURM)
def test_an_sbcast_that_fails_ends_the_job_in_a_sentence(tmp_path: Path, site: str) -> None:
    outcome = _run(tmp_path, site, settings={"STAGE": _packed(tmp_path), "ON_NODE": str(tmp_path / "node")}, SBCAST_STATUS="3")
    assert outcome.code == 1
    assert [call[0] for call in outcome.calls] == ["sbcast"]
    assert f"job script: sbcast could not copy environment.tar to {tmp_path}/node.tar on each node" in outcome.said


@pytest.mark.parametrize("site", STAGED)
def test_a_tar_that_cannot_be_unpacked_ends_the_job_in_a_sentence(tmp_path: Path, site: str) -> None:
    (tmp_path / "broken.tar").write_text("no tar")
    outcome = _run(tmp_path, site, settings={"STAGE": "broken.tar", "ON_NODE": str(tmp_path / "node")})
    assert outcome.code == 1
    assert not _launches(outcome, "doctor") + _launches(outcome, "train")
    assert "job script: broken.tar could not be unpacked" in outcome.said


# -- an image ------------------------------------------------------------------------------------------------------------------


def _with_image(folder: Path, base: str) -> str:
    """A user's own profile of a site that runs Python in an image, rendered."""
    profile = folder / "config" / "hpctrain" / "sites" / "mine.yaml"
    profile.parent.mkdir(parents=True, exist_ok=True)
    command = "[apptainer, exec, --bind, /opt/cray]"
    profile.write_text(f"extends: {base}\ncontainer: {{image: $PLACE/hpctrain.sif, command: {command}, source: our wiki}}\n")
    site = profile_files.read_site("mine", {"XDG_CONFIG_HOME": str(folder / "config")})
    request = JobRequest(1, account="mine" if site.profile.account else None)
    return render(site, plan_job(site, request, JobFiles("run", "jobs/mine", log="hpctrain.log", train=("tiny.yaml",))))


@pytest.mark.parametrize("base", SITES)
def test_python_runs_in_the_image_that_a_profile_names(tmp_path: Path, base: str) -> None:
    text = _with_image(tmp_path, base)
    require_sound(text)
    image = tmp_path / "hpctrain.sif"
    image.touch()
    outcome = run_script(tmp_path, text, PLACE=str(tmp_path))
    assert outcome.code == 0, outcome.said
    for word in ("doctor", "train"):
        (call,) = _launches(outcome, word)
        at = call.index("apptainer")
        inside = ("exec", "--bind", "/opt/cray", str(image), "python", "-m", "mpi4py", "-m", "hpctrain", word)
        assert call[at + 1 : at + 1 + len(inside)] == inside
    gpu = _profile(base).gpu
    for rank, environment in outcome.environments.items():
        assert environment["HDF5_USE_FILE_LOCKING"] == "FALSE"
        assert gpu is None or environment[gpu.variable] == str(gpu.order[rank])


@pytest.mark.parametrize("base", EACH)
def test_an_image_that_is_not_there_ends_the_job_in_a_sentence(tmp_path: Path, base: str) -> None:
    outcome = run_script(tmp_path, _with_image(tmp_path, base), PLACE=str(tmp_path))
    assert outcome.code == 1
    assert not _launches(outcome, "doctor") + _launches(outcome, "train")
    assert f"job script: there is no image {tmp_path}/hpctrain.sif, so nothing was started" in outcome.said
