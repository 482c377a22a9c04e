"""The predicting side of a job's ranks: one calibration, the operators' times, and the predictions of all points. Collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.planner_jobs import planned_run
from benchmarks.planner_points import Point
from benchmarks.quiet import QuietCores
from hpctrain.backend.choice import NodePlace, make_backend
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.planner.compute_costs import MeasuredCosts, RateCosts
from hpctrain.planner.machine import Machine
from hpctrain.planner.measurement import run_calibration
from hpctrain.planner.operator_times import OperatorTimes
from hpctrain.planner.planned_run import PlannedRun
from hpctrain.planner.program_timing import ensure_measured, setting_here
from hpctrain.planner.step_program import predict
from hpctrain.planner.tasks import Prediction, SimulationOptions

_CALIBRATION_SECONDS = 45.0
_QUIET_SECONDS = 1.0  # that a step waits for a quiet moment at most
_PASSES = 2  # over all operators
_BUDGET_SECONDS = 90.0  # of one pass over one network's operators


class Planner:
    """The machine as this job measures it, and predictions on it.

    Args:
        world: all ranks. quiet: says when operators are timed. path: of the machine's file, which rank 0 writes.
        cores: of this machine, which all ranks share, whatever host they are on; 0: hosts have the cores that they tell.
        times: of the file that keeps the operators' times; None: it is not kept.
    """

    def __init__(
        self,
        world: Communicator,
        progress: ProgressEngine,
        quiet: QuietCores,
        path: Path,
        deadline_seconds: float,
        cores: int = 0,
        times: Path | None = None,
    ) -> None:
        self._kept_at = times if world.rank == 0 else None
        self._world, self._progress, self._quiet = world, progress, quiet
        self._queue = progress.queue(world)
        kernels = make_backend("auto", place=NodePlace(world.size)).kernels
        machine = run_calibration(world, kernels, 1, _CALIBRATION_SECONDS, path, deadline_seconds)
        self.machine = on_shared_cores(machine, cores / world.size) if cores else machine
        self._times: OperatorTimes | None = None
        self.coverage: list[dict[str, Any]] = []

    def _barrier(self) -> None:
        self._quiet.wait(_QUIET_SECONDS)
        self._progress.wait(self._queue.post(self._world.ibarrier, "barrier"))

    def time_operators(self, points: Sequence[Point]) -> None:
        """Measure what all points compute, all ranks at once, several times; the less disturbed ones count."""
        for number in range(_PASSES):
            for network in dict.fromkeys(point.network for point in points):
                self._time_network(number, [planned_run(point) for point in points if point.network == network])
        assert self._times is not None
        self._times.save()

    def _time_network(self, number: int, tasks: Sequence[PlannedRun]) -> None:
        job = tasks[0].job
        setting = setting_here(job.kernels, 1, self.machine.ranks_per_node)
        times = OperatorTimes(setting)
        coverage = ensure_measured(
            job,
            [task.candidate for task in tasks],
            times,
            budget_seconds=_BUDGET_SECONDS,
            memory_bytes=self.machine.memory_bytes,
            before=self._barrier,
            agree=self._world.broadcast_object,
        )
        if self._times is None:
            self._times = OperatorTimes(setting, self._kept_at)
        self._times.take_faster(times)
        self.coverage.append({"network": tasks[0].config.model.name, "pass": number, **asdict(coverage)})

    def predict(self, point: Point) -> dict[str, Any]:
        """The prediction of one point, for JSON. Not collective."""
        prediction = self._predict(point, {})
        return {
            "step_seconds": prediction.step.seconds,
            "exposed_seconds": prediction.step.exposed_seconds,
            "memory_bytes": prediction.memory_bytes,
            "exchanged_bytes": prediction.exchanged_bytes,
            "measured_share": prediction.measured_share,
            "table": asdict(prediction.step.table),
        }

    def step_seconds(self, point: Point, slow: Mapping[int, float]) -> float:
        """The seconds of the predicted step if ranks compute longer by the factors `slow`. Not collective."""
        return self._predict(point, slow).step.seconds

    def _predict(self, point: Point, slow: Mapping[int, float]) -> Prediction:
        assert self._times is not None
        return predicted(point, self.machine, self._times, slow)


def on_shared_cores(machine: Machine, cores_per_rank: float) -> Machine:
    """The machine where hosts that seem to have cores of their own share those of one machine."""
    return replace(machine, cores_per_rank=min(machine.cores_per_rank, cores_per_rank))


def predicted(point: Point, machine: Machine, times: OperatorTimes, slow: Mapping[int, float]) -> Prediction:
    """The prediction of a point. slow: by rank, how many times longer its compute takes."""
    task = planned_run(point)
    costs = MeasuredCosts(times, RateCosts(machine, task.config.dtype))
    options = SimulationOptions(progress=ProgressMode.TEST, slow=slow)
    return predict(task.job, task.candidate, machine, costs, options)
