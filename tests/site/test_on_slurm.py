"""Jobs on a real Slurm of two nodes, as a person submits them: the doctor, signals in each phase, requeues, staging, time limits.

The cluster is brought up for this module (`tests.support.slurm_cluster`); where that cannot be done, the reason is reported.
"""

import contextlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpctrain
from hpctrain.job.session import ranges
from hpctrain.launch.process_end import SIGNALLED, STOPPED, USER_ERROR
from hpctrain.runs.directory import latest
from hpctrain_testing.run import processes_with, wait_until
from tests.support.signal_storm import final_tensors, prepare, same_bits
from tests.support.slurm_cluster import NODES, SlurmCluster, SlurmJob, SlurmUser, missing, slurm_cluster
from tests.support.stand_ins import edited

pytestmark = [pytest.mark.job, pytest.mark.slow]
EPOCHS, STEPS = 3, 5
STEPS_RECORDED = "metrics.interval_seconds=0.000001"
PROFILE = """
extends: slurm
description: two nodes that are one machine
node: {{cores: {cores}, ranks: 1}}
launch: {{mpi: pmi2}}
scratch: {{directory: {disk}}}
"""
# A minute is the shortest limit that Slurm knows. Twice a minute it looks which jobs have less time left, or none: a job
# has a quarter of a minute to start, and half of one to save.
IMPATIENT = "extends: twins\nsignal_seconds: 45\n"
WITHOUT_MPI = "extends: twins\nlaunch: {mpi: null}\n"


