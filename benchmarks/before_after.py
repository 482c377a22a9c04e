"""Compare the speed of the working tree with that of a commit, in turn on one machine: `make perf`.

    python -m benchmarks.before_after                  # against HEAD~1: eight networks, 1 and 2 threads, two jobs, `busy`
    python -m benchmarks.before_after --base v0.1.0 --only resnet34-48 averaging --rounds 15

The commit is checked out into a temporary directory. Each tree trains in a process of its own that sleeps during the turns of the
other one. One thread is measured in CPU time, several threads in wall time on a quiet machine. A ratio divides the time of the
commit by that of the working tree in the same round. A ratio above 1 means that the working tree is faster. The table shows
medians with 95 % bootstrap intervals. All rounds are written to --out.

`busy` trains two of the networks with two threads next to one busy thread of another program, which this program starts and ends.

The averaging job `links` trains on two hosts with links of 1.5 Gb/s (hpctrain_testing/lab.py). Its line also shows the limit of a
step divided by the step of each tree, as in benchmarks/overlap_report.py. It needs root and is skipped elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.interleaved import Rounds, interleave, ours, with_threads
from benchmarks.overlap_report import Analysis
from benchmarks.pairs import ratio
from hpctrain.bench.machine import machine_facts
from hpctrain.storage.atomic_write import write_json
from hpctrain_testing.lab import missing

_TOP = Path(__file__).parents[1]
BASE, NOW = "base", "now"
AVERAGING, LINKS, BUSY = "averaging", "links", "busy"
_BUSY_NETS, _BUSY_SECONDS = ("small-28", "resnet20-32"), 300
_LINKS_ROUNDS = 3  # of a job
_JOB_STEPS = 60
_JOB_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Net:
    """Network of the comparison.

    Attributes:
        model: name of the model in the catalogue.
        batch: number of images of a step.
        pixels: side of an image.
        steps: number of steps of a turn.
    """

    model: str
    batch: int
    pixels: int
    steps: int


#: the last four have the shapes of strong scaling: few images per rank, few pixels
NETS = {
    "resnet50-224": Net("resnet50", 8, 224, 1),
    "vgg16-224": Net("vgg16", 4, 224, 1),
    "resnet20-32": Net("resnet20", 64, 32, 4),
    "small-28": Net("small", 32, 28, 60),
    "resnet34-48": Net("resnet34", 12, 48, 4),
    "resnet50-64": Net("resnet50", 4, 64, 4),
    "vgg13-96": Net("vgg13", 8, 96, 2),
    "resnet18-64": Net("resnet18", 24, 64, 4),
}


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary directory, which is removed at the end.

    Raises:
        subprocess.CalledProcessError: git does not know the commit.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-base-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", str(_TOP), "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", str(_TOP), "worktree", "remove", "--force", str(tree)], check=True)


def environment_of(tree: Path, threads: int) -> dict[str, str]:
    """Return an environment in which Python imports hpctrain from `tree`, also if the working directory has another one.

    Raises:
        RuntimeError: Python imports another hpctrain nevertheless.
    """
    environment = with_threads(os.environ, threads, PYTHONPATH=str(tree), PYTHONSAFEPATH="1")
    command = [sys.executable, "-c", "import hpctrain; print(hpctrain.__file__)"]
    path = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_relative_to(tree):
        raise RuntimeError(f"Python imports {path} instead of hpctrain in {tree}.")
    return environment


@contextmanager
def busy_threads(count: int, seconds: float = _BUSY_SECONDS) -> Iterator[None]:
    """Keep `count` threads of other programs busy inside the block, for at most `seconds`."""
    loop = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end:\n    sum(range(10000))"
    others = [subprocess.Popen([sys.executable, "-S", "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def engine_rounds(net: Net, trees: Mapping[str, Path], threads: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step in each round, by tree."""
    settings = {"model": net.model, "batch": net.batch, "pixels": net.pixels, "options": {}, "backend": "onednn"}
    clock = "cpu" if threads == 1 else "wall"
    variants = {name: (ours(settings), environment_of(tree, threads)) for name, tree in trees.items()}
    series = interleave(variants, Rounds(rounds, net.steps, clock=clock))
    return {name: one.seconds(clock) for name, one in series.items()}


