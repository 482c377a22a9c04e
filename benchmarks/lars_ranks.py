"""The ranks of `lars.py`: norms and update of a step, once with every rank doing all and once with each doing its part.

Started by `lars.py` as `python -m mpi4py -m benchmarks.lars_ranks SETTINGS`. Nothing is averaged: gradients are made up, and lie
there as after an allreduce, or, in the owned parts, as after a reduce-scatter.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.overlap_rounds import mean_over_ranks, rounds
from benchmarks.process import cpu_seconds
from hpctrain.averaging.base import PlannedGroup
from hpctrain.averaging.collective_schedule import covered_slices
from hpctrain.averaging.strategies.sharded import Sharded, ShardedOptions
from hpctrain.backend.choice import make_backend
from hpctrain.backend.graph import GraphBuilder
from hpctrain.backend.specs import TensorSpec
from hpctrain.comm import mpi
from hpctrain.comm.base import Communicator
from hpctrain.models import catalogue
from hpctrain.nn.network import declared
from hpctrain.nn.parameter import FlatGroup, ParameterSpec, Segment
from hpctrain.optim.base import Norms, NormsNeeded, Optimizer
from hpctrain.optim.optimizers import Lars, Sgd

_LR = 1e-6
_DEADLINE_SECONDS = 120.0
_POLL_SECONDS = 100e-6  # between two looks at a message: little of the core, which a real step needs meanwhile


def parameter_specs(family: str, depth: int) -> dict[str, ParameterSpec]:
    """All parameters of a network for images of 64 x 64, of 1,000 classes."""
    model = catalogue.build(family, {"depth": depth, "classes": 1000})
    builder = GraphBuilder(TensorSpec((1, 64, 64, 3), "float32"))
    specs, _ = declared(model, builder.build(model.lower(builder, 0, "")))
    return dict(specs)


@dataclass(frozen=True)
class NormMessage:
    """A group of norms on one rank: the parts of its slices that this rank owns, and the place of its norms."""

    owned: tuple[Segment, ...]
    place: slice


def norm_messages(group: FlatGroup, rank: int, ranks: int) -> tuple[NormMessage, ...]:
    """The groups of norms of `sharded`, in the order in which backward completes them."""
    planned = PlannedGroup(group, ranks, norms_needed=NormsNeeded.LAYER)
    schedule = Sharded(planned, ShardedOptions(fc_exchange="never")).plan(None)
    position = {segment.parameter: number for number, segment in enumerate(group.segments)}
    messages = []
    for slices in reversed(covered_slices(schedule).values()):
        pieces = [schedule.slices[k] for k in slices]
        parts = (group.segment(name).part(*piece.part(rank, ranks)) for piece in pieces for name in piece.parameters)
        positions = [position[name] for piece in pieces for name in piece.parameters]
        owned = tuple(part for part in parts if part.size)
        messages.append(NormMessage(owned, slice(min(positions), max(positions) + 1)))
    return tuple(messages)


class Update:
    """Norms and update of a step by one optimiser on one rank. sharded: of what this rank owns; else of everything."""

    def __init__(self, group: FlatGroup, optimizer: Optimizer, comm: Communicator, *, sharded: bool) -> None:
        self._group, self._optimizer, self._comm = group, optimizer, comm
        everything = (NormMessage(tuple(group.segments), slice(None)),)
        self._messages = norm_messages(group, comm.rank, comm.size) if sharded else everything
        self._sends = sharded and comm.size > 1
        owned = sorted((one for message in self._messages for one in message.owned), key=lambda one: one.start)
        optimizer.bind(group, owned)
        self.norms = Norms(group) if optimizer.needs_norms else None

    def step(self) -> None:
        """All squares and messages, then all updates. Collective."""
        handles = []
        if self.norms is not None:
            for message in self._messages:
                squares = self.norms.squares[message.place]
                squares[...] = 0.0
                self.norms.add_partial(self._group, message.owned)
                if self._sends:
                    handles.append(self._comm.iallreduce(squares))
        for handle in handles:
            while not handle.test():
                time.sleep(_POLL_SECONDS)
        for message in self._messages:
            self._optimizer.update(message.owned, _LR, self.norms)


def updates(group: FlatGroup, comm: Communicator) -> dict[str, Update]:
    """By name, all that are measured; "sgd" has no norms, so it says what the update alone takes."""
    makers: dict[str, Callable[[], Optimizer]] = {
        "lars": lambda: Lars(weight_decay=1e-4),
        "sgd": lambda: Sgd(weight_decay=1e-4),
    }
    return {
        f"{name}, {where}": Update(group, make(), comm, sharded=where == "own part")
        for name, make in makers.items()
        for where in ("every rank all", "own part")
    }


def turn(update: Update, comm: Communicator, steps: int) -> dict[str, float]:
    """Seconds of a step, by the clock and of the core, after one that is not measured. Collective."""
    update.step()
    comm.allgather_object(None)
    begin, begin_cpu = time.perf_counter(), cpu_seconds()
    for _ in range(steps):
        update.step()
    return {
        "step_seconds": (time.perf_counter() - begin) / steps,
        "cpu_seconds": (cpu_seconds() - begin_cpu) / steps,
    }


def main(arguments: list[str] | None = None) -> int:
    (path,) = sys.argv[1:] if arguments is None else arguments
    settings = json.loads(Path(path).read_text())
    world = mpi.world(_DEADLINE_SECONDS)
    arithmetic = make_backend(settings["kernels"]).kernels.arithmetic
    group = FlatGroup(parameter_specs(settings["family"], settings["depth"]), "float32", arithmetic=arithmetic)
    random = np.random.default_rng(0)
    for flat in (group.data, group.grad):
        flat[...] = random.standard_normal(flat.size, np.float32)
    measured = {
        name: lambda update=update: turn(update, world, settings["steps"]) for name, update in updates(group, world).items()
    }
    here = rounds(world, measured, settings["rounds"], seconds=None, screen=None, screen_rounds=0, say=lambda text: None)
    everyone = world.allgather_object(here)
    if world.rank == 0:
        facts = {"parameters": group.size, "mpi": mpi.describe(), "messages": len(norm_messages(group, 0, world.size))}
        Path(settings["out"]).write_text(json.dumps({"facts": facts, "rounds": mean_over_ranks(everyone)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
