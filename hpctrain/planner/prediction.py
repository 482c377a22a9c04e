"""The prediction of a step: the one entrance for searches, commands and runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.trace.time_table import TimeTable
from hpctrain.trace.tracer import Events


@dataclass(frozen=True)
class SimulationOptions:
    """progress: who moves messages while kernels run. steps: simulated ones; the last one counts, when all pipelines are full.

    slow: by world rank, how many times longer its compute takes. jitter: deviation of an operator's time, as a share of it, drawn
    from `seed`. Both unfold the classes of ranks.
    """

    progress: ProgressMode = ProgressMode.TEST
    steps: int = 4
    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class SimulatedStep:
    """The last simulated step. seconds: of the slowest class. table: means over ranks, as runs tabulate their traces.

    events: by class, in the format that runs record, times in ns since the simulation's begin.
    """

    seconds: float
    table: TimeTable
    events: Mapping[str, Events]

    @property
    def exposed_seconds(self) -> float:
        return self.table.total.exposed_seconds


@dataclass(frozen=True)
class Prediction:
    """A candidate on a machine. memory_bytes: the most of any rank. exchanged_bytes: of a step, over all ranks.

    measured_share: of the compute seconds, how much follows from measured times rather than from rates.
    """

    step: SimulatedStep
    memory_bytes: int
    exchanged_bytes: int
    measured_share: float
