"""The comparisons of the papers that hpctrain follows, run again with this code: made-up images, hosts with shaped links.

    python -m benchmarks.paper_overlap --list                             # the experiments, their variants, what is measured
    python -m benchmarks.paper_overlap                                    # all that is not; needs root and iproute2
    python -m benchmarks.paper_overlap order --models vgg16 --rates 1gbit,500mbit --rounds 5
    python -m benchmarks.paper_overlap averaging --rates shared           # two ranks on this machine, no links, no root
    python -m benchmarks.paper_overlap --report --plots benchmarks/results

Each job is one network at one bandwidth: all variants step in turn, and the file of results, which holds every turn, is written
after each. Figures are those of this code on this machine; the papers' own are of other machines and other codes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab import LabError, missing, take_down_at_termination
from benchmarks.overlap import JobError
from benchmarks.paper_overlap_report import markdown, plot
from benchmarks.shapes import SHAPES
from benchmarks.slow_links import run_case
from benchmarks.slow_links_cases import ALONE, Case, Section
from hpctrain.storage.atomic_write import write_json

OUT = Path(__file__).resolve().parent / "results" / "paper-overlap.json"
SHARED = "shared"  # in place of a rate: ranks on this machine
_BLOCKING: Mapping[str, Any] = {"name": "blocking"}
_SHARDED: Mapping[str, Any] = {"name": "sharded", "fc_exchange": "never"}
_PRIORITY: Mapping[str, Any] = {"name": "priority", "fc_exchange": "never"}
_FINE, _COARSE = 50_000, 4_000_000  # parameters of a slice: the paper's, and more than most layers have
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Experiment:
    """A paper's comparison.

    Attributes:
        name: of it, and of its jobs. paper: the source. base: the variant that all are compared with.
        variants: averagers by name, as sections of a configuration. hosts, rates: of its jobs, unless others are asked for.
    """

    name: str
    paper: str
    base: str
    variants: Mapping[str, Section]
    hosts: tuple[int, int] = (2, 1)
    rates: tuple[str, ...] = ("500mbit", "1gbit", "2gbit")
    models: tuple[str, ...] = ("vgg16", "resnet18")

    def cases(self, models: Sequence[str] = (), rates: Sequence[str] = ()) -> tuple[Case, ...]:
        """Its jobs; of other networks and rates where some are given."""
        return tuple(
            Case(self.name, model, *self.hosts, None if rate == SHARED else rate, {ALONE: None, **self.variants})
            for model in models or self.models
            for rate in rates or self.rates
        )


EXPERIMENTS = (
    Experiment(
        "averaging",
        "Lee, Agrawal, Balaprakash, Choudhary and Liao, MLHPC 2018: no overlap, one-sided, two-sided, and exchange of factors",
        "no overlap",
        {
            "no overlap": _BLOCKING,
            "one-sided, by layers": {"name": "overlap"},
            "one-sided, fused": {"name": "bucketed"},
            "two-sided": _SHARDED,
            "two-sided, exchange": {"name": "sharded", "fc_exchange": "always"},
            "two-sided, exchange where it is less": {"name": "sharded", "fc_exchange": "auto"},
        },
    ),
    Experiment(
        "order",
        "Jayarajan, Wei, Gibson, Fedorova and Pekhimenko, MLSys 2019: slices, priority, and both",
        "neither",
        {
            "neither": {**_SHARDED, "bucket_bytes": _COARSE * _FLOAT_BYTES, "replan": False},
            "slices": {**_SHARDED, "bucket_bytes": _FINE * _FLOAT_BYTES, "replan": False},
            "priority": {**_PRIORITY, "slice_parameters": _COARSE},
            "slices and priority": {**_PRIORITY, "slice_parameters": _FINE},
            "slices by link and priority": _PRIORITY,
            "no overlap": _BLOCKING,
        },
    ),
    Experiment(
        "volume",
        "Shi et al., arXiv 2010.10458: top-k messages across nodes, next to dense ones of 32 and of 16 bits",
        "dense",
        {
            "dense": _SHARDED,
            "dense, bfloat16": {**_SHARDED, "wire": "bfloat16"},
            "dense, bfloat16, parameters too": {**_SHARDED, "wire": "bfloat16", "wire_parameters": "bfloat16"},
            "sparse, 10 %": {"name": "sparse", "density": 0.1},
            "sparse, 1 %": {"name": "sparse", "density": 0.01},
            "no overlap": _BLOCKING,
        },
        hosts=(2, 2),
        rates=("100mbit", "200mbit", "500mbit"),
    ),
)


def lines(cases: Mapping[str, Case], results: Mapping[str, Any]) -> list[str]:
    """The experiments with their variants, and the state of each job."""
    text = []
    for experiment in EXPERIMENTS:
        jobs = [case for case in cases.values() if case.kind == experiment.name]
        if jobs:
            text.append(f"{experiment.name}: {experiment.paper}")
            text.append(f"  {'; '.join(experiment.variants)}")
            text += [f"  {case.name}: {'measured' if case.name in results else 'not measured'}" for case in jobs]
    return text


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [experiment.name for experiment in EXPERIMENTS]
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--models", default="", help=f"of {', '.join(SHAPES)}, with commas between")
    parser.add_argument("--rates", default="", help=f'of the links, as tc writes them, or "{SHARED}": on this machine')
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=6.0, help="after the first round of a job, in which rounds begin")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds that one job may take")
    parser.add_argument("--progress", default="auto", choices=["auto", "none", "test", "thread", "posting"])
    parser.add_argument("--nice", type=int, default=0, help="of all processes; below 0 ahead of others on this machine")
    parser.add_argument("--again", action="store_true", help="measure jobs that the file has, too")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--plots", type=Path, help="a directory for an image of each experiment; needs matplotlib")
    parser.add_argument("--list", action="store_true", help="print the experiments; run nothing")
    parser.add_argument("--report", action="store_true", help="print tables of what is measured; run nothing")
    chosen = parser.parse_args(arguments)
    models, rates = ([word for word in text.split(",") if word] for text in (chosen.models, chosen.rates))
    for asked, known in ((chosen.experiments, names), (models, list(SHAPES))):
        for word in asked:
            if word not in known:
                parser.error(f"there is no {word}; there are {', '.join(known)}")
    wanted = [experiment for experiment in EXPERIMENTS if experiment.name in chosen.experiments or not chosen.experiments]
    chosen.cases = {case.name: case for experiment in wanted for case in experiment.cases(models, rates)}
    chosen.screen = 0  # no variant leaves early
    return chosen


def measure(chosen: argparse.Namespace, results: dict[str, Any]) -> None:
    """Run the jobs that are not among the results; the file is written after each."""
    take_down_at_termination()
    for name, case in chosen.cases.items():
        if name in results and not chosen.again:
            continue
        reason = None if case.rate is None else missing()
        if reason is not None:
            raise SystemExit(reason)
        print(name, file=sys.stderr, flush=True)
        try:
            results[name] = run_case(case, chosen)
        except (JobError, LabError) as failure:
            raise SystemExit(f"{name}: {failure}") from None
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(chosen.out, results)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 where all that was asked for has been measured."""
    chosen = parse(arguments)
    results: dict[str, Any] = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    if chosen.list:
        print("\n".join(lines(chosen.cases, results)))
        return 0
    if not chosen.report:
        measure(chosen, results)
    for experiment in EXPERIMENTS:
        runs = [(case.model, case.rate or SHARED, results[name]) for name, case in chosen.cases.items() if name in results]
        runs = [run for run in runs if run[2]["case"].startswith(f"{experiment.name}-")]
        if runs:
            print(f"{experiment.paper}\n\n{markdown(experiment.base, runs)}\n")
            if chosen.plots:
                plot(experiment.base, runs, chosen.plots / f"paper-overlap-{experiment.name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
