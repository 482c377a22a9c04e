"""Trainings that are killed at random moments and resumed: none may lose a checkpoint, change a bit, or leave a file or process.

Real jobs of two ranks. SIGKILL falls on a rank, on a rank's keeper, on the launcher, or on all of them at once, at a random
moment or while a checkpoint is being written. The job is resumed, killed again, and at the end of each chain it must have the
bits of an undisturbed run, and have left no process, no file of its own in shared memory, and no temporary file.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hpctrain.launch.process_end import FINISHED
from hpctrain.runs.directory import latest
from tests.support.signal_storm import Setting, StormJob, final_tensors, same_bits

#: by name, the overrides of the trainings that are killed
WRITERS: Mapping[str, tuple[str, ...]] = {
    "single": ("checkpoint.layout=single", "checkpoint.asynchronous=false"),
    "sharded": ("checkpoint.layout=sharded", "checkpoint.asynchronous=true"),
}

_SETTING = Setting("auto", 2, 1)
#: some ten megabytes, so that a checkpoint takes long enough to be killed in
_OVERRIDES = ("model.hidden=2000", "checkpoint.every_steps=4")
_MOST_IN_A_CHAIN = 4
_END_SECONDS = 30.0
_LEAVE_SECONDS = 10.0
_LOOK_SECONDS = 5e-4


@dataclass
class Tally:
    """The events of one writer. kills: by what was killed. in_writes: those that left a file half written.

    resumed: how many resumes went on from a checkpoint. compared: chains that were brought to their end. faults: sentences.
    """

    kills: Counter[str] = field(default_factory=Counter)
    in_writes: int = 0
    resumed: int = 0
    compared: int = 0
    faults: list[str] = field(default_factory=list)


def partial_files(folder: Path) -> set[tuple[Path, int]]:
    """The checkpoints that are being written, or were when their writer was killed, each with its number in the file system."""
    found = set()
    with contextlib.suppress(OSError):  # directories come and go
        for path in folder.rglob("*.partial*"):
            with contextlib.suppress(OSError):
                found.add((path, path.stat().st_ino))
    return found


def shared_memory_of(processes: Iterable[int]) -> set[Path]:
    """The files in shared memory that processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                if "/dev/shm/" in line and not line.endswith("(deleted)"):
                    found.add(Path(line.split(maxsplit=5)[5]))
    return found


def kill(processes: Iterable[int]) -> int:
    """End processes at once; give how many there were."""
    killed = 0
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            killed += 1
    return killed


def victims(job: StormJob, draws: random.Random) -> tuple[str, list[int]]:
    """Which processes of a job are killed, and the name of that choice."""
    ranks = job.processes()
    keepers = [rank for rank in ranks if _has_child_of(rank, ranks)]
    choices: dict[str, list[int]] = {
        "launcher": [job.process.pid],
        "rank": [process for process in ranks if process not in keepers],
        "keeper": keepers,
        "all": [job.process.pid, *ranks],
    }
    name = draws.choice([name for name, processes in choices.items() if processes])
    return name, choices[name] if name == "all" else [draws.choice(choices[name])]


def _has_child_of(process: int, ranks: Sequence[int]) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(child.pid in ranks for child in psutil.Process(process).children())
    return False


def kill_once(job: StormJob, output: Path, tally: Tally, draws: random.Random, moment: float | None) -> set[Path]:
    """Kill a job, or let it come to its end first; give the shared memory that it had mapped.

    Args:
        moment: seconds from now; None: while a checkpoint is being written.
    """
    if moment is None:
        _wait_for_a_write(job, output, draws)
    else:
        end = time.monotonic() + moment
        while job.process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
    if job.process.poll() is not None:
        return set()
    mapped = shared_memory_of(job.processes())
    name, processes = victims(job, draws)
    if kill(processes):
        tally.kills[name] += 1
    return mapped


