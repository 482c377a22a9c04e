"""Predictions of the cases of `slow_links.py` by the planner's simulator, written down before they are measured.

    python -m benchmarks.slow_links_predictions         # adds to benchmarks/results/slow-links-predicted.json what it lacks

Nothing is measured: links, cores and polls are those that calibration found for the account of predictions
(results/planner-accuracy.json), the links' rate changed to that of the case. Operators take as long as by the calibrated rates,
scaled so that a step without messages takes what it took in results/overlap-MODEL.json.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_predictions import on_shared_cores
from benchmarks.shapes import SHAPES
from benchmarks.slow_links import PREDICTIONS, read
from benchmarks.slow_links_cases import ALONE, CASES, Case, Section
from hpctrain.averaging.strategies.sparse import SELECTION_SECONDS, PartOnLink, crossover_density
from hpctrain.bench.interleaved import machine_facts
from hpctrain.comm.link import LinkModel
from hpctrain.config.schema import Config
from hpctrain.core.errors import HpctrainError
from hpctrain.planner import machine_file
from hpctrain.planner.compute_costs import ComputeCosts, RateCosts
from hpctrain.planner.machine import Machine
from hpctrain.planner.planned_run import PlannedRun, prepare
from hpctrain.planner.step_program import predict
from hpctrain.storage.atomic_write import write_json

_RESULTS = Path(__file__).resolve().parent / "results"
_CORES = 2  # that all hosts share
_CALIBRATED_MEGABITS = {"500mbit": 500, "1gbit": 1000, "2gbit": 2000}
_MEGABITS = {"100mbit": 100, "200mbit": 200, **_CALIBRATED_MEGABITS}


@dataclass(frozen=True)
class Predicted:
    """The predictions of one case. step_seconds: by variant. refused: the sentence where there is none."""

    step_seconds: Mapping[str, float]
    exchanged_bytes: Mapping[str, int]
    refused: Mapping[str, str]


def predicted(case: Case) -> Predicted:
    """The simulated step of each variant of a case, and the bytes that all its ranks exchange in it."""
    step_seconds: dict[str, float] = {}
    exchanged: dict[str, int] = {}
    refused: dict[str, str] = {}
    for name, section in case.variants.items():
        try:
            step_seconds[name], exchanged[name] = _predict(case, section)
        except HpctrainError as error:
            refused[name] = str(error)
    return Predicted(step_seconds, exchanged, refused)


def _predict(case: Case, section: Section) -> tuple[float, int]:
    task = planned_run(case.model, 1 if section is None else case.ranks, section or {"name": "blocking"})
    known = machine_of(case)
    if section is None:  # a rank by itself, on its share of a core
        known = replace(known, nodes=1, ranks_per_node=1, ranks_per_card=1)
    prediction = predict(task.job, task.candidate, known, costs_of(case.model))
    return prediction.step.seconds, prediction.exchanged_bytes


def rule_crossover(case: Case) -> float:
    """The density at which sparse and dense averaging take as long, by the rule that the averager chooses slices by."""
    task = planned_run(case.model, 1, {"name": "blocking"})
    elements = sum(math.prod(spec.shape) for spec in task.job.specs.values())
    link = machine_of(case).between
    # The ranks of a host share its link.
    shared = LinkModel(link.segments[0].alpha_seconds, case.ranks_per_host * link.segments[-1].beta_seconds_per_byte)
    part = PartOnLink(-(-elements // case.ranks_per_host), case.hosts, 4, SELECTION_SECONDS)
    return crossover_density(part, shared)


def machine_of(case: Case) -> Machine:
    """The hosts of a case, as far as they are known."""
    calibrated = calibrated_machines()
    if case.rate is None:
        machine = calibrated["shared memory"]
    else:
        nearest = case.rate if case.rate in calibrated else "500mbit"
        machine = calibrated[nearest]
        slower = machine.scaled(bandwidth=_MEGABITS[case.rate] / _CALIBRATED_MEGABITS[nearest])
        machine = replace(machine, between=slower.between, within=calibrated["shared memory"].within)
    nodes, per_node = (1, case.ranks) if case.rate is None else (case.hosts, case.ranks_per_host)
    machine = replace(machine, nodes=nodes, ranks_per_node=per_node, ranks_per_card=per_node, concurrency={})
    return on_shared_cores(machine, _CORES / case.ranks)


@cache
def calibrated_machines() -> dict[str, Machine]:
    """By link, the machine that two ranks have calibrated."""
    runs = json.loads((_RESULTS / "planner-accuracy.json").read_text())["runs"]
    machines: dict[str, Machine] = {}
    with tempfile.TemporaryDirectory() as name:
        for number, run in enumerate(runs):
            path = Path(name) / f"machine{number}.yaml"
            path.write_text(run["machine_file"])
            machines.setdefault(run["link"], machine_file.read(str(path)))
    return machines


def planned_run(model: str, ranks: int, section: Mapping[str, Any]) -> PlannedRun:
    """The training of a case's variant, without ranks and images."""
    shape = SHAPES[model]
    config = Config.model_validate(
        {
            "name": "slow-links",
            "backend": "onednn",
            "threads": 1,
            "model": {"name": f"{shape.family}{shape.depth}", "width": shape.width},
            "data": {"train": "made-up.h5"},
            "batch": ranks * shape.batch,
            "epochs": 1,
            "optimizer": {"name": "sgd", "lr": 1e-4, "momentum": 0.9},
            "schedule": "constant",
            "averager": dict(section),
            "progress": "test",
        }
    )
    return prepare(config, ranks, (shape.pixels, shape.pixels, 3), shape.classes)


@cache
def costs_of(model: str) -> ComputeCosts:
    """Operators by the calibrated rates, as fast as a step without messages was measured to be."""
    machine = replace(calibrated_machines()["shared memory"], nodes=1, ranks_per_node=1, ranks_per_card=1, concurrency={})
    task = planned_run(model, 1, {"name": "blocking"})
    rates = RateCosts(machine, task.config.dtype)
    seconds = predict(task.job, task.candidate, machine, rates).step.seconds
    return RateCosts(machine.scaled(compute=seconds / alone_seconds(model)), task.config.dtype)


def alone_seconds(model: str) -> float:
    """The measured median of a step without messages, on a core of its own."""
    runs = json.loads((_RESULTS / f"overlap-{model}.json").read_text())["runs"]
    return float(np.median([turn["step_seconds"] for run in runs for turn in run["rounds"][ALONE]]))


def main() -> int:
    """Write down the predictions of all cases that have none yet, and print how many there are."""
    tables = ("step_seconds", "rule_crossover", "exchanged_bytes", "refused")
    values: dict[str, Any] = {"machine": machine_facts(), **{table: {} for table in tables}, **read(PREDICTIONS)}
    for case in CASES:
        if case.name in values["step_seconds"]:
            continue
        one = predicted(case)
        values["step_seconds"][case.name] = dict(one.step_seconds)
        values["exchanged_bytes"][case.name] = dict(one.exchanged_bytes)
        if case.kind == "slow":
            values["rule_crossover"][case.name] = rule_crossover(case)
        if one.refused:
            values["refused"][case.name] = dict(one.refused)
        print(f"{case.name}: {len(one.step_seconds)} predicted, {len(one.refused)} refused")
    write_json(PREDICTIONS, values)
    return 0


if __name__ == "__main__":
    sys.exit(main())