def averaging_rounds(trees: Mapping[str, Path], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step of ResNet-20 on two ranks of one thread with the default averager, by tree; jobs in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    environments = {name: environment_of(tree, 1) for name, tree in trees.items()}
    for number in range(rounds):
        for name in list(trees) if number % 2 else list(trees)[::-1]:
            seconds[name].append(_job(trees[name], environments[name]))
    return seconds


def _job(tree: Path, environment: Mapping[str, str]) -> float:
    with tempfile.TemporaryDirectory(prefix="hpctrain-job-") as folder:
        arguments = ["data=synthetic", "batch=32", "--steps", str(_JOB_STEPS), f"output={folder}"]
        train = ["-m", "mpi4py", "-m", "hpctrain", "train", str(tree / "configs" / "cifar10-resnet20.yaml"), *arguments]
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        command = [mpiexec, "-n", "2", sys.executable, *train]
        subprocess.run(command, env=dict(environment), cwd=folder, capture_output=True, check=True, timeout=_JOB_TIMEOUT_SECONDS)
        (metrics,) = Path(folder).glob("*/metrics.jsonl")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return float([record for record in records if record["kind"] == "steps"][-1]["measured_step_seconds"])


def links_rounds(trees: Mapping[str, Path], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of a step of VGG-13 over links, and its limit divided by them, by tree; jobs of three rounds in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    shares: dict[str, list[float]] = {name: [] for name in trees}
    environments = {name: environment_of(tree, 1) for name, tree in trees.items()}
    for number in range(max(1, rounds // _LINKS_ROUNDS)):
        for name in list(trees) if number % 2 else list(trees)[::-1]:
            found = _links_job(trees[name], environments[name])
            limit = found.limit(found.cheapest).median
            seconds[name] += found.column("sharded-auto")
            shares[name] += [limit / step for step in found.column("sharded-auto")]
    return seconds, shares


def _links_job(tree: Path, environment: Mapping[str, str]) -> Analysis:
    with tempfile.TemporaryDirectory(prefix="hpctrain-links-") as folder:
        out = Path(folder) / "overlap.json"
        wanted = ["vgg13", "--batch", "12", "--rates", "1500mbit", "--variants", "sharded-auto"]
        command = [sys.executable, "-m", "benchmarks.overlap", *wanted, "--rounds", str(_LINKS_ROUNDS), "--out", str(out)]
        inside = {key: value for key, value in environment.items() if key != "PYTHONSAFEPATH"}  # the tree's own benchmark
        subprocess.run(command, env=inside, cwd=tree, capture_output=True, check=True, timeout=_JOB_TIMEOUT_SECONDS)
        (run,) = json.loads(out.read_text())["runs"]
    return Analysis(run)


def line(name: str, threads: int, seconds: Mapping[str, Sequence[float]]) -> str:
    """Return a line of the table."""
    return f"{name:16} {threads:7}  {1e3 * median(seconds[NOW]):10.2f}  {ratio(seconds[BASE], seconds[NOW])}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    names = [*NETS, AVERAGING, LINKS, BUSY]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD~1", help="commit to compare with (default HEAD~1)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (default 1 2)")
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds (default 9)")
    parser.add_argument("--out", type=Path, help="JSON file for all rounds")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    chosen = parse(arguments)
    content: dict[str, Any] = {"machine": machine_facts(), "base": chosen.base, "runs": []}
    print(f"{'network':16} {'threads':>7}  {'ms per step':>11}  base / now")
    with checked_out(chosen.base) as base:
        trees = {BASE: base, NOW: _TOP}
        for name in chosen.only:
            if name == LINKS and (reason := missing()) is not None:
                print(f"{name:16} skipped: {reason}")
                continue
            if name == BUSY:
                for busy in _BUSY_NETS:
                    with busy_threads(1):
                        net = replace(NETS[busy], steps=max(1, NETS[busy].steps // 10))
                        seconds = engine_rounds(net, trees, 2, chosen.rounds)
                    _keep(content, chosen.out, f"{busy} busy", 2, seconds)
                continue
            for threads in chosen.threads if name in NETS else [1]:
                after = ""
                if name == AVERAGING:
                    seconds = averaging_rounds(trees, chosen.rounds)
                elif name == LINKS:
                    seconds, shares = links_rounds(trees, chosen.rounds)
                    after = f"; limit / step {median(shares[BASE]):.3f} -> {median(shares[NOW]):.3f}"
                else:
                    seconds = engine_rounds(NETS[name], trees, threads, chosen.rounds)
                _keep(content, chosen.out, name, threads, seconds, after)
    return 0


def _keep(
    content: dict[str, Any], out: Path | None, name: str, threads: int, seconds: Mapping[str, Sequence[float]], after: str = ""
) -> None:
    """Print a line of the table, and write all rounds so far."""
    content["runs"].append({"name": name, "threads": threads, "seconds": seconds})
    print(f"{line(name, threads, seconds)}{after}", flush=True)
    if out is not None:
        write_json(out, content)


if __name__ == "__main__":
    sys.exit(main())
