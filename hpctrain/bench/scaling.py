"""Scaling studies: the same training on several numbers of ranks, one job after another.

Efficiency is relative to the smallest number of ranks: T(R0) / T(R) for weak scaling, R0 T(R0) / (R T(R)) for strong scaling,
where T is the median step time. A point whose ranks share cores has no efficiency.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpctrain.assembly.faults import load_checked
from hpctrain.bench.machine import machine_facts
from hpctrain.config.schema import Config
from hpctrain.core.errors import ConfigError, HpctrainError, LaunchError
from hpctrain.core.files import read_text
from hpctrain.core.text import counted
from hpctrain.launch.threads import usable_cores
from hpctrain.run.trace_report import COMPUTE_ONLY_FILE
from hpctrain.runs.directory import TABLE_FILE, RunDirectory
from hpctrain.storage.atomic_write import write_json

Mode = Literal["weak", "strong"]

_MANY_EPOCHS = 1_000_000  # enough for any number of steps


@dataclass(frozen=True)
class ScalingStudy:
    """Settings of a scaling study.

    Attributes:
        mode: "weak" or "strong"; if weak, the configured batch is the batch of each rank.
        steps, timeout_seconds: number of steps and time limit of a job.
        launcher: command that contains "{ranks}"; None: mpiexec.
        threads: number of threads per rank; None: as configured, else the cores divided by the ranks of the largest job.
    """

    file: Path
    overrides: tuple[str, ...] = ()
    mode: Mode = "weak"
    steps: int = 20
    launcher: str | None = None
    threads: int | None = None
    timeout_seconds: float = 3600.0


@dataclass(frozen=True)
class Point:
    """Measurement with one number of ranks. Times are per step, and medians over steps unless stated otherwise.

    Attributes:
        batch: samples of a step over all ranks.
        compute_only_seconds: time of a step without communication, on the slowest rank.
        communication_seconds: time of communication, mean over ranks.
        exposed_seconds: time of communication that no computation hides, mean over ranks.
        limit_seconds: lower limit of the time of a step: the time of the exchange, or the time in which a core computes and
            handles messages, whichever is longer.
        about: names and versions of the software, the model and the averager.
        efficiency: efficiency relative to the first point; None if ranks share cores at either point (`oversubscribed`).
        predicted_seconds: predicted time of a step, by which the run chose its plan; None if it chose none.
    """

    ranks: int
    threads: int
    batch: int
    step_seconds: float
    compute_only_seconds: float
    communication_seconds: float
    exposed_seconds: float
    limit_seconds: float
    oversubscribed: bool
    about: Mapping[str, Any]
    efficiency: float | None = None
    predicted_seconds: float | None = None

    @property
    def images_per_second(self) -> float:
        return self.batch / self.step_seconds


def run(task: ScalingStudy, ranks: Sequence[int], *, say: Callable[[str], None] = print) -> list[Point]:
    """Measure all points in the given order, each with two jobs.

    Raises:
        ConfigError: the configuration cannot be used.
        LaunchError: a job cannot be started, fails or takes too long; if it fails, the message contains the end of its output.
    """
    config = load_checked(task.file, task.overrides)
    threads = task.threads if task.threads is not None else _threads(config, task, max(ranks))
    points = []
    for count in ranks:
        say(f"{counted(count, 'rank')} ...")
        points.append(_measure(task, config, count, threads))
    return with_efficiency(points, task.mode)


def with_efficiency(points: Sequence[Point], mode: Mode) -> list[Point]:
    """Return the points with their efficiency relative to the first one; None if ranks share cores at either point."""
    base = points[0]

    def efficiency(point: Point) -> float | None:
        if base.oversubscribed or point.oversubscribed:
            return None
        ratio = base.step_seconds / point.step_seconds
        return ratio if mode == "weak" else ratio * base.ranks / point.ranks

    return [replace(point, efficiency=efficiency(point)) for point in points]


def _threads(config: Config, task: ScalingStudy, most_ranks: int) -> int | None:
    """Return the number of threads per rank for all points; None if it is configured, or if a custom launcher is used."""
    if config.threads != "auto" or task.launcher is not None:
        return None
    return max(1, usable_cores(os.sched_getaffinity(0)) // most_ranks)


def _measure(task: ScalingStudy, config: Config, ranks: int, threads: int | None) -> Point:
    batch = config.batch * ranks if task.mode == "weak" else config.batch
    if batch < ranks:
        raise ConfigError(f"batch is {batch}, but must be at least {ranks}, a sample for each rank.")
    settings = [
        *task.overrides,
        f"batch={batch}",
        f"epochs={_MANY_EPOCHS}",
        "evaluate.every_epochs=0",
        "checkpoint.every_epochs=0",
        "checkpoint.every_steps=0",
    ]
    settings += [] if threads is None else [f"threads={threads}"]
    table, account = _job(task, ranks, [*settings, "trace=true"], TABLE_FILE)
    alone, _ = _job(task, ranks, [*settings, "--compute-only"], COMPUTE_ONLY_FILE)
    total = table["table"]["total"]
    names = ("kernels", "mpi", "launcher", "numpy", "model", "averager")
    return Point(
        ranks=ranks,
        threads=table["threads"],
        batch=batch,
        step_seconds=table["table"]["median_step_seconds"],
        compute_only_seconds=alone["compute_only_seconds"],
        communication_seconds=total["communication_seconds"],
        exposed_seconds=total["exposed_seconds"],
        limit_seconds=alone["limit_seconds"],
        oversubscribed=table["oversubscribed"],
        about={name: table[name] for name in names},
        predicted_seconds=account.get("predicted_step_seconds"),
    )


def _job(task: ScalingStudy, ranks: int, arguments: Sequence[str], result: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run one job in a temporary directory. Return the content of its file `result`, and its last `steps` metrics, if any."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-scaling-", dir=Path.cwd()) as folder:
        program = [sys.executable, "-m", "mpi4py", "-m", "hpctrain", "train", str(task.file)]
        command = [*_launcher(task, ranks), *program, *arguments, "--steps", str(task.steps), f"output={folder}"]
        code, output = _run(command, task.timeout_seconds)
        if code != 0:
            end = "\n".join(output.strip().splitlines()[-12:])
            raise LaunchError(f"The job of {counted(ranks, 'rank')} ended with exit code {code}: {shlex.join(command)}\n{end}")
        paths = list(Path(folder).glob(f"*/{result}"))
        if len(paths) != 1:
            raise LaunchError(f"The job of {counted(ranks, 'rank')} did not write {result}; check {shlex.join(command)}")
        content: dict[str, Any] = json.loads(read_text(paths[0]))
        if content["ranks"] != ranks:
            raise LaunchError(f"The job has {counted(content['ranks'], 'rank')}, but must have {ranks}; check the launcher.")
        accounts = [line for line in RunDirectory(paths[0].parent).metrics() if line["kind"] == "steps"]
        return content, dict(accounts[-1]) if accounts else {}


def _launcher(task: ScalingStudy, ranks: int) -> list[str]:
    if task.launcher is not None:
        if "{ranks}" not in task.launcher:
            raise LaunchError(f'--launcher is {task.launcher!r}, but must contain {{ranks}}, as in "srun -n {{ranks}}".')
        return shlex.split(task.launcher.replace("{ranks}", str(ranks)))
    own_mpiexec = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(own_mpiexec) if own_mpiexec.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise LaunchError('Cannot find mpiexec next to this Python or on PATH; give one with --launcher "... {ranks}".')
    return [mpiexec, "-n", str(ranks)]


def _run(command: Sequence[str], timeout_seconds: float) -> tuple[int, str]:
    """Run a command, and return exit code and output. After a timeout, kill the whole job."""
    try:
        with subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout_seconds)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired:
        sentence = f"A job took longer than {timeout_seconds:g} s; increase --timeout-seconds: {shlex.join(command)}"
        raise LaunchError(sentence) from None
    except OSError as error:
        raise LaunchError(f"Cannot start {command[0]} ({error.strerror}); give another --launcher.") from error
    return process.returncode, output


def lines(points: Sequence[Point], mode: Mode) -> list[str]:
    """Return the lines of the table of points."""
    planned = any(each.predicted_seconds is not None for each in points)
    head = f"{'ranks':>6} {'batch':>7} {'step ms':>9}{' predicted ms' if planned else ''} {'compute ms':>11} {'exposed ms':>11}"
    made = [f"{head} {'limit ms':>9} {'limit/step':>10} {'images/s':>9}  {mode} efficiency"]
    for each in points:
        predicted = "-" if each.predicted_seconds is None else f"{each.predicted_seconds * 1e3:.2f}"
        predicted = f" {predicted:>12}" if planned else ""
        efficiency = "oversubscribed" if each.oversubscribed else "-" if each.efficiency is None else f"{each.efficiency:.1%}"
        made.append(
            f"{each.ranks:6d} {each.batch:7d} {each.step_seconds * 1e3:9.2f}{predicted} "
            f"{each.compute_only_seconds * 1e3:11.2f} {each.exposed_seconds * 1e3:11.2f} {each.limit_seconds * 1e3:9.2f} "
            f"{each.limit_seconds / each.step_seconds:10.2f} {each.images_per_second:9.0f}  {efficiency}"
        )
    if any(each.oversubscribed for each in points):
        made.append("oversubscribed: ranks share cores, so the times do not show scaling")
    return made


def write(path: Path, task: ScalingStudy, points: Sequence[Point]) -> None:
    """Write all points and the machine on which they were measured as JSON.

    Raises:
        HpctrainError: the file cannot be written.
    """
    content = {
        "file": str(task.file),
        "overrides": list(task.overrides),
        "mode": task.mode,
        "steps": task.steps,
        "machine": machine_facts(),
        "points": [{**asdict(each), "images_per_second": each.images_per_second} for each in points],
    }
    try:
        write_json(path, content)
    except OSError as error:
        raise HpctrainError(f"Cannot write {path} ({error.strerror}); give another --out.") from error
