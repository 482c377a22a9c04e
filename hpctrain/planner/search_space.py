"""The candidates that a search looks at: grid shapes, uses, averagers and micro-batches, less what the user has fixed."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpctrain.backend.graph import Graph
from hpctrain.backend.specs import Conv2dSpec, LinearSpec
from hpctrain.core.errors import ConfigError
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner.averaging_costs import AveragerChoice
from hpctrain.planner.tasks import SimulationOptions

#: averagers that leave the optimisation as it is; `lazy` changes it
AVERAGERS = (
    AveragerChoice("sharded"),
    AveragerChoice("sharded", {"fc_exchange": "never"}),
    AveragerChoice("bucketed"),
    AveragerChoice("priority"),
    AveragerChoice("overlap"),
    AveragerChoice("blocking"),
)


@dataclass(frozen=True)
class SearchSpace:
    """Choices that are open, and those that the user has made.

    Attributes:
        fixed_grid: (Pr, Pc) that the user gives. fixed_plan: a plan whose uses, tiles and overlapped layers stay; its own grid
            does not count. fixed_averager, fixed_micro_batches: that stay.
        averagers, micro_batches: those that are looked at where none is fixed.
        simulated: candidates that are simulated at first, the best by their lower bounds; pure batch with each averager counts
            among them. A few follow that exchange averagers and plans among the best.
        options: of the simulations.
    """

    fixed_grid: tuple[int, int] | None = None
    fixed_plan: ParallelPlan | None = None
    fixed_averager: AveragerChoice | None = None
    fixed_micro_batches: int | None = None
    averagers: tuple[AveragerChoice, ...] = AVERAGERS
    micro_batches: tuple[int, ...] = (1, 2, 4)
    simulated: int = 8
    options: SimulationOptions = field(default_factory=SimulationOptions)

    @property
    def averager_choices(self) -> tuple[AveragerChoice, ...]:
        return self.averagers if self.fixed_averager is None else (self.fixed_averager,)

    @property
    def micro_batch_choices(self) -> tuple[int, ...]:
        return self.micro_batches if self.fixed_micro_batches is None else (self.fixed_micro_batches,)


def grid_shapes(space: SearchSpace, graph: Graph, ranks: int, batch: int) -> tuple[tuple[int, int], ...]:
    """Return (Pr, Pc) of all grids on which each split group has a sample and some layer has a part for each rank.

    Raises:
        ConfigError: there is no such grid; the message contains the nearest number of ranks that has one.
    """
    if space.fixed_grid is not None:
        return (space.fixed_grid,)
    most = _most_parts(graph)
    shapes = _shapes(ranks, batch, most)
    if not shapes:
        legal = max(number for number in range(1, ranks) if _shapes(number, batch, most))
        raise ConfigError(
            f"batch is {batch}, fewer samples than the {ranks} ranks, and no grid lets them share a sample: grid.rows would have "
            f"to divide {ranks}, be at least {-(-ranks // batch)} and at most {most}, the parts of the widest layer; the nearest "
            f"number of ranks that has a grid is {legal}."
        )
    return shapes


def _shapes(ranks: int, batch: int, most_parts: int) -> tuple[tuple[int, int], ...]:
    divisors = (rows for rows in range(1, min(ranks, most_parts) + 1) if ranks % rows == 0)
    return tuple((rows, ranks // rows) for rows in divisors if ranks // rows <= batch)


def _most_parts(graph: Graph) -> int:
    """Return the most ranks over which a layer can be split: by the height of its images or by its output channels."""
    most = 1
    for node in graph.nodes:
        if isinstance(node.spec, LinearSpec):
            most = max(most, node.spec.features_out)
        elif isinstance(node.spec, Conv2dSpec):
            most = max(most, node.spec.channels_out, graph.tensors[node.output].shape[1])
    return most
