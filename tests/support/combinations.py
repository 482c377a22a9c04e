"""Options of the program combined, each combination against one rank in float64: the net under all features.

    python -m tests.support.combinations net=plain grid=3x1 ...   one of them; options left out have their first value

See docs/testing.md.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core import registry
from hpctrain.core.errors import ConfigError, ShapeError
from hpctrain.data import pipeline
from hpctrain.runs.records import HashRecord
from hpctrain.training.replica import StrategyFactory
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support.device_views import ViewingCommunicator
from tests.support.dimensions import (
    VALUES,
    Row,
    averager_options,
    config_of,
    ends_early,
    has_batch_norm,
    is_run,
    kernels_of,
    line,
    parsed,
    refusal,
    resumed,
    steps_of,
    steps_per_epoch,
    task_of,
    value_of,
)
from tests.support.interrupted import Course, PartOfRun, PartOutcome, RunOutcome, by_epoch, other_order_from, run_whole
from tests.support.one_rank import Groups, groups_of, one_group, train_alone
from tests.support.pairwise import Draw, draw
from tests.support.training import Result, Task, distance, train

T = TypeVar("T")

TOLERANCE = 1e-9
#: of one rounding, relative; each step rounds each gradient, and what follows from it in later steps adds a few times as much
_UNITS = {"bfloat16": 2.0**-8}
_AMPLIFICATION = 2
#: optimisers that divide by the length of gradients, so that an error of a small one matters more
_DIVIDING = ("adam", "adamw", "lamb")
#: with these values a training has no thread, no order by measured times, and messages that come at once
_HIDES_NOTHING = {
    "replan": "no",
    "window": "default",
    "messages": "prompt",
    "device": "host",
    "transport": "staged",
}


def run(row: Row) -> float:
    """The largest relative distance of any rank's losses, parameters and running statistics from those of one rank.

    One rank cannot withhold values from others, so sparse averaging is compared with the same ranks at full density. A run that
    ends early and resumes on the same grid is also compared with an uninterrupted run, and sums in a fixed order with one rank.

    Raises:
        ConfigError: the program refuses the combination.
        AssertionError: ranks end with different bits, or a resumed run ends with other bits than an uninterrupted one.
    """
    sentence = refusal(row)
    if sentence is not None:
        raise ConfigError(sentence)
    task = task_of(row)
    course = Course.drawn(value_of(row, "end"), task.steps, zlib.crc32(line(row).encode()))
    found = _train(row, course)
    _check_ranks(found.results)
    first = found.results[0]
    if ends_early(row) and value_of(row, "resume") is None:
        whole = _train({**row, "end": "own"}, replace(course, end="own"))
        if whole.other_order_from == found.other_order_from:
            _check_same(first, whole.results[0])
            same = found.hashes == whole.hashes or not is_run({**row, "end": "own"})  # which then has no file of hashes
            assert same, "hashes are not those of a run that does not end early"
    if value_of(row, "exact") is not None:
        alone = _train({**row, "grid": "1x1", "nodes": "one", "end": "own"}, replace(course, end="own"))
        if alone.other_order_from == found.other_order_from:
            _check_same_bits(first, alone.results[0], "is not that of one rank")
    if value_of(row, "averager") == "sparse" and averager_options(row)["density"] < 1.0:
        return _distance(first, _train({**row, **_HIDES_NOTHING}, course).results[0], row)
    return _distance(first, _expected(row, replace(task, kernels=NumpyKernelSet(), dtype=Task.dtype), found), row)


@dataclass(frozen=True)
class _Trained:
    """Results by rank, with sums over the epoch so far.

    other_order_from: the step from which samples came in another order, if they did.
    goes_on_from: the step with which a second part of the run has begun; None: there is one part. hashes: of a run, by step.
    """

    results: list[Result]
    other_order_from: int | None = None
    goes_on_from: int | None = None
    hashes: Mapping[int, HashRecord] = field(default_factory=dict)


def _train(row: Row, course: Course) -> _Trained:
    """The training of a combination."""
    if not is_run(row):
        task, batch = task_of(row), value_of(row, "batch")

        def program(comm: ThreadCommunicator, engine: ProgressEngine) -> Result:
            return train(_of_rank(task, row, comm.rank), comm, engine, _strategy(row), nominal_batch=batch)

        results = _on_ranks(row, program)
        return _Trained([by_epoch(result, steps_per_epoch(row)) for result in results])

    def make(folder: Path, ends: Course | None) -> PartOfRun:
        goes_on = ends is None and course.end != "own"
        of_part = resumed(row) if goes_on else row
        return PartOfRun(task_of(of_part), config_of(of_part, folder, course.every_steps), _strategy(of_part), ends)

    def on_ranks(part: PartOfRun) -> list[PartOutcome]:
        grid = f"{part.task.plan.rows}x{part.task.plan.cols}"

        def program(comm: ThreadCommunicator, engine: ProgressEngine) -> PartOutcome:
            return replace(part, task=_of_rank(part.task, row, comm.rank)).run(comm, engine)

        return _on_ranks({**row, "grid": grid}, program)

    with mock.patch.object(pipeline, "_LEAST_CHUNK_BYTES", 1):  # else one thread makes a whole batch of such small images
        outcome = run_whole(make, course, on_ranks)
    every = value_of(row, "hashes")
    hashed = list(range(0, steps_of(row) + 1, every)) if every else []
    assert sorted(outcome.hashes) == hashed, f"{sorted(outcome.hashes)} are not the steps with hashes, but {hashed}"
    return _Trained(outcome.results, _check_position(row, course, outcome), outcome.goes_on_from, outcome.hashes)


def _of_rank(task: Task, row: Row, rank: int) -> Task:
    """The task with a kernel set of the rank's own: a device is that of one rank."""
    return task if rank == 0 else replace(task, kernels=kernels_of(row, rank))


