"""Simulated scaling of VGG-16 and ResNet-50 on a machine like a Cray XC40, 1 to 8192 cores, for every way of averaging.

    python -m benchmarks.planner_scaling                  # simulates, prints tables; JSON and PNG in benchmarks/results
    python -m benchmarks.planner_scaling --report benchmarks/results/planner-scaling.json --plot scaling.png

A rank has a node of 32 cores and a thread for its messages. Below 32 cores one rank has some of a node's cores: flops follow
them, and memory serves each of them with 12 GB/s until the node's is used up. Strong scaling keeps a batch of 256 over all ranks,
weak scaling one image a core. Lee et al. 2018 measured 2516x for VGG-16 and 2734x for ResNet-50 on 8192 cores of Cori Phase I, of
a batch and a baseline that are not public. All else is simulated; nothing here was measured on such a machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.planner_scaling_report import markdown, plot
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.config.load import load
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner import machine_file
from hpctrain.planner.compute_costs import RateCosts
from hpctrain.planner.job import AveragerChoice, Candidate, Job
from hpctrain.planner.machine import Link, Machine, OperatorRate
from hpctrain.planner.planned_run import prepare
from hpctrain.planner.search import search
from hpctrain.planner.search_space import SearchSpace
from hpctrain.planner.step_program import predict
from hpctrain.planner.tasks import SimulationOptions
from hpctrain.storage.atomic_write import write_json

_ROOT = Path(__file__).resolve().parent.parent
_OUT = _ROOT / "benchmarks/results/planner-scaling.json"
CONFIGS = {"VGG-16": "configs/imagenet-vgg16.yaml", "ResNet-50": "configs/imagenet-resnet50.yaml"}
# name -> (averager, options)
SERIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "blocking": ("blocking", {}),
    "allreduce by layer": ("overlap", {}),
    "allreduce in buckets": ("bucketed", {}),
    "sharded": ("sharded", {"fc_exchange": "never"}),
    "sharded, exchange": ("sharded", {"fc_exchange": "auto"}),
    "priority": ("priority", {"fc_exchange": "never"}),
}
SEARCHED = "search's choice"
CORES_PER_NODE = 32
CORES = tuple(1 << exponent for exponent in range(14))
_STRONG_BATCH, _WEAK_BATCH = 256, 32  # over all ranks; of a node
_CORE_BYTES_PER_SECOND = 12e9  # that one core of Haswell draws from memory alone, by published STREAM measurements
# A rank has a thread for messages, as the authors' code does.
_OPTIONS = SimulationOptions(progress=ProgressMode.THREAD)


def nodes_of(cores: int) -> int:
    """Ranks of a job on `cores` cores: one per node."""
    return max(1, cores // CORES_PER_NODE)


def batch_of(scaling: str, cores: int) -> int:
    """Samples of a step over all ranks. Weak scaling: one a core."""
    return _STRONG_BATCH if scaling == "strong" else cores * _WEAK_BATCH // CORES_PER_NODE


def one_rank_per_node(machine: Machine) -> Machine:
    """The machine with one rank on all cores of a node, whose rates are those of all ranks of the file together.

    Its messages are summed by one core, which reads two numbers and writes one while others leave it the memory.
    """
    ranks = machine.ranks_per_node
    within, between = (replace(link, sum_seconds=3 / _CORE_BYTES_PER_SECOND) for link in (machine.within, machine.between))
    rates = {
        name: replace(rate, flops_per_second=rate.flops_per_second * ranks, bytes_per_second=rate.bytes_per_second * ranks)
        for name, rate in machine.rates.items()
    }
    return replace(
        machine,
        ranks_per_node=1,
        ranks_per_card=1,
        cores_per_rank=machine.cores_per_rank * ranks,
        memory_bytes=machine.memory_bytes * ranks,
        within=within,
        between=between,
        rates=rates,
    )


def on_some_cores(machine: Machine, cores: int) -> Machine:
    """A machine with one rank per node, of which only `cores` cores compute."""
    share = min(1.0, cores / CORES_PER_NODE)
    rates = {
        name: replace(
            rate,
            flops_per_second=rate.flops_per_second * share,
            bytes_per_second=min(rate.bytes_per_second, _CORE_BYTES_PER_SECOND * cores),
        )
        for name, rate in machine.rates.items()
    }
    return replace(machine, rates=rates)


def job_of(network: str, batch: int, *overrides: str) -> Job:
    """The published network on 224 px and 1,000 classes, with `batch` samples per step."""
    config, _ = load(_ROOT / CONFIGS[network], [f"batch={batch}", "backend=onednn", *overrides])
    return prepare(config, 1, (224, 224, 3), 1000).job


def point(job: Job, series: str, cores: int, machine: Machine) -> dict[str, Any]:
    """One simulated step: seconds, exposed seconds, bytes, and what was chosen where the search chooses."""
    ranks = nodes_of(cores)
    machine = on_some_cores(machine, cores)
    costs = RateCosts(machine, job.dtype)
    if series == SEARCHED:
        space = SearchSpace(options=_OPTIONS)
        candidate = search(job, machine, costs, ranks, space, predicted_by=predict).best.candidate
    else:
        averager, options = SERIES[series]
        candidate = Candidate(ParallelPlan(1, ranks), AveragerChoice(averager, options))
    prediction = predict(job, candidate, machine, costs, _OPTIONS)
    return {
        "cores": cores,
        "ranks": ranks,
        "batch": job.batch,
        "step_seconds": prediction.step.seconds,
        "exposed_seconds": prediction.step.exposed_seconds,
        "exchanged_bytes": prediction.exchanged_bytes,
        "memory_bytes": prediction.memory_bytes,
        "grid": [candidate.plan.rows, candidate.plan.cols],
        "averager": candidate.averager.name,
        "options": dict(candidate.averager.options),
    }


def curves(machine: Machine, cores: Sequence[int], series: Sequence[str]) -> Iterator[dict[str, Any]]:
    """All curves: a network, a scaling and a series each."""
    for network in CONFIGS:
        for scaling in ("strong", "weak"):
            jobs = {count: job_of(network, batch_of(scaling, count)) for count in cores}
            for name in series:
                points = [point(jobs[count], name, count, machine) for count in cores]
                print(f"{network}, {scaling}, {name}: {points[-1]['step_seconds']:.4f} s", file=sys.stderr, flush=True)
                yield {"network": network, "scaling": scaling, "series": name, "points": points}


def variations(machine: Machine, factor: float) -> dict[str, Machine]:
    """The machine with one of its numbers `factor` times as large, by the number's name. Numbers that are 0 stay out."""
    between = machine.between
    segments = between.segments
    latency = tuple(replace(one, alpha_seconds=one.alpha_seconds * factor) for one in segments)
    bandwidth = tuple(replace(one, beta_seconds_per_byte=one.beta_seconds_per_byte / factor) for one in segments)
    links: dict[str, Link] = {
        "latency between nodes": replace(between, segments=latency),
        "bandwidth between nodes": replace(between, segments=bandwidth),
        "core time of an operation": replace(between, operation_seconds=between.operation_seconds * factor),
        "core time of a byte": replace(between, byte_seconds=between.byte_seconds * factor),
        "core time of a byte's sum": replace(between, sum_seconds=between.sum_seconds * factor),
    }
    varied = {name: replace(machine, between=link) for name, link in links.items() if link != between}
    for kind, rate in machine.rates.items():
        rates: dict[str, OperatorRate] = {
            f"flop rate, {kind}": replace(rate, flops_per_second=rate.flops_per_second * factor),
            f"byte rate, {kind}": replace(rate, bytes_per_second=rate.bytes_per_second * factor),
            f"call time, {kind}": replace(rate, call_seconds=rate.call_seconds * factor),
        }
        varied |= {name: replace(machine, rates={**machine.rates, kind: changed}) for name, changed in rates.items()}
    return varied


