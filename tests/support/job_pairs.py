"""Pairs of jobs that meet in one run: no job may crash, lose a checkpoint, or write to the run together with the other one.

A first job trains. A second job of the same name starts at the same time, between two steps, or while a checkpoint is written. It
is a training, a resume, a job of `hpctrain submit` or a command that deletes checkpoints. In some pairs the first job is killed.
Two hosts are network namespaces with host names of their own, so no host recognises the other's processes. In the end a last job
trains the run to its last epoch. The run must then have the record of each step once, each checkpoint that ever existed, and the
bits of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hpctrain.launch.process_end import FINISHED, USER_ERROR
from hpctrain.runs.owner import owners
from hpctrain.storage import checkpoint
from hpctrain_testing.lab import Lab
from hpctrain_testing.run import StartedJob
from tests.support.tiny_runs import tiny

#: a meeting, whether the first job is killed, and the seed of all other choices
Pair = tuple[str, bool, int]

MEETINGS = ("start", "step", "write", "resume", "submit", "prune")

_STEPS = 80
_CONFIG = tiny(
    "name: pair, seed: 3, model: {name: small, channels: [4, 6], hidden: 400}, data: {train: synthetic, test: synthetic, "
    "synthetic: {height: 12, width: 12, channels: 1, classes: 3, samples: 80, test_samples: 9}}, batch: 8, threads: 1, "
    f"epochs: {_STEPS // 10}, checkpoint: {{every_steps: 4, keep: 100}}, metrics: {{interval_seconds: 0.0001}}"
)
_PATIENCE_SECONDS = 600.0
_CRASHES = ("Traceback", "Fatal Python error", "SIGBUS", "Bus error", "Segmentation")
_REFUSALS = ("is being written to by", "was taken over by", "was released by")


@dataclass
class Tally:
    """Counts of what happened in all pairs. faults: sentences, by kind."""

    pairs: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    taken_over: int = 0
    killed: int = 0
    faults: dict[str, list[str]] = field(default_factory=lambda: {"crash": [], "lost checkpoint": [], "double writer": []})

    def fault(self, kind: str, sentence: str) -> None:
        """Note a fault."""
        self.faults[kind].append(sentence)


class Job(StartedJob):
    """A command that runs on a host: the program with these words, unless a `command` is given."""

    def __init__(self, folder: Path, lab: Lab | None, host: int, words: Sequence[str], command: Sequence[str] = ()) -> None:
        command = command or [sys.executable, "-m", "hpctrain", *words]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        extra = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": path}
        super().__init__(command if lab is None else lab.on_host(host, command), folder, extra)
        self._logs = None if words else folder / "runs" / "jobs"

    def end(self, patience_seconds: float = _PATIENCE_SECONDS) -> tuple[int, str]:
        """As the base's, with the logs of what was submitted. What hangs counts as a crash."""
        code, said = super().end(patience_seconds)
        logs = () if self._logs is None else self._logs.glob("*.log")
        return code, said + "".join(path.read_text(errors="replace") for path in logs)


