"""Passes over one rank's samples in shards, in one process on one core: what of the price of `exact` is what.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python -m benchmarks.shards             # ResNet-18 at 64 px, 24 samples
    python -m benchmarks.shards --report FILE                                        # of what has been measured; runs nothing

All ways run in turns: one pass over all samples, as an ordinary step does; shards one after another; shards side by side, whose
gradients are written where they wait. Each once more with oneDNN's kernels alone, where few pixels are no products of matrices.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.pairs import ratio
from hpctrain.averaging.group_sums import ShardGradients
from hpctrain.backend.onednn import conv2d
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.backend.operators import StepContext
from hpctrain.core.intervals import ShardsOfRank
from hpctrain.models import catalogue
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import Parameter
from hpctrain.nn.program import StepHooks

_OUT = Path(__file__).resolve().parent / "results" / "shards.json"
_SHAPE, _CLASSES = (64, 64, 3), 200
_SHARDS = (2, 4)
_ORDINARY = "all at once"
_ALONE = ", oneDNN alone"


class Adding(StepHooks):
    """Adds up the gradients of the shards, and keeps the seconds that this takes."""

    def __init__(self, network: Network, shards: int, *, homes: bool) -> None:
        self._sums = ShardGradients(network.groups["all"], ShardsOfRank(0, 1, shards), homes=homes)
        self.buffer_for, self._last, self._place, self.seconds = self._sums.buffer_for, shards - 1, 0, 0.0

    def turn(self, place: int) -> None:
        """From now on gradients belong to this shard."""
        self._place = place

    def grad_ready(self, parameter: Parameter) -> None:
        started = time.perf_counter()
        if self._place < self._last:
            self._sums.add(parameter, self._place)
        else:
            self._sums.complete(parameter)
        self.seconds += time.perf_counter() - started


def stepping(network: Network, samples: int, shards: int, *, together: bool) -> tuple[Callable[[], None], Adding]:
    """(a step's passes over random images, what adds up its gradients)."""
    random, size = np.random.default_rng(0), samples // shards
    images, labels = random.standard_normal((size, *_SHAPE), np.float32), random.integers(0, _CLASSES, size)
    adding = Adding(network, shards, homes=together)
    context = StepContext(training=True, sample_ids=np.arange(size), global_count=samples)
    turns = shards if together else 1
    programs = network.side_by_side([(size,)] * turns, gradient_buffers=adding.buffer_for if together else None)

    def step() -> None:
        for first in range(0, shards, turns):
            for program in programs:
                program.set_input(images)
            programs.forward([context] * turns, adding, lambda place: adding.turn(first + place))  # noqa: B023  called at once
            for program in programs:
                program.loss(labels, samples)
            programs.backward(adding, lambda place: adding.turn(first + place))  # noqa: B023

    return step, adding


def measured(samples: int, rounds: int) -> dict[str, Any]:
    """Seconds of each way by round, and of its additions."""
    ways: dict[str, tuple[Callable[[], None], Adding]] = {}
    pixels = conv2d._FEW_PIXELS
    for ending, few in (("", pixels), (_ALONE, 0)):
        conv2d._FEW_PIXELS = few
        network = Network(catalogue.build("resnet18", {"classes": _CLASSES}), _SHAPE, OnednnKernelSet())
        ways[_ORDINARY + ending] = stepping(network, samples, 1, together=True)
        for shards in _SHARDS:
            for together, how in ((False, "one after another"), (True, "side by side")):
                ways[f"{shards} shards {how}{ending}"] = stepping(network, samples, shards, together=together)
    conv2d._FEW_PIXELS = pixels
    for step, _ in ways.values():
        step()
    result: dict[str, Any] = {"samples": samples, "ways": {name: {"step": [], "additions": []} for name in ways}}
    for _ in range(rounds):
        for name, (step, adding) in ways.items():
            adding.seconds, started = 0.0, time.perf_counter()
            step()
            result["ways"][name]["step"].append(time.perf_counter() - started)
            result["ways"][name]["additions"].append(adding.seconds)
    return result


def markdown(run: Mapping[str, Any]) -> str:
    """A row for each way: medians, and ratios of pairs to the ordinary pass."""
    ordinary = run["ways"][_ORDINARY]["step"]
    lines = [f"| {run['samples']} samples | ms | over {_ORDINARY} | additions, ms |", "|---|---|---|---|"]
    for name, seconds in run["ways"].items():
        step, additions = (f"{1e3 * median(seconds[kind]):.0f}" for kind in ("step", "additions"))
        lines.append(f"| {name} | {step} | {ratio(seconds['step'], ordinary)} | {additions} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where all was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=_OUT)
    parser.add_argument("--report", type=Path, help="print the table of an earlier run's JSON; runs nothing")
    chosen = parser.parse_args(arguments)
    if chosen.report is None:
        chosen.out.write_text(json.dumps(measured(chosen.samples, chosen.rounds), indent=1) + "\n")
    print(markdown(json.loads((chosen.report or chosen.out).read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
