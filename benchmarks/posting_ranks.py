"""The part of `posting.py` that runs on each rank: traced steps under each progress mode in turn."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.process import cpu_seconds
from benchmarks.shapes import Shape, made_up_batch
from hpctrain.averaging.averagers import make_strategy
from hpctrain.backend.choice import make_backend
from hpctrain.comm import mpi, progress_mode
from hpctrain.comm.groups import ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.data.loader import LoaderRank
from hpctrain.models import catalogue
from hpctrain.nn.network import Network
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.groups import GridGroups
from hpctrain.trace.time_table import tabulate
from hpctrain.trace.tracer import Category, Events, Tracer
from hpctrain.training.replica import Replica

_LR = 1e-4
_ROOM = 1 << 18
_WARM_UP_STEPS = 6


@dataclass(frozen=True)
class Settings:
    """The request of `posting.py`. steps: traced ones of a turn, after one that is not. out: JSON, written by rank 0."""

    shape: dict[str, Any]
    averager: str
    options: dict[str, Any]
    modes: list[str]
    rounds: int
    steps: int
    out: str
    deadline_seconds: float = 300.0


def delays_of(events: Events) -> list[float]:
    """Seconds that each posted operation may have been late; 0 where it was not."""
    delays = events.of(Category.DELAY)
    late = ((delays.stop_ns - delays.start_ns) * 1e-9).tolist()
    return [*late, *[0.0] * max(0, len(events.of(Category.COMMUNICATION)) - len(late))]


def facts_of(events: Events, steps: int) -> dict[str, float]:
    """One turn's figures, in seconds per step but those of operations and operators, which are of one."""
    table = tabulate(events, skip=0)
    assert table is not None, "a turn has whole steps"
    delays, total = delays_of(events), table.total
    operators = events.of(Category.FORWARD, Category.PARAMETERS, Category.INPUT)
    lengths = (operators.stop_ns - operators.start_ns) * 1e-9
    of_thread = events.of(Category.THREAD)
    return {
        "step_seconds": table.step_seconds,
        "exposed_seconds": total.exposed_seconds,
        "messages_seconds": total.messages_seconds,
        "thread_seconds": float((of_thread.stop_ns - of_thread.start_ns).sum()) * 1e-9 / steps,
        "delay_seconds": sum(delays) / steps,
        "operations": len(delays) / steps,
        "delay_of_operation_seconds": sum(delays) / max(1, len(delays)),
        "longest_delay_seconds": max(delays, default=0.0),
        # of the operator that runs at a random instant
        "operator_seconds": float((lengths**2).sum() / lengths.sum()) if len(lengths) else 0.0,
    }


class _Turns:
    def __init__(self, settings: Settings) -> None:
        self._settings, self.world = settings, mpi.world(settings.deadline_seconds)
        shape = Shape(**settings.shape)
        self._trace = Tracer(_ROOM)
        self._progress = ProgressEngine(
            rank=self.world.rank, deadline_seconds=settings.deadline_seconds, abort=self.world.abort, trace=self._trace
        )
        model, image_shape = catalogue.build(shape.family, shape.options), (shape.pixels, shape.pixels, 3)
        place: LoaderRank = {"rank": self.world.rank, "ranks": self.world.size, "split_size": 1, "tiles": None, "shards": None}
        self._batch = made_up_batch(shape, place)
        self._replica = Replica(
            Network(model, image_shape, make_backend("onednn").kernels),
            groups=GridGroups(ProcessGrid(self.world, 1, self.world.size)),
            progress=self._progress,
            strategy=partial(make_strategy, settings.averager, settings.options),
            optimizer=partial(Sgd, momentum=0.9),
            nominal_batch=self._batch.global_count,
        )
        self._replica.agree()
        for _ in range(_WARM_UP_STEPS):
            self._replica.step(self._batch, _LR)

    def turn(self, mode: ProgressMode) -> dict[str, float]:
        """Steps under one mode, traced. Collective."""
        progress_mode.apply(self._progress, mode)
        self._replica.step(self._batch, _LR)
        self._trace.clear()
        cpu = cpu_seconds()
        for number in range(self._settings.steps):
            begin_ns = time.perf_counter_ns()
            self._replica.step(self._batch, _LR)
            self._trace.add(Category.STEP, "step", begin_ns, time.perf_counter_ns(), "", number)
        cpu = cpu_seconds() - cpu
        facts = facts_of(self._trace.events(), self._settings.steps) | {"cpu_seconds": cpu / self._settings.steps}
        self._replica.drain()
        self._replica.settle()
        progress_mode.apply(self._progress, ProgressMode.TEST)
        everyone = self.world.allgather_object(facts)
        return {name: float(np.mean([of_rank[name] for of_rank in everyone])) for name in facts}


def main(arguments: list[str] | None = None) -> int:
    (path,) = sys.argv[1:] if arguments is None else arguments
    settings = Settings(**json.loads(Path(path).read_text()))
    turns = _Turns(settings)
    modes = [ProgressMode(name) for name in settings.modes]
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for number in range(settings.rounds):
        first = number % len(modes)
        for mode in modes[first:] + modes[:first]:
            found[mode].append(turns.turn(mode))
    if turns.world.rank == 0:
        Path(settings.out).write_text(json.dumps({"ranks": turns.world.size, "mpi": mpi.describe(), "rounds": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