def _has_mpich() -> bool:
    return any(importlib.metadata.distributions(name="mpich"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm of two nodes."""
    reason = missing() if _has_mpich() else "The wheel of MPICH, which srun starts by pmi2, is not installed."
    if reason is not None:
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def user(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> SlurmUser:
    """Somebody with a configuration, data, code and site profiles of their own."""
    user = SlurmUser(tmp_path_factory.mktemp("user"), cluster)
    prepare(user.folder, images=32 * STEPS, epochs=EPOCHS)
    shutil.copy(Path(__file__).parents[1] / "support" / "holding_reporter.py", user.folder)
    user.write_site("twins", PROFILE.format(cores=cluster.cores, disk=cluster.node_disk))
    user.write_site("impatient", IMPATIENT)
    user.write_site("without-mpi", WITHOUT_MPI)
    return user


def _submit(user: SlurmUser, output: str, *more: str, site: str = "twins", hold: str = "", **how: Any) -> SlurmJob:
    """A job on both nodes with its runs in `output`, which rank 0 holds up in a phase."""
    reporter = f"metrics.reporters=[{{name: holding_reporter.py:Hold, phase: {hold}, job: {output}}}]"
    overrides = [f"output={output}", STEPS_RECORDED, *([reporter] if hold else [])]
    options = ["--site", site, "--nodes", str(len(NODES)), "--time", "10m"]
    return user.submit("storm.yaml", *overrides, *options, *more, **how)


def _tell(user: SlurmUser, job: SlurmJob, output: str, command: str | None = None) -> None:
    """Send the signal while rank 0 is held up, by scancel or another command."""
    user.wait((user.folder / f"{output}.here").exists, job)
    user.run("bash", "-c", command or f"scancel --signal=USR1 {job.number}")


def _records(user: SlurmUser, output: str, *kinds: str) -> list[dict[str, Any]]:
    """The lines of the metrics, without what is measured in time."""
    run = latest(user.folder / output, "storm")
    timed = ("time", "images_per_second")
    return [{key: each[key] for key in each if key not in timed} for each in run.metrics() if each["kind"] in kinds]


def _require_same(user: SlurmUser, undisturbed: str, output: str) -> None:
    """A run has the bits and the metrics of the undisturbed one, each step and each evaluation once."""
    assert same_bits(final_tensors(user.folder, undisturbed), final_tensors(user.folder, output))
    kinds = ("interval", "epoch", "evaluation")
    assert _records(user, output, *kinds) == _records(user, undisturbed, *kinds)


@pytest.fixture(scope="module")
def limited(user: SlurmUser) -> SlurmJob:
    """A job that waits for the end of its time from the beginning of the module on, with the others on the same cores."""
    return _submit(user, "limited", "--time", "1m", "--no-doctor", site="impatient", hold="step")


@pytest.fixture(scope="module")
def undisturbed(user: SlurmUser, limited: SlurmJob) -> str:
    """The output of a job that a doctor has looked after and that has not been stopped."""
    job = _submit(user, "whole")
    assert user.code(job) == 0, job.text
    for sentence in ("2 ranks on 2 nodes, started by Slurm srun.", "A training would run", f"epoch {EPOCHS}/{EPOCHS}"):
        assert sentence in job.text
    assert "resumed" not in job.text
    assert user.shown(job)["Restarts"] == "0"
    assert [each["step"] for each in _records(user, "whole", "interval")] == list(range(1, EPOCHS * STEPS + 1))
    return "whole"


def test_each_node_has_cores_and_a_disk_of_its_own(cluster: SlurmCluster, user: SlurmUser) -> None:
    command = 'taskset -cp $$; touch "$1/$(hostname)"; ls "$1"'
    srun = ["srun", "--nodes=2", "--label", "--cpu-bind=cores", f"--cpus-per-task={cluster.cores}"]
    said = user.run(*srun, "bash", "-c", command, "on-node", str(cluster.node_disk))
    lines = sorted(line.partition(": ")[::2] for line in said.splitlines())
    assert [text for rank, text in lines if "list" not in text] == list(NODES)
    first, second = (text.rpartition(": ")[2] for rank, text in lines if "list" in text)
    assert first != second
    for node in NODES:
        assert [path.name for path in cluster.disks[node].iterdir()] == [node]
        (cluster.disks[node] / node).unlink()


_BRINGS_UP = """
import subprocess, sys, time
from pathlib import Path
from tests.support.slurm_cluster import slurm_cluster
with slurm_cluster(Path(sys.argv[1])) as cluster:
    subprocess.run(["sbatch", "--output=none", "--nodes=2", "--wrap", "srun sleep 5999"], env=cluster.environment, check=True)
    while "sleep 5999" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout:
        time.sleep(0.05)
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_second_cluster_ends_with_the_process_that_brought_it_up(
    cluster: SlurmCluster, user: SlurmUser, tmp_path: Path, number: signal.Signals
) -> None:
    top = Path(__file__).parents[2]
    environment = {**user.environment, "PYTHONPATH": str(top)}
    command = [sys.executable, "-c", _BRINGS_UP, str(tmp_path / "other")]
    of_cluster = f"SLURM_CONF={tmp_path}/other/slurm.conf"
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while process.stdout.readline() not in (b"up\n", b""):
            pass
        assert processes_with(of_cluster)
        process.send_signal(number)
    wait_until(lambda: not processes_with(of_cluster))
    assert "is UP" in user.run("scontrol", "ping")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("phase", "settings"), [("step", []), ("evaluation", []), ("checkpoint", ["checkpoint.every_steps=3"])])
def test_a_signal_saves_and_queues_the_job_again(user: SlurmUser, undisturbed: str, phase: str, settings: list[str]) -> None:
    job = _submit(user, phase, *settings, "--no-doctor", hold=phase)
    _tell(user, job, phase)
    assert user.code(job) == 0, job.text
    assert user.shown(job)["Restarts"] == "1"
    # The output of both parts is in one file, in order.
    first, second = (job.text.index(word) for word in ("stopped by SIGUSR1", "resumed"))
    assert first < second < job.text.rindex(f"epoch {EPOCHS}/{EPOCHS}")
    _require_same(user, undisturbed, phase)
    assert not list((user.folder / phase / "jobs").glob(".stopped*"))


def test_the_printed_command_stops_for_good_and_the_same_submission_goes_on(user: SlurmUser, undisturbed: str) -> None:
    job = _submit(user, "good", "--no-doctor", hold="step")
    _tell(user, job, "good", job.stop)
    assert user.code(job) == STOPPED, job.text
    assert user.shown(job)["Restarts"] == "0"
    again = _submit(user, "good", "--no-doctor", hold="step")
    assert user.code(again) == 0, again.text
    assert "resumed" in again.text
    _require_same(user, undisturbed, "good")


def test_a_launcher_of_another_mpi_is_reported_and_nothing_is_trained(user: SlurmUser) -> None:
    job = _submit(user, "alone", site="without-mpi")
    # The second process leaves the word to the first; where srun ends it meanwhile, the job has the code of that signal.
    assert user.code(job) in (USER_ERROR, SIGNALLED + signal.SIGTERM), job.text
    assert "--mpi=pmi2" in job.text
    assert latest(user.folder / "alone", "storm") is None


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds a copy of hpctrain and an MPI, and finds other packages in the tests' own."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (package,) = hpctrain.__path__
    shutil.copytree(package, packages / "hpctrain")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    libraries = Path(sys.prefix) / "lib"
    for library in libraries.glob("libmpi.so*"):
        shutil.copy(library, folder / "lib")
    shutil.copytree(libraries / "mpich", folder / "lib" / "mpich")
    return folder


def test_a_staged_environment_is_run_from_the_nodes_own_disks(user: SlurmUser, environment: Path) -> None:
    subprocess.run(["tar", "--create", "--file", user.folder / "environment.tar", "--directory", environment, "."], check=True)
    bare = {name: value for name, value in user.environment.items() if name != "PYTHONPATH"}
    python = str(environment / "bin" / "python")
    stage = ["--stage", "environment.tar", "--no-doctor"]
    job = _submit(user, "staged", *stage, hold="nowhere", python=python, environment=bare)
    assert user.code(job) == 0, job.text
    for node in NODES:
        prefix, package = (user.folder / f"from-{job.number}-{node}").read_text().splitlines()
        assert Path(prefix) == user.cluster.node_disk / f"hpctrain-{job.number}"
        assert Path(package).is_relative_to(prefix)
        assert not list(user.cluster.disks[node].iterdir())
    assert final_tensors(user.folder, "staged")[0] == EPOCHS * STEPS


@pytest.mark.thorough  # takes Slurm's least limit, a minute; the signals before it are sampled
def test_the_time_limit_itself_saves_and_queues_the_job_again(user: SlurmUser, limited: SlurmJob, undisturbed: str) -> None:
    assert user.code(limited) == 0, limited.text
    assert int(user.shown(limited)["Restarts"]) >= 1
    assert "stopped by SIGUSR1" in limited.text
    _require_same(user, undisturbed, "limited")


def _bound(configuration: str) -> dict[int, str]:
    """By rank, its cores as the system knows them, of the ranks that run on a cluster."""
    cores = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            environ = dict(line.split("=", 1) for line in (folder / "environ").read_text().split("\0") if "=" in line)
            ours = environ.get("SLURM_CONF") == configuration and "SLURM_PROCID" in environ
            if ours and "mpi4py" in (folder / "cmdline").read_text().split("\0"):
                cores[int(environ["SLURM_PROCID"])] = ranges(os.sched_getaffinity(int(folder.name)))
    return cores


@pytest.mark.thorough
def test_ranks_are_bound_to_the_cores_that_were_asked_for(tmp_path: Path) -> None:
    """By the script in jobs/, on nodes that have all cores of this machine; a job that its user cancels is not queued again."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with slurm_cluster(tmp_path / "cluster", shared_cores=True) as cluster:
        user = SlurmUser(tmp_path, cluster)
        prepare(tmp_path, images=480)
        script = (Path(__file__).parents[2] / "jobs" / "slurm.sbatch").read_text()
        (tmp_path / "job.sbatch").write_text(edited(script, DOCTOR_SECONDS="0", MPI="pmi2"))
        kept = {name: value for name, value in user.environment.items() if not name.endswith("_NUM_THREADS")}
        kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
        for tasks in sorted({1, cluster.cores}):
            threads, log = cluster.cores // tasks, tmp_path / f"{tasks}.out"
            sizes = ("--nodes=2", f"--ntasks-per-node={tasks}", f"--cpus-per-task={threads}", "--time=10", f"--output={log}")
            words = ("job.sbatch", "storm.yaml", f"output=bound-{tasks}", "epochs=100000")
            job = SlurmJob(user.run("sbatch", "--parsable", *sizes, *words, environment=kept).strip(), log)
            user.wait(lambda job=job: "run directory" in job.text, job)
            bound = _bound(kept["SLURM_CONF"])
            user.run("scancel", job.number)
            user.code(job)
            assert len(bound) == 2 * tasks
            each = " | ".join(bound[rank] for rank in range(tasks))
            assert f"cores of the ranks: {each} on each of 2 nodes" in job.text
            assert f"{threads} thread{'s' * (threads > 1)} per rank" in job.text
            user.wait(lambda: not _bound(kept["SLURM_CONF"]), job, may_end=True)
            shown = user.shown(job)
            assert (shown["Restarts"], shown["JobState"]) == ("0", "CANCELLED")