def sensitivity(machine: Machine, cores: int, series: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Speed-ups of strong scaling on `cores` cores, with each number of the machine 25 % smaller and 25 % larger."""
    for network in CONFIGS:
        job = job_of(network, _STRONG_BATCH)
        for name in series:

            def speedup(varied: Machine, job: Job = job, name: str = name) -> float:
                alone, together = (point(job, name, count, varied)["step_seconds"] for count in (1, cores))
                return float(alone / together)

            smaller, larger = (variations(machine, factor) for factor in (0.75, 1.25))
            numbers = {number: [speedup(smaller[number]), speedup(larger[number])] for number in smaller}
            yield {"network": network, "series": name, "cores": cores, "speedup": speedup(machine), "numbers": numbers}


def study(chosen: argparse.Namespace) -> dict[str, Any]:
    """All curves and sensitivities, for JSON."""
    machine = one_rank_per_node(machine_file.read(chosen.machine))
    names = [*SERIES, SEARCHED]
    return {
        "simulated": True,
        "machine": asdict(machine),
        "curves": list(curves(machine, chosen.cores, names)),
        "sensitivity": list(sensitivity(machine, chosen.cores[-1], ["allreduce in buckets", "sharded, exchange"])),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="xc40", help="a machine file, or a shipped one's name")
    parser.add_argument("--cores", type=lambda text: [int(word) for word in text.split(",")], default=CORES)
    parser.add_argument("--out", type=Path, default=_OUT)
    parser.add_argument("--plot", type=Path, help="an image; needs matplotlib")
    parser.add_argument("--report", type=Path, help="print the tables of an earlier study; simulates nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0."""
    chosen = parse(arguments)
    if chosen.report is None:
        result = study(chosen)
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(chosen.out, result)
    else:
        result = json.loads(chosen.report.read_text())
    print(markdown(result))
    if chosen.plot is not None:
        plot(result, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
