"""`make slurm`: the shipped job script on a real Slurm of two nodes. Submitted, stopped by a signal, submitted again, finished.

`python -m tests.support.slurm_jobs`. One line for each thing that was checked; exit code 1 where one does not hold.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.data import format as data_format
from hpctrain.experiment.cores import ranges
from hpctrain.launch.exit_codes import STOPPED
from hpctrain.storage import checkpoint
from hpctrain.storage.run_directory import latest
from tests.support.slurm_cluster import missing, slurm_cluster

_SCRIPT = Path(__file__).parents[2] / "jobs" / "slurm.sbatch"
# Two nodes that are one machine share their cores, which the doctor would refuse.
_ALONE = {"DOCTOR_SECONDS=80": "DOCTOR_SECONDS=0"}
_REQUEUE = {**_ALONE, 'MPI=""': "MPI=pmi2"}  # which the MPICH wheel needs
_MPI = {**_REQUEUE, "MOST_RESTARTS=20": "MOST_RESTARTS=0"}
_PATIENCE_SECONDS = 150
_CONFIG = """
name: tiny
seed: 7
backend: numpy
model: {name: small, channels: [4, 6], hidden: 9}
data: {train: train.h5, test: train.h5}
batch: 12
epochs: 30
optimizer: {name: sgd, lr: 0.01, momentum: 0.9}
schedule: constant
deadline_seconds: 60
evaluate: {every_epochs: 10}
checkpoint: {every_epochs: 10}
"""


@dataclass(frozen=True)
class Job:
    """A submitted job and what it prints."""

    number: str
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


class Bench:
    """Submits the script in a directory of its own and counts what does not hold."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        kept = {name: value for name, value in environment.items() if not name.endswith("_NUM_THREADS")}
        self._environment = {**kept, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}
        self._jobs = 0
        self.failures = 0
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (480, 9, 8, 1), dtype=np.uint8)
        data_format.write(folder / "train.h5", 480, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 480))])
        (folder / "tiny.yaml").write_text(_CONFIG)

    def say(self, holds: bool, what: str) -> None:
        """One line on a thing that must hold."""
        self.failures += not holds
        print(f"{'ok    ' if holds else 'FAILED'} {what}", flush=True)

    def run(self, *command: str) -> str:
        """The output of a command of Slurm's."""
        done = subprocess.run(command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def submit(self, tasks: int, cores: int, *arguments: str, edits: Mapping[str, str]) -> Job:
        """The script as it is shipped, but for `edits`, on two nodes with so many tasks each and so many cores a task."""
        text = _SCRIPT.read_text()
        for line, edited in edits.items():
            assert text.count(line) == 1, line
            text = text.replace(line, edited)
        self._jobs += 1
        script, output = self.folder / f"job-{self._jobs}.sbatch", self.folder / f"job-{self._jobs}.out"
        script.write_text(text)
        sizes = ["--nodes=2", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cores}", "--time=10"]
        said = self.run("sbatch", "--parsable", f"--output={output}", *sizes, str(script), "tiny.yaml", *arguments)
        assert said.strip().isdecimal(), said
        return Job(said.strip(), output)

    def shown(self, job: Job) -> dict[str, str]:
        """The state of a job, as Slurm tells it."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", job.number)))

    def wait(self, reached: Callable[[], bool], job: Job) -> None:
        """Until something has come true; the job is shown where it does not.

        Raises:
            TimeoutError: it has not, for long.
        """
        end = time.monotonic() + _PATIENCE_SECONDS
        while not reached():
            if time.monotonic() > end:
                raise TimeoutError(f"Job {job.number} does not get on: {self.shown(job)}\n{job.text}")
            time.sleep(0.2)

    def code(self, job: Job) -> int:
        """The exit code of a job, once it has ended."""
        self.wait(lambda: self.shown(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), job)
        return int(self.shown(job)["ExitCode"].split(":")[0])

    def cores(self) -> dict[int, str]:
        """Rank -> its cores as the system knows them, of the ranks that run."""
        cores = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environ = dict(line.split("=", 1) for line in (folder / "environ").read_text().split("\0") if "=" in line)
                words = (folder / "cmdline").read_text().split("\0")
                ours = environ.get("SLURM_CONF") == self._environment["SLURM_CONF"]
                if ours and "mpi4py" in words and "SLURM_PROCID" in environ:
                    cores[int(environ["SLURM_PROCID"])] = ranges(os.sched_getaffinity(int(folder.name)))
            except (OSError, UnicodeDecodeError):
                continue
        return cores


def check_cores(bench: Bench, tasks: int, cores: int) -> None:
    """A job's ranks are bound as was asked for, and it says how."""
    job = bench.submit(tasks, cores, "output=bound", "epochs=100000", edits=_MPI)
    bench.wait(lambda: "run directory" in job.text, job)
    actual = bench.cores()
    bench.run("scancel", job.number)
    bench.code(job)
    (line,) = re.findall(r"cores of the ranks: (.*)", job.text) or [""]
    (threads,) = re.findall(r"(\d+) threads? per rank", job.text) or ["0"]
    of_a_node = " | ".join(actual[rank] for rank in range(tasks)) if len(actual) == 2 * tasks else "?"
    bench.say(line == f"{of_a_node} on each of 2 nodes", f"{tasks} x {cores} cores a node: printed {line!r}, bound to {actual}")
    bench.say(int(threads) == cores, f"{tasks} x {cores} cores a node: {threads} threads per rank")


def check_stop_and_resume(bench: Bench) -> None:
    """Stopped by USR1, submitted again, finished: the same bits as without."""
    cores = os.cpu_count() or 1
    whole = bench.submit(1, cores, "output=whole", edits=_MPI)
    bench.say(bench.code(whole) == 0, "a job that nobody disturbs ends with 0")
    bench.say("resumed" not in whole.text, "its first submission starts from nothing")
    first = bench.submit(1, cores, "output=stopped", "metrics.interval_seconds=0.1", edits=_MPI)
    bench.wait(lambda: "epoch 3/" in first.text, first)
    bench.run("scancel", "--signal=USR1", first.number)
    code = bench.code(first)
    bench.say(code == STOPPED, f"stopped by USR1 it ends with {code}")
    bench.say(bool(_newest(bench.folder / "stopped")), "and leaves a checkpoint")
    second = bench.submit(1, cores, "output=stopped", edits=_MPI)
    bench.say(bench.code(second) == 0 and "resumed" in second.text, "submitted again it goes on and ends with 0")
    tensors, others = (_newest(bench.folder / name) for name in ("whole", "stopped"))
    same = bool(tensors) and tensors.keys() == others.keys()
    same = same and all(np.array_equal(values, others[key]) for key, values in tensors.items())
    bench.say(same, "with the same bits as the undisturbed one")


def _newest(output: Path) -> Mapping[str, np.ndarray]:
    """The tensors of the newest checkpoint below `output`."""
    run = latest(output, "tiny")
    newest = checkpoint.read_newest(run.checkpoints) if run is not None else None
    return newest[1].tensors if newest is not None else {}


def check_requeue(bench: Bench) -> None:
    """A stopped job is queued again, a cancelled one is not."""
    job = bench.submit(1, 1, "output=requeued", "epochs=100000", edits=_REQUEUE)
    bench.wait(lambda: "run directory" in job.text, job)
    time.sleep(1)
    bench.run("scancel", "--signal=USR1", job.number)
    bench.wait(lambda: bench.shown(job)["Restarts"] == "1" and bench.shown(job)["JobState"] == "PENDING", job)
    bench.say(True, "a stopped job is queued again")
    bench.run("scancel", job.number)
    job = bench.submit(1, 1, "output=cancelled", "epochs=100000", edits=_REQUEUE)
    bench.wait(lambda: "run directory" in job.text, job)
    time.sleep(1)
    bench.run("scancel", job.number)
    bench.wait(lambda: not bench.cores(), job)
    time.sleep(5)
    shown = bench.shown(job)
    bench.say((shown["Restarts"], shown["JobState"]) == ("0", "CANCELLED"), "and one that its user cancels is not")


def check_wrong_mpi(bench: Bench) -> None:
    """Without the edit, one sentence names the option."""
    job = bench.submit(1, 1, "output=alone", edits=_ALONE)
    code = bench.code(job)
    bench.say(code == 2 and "MPICH needs `srun --mpi=pmi2`" in job.text, f"without MPI=pmi2 it ends with {code} and says so")
    bench.say(not (bench.folder / "alone").exists(), "and trains nothing")


def main() -> int:
    """Bring up a cluster, check, take it down."""
    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="hpctrain-slurm-"))
    try:
        with slurm_cluster(folder / "cluster") as environment:
            bench = Bench(folder, environment)
            total = os.cpu_count() or 1
            for tasks in sorted({1, total}):
                check_cores(bench, tasks, total // tasks)
            check_wrong_mpi(bench)
            check_stop_and_resume(bench)
            check_requeue(bench)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{bench.failures} things do not hold" if bench.failures else "all of it holds")
    return int(bench.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