def _wait_for_a_write(job: StormJob, output: Path, draws: random.Random) -> None:
    """Until some write of a checkpoint is under way, or the job has ended."""
    left, old, begun = draws.randrange(3), partial_files(output), False
    while job.process.poll() is None:
        writing = bool(partial_files(output) - old)
        if writing and not begun:
            if not left:
                time.sleep(draws.uniform(0, 0.02))
                return
            left -= 1
        begun = writing
        time.sleep(_LOOK_SECONDS)


def run_chain(
    folder: Path, name: str, overrides: Sequence[str], tally: Tally, chain: Sequence[float | None], reference: Any
) -> None:
    """Start, kill and resume one training at the moments of a chain, then let it come to its end; then compare."""
    draws = random.Random(name)
    mapped: set[Path] = set()
    arguments = ("--resume", "auto", *overrides)
    for moment in chain:
        old = partial_files(folder / name)
        job = StormJob(folder, _SETTING, name, *arguments)
        mapped |= kill_once(job, folder / name, tally, draws, moment)
        _, said = job.end(_END_SECONDS)
        tally.in_writes += bool(partial_files(folder / name) - old)
        tally.resumed += "resumed at" in said
        _look_for_processes(job, name, tally)
    job = StormJob(folder, _SETTING, name, *arguments)
    code, said = job.end()
    _look_for_processes(job, name, tally)
    _judge(folder / name, code, said, tally, mapped)
    if not tally.faults and not same_bits(final_tensors(folder, name), reference):
        tally.faults.append(f"{name}: other bits than the undisturbed run")
    tally.compared += 1


def _judge(output: Path, code: int, said: str, tally: Tally, mapped: set[Path]) -> None:
    if code != FINISHED:
        tally.faults.append(f"{output.name}: code {code}: {said[-1500:]}")
    run = latest(output, "storm")  # one that was killed in its first checkpoint cannot be resumed, and keeps what it has
    files = {path for path, _ in partial_files(output) if run is not None and run.path in path.parents}
    left = [path.name for path in files | mapped if path.exists()]
    if left:
        tally.faults.append(f"{output.name}: left {', '.join(sorted(left)[:5])}")


def _look_for_processes(job: StormJob, name: str, tally: Tally) -> None:
    end = time.monotonic() + _LEAVE_SECONDS
    while job.started_processes() and time.monotonic() < end:
        time.sleep(0.05)
    if left := job.started_processes():
        tally.faults.append(f"{name}: processes {left} still run")
        kill(left)


def moments(kills: int, in_writes: int, seconds: float, seed: int) -> list[float | None]:
    """When the kills come, in a random order: None stands for a write of a checkpoint."""
    draws = random.Random(seed)
    chosen = [None] * in_writes + [draws.uniform(0, seconds) for _ in range(kills - in_writes)]
    draws.shuffle(chosen)
    return chosen


def run_writer(folder: Path, name: str, overrides: Sequence[str], kills: int, in_writes: int, seed: int) -> Tally:
    """All kills of one writer: an undisturbed run first, then chains until the kills are used up."""
    tally, all_overrides = Tally(), (*_OVERRIDES, *overrides)
    begin = time.monotonic()
    code, said = StormJob(folder, _SETTING, f"{name}-reference", *all_overrides).end()
    assert code == FINISHED, said
    seconds = time.monotonic() - begin
    reference = final_tensors(folder, f"{name}-reference")
    wanted = moments(kills, in_writes, seconds, seed)
    while (tally.kills.total() < kills or tally.in_writes < in_writes) and not tally.faults:
        left, short = kills - tally.kills.total(), max(0, in_writes - tally.in_writes)
        wanted = wanted or moments(max(left, short), short, seconds, seed + tally.compared)
        chain = [wanted.pop() for _ in range(min(_MOST_IN_A_CHAIN, len(wanted)))]
        output = f"{name}-{tally.compared}"
        run_chain(folder, output, all_overrides, tally, chain, reference)
        print(f"{output}: {tally.kills.total()} kills, {tally.in_writes} in writes", flush=True)
        if not tally.faults:
            shutil.rmtree(folder / output)
    return tally
