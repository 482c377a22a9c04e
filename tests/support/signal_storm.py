"""Trainings under thousands of signals: none may crash, change a bit of the result, or end a run without its checkpoint.

Real jobs on both kernel sets, 1 and 2 ranks, 1 and 2 threads. Signals that stop nothing fall on whole runs. Those that stop a run
fall on it in bursts from a random moment on; it must leave a checkpoint and code 85, is resumed, stopped again, and at the end it
must have the bits of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np

from hpctrain.launch.process_end import FINISHED, STOPPED
from hpctrain.launch.process_start import HELD, STOPS
from hpctrain.runs.directory import latest
from hpctrain_testing.run import StartedJob, find_mpiexec
from tests.support import tiny_runs
from tests.support.newest_checkpoint import read_newest

QUIET = tuple(number for number in HELD if number not in STOPS)

_GAP_SECONDS = (0.1e-3, 0.7e-3)
# Of one burst: SIGINT and SIGTERM that come later than AGAIN_SECONDS mean something else.
_BURST_SECONDS = 2.0
_PATIENCE_SECONDS = 180.0

_CONFIG = tiny_runs.tiny(
    "name: storm, backend: auto, model: {name: small, channels: [16, 16], hidden: 24, dropout: 0.2}, batch: 32, epochs: EPOCHS, "
    "data: {train: FOLDER/train.h5, test: FOLDER/test.h5, augment: [{name: flip}]}, checkpoint: {keep: 3}, "
    "averager: {name: sharded, bucket_bytes: 8192}, deadline_seconds: 120"
)


@dataclass(frozen=True)
class Setting:
    """The kernels, ranks and threads of a job. ranks: 0 stands for one process without a launcher."""

    kernels: str
    ranks: int
    threads: int


@dataclass
class Tally:
    """The events of one setting. sent: signals by name. faults: sentences, none where all is well.

    runs: jobs that got signals that do not stop. requests: jobs that got a burst of one that does; stopped: those that left a
    checkpoint and code 85; finished: those whose request came when the training was over.
    """

    sent: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    faults: list[str] = field(default_factory=list)


def prepare(folder: Path, images: int = 1024, epochs: int = 6) -> None:
    """Data and configuration for jobs in `folder`."""
    tiny_runs.prepare(folder, _CONFIG.replace("EPOCHS", str(epochs)), images, 64, (14, 14, 3), "storm.yaml")


class StormJob(StartedJob):
    """A job of the program that is started here, and whose processes get signals."""

    def __init__(self, folder: Path, setting: Setting, output: str, *more: str) -> None:
        threads = str(setting.threads)
        pools = {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}  # they share cores
        command = [sys.executable, "-m", "mpi4py", "-m", "hpctrain", "train", str(folder / "storm.yaml")]
        command += [f"backend={setting.kernels}", f"output={folder / output}", *more]
        self.ranks = max(1, setting.ranks)
        if setting.ranks:
            command = [find_mpiexec() or "mpiexec", "-n", str(setting.ranks), *command]
        super().__init__(command, folder, pools)

    def targets(self) -> list[int]:
        """The ranks' processes that hold signals back."""
        return [pid for pid in self.processes() if _holds_back(pid)]

    def ready(self) -> bool:
        """True once each rank's processes hold signals back; False where the job has ended before. Waits for it."""
        begin = time.monotonic()
        while self.process.poll() is None and time.monotonic() - begin < _PATIENCE_SECONDS:
            processes = self.processes()
            if len(processes) >= self.ranks and all(_holds_back(pid) for pid in processes):
                return True
            time.sleep(2e-3)
        return False

    def storm(self, kinds: Sequence[Signals], count: int, seconds: float, draws: random.Random) -> Counter[str]:
        """Send up to `count` signals for so long, or until the job ends; give how many of each."""
        sent: Counter[str] = Counter()
        end, looked = time.monotonic() + seconds, float("-inf")
        targets: list[int] = []
        while sent.total() < count and self.process.poll() is None and (now := time.monotonic()) < end:
            if now - looked > 0.1:
                targets, looked = self.targets(), now
            if targets:
                number = draws.choice(kinds)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draws.choice(targets), number)
                    sent[number.name] += 1
            time.sleep(draws.uniform(*_GAP_SECONDS))
        return sent

    def end(self, patience_seconds: float = _PATIENCE_SECONDS) -> tuple[int, str]:
        """Exit code and output, once it has ended; a job that does not is ended, with code -9."""
        return super().end(patience_seconds)

    def processes(self) -> list[int]:
        """The processes of its ranks, and their keepers."""
        return [pid for pid in self.started_processes() if _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"python" in Path(os.fsdecode(words[0])).name.encode() and b"hpctrain" in words
    return False


def _holds_back(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigBlk:"):
                return bool(int(line.split()[1], 16) >> (Signals.SIGTERM - 1) & 1)
    return False


def final_tensors(folder: Path, output: str) -> tuple[int, dict[str, np.ndarray]]:
    """Steps and tensors of the newest checkpoint of the run in `output`."""
    run = latest(folder / output, "storm")
    newest = read_newest(run.checkpoints) if run is not None else None
    assert newest is not None, "the run left no checkpoint"
    return int(newest[1].meta["global_step"]), dict(newest[1].tensors)  # type: ignore[call-overload]


def same_bits(ours: tuple[int, dict[str, np.ndarray]], theirs: tuple[int, dict[str, np.ndarray]]) -> bool:
    """True where two checkpoints are of one step and have the same tensors."""
    same_names = ours[0] == theirs[0] and ours[1].keys() == theirs[1].keys()
    return same_names and all(np.array_equal(tensor, theirs[1][name]) for name, tensor in ours[1].items())


def quiet_storm(folder: Path, setting: Setting, tally: Tally, reference: Any, signals: int, draws: random.Random) -> None:
    """Send signals that stop nothing, a number of each kind, on as many whole runs as that takes."""
    while min(tally.sent[number.name] for number in QUIET) < signals and not tally.faults:
        output = f"quiet-{tally.runs}"
        job = StormJob(folder, setting, output)
        if job.ready():
            wanted = [number for number in QUIET if tally.sent[number.name] < signals]
            tally.sent += job.storm(wanted, signals * len(wanted), _PATIENCE_SECONDS, draws)
        code, said = job.end()
        tally.runs += 1
        _compare(folder, output, tally, reference, f"quiet run {tally.runs} of {setting}", code, said)


def stop_storm(
    folder: Path, setting: Setting, tally: Tally, reference: Any, signals: int, draws: random.Random, run_seconds: float
) -> None:
    """Send bursts of signals that stop, a number of each kind in all; each stopped run is resumed until it is over."""
    for chain in itertools.count():
        if min(tally.sent[number.name] for number in STOPS) >= signals or tally.faults:
            return
        output = f"chain-{chain}"
        code, said = STOPPED, ""
        while code == STOPPED:
            run = latest(folder / output, "storm")
            resume = ["--resume", "auto"] if run is not None and any(run.checkpoints.iterdir()) else []
            number = draws.choice([n for n in STOPS if tally.sent[n.name] < signals] or STOPS)
            code, said = _stop_once(StormJob(folder, setting, output, *resume), number, tally, signals, draws, run_seconds)
        _compare(folder, output, tally, reference, f"chain {chain} of {setting}", code, said)


def _stop_once(
    job: StormJob, number: Signals, tally: Tally, signals: int, draws: random.Random, run_seconds: float
) -> tuple[int, str]:
    sent: Counter[str] = Counter()
    if job.ready():
        # Half of the requests come while the job is still starting.
        time.sleep(draws.uniform(0, run_seconds) if draws.random() < 0.5 else draws.uniform(0, 1))
        sent = job.storm([number], draws.choice([1, *[100_000] * 3]), _BURST_SECONDS, draws)
    code, said = job.end()
    tally.sent += sent
    if sent:
        tally.requests[number.name] += 1
        tally.stopped[number.name] += code == STOPPED and f"stopped by {number.name}" in said
        tally.finished[number.name] += code == FINISHED
    return code, said


def _compare(folder: Path, output: str, tally: Tally, reference: Any, title: str, code: int, said: str) -> None:
    if code != FINISHED:
        tally.faults.append(f"{title}: code {code}: {said[-1500:]}")
    elif not same_bits(final_tensors(folder, output), reference):
        tally.faults.append(f"{title}: other bits than the undisturbed run")
    tally.compared += 1
    shutil.rmtree(folder / output)


def run_setting(folder: Path, setting: Setting, signals: int, seed: int) -> Tally:
    """All of one setting: an undisturbed run first, then both kinds of storms."""
    draws, tally = random.Random(f"{seed} {setting}"), Tally()
    begin = time.monotonic()
    job = StormJob(folder, setting, "reference")
    code, said = job.end()
    assert code == FINISHED, said
    run_seconds = time.monotonic() - begin
    reference = final_tensors(folder, "reference")
    quiet_storm(folder, setting, tally, reference, signals, draws)
    stop_storm(folder, setting, tally, reference, signals, draws, run_seconds)
    return tally
