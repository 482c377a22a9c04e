"""Step times of what `auto` chooses, next to its rivals and PyTorch's DDP, on jobs drawn by a seed before any is measured.

    python -m benchmarks.auto --list                               # the jobs; --seed draws others
    python -m benchmarks.auto --peer-python PATH --jobs 0-7        # measures them one by one; needs root and iproute2
    python -m benchmarks.auto --report                             # the table and the bars

Each job is one hpctrain job that starts as `train` with `auto` does and then steps all variants in turn, and a job of PyTorch on
the same hosts that sleeps otherwise (PATH is a Python that has torch and torchvision). The file of results grows by a job at a
time; a second call measures the jobs that are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks import auto_report
from benchmarks.overlap import JobError, Jobs, jobs, mpiexec_here, rank_command, start_peers
from benchmarks.overlap_report import SHARED_MEMORY
from hpctrain.bench.machine import machine_facts
from hpctrain.core.errors import ShapeError
from hpctrain.models import catalogue
from hpctrain.nn.network import Lowering, declared
from hpctrain.runs.directory import git_state
from hpctrain.storage.atomic_write import write_json
from hpctrain_testing.lab import Lab, missing, take_down_at_termination

Value = TypeVar("Value")

OFFICIAL_SEED = 59
_HOSTS = 2
_NETWORKS = ("alexnet2014", *(f"vgg{depth}{norm}" for depth in (11, 13, 16) for norm in ("", "_bn")))
_NETWORKS += ("resnet18", "resnet34", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "resnet20", "resnet9")
_SMALL_IMAGES = ("resnet20", "resnet9")  # ten classes; all others have a thousand
_BATCHES = (4, 8, 16, 24)
_PIXELS = (32, 112)
_RATES = ("700mbit", "1200mbit", "3gbit")
_ALONE, _SHARING = 24, 8  # jobs of one rank a host, and of two ranks, which share the host's core

# Arrays of the size of the parameters, and of all activations, in the memory of a rank and its peer: the network of pure data
# parallelism with three averagers, those of two plans, and PyTorch's.
_PARAMETER_ARRAYS, _ACTIVATION_ARRAYS = 12, 6
_MEMORY_BYTES = 18 << 30  # of all ranks
_ROOT = Path(__file__).resolve().parent.parent
_START_SECONDS = 120.0


@dataclass(frozen=True)
class TrialJob:
    """A job to measure. batch: images a rank. rate: of each link in tc's notation, or shared memory."""

    model: str
    batch: int
    pixels: int
    rate: str
    ranks_per_host: int

    @property
    def classes(self) -> int:
        return 10 if self.model in _SMALL_IMAGES else 1000

    @property
    def ranks(self) -> int:
        return _HOSTS * self.ranks_per_host

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of a user who leaves the layout open."""
        images = {"height": self.pixels, "width": self.pixels, "classes": self.classes, "samples": 64 * self.batch}
        return {
            "name": "auto",
            "epochs": 1,
            "schedule": "constant",
            "model": {"name": self.model},
            "data": {"train": "synthetic", "test": "synthetic", "synthetic": images},
            "batch": self.batch * self.ranks,
            "optimizer": {"name": "sgd", "lr": 1e-4, "momentum": 0.9},
            **dict.fromkeys(("grid", "plan", "averager"), "auto"),
        }

    @property
    def possible(self) -> bool:
        """Whether the images are large enough for the network, and all variants of all ranks fit in memory together."""
        sizes = _sizes(self.model, self.pixels)
        if sizes is None:
            return False
        parameters, activations = sizes
        elements = _PARAMETER_ARRAYS * parameters + _ACTIVATION_ARRAYS * self.batch * activations
        return 4 * self.ranks * elements <= _MEMORY_BYTES

    def __str__(self) -> str:
        hosts = "" if self.ranks_per_host == 1 else f", {_HOSTS} hosts of {self.ranks_per_host} ranks"
        return f"{self.model} {self.pixels} px, {self.batch} a rank, {self.rate}{hosts}"


@cache
def _sizes(model: str, pixels: int) -> tuple[int, int] | None:
    """The numbers of elements of all parameters, and of one image's activations; None: the image is too small."""
    layers = catalogue.build(model, {})
    try:
        graph = Lowering(layers).graph(1, (pixels, pixels, 3))
    except ShapeError:
        return None
    specs, _ = declared(layers, graph)
    return sum(prod(spec.shape) for spec in specs.values()), sum(prod(tensor.shape) for tensor in graph.tensors)


def draw(seed: int) -> list[TrialJob]:
    """The jobs of a seed. Networks, batches, sizes and rates occur equally often each; their combinations are drawn.

    A draw with an impossible job is repeated as a whole. Networks that fit in memory with no batch and size are left out.
    """
    random = np.random.default_rng(seed)
    return [*_drawn(random, _ALONE, 1, (*_RATES, SHARED_MEMORY)), *_drawn(random, _SHARING, 2, _RATES)]


