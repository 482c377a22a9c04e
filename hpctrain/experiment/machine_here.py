"""The machine that a started job runs on, measured by its ranks: whole for a choice at the start, in haste for an account."""

from __future__ import annotations

import time

from hpctrain.backend.operators import KernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.planner.measurement import facts_here
from hpctrain.launch.threads import usable_cores
from hpctrain.planner import rate_measurement
from hpctrain.planner.calibration import MeasureRates, calibrate
from hpctrain.planner.machine import Machine

NAME = "measured at the run"

_WHOLE_SECONDS = 60.0
# Links have a part of it alone; rates are known then.
_HASTE_SECONDS = 3.0


def measured(world: Communicator, kernels: KernelSet, threads: int, deadline_seconds: float) -> Machine:
    """Links, memory and rates, within a minute. Collective; the same on every rank."""
    return _calibrated(world, lambda before: rate_measurement.measure(kernels, threads, before), _WHOLE_SECONDS, deadline_seconds)


def measured_in_haste(world: Communicator, rates: MeasureRates, deadline_seconds: float) -> Machine:
    """Links of a few sizes of messages, in two seconds, beside rates that are known. Collective; the same on every rank."""
    return _calibrated(world, rates, _HASTE_SECONDS, deadline_seconds)


def _calibrated(world: Communicator, rates: MeasureRates, seconds: float, deadline_seconds: float) -> Machine:
    return calibrate(
        world,
        ProgressEngine(rank=world.rank, deadline_seconds=deadline_seconds, abort=world.abort),
        facts_here(),
        rates,
        name=NAME,
        when=time.strftime("%Y-%m-%d"),
        seconds=seconds,
        physical_cores=usable_cores,
    )