class SeenCheckpoints:
    """Records all checkpoints that ever exist in the runs below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ended = folder, threading.Event()
        self.seen: set[Path] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> set[Path]:
        """Stop, and return the checkpoints that were seen."""
        self._ended.set()
        self._thread.join()
        return self.seen

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            for directory in self._folder.glob("runs/*/checkpoints"):
                self.seen |= {path for _, path in checkpoint.checkpoints(directory)}


def final_digest(folder: Path) -> dict[str, bytes]:
    """Return the tensors of the last checkpoint of the run in a folder that has all steps."""
    path = next(path for path in folder.glob("runs/*/checkpoints/*.h5") if path.name == f"checkpoint-{_STEPS:08d}.h5")
    return {key: np.asarray(tensor).tobytes() for key, tensor in checkpoint.read(path).tensors.items()}


def run_pair(folder: Path, lab: Lab | None, pair: Pair, reference: dict[str, bytes], tally: Tally) -> None:
    """Run one pair, and judge what it leaves."""
    meeting, kills, seed = pair
    draws, name = random.Random(seed), f"{meeting}, seed {seed}, {'two hosts' if lab else 'one host'}"
    (folder / "pair.yaml").write_text(_CONFIG)
    hosts = (0, draws.choice((0, 1, 1)))
    seen, jobs = SeenCheckpoints(folder), list[Job]()
    train = ("train", "pair.yaml", "--resume", "auto", "output=runs")
    try:
        if meeting == "start":  # both find a run that stopped on its way
            Job(folder, lab, 0, ("train", "pair.yaml", "output=runs", "--steps", "8")).end()
        jobs.append(_submit(folder, lab, hosts[0]) if meeting == "submit" else Job(folder, lab, hosts[0], train))
        run = _meet(folder, meeting, jobs[0], draws)
        if kills and draws.random() < 0.5:
            time.sleep(draws.uniform(0, 0.3))
            jobs[0].kill()
        jobs.append(_second(folder, lab, hosts[1], meeting, run, train, draws))
        if kills and not jobs[0].killed:
            time.sleep(draws.uniform(0, 2.0))
            jobs[0].kill()
        for job in jobs:
            _judge_end(job, name, tally)
        last = Job(folder, lab, 0, train)
        _judge_end(last, name, tally, must_finish=True)
    finally:
        for job in jobs:
            job.kill()
    _judge_runs(folder, seen.close(), meeting == "prune", name, reference, tally)
    tally.pairs[f"{meeting}, {'two hosts' if lab else 'one host'}"] += 1
    tally.killed += any(job.killed for job in jobs)


def _submit(folder: Path, lab: Lab | None, host: int) -> Job:
    """Return a job that runs the script of the site `local`. A submitted job would outlive the command that submits it."""
    words = ["submit", "pair.yaml", "--site", "local", "--ranks-per-node", "1", "--no-doctor", "--dry-run", "output=runs"]
    code, script = Job(folder, lab, host, words).end()
    assert code == 0, script
    (folder / "runs" / "jobs").mkdir(parents=True, exist_ok=True)  # as without --dry-run
    path = folder / f"job-{random.random()}.sh"
    path.write_text(script)
    return Job(folder, lab, host, (), ["bash", str(path)])


def _meet(folder: Path, meeting: str, first: Job, draws: random.Random) -> Path | None:
    """Wait for the moment at which the second job starts, and return the run of the first one if there is one."""
    if meeting == "start":
        time.sleep(draws.uniform(0, 0.5))
    else:
        wanted = "*.partial" if meeting == "write" else "*.h5"
        end = time.monotonic() + 60
        while first.process.poll() is None and time.monotonic() < end:
            if any(folder.glob(f"runs/*/checkpoints/{wanted}")):
                break
            time.sleep(0.001)
        if meeting != "write":
            time.sleep(draws.uniform(0, 0.5))
    return next(iter(folder.glob("runs/pair-*")), None)


def _second(
    folder: Path, lab: Lab | None, host: int, meeting: str, run: Path | None, train: Sequence[str], draws: random.Random
) -> Job:
    if meeting == "submit":
        return _submit(folder, lab, host)
    if meeting == "resume" and run is not None:
        newest = checkpoint.checkpoints(run / "checkpoints")
        source = draws.choice([run, newest[-1][1] if newest else run])
        return Job(folder, lab, host, ("train", "pair.yaml", "--resume", str(source), "output=runs"))
    if meeting == "prune" and run is not None:
        return Job(folder, lab, host, ("checkpoint", "prune", str(run), "--keep", "1"))
    return Job(folder, lab, host, train)


def _judge_end(job: Job, name: str, tally: Tally, *, must_finish: bool = False) -> None:
    code, said = job.end()
    refused = any(words in said for words in _REFUSALS)
    tally.refused += refused and code != FINISHED
    tally.taken_over += "is taken over from" in said
    if any(words in said for words in _CRASHES):
        tally.fault("crash", f"{name}: {said[-1500:]}")
    elif not job.killed and code != FINISHED and (must_finish or not (code == USER_ERROR and refused)):
        tally.fault("crash", f"{name}: code {code}: {said[-1500:]}")


def _judge_runs(folder: Path, seen: set[Path], pruned: bool, name: str, reference: dict[str, bytes], tally: Tally) -> None:
    gone = sorted(path for path in seen if not path.exists())
    if gone and not pruned:
        tally.fault("lost checkpoint", f"{name}: {', '.join(path.name for path in gone)}")
    for run in folder.glob("runs/pair-*"):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
        times = Counter((line["kind"], line["step"]) for line in lines if line["kind"] in ("interval", "epoch"))
        if twice := [key for key, count in times.items() if count > 1]:
            tally.fault("double writer", f"{name}: records {twice} twice in {run.name}")
        if len(found := owners(run)) != len({owner.token for owner in found}):
            tally.fault("double writer", f"{name}: owners {found}")
    try:
        same = final_digest(folder) == reference
    except StopIteration:
        tally.fault("lost checkpoint", f"{name}: no run has all steps")
        return
    if not same:
        tally.fault("double writer", f"{name}: other bits than the undisturbed run")


def reference_of(folder: Path) -> dict[str, bytes]:
    """Return the last tensors of an undisturbed run."""
    folder.mkdir()
    (folder / "pair.yaml").write_text(_CONFIG)
    code, said = Job(folder, None, 0, ("train", "pair.yaml", "output=runs")).end()
    assert code == FINISHED, said
    return final_digest(folder)


def run_pairs(folder: Path, pairs: Sequence[Pair], lab: Lab | None, tally: Tally, together: int = 2) -> None:
    """Run all pairs, `together` at a time."""
    reference = reference_of(folder / "reference")

    def one(pair: Pair) -> None:
        below = folder / f"{'two' if lab else 'one'}-{pair[2]}"
        below.mkdir()
        before = sum(map(len, tally.faults.values()))
        run_pair(below, lab, pair, reference, tally)
        if sum(map(len, tally.faults.values())) == before:
            shutil.rmtree(below, ignore_errors=True)
        print(f"{tally.pairs.total()} pairs, {sum(map(len, tally.faults.values()))} faults", flush=True)

    with ThreadPoolExecutor(together) as pool:
        list(pool.map(one, pairs))


def draw_pairs(count: int, seed: int) -> Iterator[Pair]:
    """Yield pairs with the kinds of meeting in turn. In a third of them the first job is killed."""
    draws = random.Random(seed)
    for number in range(count):
        yield MEETINGS[number % len(MEETINGS)], draws.random() < 1 / 3, seed + number
