"""The ranks of `planner_accuracy.py`: one job that calibrates, predicts all its points, and then steps them in turn.

Started by `planner_accuracy.py` as `python -m mpi4py -m benchmarks.planner_accuracy_ranks SETTINGS`. Each point has a network,
communicators and averagers of its own. The predictions are on disk before the first point is stepped.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.core_speed import Yardstick, slowed, slowed_ranks
from benchmarks.planner_jobs import configuration, made_up_batch, started
from benchmarks.planner_points import POINTS, Point
from benchmarks.planner_predictions import Planner
from benchmarks.process import be_nice, cpu_seconds, sent_bytes
from benchmarks.quiet import QuietCores
from hpctrain.comm import mpi, progress_mode
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.launch.control_groups import peak_resident_bytes
from hpctrain.storage.atomic_write import write_json
from hpctrain.trace.time_table import merge, tabulate
from hpctrain.trace.tracer import Category

_LR = 1e-4
_WARMUP, _WARMUP_OF_PLANS = 2, 6  # steps: connections and buffers; orders that follow from the times of the first steps


@dataclass(frozen=True)
class Settings:
    """The request of `planner_accuracy.py`.

    points: names. rounds: turns of each. lead: steps that open a turn and are not timed. steps: timed ones. traced: names of
    points that are stepped again with a trace, `traced_steps` times. predicts: False only measures. cores: of this machine, on
    which ranks take turns; 0: a rank runs wherever the launcher puts it. out, predictions, machine: files that rank 0
    writes. times: one that keeps the operators' times; "": they are not kept.
    """

    points: list[str]
    out: str
    predictions: str
    machine: str
    rounds: int = 5
    lead: int = 1
    steps: int = 1
    traced: list[str] = field(default_factory=list)
    traced_steps: int = 6
    predicts: bool = True
    cores: int = 0
    times: str = ""
    nice: int = 0
    deadline_seconds: float = 120.0


class MeasuredPoint:
    """One point, ready to step. Making one is collective."""

    def __init__(self, point: Point, world: Communicator, deadline_seconds: float, *, trace: bool = False) -> None:
        config = configuration(point, trace=trace).model_copy(update={"deadline_seconds": deadline_seconds})
        session, self.replica = started(config, point, world)
        self.point, self.progress = point, session.progress
        self._batch = made_up_batch(point, self.replica.place)
        replans = any(getattr(strategy.options, "replan", False) for strategy in self.replica.strategies.values())
        self.warmup = _WARMUP_OF_PLANS if replans else _WARMUP

    def steps(self, count: int) -> None:
        """Train; where there is a trace it records whole steps. Collective."""
        trace = self.progress.trace
        for number in range(count):
            begin = 0 if trace is None else trace.clock_ns()
            self.replica.step(self._batch, _LR)
            if trace is not None:
                trace.add(Category.STEP, "step", begin, trace.clock_ns(), "", number)

    def settle(self) -> None:
        """Complete all that is on its way. Collective."""
        self.replica.drain()
        self.replica.settle()


class Rank:
    """All that one rank measures. Every method is collective."""

    def __init__(self, settings: Settings) -> None:
        self._begin = time.perf_counter()
        self.settings = settings
        self.world = mpi.world(settings.deadline_seconds)
        if settings.cores:
            os.sched_setaffinity(0, {core_of(self.world.rank, settings.cores)})
        barriers = self.world.split(0, self.world.rank, "barriers")
        assert barriers is not None
        self._barriers = barriers
        quiet = self.world.split(0, self.world.rank, "quiet")
        assert quiet is not None
        self.quiet = QuietCores(quiet)
        self._bare = ProgressEngine(rank=self.world.rank, deadline_seconds=settings.deadline_seconds, abort=self.world.abort)
        self.points = [point for point in POINTS if point.name in settings.points]
        self._yardsticks: dict[str, Yardstick] = {}
        self._planner: Planner | None = None

    def say(self, text: str) -> None:
        """A line on rank 0's stderr: how far the job has come, where it ends early."""
        if self.world.rank == 0:
            print(f"{time.perf_counter() - self._begin:7.1f} s  {text}", file=sys.stderr, flush=True)

    def barrier(self) -> None:
        self._bare.wait(self._bare.queue(self._barriers).post(self._barriers.ibarrier, "barrier"))

    def predict(self) -> None:
        """Calibrate, time the operators of all points, and predict them: rank 0 writes that down."""
        settings, begin = self.settings, time.perf_counter()
        self.say("calibration")
        times = Path(settings.times) if settings.times else None
        machine = Path(settings.machine)
        planner = Planner(self._barriers, self._bare, self.quiet, machine, settings.deadline_seconds, settings.cores, times)
        self._planner = planner
        calibrated = time.perf_counter()
        self.say("times of operators")
        planner.time_operators(self.points)
        timed = time.perf_counter()
        self.say("predictions")
        if self.world.rank == 0:
            predictions = {point.name: planner.predict(point) for point in self.points}
            seconds = {
                "calibration": calibrated - begin,
                "operators": timed - calibrated,
                "predictions": time.perf_counter() - timed,
            }
            account = {"seconds": seconds, "coverage": planner.coverage, "written": time.time()}
            write_json(Path(settings.predictions), {"predictions": predictions, **account})
        self.barrier()

    def yardstick(self, point: Point) -> float:
        """Seconds of the network's step on each rank's samples alone, all ranks at once."""
        if point.network not in self._yardsticks:
            self._yardsticks[point.network] = Yardstick(point)
        self.barrier()
        return self._yardsticks[point.network].seconds()

    def turn(self, measured: MeasuredPoint) -> dict[str, float]:
        """Seconds, exposed waits and CPU seconds of a step, bytes on the link of a step; begins and ends with messages on their
        way, as the steps of a run do. Yardsticks are taken before and after."""
        before = self.yardstick(measured.point)
        turn = self.timed_steps(measured)
        after = self.yardstick(measured.point)
        return turn | {"yardstick_seconds": (before + after) / 2, "yardstick_least_seconds": min(before, after)}

    def timed_steps(self, measured: MeasuredPoint) -> dict[str, float]:
        """As `turn`, without yardsticks."""
        settings = self.settings
        progress_mode.apply(measured.progress, ProgressMode.TEST)
        self.barrier()
        sent = sent_bytes()
        measured.steps(settings.lead)
        begin, cpu, waited = time.perf_counter(), cpu_seconds(), measured.progress.waited_seconds
        measured.steps(settings.steps)
        seconds = time.perf_counter() - begin
        cpu, waited = cpu_seconds() - cpu, measured.progress.waited_seconds - waited
        measured.settle()
        self.barrier()
        return {
            "step_seconds": seconds / settings.steps,
            "waited_seconds": waited / settings.steps,
            "cpu_seconds": cpu / settings.steps,
            "link_bytes": (sent_bytes() - sent) / (settings.lead + settings.steps),
        }

    def warm_up(self, measured: MeasuredPoint) -> None:
        """Steps that are not measured: set-up, and whatever a strategy measures by itself."""
        progress_mode.apply(measured.progress, ProgressMode.TEST)
        measured.steps(measured.warmup)
        measured.settle()
        self.barrier()

    def rounds(self, all_measured: list[MeasuredPoint]) -> dict[str, list[dict[str, float]]]:
        """All turns of all points, this rank's; the order within a round moves on by one each time."""
        turns: dict[str, list[dict[str, float]]] = {measured.point.name: [] for measured in all_measured}
        for number in range(self.settings.rounds):
            self.say(f"round {number + 1} of {self.settings.rounds}")
            at = number % len(all_measured)
            for measured in all_measured[at:] + all_measured[:at]:
                turns[measured.point.name].append(self.turn(measured))
        return turns

    def at_speed(self, turns: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
        """By point, for each turn: how many times each rank's core was slowed, and what the prediction is with that."""
        network_of = {point.name: point.network for point in self.points}
        all_ranks = self.world.allgather_object(slowed(turns, network_of))
        if self._planner is None or self.world.rank:
            return {}
        result = {}
        for point in self.points:
            by_turn = slowed_ranks(all_ranks, point.name)
            seconds = [self._planner.step_seconds(point, slow) for slow in by_turn]
            result[point.name] = {"slowed": [list(slow.values()) for slow in by_turn], "step_seconds": seconds}
        return result

    def trace(self, point: Point) -> dict[str, Any]:
        """The time table of some steps at a point, the mean over the ranks."""
        self.say(f"trace of {point.name}")
        measured = MeasuredPoint(point, self.world, self.settings.deadline_seconds, trace=True)
        self.warm_up(measured)
        recorder = measured.progress.trace
        assert recorder is not None
        progress_mode.apply(measured.progress, ProgressMode.TEST)
        recorder.clear()
        measured.steps(self.settings.lead + self.settings.traced_steps)
        table = tabulate(recorder.events(), skip=self.settings.lead)
        measured.settle()
        assert table is not None, "whole steps are recorded"
        return asdict(merge(self.world.allgather_object(table), {}))


def core_of(rank: int, cores: int) -> int:
    """The core of a rank: neighbours have different ones, and so have ranks of the same number on neighbouring hosts."""
    return (rank + rank // cores) % cores


def mean_over_ranks(all_ranks: list[Mapping[str, list[dict[str, float]]]]) -> dict[str, list[dict[str, float]]]:
    """The ranks' measurements of the same turn, averaged: one that starts its timed steps late ends them early."""
    return {
        name: [
            {key: float(np.mean([turns[name][number][key] for turns in all_ranks])) for key in turn}
            for number, turn in enumerate(first)
        ]
        for name, first in all_ranks[0].items()
    }


def main(arguments: list[str] | None = None) -> int:
    (path,) = sys.argv[1:] if arguments is None else arguments
    settings = Settings(**json.loads(Path(path).read_text()))
    be_nice(settings.nice)
    rank = Rank(settings)
    if settings.predicts:
        rank.predict()
    all_measured = []
    for point in rank.points:
        rank.say(f"warm-up of {point.name}")
        all_measured.append(MeasuredPoint(point, rank.world, settings.deadline_seconds))
        rank.warm_up(all_measured[-1])
    turns = rank.rounds(all_measured)
    rounds = mean_over_ranks(rank.world.allgather_object(turns))
    at_speed = rank.at_speed(turns)
    traces = {point.name: rank.trace(point) for point in rank.points if point.name in settings.traced}
    resident = rank.world.allgather_object(peak_resident_bytes())
    if rank.world.rank == 0:
        waited = rank.quiet.waited_seconds
        facts = {
            "quiet_seconds": waited,
            "mpi": mpi.describe(),
            "ranks": rank.world.size,
            "resident_bytes": resident,
            "measured": time.time(),
        }
        result = {"settings": asdict(settings), "facts": facts, "predictions": {}, "rounds": rounds, "traces": traces}
        result["at_speed"] = at_speed
        Path(settings.out).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
