"""The costs of computation that a plan is made with: measured times where there are some, a machine's rates elsewhere."""

from __future__ import annotations

from hpctrain.experiment.dry_run import PlannedRun
from hpctrain.planner.compute_costs import ComputeCosts
from hpctrain.planner.machine import Machine
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.scaled_costs import ScaledCosts


def costs(machine: Machine, task: PlannedRun, compute: float = 1.0) -> ComputeCosts:
    """The costs of a job's operators on a machine.

    Args:
        machine: as it is, not scaled. compute: ranks compute so many times as fast.
    """
    rates = RateCosts(machine, task.config.dtype)
    return rates if compute == 1 else ScaledCosts(rates, compute)
