"""The cost of watched weights: processor time of a check, of sums and of guarded updates, over that of a step of one rank.

    python -m benchmarks.checks                # ResNet-20 and ResNet-50; a minute
    python -m benchmarks.checks --report       # Markdown of the file of results; runs nothing

A share of a thousandth cannot be seen in the time of steps on a machine that others use. So each kind of event is timed alone, on
a whole model, and multiplied by how often a step has it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.averaging.group_sums import ReadSums
from hpctrain.averaging.slicing import RULE_LINK, Slice, cut, fused, slice_elements
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.bench.interleaved import machine_facts
from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.schema import ChecksConfig
from hpctrain.models import catalogue
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Optimizer
from hpctrain.optim.guarded import GuardedOptimizer
from hpctrain.optim.optimizers import Sgd
from hpctrain.storage.atomic_write import write_json
from hpctrain.training.replica import Replica
from hpctrain.training.weight_watch import AgreedChecksums, CheckCadence
from tests.support.training import Task, batches, replica_of

OUT = Path(__file__).resolve().parent / "results" / "checks.json"
EVERY_STEPS = ChecksConfig().every_steps
_ROUNDS = 9
_RANKS = 2
#: model -> image shape, samples of a rank's step, classes
MODELS: dict[str, tuple[tuple[int, int, int], int, int]] = {
    "resnet20": ((32, 32, 3), 128, 10),
    "resnet50": ((224, 224, 3), 8, 1000),
}


def task_of(name: str) -> Task:
    """Some steps of a model on made-up images."""
    shape, batch, classes = MODELS[name]
    return Task(
        partial(catalogue.build, name, {"classes": classes}),
        OnednnKernelSet(),
        partial(Sgd, momentum=0.9),
        image_shape=shape,
        classes=classes,
        samples=batch,
        batch=batch,
        steps=4,
        dtype="float32",
        checks=CheckCadence(EVERY_STEPS),
    )


def _replica(task: Task) -> Replica:
    comm = SingleCommunicator()
    return replica_of(task, comm, ProgressEngine(rank=0, deadline_seconds=300, abort=comm.abort), Blocking)


def step_seconds(task: Task) -> list[float]:
    """Processor time of each step but the first, without checks."""
    replica = _replica(replace(task, checks=CheckCadence()))
    seconds = []
    for batch in batches(task, 0, 1):
        begin = time.process_time()
        replica.step(batch, task.lr)
        seconds.append(time.process_time() - begin)
    return seconds[1:]


def check_seconds(task: Task) -> dict[str, Any]:
    """The time of one check, the optimizer's state among what is looked at, and the checks until all was."""
    watch = _replica(task).watch
    assert watch is not None
    looks = [_seconds(partial(watch.take_checksums, turn * EVERY_STEPS)) for turn in range(_ROUNDS * watch.checks_to_see_all)]

    def message() -> None:
        watch.take_checksums(0)
        watch.read(watch.message())

    whole = [_seconds(message) - looks[0] for _ in range(_ROUNDS)]
    return {"look": looks, "message": [max(0.0, seconds) for seconds in whole], "checks": watch.checks_to_see_all}


def guard_seconds(task: Task) -> list[float]:
    """The time of guarding all updates of a step on the first of two ranks with `sharded`: the difference to unguarded ones."""
    (group,) = _replica(task).network.groups.values()
    pieces = _owned(group)
    owned = [segment for segments in pieces for segment in segments]
    plain, watched = Sgd(momentum=0.9), GuardedOptimizer(Sgd(momentum=0.9))
    for optimizer in (plain, watched):
        optimizer.bind(group, owned)
    watched.watch(parameters=True)

    def updates(optimizer: Optimizer) -> None:
        watched.forget() if optimizer is plain else None
        for segments in pieces:
            optimizer.update(segments, 1e-9, None)

    differences = []
    for _ in range(_ROUNDS):
        without = _seconds(partial(updates, plain))
        updates(watched)  # what is loaded is remembered
        differences.append(_seconds(partial(updates, watched)) - without)
    return differences


def read_seconds(task: Task) -> list[float]:
    """The time of the sums over all parameters that a step has read, as on one of two ranks with `sharded`."""
    (group,) = _replica(task).network.groups.values()
    slices = _slices(group)
    places = [bound for piece in slices for rank in range(_RANKS) for bound in piece.part(rank, _RANKS)]
    reads = ReadSums(group, [group.covering(piece.start, piece.stop) for piece in slices], places)
    agreed = AgreedChecksums(([range(_RANKS)],), 0)

    def step() -> None:
        sums = np.concatenate([fetch.result() for fetch in reads.complete()])
        agreed.numbers([zlib.crc32(sums.tobytes())], found=False)

    return [_seconds(step) for _ in range(_ROUNDS)]


def _owned(group: FlatGroup) -> list[tuple[Segment, ...]]:
    """The pieces that rank 0 updates one after the other."""
    parts = [piece.part(0, _RANKS) for piece in _slices(group)]
    return [group.covering(begin, end) for begin, end in parts if begin < end]


def _slices(group: FlatGroup) -> Sequence[Slice]:
    least, most = slice_elements(None, group, _RANKS, RULE_LINK)
    return cut(group, fused(group, least), most)


def _seconds(event: Callable[[], object]) -> float:
    begin = time.thread_time()
    event()
    return time.thread_time() - begin


def measure(names: Sequence[str]) -> dict[str, Any]:
    """Measure the models."""
    return {"machine": machine_facts(), "every_steps": EVERY_STEPS, "models": {name: _of_model(name) for name in names}}


def _of_model(name: str) -> dict[str, Any]:
    task = task_of(name)
    steps, check, read, guard = step_seconds(task), check_seconds(task), read_seconds(task), guard_seconds(task)
    per_check = statistics.median(check["look"]) + statistics.median(check["message"])
    step = statistics.median(steps)
    return {
        "samples": task.batch,
        "step_seconds": steps,
        "check": check,
        "read_seconds": read,
        "guard_seconds": guard,
        "share_of_reads": statistics.median(read) / step,
        "share_of_checks": per_check / EVERY_STEPS / step,
        "share_of_guards": statistics.median(guard) / step,
    }


def markdown(results: dict[str, Any]) -> str:
    """A line for each model."""
    lines = [
        "| model, images of a rank | step, ms | sums, ms | a check, ms | all seen after | guards, ms "
        "| share of sums | share of checks | share of guards |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, values in results["models"].items():
        check = values["check"]
        keys = ("step_seconds", "read_seconds", "guard_seconds")
        step, read, guard = (statistics.median(values[key]) * 1e3 for key in keys)
        of_check = (statistics.median(check["look"]) + statistics.median(check["message"])) * 1e3
        lines.append(
            f"| {name}, {values['samples']} | {step:.0f} | {read:.2f} | {of_check:.2f} "
            f"| {check['checks'] * results['every_steps']} steps | {guard:.2f} | {values['share_of_reads']:.3%} "
            f"| {values['share_of_checks']:.3%} | {values['share_of_guards']:.3%} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="print the report as Markdown; run nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("models", nargs="*", default=list(MODELS), help="by default all")
    chosen = parser.parse_args(arguments)
    if not chosen.report:
        write_json(chosen.out, measure(chosen.models))
    print(markdown(json.loads(chosen.out.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