def _drawn(random: np.random.Generator, count: int, ranks_per_host: int, rates: Sequence[str]) -> list[TrialJob]:
    large = _PIXELS[1]  # no network is too large for these, but some are for the smallest
    networks = [one for one in _NETWORKS if TrialJob(one, _BATCHES[0], large, rates[0], ranks_per_host).possible]
    edges = np.linspace(_PIXELS[0], _PIXELS[1] + 1, count + 1)
    while True:
        sizes = random.permutation(random.uniform(edges[:-1], edges[1:]).astype(int)).tolist()
        columns = _evenly(random, networks, count), _evenly(random, _BATCHES, count), sizes, _evenly(random, rates, count)
        found = [TrialJob(*row, ranks_per_host) for row in zip(*columns, strict=True)]
        if all(job.possible for job in found):
            return found


def _evenly(random: np.random.Generator, values: Sequence[Value], count: int) -> list[Value]:
    """`count` values in a drawn order, each equally often or once more."""
    places = [*range(len(values))] * (count // len(values))
    places += random.permutation(len(values))[: count % len(values)].tolist()
    return [values[place] for place in random.permutation(places)]


@contextmanager
def _hosts(job: TrialJob) -> Iterator[Lab | None]:
    """The laboratory of a job; None in shared memory."""
    if job.rate == SHARED_MEMORY:
        yield None
    else:
        with Lab(_HOSTS, job.rate) as lab:
            yield lab


def measure(job: TrialJob, rounds: int, peer_python: str | None, timeout_seconds: float) -> dict[str, Any]:
    """All rounds of a job.

    PyTorch's ranks are ready before hpctrain's start, so that nothing disturbs the choice.
    """
    with _hosts(job) as lab, jobs(timeout_seconds) as (directory, running):
        settings, out = directory / "settings.json", directory / "result.json"
        peers = [str(directory / f"peer{rank}") for rank in range(job.ranks)] if peer_python else []
        shape = {"model": job.model, "classes": job.classes, "pixels": job.pixels, "batch": job.batch}
        values = {"job": asdict(job), "shape": shape, "rounds": rounds, "out": str(out), "peers": peers, "nice": 0}
        settings.write_text(json.dumps(values))
        if peer_python:
            start_peers(running, lab, peer_python, settings, job.ranks, job.ranks_per_host)
            _wait_for(peers, running)
        command = ["env", f"XDG_CACHE_HOME={directory}", *rank_command(settings, "benchmarks.auto_ranks")]
        running.start("job", mpiexec_here(command, job.ranks) if lab is None else lab.mpiexec(command, job.ranks_per_host))
        running.wait("job")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _wait_for(sockets: Sequence[str], running: Jobs) -> None:
    give_up = time.monotonic() + _START_SECONDS
    while not all(Path(one).exists() for one in sockets):
        running.check()
        if time.monotonic() > give_up:
            raise JobError(f"PyTorch's ranks were not ready after {_START_SECONDS:g} s.")
        time.sleep(0.1)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=OFFICIAL_SEED)
    parser.add_argument("--list", action="store_true", help="print the jobs; runs nothing")
    parser.add_argument("--jobs", default=f"0-{_ALONE + _SHARING - 1}", help="numbers and ranges; measured ones are skipped")
    parser.add_argument("--peer-python", help="a Python with torch and torchvision; none: no peer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one job may take")
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks/results/auto.json")
    parser.add_argument("--report", action="store_true", help="print the table and the bars of --out; runs nothing")
    return parser.parse_args(arguments)


def numbers(text: str) -> list[int]:
    """The numbers of "0-3,7"."""
    ends = [part.partition("-") for part in text.split(",")]
    return [number for low, _, high in ends for number in range(int(low), int(high or low) + 1)]


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    if chosen.report:
        auto_report.report(json.loads(chosen.out.read_text()))
        return 0
    drawn = draw(chosen.seed)
    if chosen.list:
        for number, job in enumerate(drawn):
            print(f"{number:2}  {job}")
        return 0
    take_down_at_termination()
    if reason := missing():
        raise SystemExit(reason)
    fresh = {"seed": chosen.seed, "machine": machine_facts(), "jobs": {}}
    result = json.loads(chosen.out.read_text()) if chosen.out.exists() else fresh
    if result["seed"] != chosen.seed:
        raise SystemExit(f"{chosen.out} has jobs of seed {result['seed']}; choose another file with --out.")
    for number in numbers(chosen.jobs):
        if str(number) in result["jobs"]:
            continue
        begin, job = time.monotonic(), drawn[number]
        print(f"{number}: {job}", flush=True)
        try:
            found = measure(job, chosen.rounds, chosen.peer_python, chosen.timeout)
        except JobError as failure:
            raise SystemExit(f"job {number}, {job}: {failure}") from None
        facts = {"job": asdict(job), "name": str(job), "git": git_state(_ROOT), "seconds": time.monotonic() - begin}
        result["jobs"][str(number)] = facts | found
        write_json(chosen.out, result)
        auto_report.report_job(number, result["jobs"][str(number)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
