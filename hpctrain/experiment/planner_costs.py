"""The costs of computation that a plan is made with: measured times where there are some, a machine's rates elsewhere."""

from __future__ import annotations

from hpctrain.experiment.planned_run import PlannedRun
from hpctrain.planner.compute_costs_rest import ComputeCosts
from hpctrain.planner.machine import Machine
from hpctrain.planner.measured_costs import MeasuredCosts
from hpctrain.planner.operator_times import OperatorTimes, Setting, cache_file
from hpctrain.planner.program_timing_rest import processor_model, setting_here
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.scaled_costs import ScaledCosts


def costs(machine: Machine, task: PlannedRun, compute: float = 1.0) -> ComputeCosts:
    """The costs of a job's operators on a machine: measured ones from the user's cache where it is this one, else by its rates.

    Args:
        machine: as it is, not scaled. compute: ranks compute so many times as fast.
    """
    rates = RateCosts(machine, task.config.dtype)
    known: ComputeCosts = rates
    if is_here(machine):
        times = OperatorTimes(setting(machine, task), cache_file())
        known = MeasuredCosts(times, rates) if len(times) else rates
    return known if compute == 1 else ScaledCosts(known, compute)


def is_here(machine: Machine) -> bool:
    """True where the machine's rates were measured on a processor like this one: its times hold there."""
    sources = [source for key, source in machine.sources.items() if key.startswith("rates")]
    return any(source.startswith("measured") and processor_model() in source for source in sources)


def setting(machine: Machine, task: PlannedRun) -> Setting:
    """The setting of a rank of the job: its threads, and as many ranks at work as there are on a node."""
    return setting_here(task.kernels, threads(machine, task), concurrency(machine, task.plan.rows * task.plan.cols))


def threads(machine: Machine, task: PlannedRun) -> int:
    """Threads of a rank: as configured, else one for each of its cores."""
    configured = task.config.threads
    return max(1, int(machine.cores_per_rank)) if configured == "auto" else configured


def concurrency(machine: Machine, ranks: int) -> int:
    """Ranks that compute at the same time on a node."""
    return min(ranks, machine.ranks_per_node)
