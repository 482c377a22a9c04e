"""`make slurm`: ranks of the shipped job script are bound to cores as was asked for, on a real Slurm whose nodes have several.

`python -m tests.support.slurm_jobs`. One line for each thing that was checked; exit code 1 where one does not hold. Both nodes
have all cores of this machine; signals, requeues and staging are the matter of `tests/site/test_on_slurm.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpctrain.job.session import ranges
from tests.support.signal_storm import prepare
from tests.support.slurm_cluster import SlurmJob, SlurmUser, missing, slurm_cluster

_SCRIPT = Path(__file__).parents[2] / "jobs" / "slurm.sbatch"
# The doctor would refuse nodes that share cores; MPICH's wheel needs pmi2.
_EDITS = {"DOCTOR_SECONDS=80": "DOCTOR_SECONDS=0", 'MPI=""': "MPI=pmi2"}


class Bench:
    """Submits the script in a directory of its own and counts what does not hold."""

    def __init__(self, user: SlurmUser) -> None:
        self.user = user
        path = f"{Path(sys.executable).parent}:{user.environment['PATH']}"
        kept = {name: value for name, value in user.environment.items() if not name.endswith("_NUM_THREADS")}
        self._environment = {**kept, "PATH": path}
        self._jobs = 0
        self.failures = 0
        prepare(user.folder, images=480)

    def say(self, holds: bool, what: str) -> None:
        """One line on a thing that must hold."""
        self.failures += not holds
        print(f"{'ok    ' if holds else 'FAILED'} {what}", flush=True)

    def submit(self, tasks: int, cores: int, *overrides: str) -> SlurmJob:
        """The script as it is shipped, but for `_EDITS`, on two nodes with `tasks` tasks each and `cores` cores per task."""
        text = _SCRIPT.read_text()
        for line, edited in _EDITS.items():
            assert text.count(line) == 1, line
            text = text.replace(line, edited)
        self._jobs += 1
        script, output = (self.user.folder / f"job-{self._jobs}.{ending}" for ending in ("sbatch", "out"))
        script.write_text(text)
        sizes = ["--nodes=2", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cores}", "--time=10"]
        command = ["sbatch", "--parsable", f"--output={output}", *sizes, str(script), "storm.yaml", *overrides]
        said = self.user.run(*command, environment=self._environment)
        assert said.strip().isdecimal(), said
        return SlurmJob(said.strip(), output)

    def cores(self) -> Mapping[int, str]:
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
    """The ranks of a job are bound as was asked for, and it says how; one that its user cancels is not queued again."""
    job = bench.submit(tasks, cores, "output=bound", "epochs=100000")
    bench.user.wait(lambda: "run directory" in job.text, job)
    actual = bench.cores()
    bench.user.run("scancel", job.number)
    bench.user.code(job)
    (line,) = re.findall(r"cores of the ranks: (.*)", job.text) or [""]
    (threads,) = re.findall(r"(\d+) threads? per rank", job.text) or ["0"]
    where = f"{tasks} x {cores} cores a node"
    bench.say(line == _words(actual, tasks), f"{where}: printed {line!r}, bound to {actual}")
    bench.say(int(threads) == cores, f"{where}: {threads} threads per rank")
    bench.user.wait(lambda: not bench.cores(), job, may_end=True)
    shown = bench.user.shown(job)
    bench.say((shown["Restarts"], shown["JobState"]) == ("0", "CANCELLED"), f"{where}: cancelled, it is not queued again")


def _words(actual: Mapping[int, str], tasks: int) -> str:
    if len(actual) != 2 * tasks:
        return "?"
    return " | ".join(actual[rank] for rank in range(tasks)) + " on each of 2 nodes"


def main() -> int:
    """Bring up a cluster, check, take it down."""
    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="hpctrain-slurm-"))
    try:
        with slurm_cluster(folder / "cluster", shared_cores=True) as cluster:
            bench = Bench(SlurmUser(folder, cluster))
            for tasks in sorted({1, cluster.cores}):
                check_cores(bench, tasks, cluster.cores // tasks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{bench.failures} things do not hold" if bench.failures else "all of it holds")
    return int(bench.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