def _check_position(row: Row, course: Course, outcome: RunOutcome) -> int | None:
    """The step from which samples came in another order, where that and all else of the last position is as it must be."""
    action, poisoned_step = value_of(row, "on_nonfinite")
    position, steps, per_epoch = outcome.position, steps_of(row), steps_per_epoch(row)
    poisoned = poisoned_step is not None and 0 <= poisoned_step < steps
    back_to = None
    if poisoned and action == "rollback":
        saves = value_of(row, "checkpoint") is not None
        back_to = other_order_from(course, poisoned_step, per_epoch, outcome.stops, saves=saves)
    orders = [change.epoch * per_epoch + -(-change.first // value_of(row, "batch")) for change in position.reorderings]
    assert orders == ([] if back_to is None else [back_to]), f"{orders} are not the steps of other orders, but {back_to}"
    assert position.global_step == steps, f"{position.global_step} steps of {steps}"
    assert position.skipped == (poisoned and action == "skip"), f"{position.skipped} steps skipped"
    return back_to


def _strategy(row: Row) -> StrategyFactory:
    return AveragerChoice(value_of(row, "averager"), averager_options(row)).strategy


def _on_ranks(row: Row, program: Callable[[ThreadCommunicator, ProgressEngine], T]) -> list[T]:
    """A program on the ranks of a combination, by rank."""

    def with_engine(comm: ThreadCommunicator) -> T:
        engine = virtual_engine(comm)
        ranks: Any = ViewingCommunicator(comm) if value_of(row, "transport") == "mpi" else comm
        return program(ranks, engine)

    seed = zlib.crc32(line(row).encode()) if value_of(row, "messages") else None
    ranks = math.prod(value_of(row, "grid"))
    return run_virtual(ranks, with_engine, seed=seed, ranks_per_node=value_of(row, "nodes"), deadline_seconds=600)


def tolerance(row: Row) -> float:
    """The largest distance from one rank that a combination may have: that of float64, or what rounding explains."""
    units = [_UNITS[value] for value in (*_wires(row), value_of(row, "precision")) if value is not None]
    amplification = _AMPLIFICATION * (8 if value_of(row, "optimizer")["name"] in _DIVIDING else 1)
    return amplification * steps_of(row) * max(units) if units else TOLERANCE


def _wires(row: Row) -> tuple[str | None, str | None]:
    """How gradients and parameters travel, where they are rounded."""
    return value_of(row, "wire"), value_of(row, "wire_parameters")


def _check_ranks(results: Sequence[Result]) -> None:
    for rank, result in enumerate(results):
        _check_same_bits(result, results[0], f"of rank {rank} is not rank 0's")


def _check_same(found: Result, whole: Result) -> None:
    """A run that has ended early and gone on has the bits of one that has not."""
    _check_same_bits(found, whole, "is not that of a run that does not end early")
    for step, (ours, theirs) in enumerate(zip(found.totals, whole.totals, strict=True)):
        same = (ours.loss, ours.top1, ours.top5, ours.count) == (theirs.loss, theirs.top1, theirs.top5, theirs.count)
        assert same, f"the sums after step {step + 1} are not those of a run that does not end early"


def _check_same_bits(result: Result, first: Result, sentence: str) -> None:
    for values, of_first in ((result.parameters, first.parameters), (result.statistics, first.statistics)):
        for name in of_first:
            assert values[name].tobytes() == of_first[name].tobytes(), f"{name} {sentence}"


def _distance(found: Result, expected: Result, row: Row) -> float:
    # If messages or activations are rounded, a sample between two classes may fall to either.
    exact = all(rounding is None for rounding in (*_wires(row), value_of(row, "precision")))
    pairs = zip(found.totals, expected.totals, strict=True)
    losses = [abs(a.loss - b.loss) / (abs(b.loss) or 1.0) + (a.count != b.count) + (exact and a.top1 != b.top1) for a, b in pairs]
    # If anything is rounded, all values are compared together: the bias after a batch norm of few samples, and the running mean
    # of normalised images, are small differences of large numbers.
    compared = (lambda values: values) if exact else _together
    statistics = distance(compared(found.statistics), compared(expected.statistics)) if expected.statistics else 0.0
    return max(*losses, distance(compared(found.parameters), compared(expected.parameters)), statistics)


def _together(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"all": np.concatenate([values.ravel() for values in parameters.values()])}


def _expected(row: Row, task: Task, found: _Trained) -> Result:
    """One rank's result; kept, as many combinations share it."""
    groups, key = _groups(row)
    then, key_then = _groups(resumed(row))
    other_groups = (found.goes_on_from, then) if found.goes_on_from is not None and key_then != key else None
    lazy = averager_options(row) if row["averager"] == "lazy" else None
    left_out = task.poisoned_step if task.skips else None
    key += (
        row["net"],
        row["optimizer"],
        row["ema"],
        row["mixing"],
        row["image_sizes"],
        row["batch"],
        row["smoothing"],
        task.steps,
        repr(lazy),
        left_out,
        task.unreadable,
        task.frozen,
    )
    key += (found.other_order_from, other_groups and (found.goes_on_from, *key_then))
    if key not in _KEPT:
        alone: StrategyFactory = Blocking
        if lazy is not None:
            # One rank announces gradients alone, and no inputs and errors.
            alone = AveragerChoice("lazy", {**lazy, "fc_exchange": "never"}).strategy
        result = train_alone(task, groups, alone, other_order_from=found.other_order_from, other_groups=other_groups)
        _KEPT[key] = by_epoch(result, steps_per_epoch(row))
    return _KEPT[key]


def _groups(row: Row) -> tuple[Callable[[int], Groups], tuple[object, ...]]:
    """How samples fall into groups with statistics of their own, and what that follows from."""
    (rows, cols), micro_batches = value_of(row, "grid"), value_of(row, "micro_batches")
    shards = value_of(row, "exact")
    if shards is not None and has_batch_norm(row["net"]):
        return partial(groups_of, ranks=1, split_size=1, micro_batches=shards, together=1), (1, 1, shards, 1)
    if not has_batch_norm(row["net"]) or (row["net"] != "residual-local" and micro_batches == 1):
        return one_group, ()
    together = rows * cols
    if row["net"] == "residual-local":
        together = 1 if rows == 1 or row["plan"] == "batch" else rows
    groups = partial(groups_of, ranks=rows * cols, split_size=rows, micro_batches=micro_batches, together=together)
    return groups, (rows, cols, micro_batches, together)


_KEPT: dict[tuple[object, ...], Result] = {}


def predicted_seconds(row: Row) -> float:
    """Processor seconds of a combination, up to a factor of two: a fit to 60 of them. Options not chosen yet count as cheap."""
    trainings = 1 + (ends_early(row) and value_of(row, "resume") is None) + (value_of(row, "exact") is not None)
    trainings += (row.get("averager"), row.get("sparse")) == ("sparse", "third")
    factor = 0.09 if row.get("net", "narrow") != "narrow" else 0.045
    factor *= 1.0 if row.get("precision", "float64") == "float64" else 1.5
    factor *= 1.0 if row.get("device", "host") == "host" else 1.9
    factor *= 1.7 if row.get("averager") in ("lazy", "sparse") else 1.0
    ranks = math.prod(value_of(row, "grid")) if "grid" in row else 1
    return factor * float(ranks * steps_of(row) * trainings) ** 0.75


@lru_cache(maxsize=4)
def drawn(count: int, seed: int | str, most_seconds: float = math.inf) -> Draw:
    """At least `count` combinations, and at least as many as all legal pairs need. Each takes at most `most_seconds`."""

    def refused(row: Row) -> str | None:
        sentence = refusal(row)
        return "It takes too long." if sentence is None and predicted_seconds(row) > most_seconds else sentence

    with mock.patch.object(registry, "parameters_of", cache(registry.parameters_of)):  # thousands ask for a few classes
        return draw(VALUES, refused, seed=seed, count=count)


@dataclass
class Tally:
    """How combinations went. failures: the line of each, with the error. refused: by sentence."""

    run: int = 0
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, row: Row) -> None:
        """Run one combination."""
        self.run += 1
        try:
            found = run(row)
        except (ConfigError, ShapeError) as error:
            self.refused[str(error)] += 1
        except Exception as error:
            notes = "; ".join(getattr(error, "__notes__", ()))
            self.failures.append(f"{line(row)}\n    {type(error).__name__}: {error} ({notes})")
        else:
            self.worst = max(self.worst, found) if tolerance(row) == TOLERANCE else self.worst
            if not found <= tolerance(row):
                self.failures.append(f"{line(row)}\n    {found:.1e} from one rank, and {tolerance(row):.0e} is allowed")


if __name__ == "__main__":
    print(f"{run(parsed(sys.argv[1:])):.1e} from one rank")
