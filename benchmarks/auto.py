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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.overlap import JobError, run_job
from benchmarks.overlap_report import SHARED_MEMORY
from benchmarks.pairs import Interval, ratio
from hpctrain.bench.machine import machine_facts
from hpctrain.core.errors import ShapeError
from hpctrain.models import catalogue
from hpctrain.nn.network import Lowering, declared
from hpctrain.runs.directory import git_state
from hpctrain.storage.atomic_write import write_json
from hpctrain_testing.lab import missing, take_down_at_termination

Value = TypeVar("Value")

DDP = "ddp"

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
_JOB_SECONDS = 600.0
_SLOW_LINKS = _RATES[:2]
_COLUMNS = ("default", "bucketed", "priority", "second", "auto", DDP)
_ROW = "{:>2} {:<56}" + " {:>8}" * len(_COLUMNS) + " {:>21} {:>21} {:>21} {:>5} {:>9} {:>6}  {}"
_ROOT = Path(__file__).resolve().parent.parent


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
    networks = [one for one in _NETWORKS if TrialJob(one, _BATCHES[0], _PIXELS[1], rates[0], ranks_per_host).possible]
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


class Measured:
    """The figures of one job. `names` has the words of each variant; several that are the same were measured once.

    Speeds are those of `auto` over another variant, medians of pairs of the same round; accuracy is 1 - |predicted - measured| /
    measured.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.name, self.rate, self.start_seconds = found["name"], found["job"]["rate"], found["start_seconds"]
        seconds = {words: [turn["step_seconds"] for turn in turns] for words, turns in found["rounds"].items()}
        self.names = {**found["names"], **({DDP: DDP} if DDP in seconds else {})}
        self.median = {words: float(np.median(of_words)) for words, of_words in seconds.items()}
        pick = self.names["auto"]
        self.over = {name: ratio(seconds[words], seconds[pick]) for name, words in self.names.items()}
        self.over_fastest: Interval = ratio(min(seconds.values(), key=np.median), seconds[pick])
        self.predicted = {words: step["seconds"] / self.median[words] for words, step in found["predicted"].items()}
        self.accuracy = {words: 1 - abs(share - 1) for words, share in self.predicted.items()}

    def row(self, number: int) -> str:
        """The job as a line of the table."""
        steps = [f"{self.median[self.names[name]]:.3f}" if name in self.names else "" for name in _COLUMNS]
        pick, worst = self.names["auto"], min(self.predicted, key=lambda words: self.accuracy[words])
        ratios = [str(one) for one in (self.over_fastest, self.over["default"], self.over.get(DDP, ""))]
        shares = [f"{self.predicted[words]:.2f}" for words in (pick, worst)]
        return _ROW.format(number, self.name, *steps, *ratios, *shares, f"{self.start_seconds:.1f}", pick)


def report(result: Mapping[str, Any], say: Callable[[str], None] = print) -> None:
    """Print a row for each job, and for each bar what was measured, with the jobs that miss it."""
    say(f"seed {result['seed']}; {result['machine']}")
    titles = ("auto over fastest", "over default", "over DDP", "p/m", "worst p/m", "start", "choice")
    say(_ROW.format("", "job", *(f"{name}, s" for name in _COLUMNS), *titles))
    jobs = [(int(number), Measured(found)) for number, found in result["jobs"].items()]
    for number, job in sorted(jobs, key=lambda one: one[0]):
        say(job.row(number))
    accuracy = {f"{job.name}: {words}": value for _, job in jobs for words, value in job.accuracy.items()}
    over_ddp = {job.name: job.over[DDP].median for _, job in jobs if DDP in job.over}
    slow = {job.name: over_ddp[job.name] for _, job in jobs if job.name in over_ddp and job.rate in _SLOW_LINKS}
    _bar(say, "auto over the fastest variant, in all jobs but 3", {job.name: job.over_fastest.median for _, job in jobs}, 0.97, 3)
    _bar(say, "auto over the default", {job.name: job.over["default"].median for _, job in jobs}, 0.95)
    _bar(say, "auto over DDP at 1.2 Gb/s and below", slow, 1.25)
    _bar(say, "auto over DDP, median", {"all jobs": float(np.median([*over_ddp.values()]))}, 1.6)
    _bar(say, "accuracy of predictions, mean", {"all variants": float(np.mean([*accuracy.values()]))}, 0.95)
    _bar(say, "accuracy of each prediction", accuracy, 0.85)


def _bar(say: Callable[[str], None], what: str, values: Mapping[str, float], least: float, may_miss: int = 0) -> None:
    ordered = sorted((value, name) for name, value in values.items())
    missing = [(value, name) for value, name in ordered if value < least]
    mark = "met   " if len(missing) <= may_miss else "MISSED"
    say(f"{mark} {what}, at least {least}: {len(values) - len(missing)} of {len(values)}")
    for value, name in missing or ordered[:1]:
        say(f"     {value:.3f}  {name}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=OFFICIAL_SEED)
    parser.add_argument("--list", action="store_true", help="print the jobs; runs nothing")
    parser.add_argument("--jobs", default=f"0-{_ALONE + _SHARING - 1}", help="a number or a range; measured ones are skipped")
    parser.add_argument("--peer-python", help="a Python with torch and torchvision; none: no peer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks/results/auto.json")
    parser.add_argument("--report", action="store_true", help="print the table and the bars of --out; runs nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    if chosen.report:
        report(json.loads(chosen.out.read_text()))
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
    (low, _, high), failed = chosen.jobs.partition("-"), 0
    for number in range(int(low), int(high or low) + 1):
        if str(number) in result["jobs"]:
            continue
        begin, job = time.monotonic(), drawn[number]
        values = {"job": asdict(job), "shape": {**asdict(job), "classes": job.classes}, "rounds": chosen.rounds, "nice": 0}
        print(f"{number}: {job}", flush=True)
        try:
            place = {"rate": job.rate, "hosts": _HOSTS, "ranks_per_host": job.ranks_per_host}
            found = run_job("benchmarks.auto_ranks", values, **place, peer_python=chosen.peer_python, timeout=_JOB_SECONDS)
        except JobError as failure:
            print(f"{number}: {job} failed: {failure}", file=sys.stderr, flush=True)
            failed += 1
            continue
        facts = {"job": asdict(job), "name": str(job), "git": git_state(_ROOT), "seconds": time.monotonic() - begin}
        result["jobs"][str(number)] = facts | found
        write_json(chosen.out, result)
        print(Measured(result["jobs"][str(number)]).row(number), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
