"""The ranks of `grid.py`: one job that steps several grids and plans in turn and measures each.

Started by `grid.py` as `python -m mpi4py -m benchmarks.grid_ranks SETTINGS`. Each variant has a network, communicators and an
averager of its own; the images are made up.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.process import cpu_seconds, sent_bytes
from benchmarks.shapes import Shape, made_up_batch
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.choice import make_backend
from hpctrain.comm import mpi
from hpctrain.comm.groups import ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Batch
from hpctrain.models import catalogue
from hpctrain.nn.network import Network
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.rank_graph import make_network
from hpctrain.training.replica import Replica
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator

_LR = 1e-4
_WARMUP = 3


@dataclass(frozen=True)
class Choice:
    """A grid and its plan. use: pattern -> use, in order. overlapped: interiors are computed while halos travel."""

    rows: int
    default: str = "batch"
    use: Mapping[str, str] | None = None
    overlapped: bool = False
    hides: bool = True


@dataclass
class Variant:
    """One grid, ready to step."""

    replica: Replica
    batch: Batch
    counters: Counters

    @property
    def split_waited_seconds(self) -> float:
        """All waits for exchanges of activations so far."""
        distribution = self.replica.distribution
        return 0.0 if distribution is None else distribution.group.waited_seconds


class Rank:
    """All that one rank measures. Every method is collective."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._shape = Shape(**settings["shape"])
        self.world = mpi.world(settings["deadline_seconds"])
        self._kernels = make_backend(settings["kernels"]).kernels
        self._bare = ProgressEngine(rank=self.world.rank, deadline_seconds=settings["deadline_seconds"], abort=self.world.abort)
        barriers = self.world.split(0, self.world.rank, "barriers")
        assert barriers is not None
        self._barriers = barriers
        self.variants = {name: self._variant(Choice(**choice)) for name, choice in settings["variants"].items()}

    def _variant(self, choice: Choice) -> Variant:
        counters = Counters()
        progress = ProgressEngine(
            rank=self.world.rank, deadline_seconds=self._settings["deadline_seconds"], abort=self.world.abort
        )
        cols = self.world.size // choice.rows
        groups = GridGroups(ProcessGrid(CountingCommunicator(self.world, counters), choice.rows, cols))
        side = self._shape.pixels
        model = catalogue.build(self._shape.family, self._shape.options)
        names = frozenset(node.name for node in Network(model, (side, side, 3), self._kernels).graph(1).nodes)
        plan = ParallelPlan(
            choice.rows,
            cols,
            Parallelism(choice.default),
            {pattern: Parallelism(use) for pattern, use in (choice.use or {}).items()},
            overlapped=names if choice.overlapped else frozenset(),
            hides=choice.hides,
        )
        network = make_network(model, (side, side, 3), self._kernels, groups=groups, progress=progress, plan=plan)
        replica = Replica(
            network,
            groups=groups,
            progress=progress,
            strategy=Blocking if self._settings["averager"] == "blocking" else Sharded,
            optimizer=partial(Sgd, momentum=0.9),
            nominal_batch=self._shape.batch * self.world.size,
        )
        replica.agree()
        return Variant(replica, made_up_batch(self._shape, replica.place), counters)

    def barrier(self) -> None:
        queue = self._bare.queue(self._barriers)
        self._bare.wait(queue.post(self._barriers.ibarrier, "barrier"))

    def _step(self, variant: Variant) -> None:
        variant.replica.step(variant.batch, _LR)

    def _settle(self, variant: Variant) -> None:
        variant.replica.drain()
        variant.replica.settle()
        self.barrier()

    def turn(self, variant: Variant, steps: int) -> dict[str, Any]:
        """Seconds, exposed waits and CPU seconds of a step after one that is not timed; bytes by communicator of both."""
        self.barrier()
        sent, counted = sent_bytes(), variant.counters.snapshot()
        self._step(variant)
        begin, cpu, waited = time.perf_counter(), cpu_seconds(), variant.replica.progress.waited_seconds
        row_waited = variant.split_waited_seconds
        for _ in range(steps):
            self._step(variant)
        found: dict[str, Any] = {
            "step_seconds": (time.perf_counter() - begin) / steps,
            "waited_seconds": (variant.replica.progress.waited_seconds - waited) / steps,
            "row_waited_seconds": (variant.split_waited_seconds - row_waited) / steps,
            "cpu_seconds": (cpu_seconds() - cpu) / steps,
        }
        self._settle(variant)
        since = variant.counters.since(counted)
        found["link_bytes"] = (sent_bytes() - sent) / (steps + 1)
        found["row_bytes"] = since.total("split").exchanged_bytes / (steps + 1)
        found["all_bytes"] = since.total().exchanged_bytes / (steps + 1)
        return found

    def warm_up(self) -> None:
        for variant in self.variants.values():
            for _ in range(_WARMUP):
                self._step(variant)
            self._settle(variant)


def main() -> int:
    settings = json.loads(Path(sys.argv[1]).read_text())
    rank = Rank(settings)
    rank.warm_up()
    names = list(rank.variants)
    turns: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    for number in range(settings["rounds"]):
        for i in range(len(names)):
            name = names[(number + i) % len(names)]
            mine = rank.turn(rank.variants[name], settings["steps"])
            turns[name].append(rank.world.allgather_object(mine))
        if rank.world.rank == 0:
            print(f"round {number + 1} of {settings['rounds']}", file=sys.stderr, flush=True)
    facts = {
        name: rank.world.allgather_object(
            {"activation_bytes": variant.replica.network.program(variant.batch.share.counts, training=True).activation_bytes}
        )
        for name, variant in rank.variants.items()
    }
    if rank.world.rank == 0:
        content = {"mpi": mpi.describe(), "ranks": rank.world.size, "turns": turns, "facts": facts, "shape": asdict(rank._shape)}
        Path(settings["out"]).write_text(json.dumps(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
