"""Whole networks on process grids in float32 on oneDNN: `python -m tests.support.grid_float32` prints a table of them.

A float32 result is judged by its distance to one rank's in float64: the median over tensors of the relative L2 distance, of every
gradient of the first step and of all parameters after five. It may be twice that of one float32 rank, plus 1e-6.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.parallel.parallel_plan import ParallelPlan
from tests.support.grid_matrix import (
    NETS,
    add_choice,
    alone,
    chosen_cells,
    expected_of,
    on_virtual_ranks,
    plan_of,
    relative_distances,
)
from tests.support.training import Result, Task

FIELDS = ("gradients", "parameters")


@dataclass(frozen=True)
class Medians:
    """Distances of one rank and of the farthest of many, for one of FIELDS."""

    one: float
    many: float

    @property
    def limit(self) -> float:
        return 2 * self.one + 1e-6

    @property
    def near(self) -> bool:
        return self.many <= self.limit


def task_of(name: str) -> Task:
    """The network's task in float32 on oneDNN."""
    return NETS[name].task(kernels=OnednnKernelSet(), dtype="float32")


def cell(name: str, plan: ParallelPlan) -> Mapping[str, Medians]:
    """By field: how far one rank and the ranks of a grid are from float64."""
    many, exact = on_virtual_ranks(replace(task_of(name), plan=plan)), expected_of(name)
    return {field: Medians(_one(name, field), max(median_distance(each, exact, field) for each in many)) for field in FIELDS}


def median_distance(found: Result, exact: Result, field: str) -> float:
    """Over the tensors of a field."""
    return float(np.median(relative_distances(getattr(found, field), getattr(exact, field))))


def _one(name: str, field: str) -> float:
    return median_distance(_alone(name), expected_of(name), field)


@lru_cache(maxsize=2)
def _alone(name: str) -> Result:
    return alone(task_of(name))


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 where a cell is farther than its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_choice(parser)
    chosen = parser.parse_args(arguments)
    heads = "".join(f" {field:>10}, one rank" for field in FIELDS)
    print(f"{'network':10} {'grid':5} {'plan':7}{heads}  seconds", flush=True)
    cells = far = 0
    for name, rows, cols, kind in chosen_cells(chosen):
        start = time.perf_counter()
        plan = plan_of(NETS[name], kind, rows, cols)
        assert plan is not None
        found = cell(name, plan)
        numbers = "".join(f" {each.many:10.1e}, {each.one:8.1e}" for each in found.values())
        where = ", ".join(field for field, each in found.items() if not each.near)
        cells, far = cells + 1, far + bool(where)
        note = f"  far: {where}" if where else ""
        print(f"{name:10} {rows}x{cols:<3} {kind:7}{numbers} {time.perf_counter() - start:8.1f}{note}", flush=True)
    print(f"{cells} cells, {far} farther than twice one rank's distance + 1e-6")
    return int(far > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
