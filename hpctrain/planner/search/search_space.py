"""The candidates of a search: grid shapes, uses, averagers and micro-batches, except for the user's fixed choices.

`configured_space` returns the `SearchSpace` of a configuration.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from hpctrain.assembly.recipe import Recipe, check_batch, columns
from hpctrain.averaging.averagers import AVERAGERS, AveragerChoice
from hpctrain.backend.graph import Graph
from hpctrain.backend.operators import KernelSet
from hpctrain.backend.specs import Conv2dSpec, LinearSpec
from hpctrain.comm.groups import check_grid
from hpctrain.comm.progress import ProgressMode
from hpctrain.config.schema import Config
from hpctrain.core.errors import ConfigError
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.planner.simulation.tasks import SimulationOptions

#: sections of a configuration that a search chooses
SEARCHED_SECTIONS = ("grid", "plan", "averager", "micro_batches")


def searched_averagers() -> tuple[AveragerChoice, ...]:
    """Return the averagers that a search tries: those that sum unchanged gradients (`Strategy.sums_shards`), the default first.

    The default is also tried without the exchange of inputs and errors.
    """
    default = AveragerChoice()
    others = (name for name in AVERAGERS.names() if name != default.name and getattr(AVERAGERS.find(name), "sums_shards", False))
    return default, AveragerChoice(default.name, {"fc_exchange": "never"}), *map(AveragerChoice, others)


@dataclass(frozen=True)
class SearchSpace:
    """Choices fixed by the user, which are None if they are open, and the alternatives of open choices.

    Attributes:
        fixed_grid: the user's (Pr, Pc); None: open.
        fixed_plan: plan with the user's uses, and with tiles if the grid is fixed, too; None: open.
        tiles: tiles of the user's grid if the plan is open; None: all ranks split the height.
        uses: pairs (Pr, use) from which open plans on grids of Pr > 1 are made; None: all. A grid without a pair is left out,
            unless it is the user's.
        simulated: maximum number of candidates with the best lower bounds in the first round of simulations. More follow, with
            averagers and plans exchanged among the best.
    """

    fixed_grid: tuple[int, int] | None = None
    fixed_plan: ParallelPlan | None = None
    fixed_averager: AveragerChoice | None = None
    fixed_micro_batches: int | None = None
    tiles: tuple[int, int] | None = None
    uses: frozenset[tuple[int, Parallelism]] | None = None
    averagers: tuple[AveragerChoice, ...] = field(default_factory=searched_averagers)
    micro_batches: tuple[int, ...] = (1, 2, 4)
    simulated: int = 4
    options: SimulationOptions = field(default_factory=SimulationOptions)

    def uses_on(self, rows: int) -> tuple[Parallelism, ...]:
        """Return the uses of layers on grids with `rows` rows, for an open plan."""
        if rows == 1:
            return (Parallelism.BATCH,)
        return tuple(use for use in Parallelism if self.uses is None or (rows, use) in self.uses) or tuple(Parallelism)

    @property
    def averager_choices(self) -> tuple[AveragerChoice, ...]:
        return self.averagers if self.fixed_averager is None else (self.fixed_averager,)

    @property
    def micro_batch_choices(self) -> tuple[int, ...]:
        return self.micro_batches if self.fixed_micro_batches is None else (self.fixed_micro_batches,)


def kept_sections(config: Config) -> tuple[str, ...]:
    """Return the sections that are not `auto`.

    They include micro_batches, which cannot be auto because it changes batch statistics.
    """
    return tuple(section for section in SEARCHED_SECTIONS if section not in config.automatic)


def configured_space(config: Config, ranks: int, keep: Collection[str], kernels: KernelSet) -> SearchSpace:
    """Return the space of all grids, plans, averagers and micro-batches, with the configured values in the kept sections.

    Raises:
        ConfigError, ShapeError: a kept grid or plan is impossible on these ranks.
    """
    fixed_grid = open_grid(ranks, kernels) if config.exact.shards is None else (1, ranks)
    if "grid" in keep:
        fixed_grid = config.grid.rows, columns(config, ranks)
        check_grid(*fixed_grid, ranks)
        check_batch(config.batch, *fixed_grid)
    plan = ParallelPlan()
    if {"grid", "plan"} & set(keep):
        plan = Recipe.of(config, grid=(config.grid.rows, columns(config, ranks))).plan
    if "grid" not in keep:  # tiles are a key of the grid
        plan = replace(plan, tiles=None)
    return SearchSpace(
        fixed_grid=fixed_grid,
        fixed_plan=plan if "plan" in keep else None,
        tiles=plan.tiles,
        fixed_averager=AveragerChoice(config.averager.name, config.averager.options) if "averager" in keep else None,
        fixed_micro_batches=config.micro_batches if "micro_batches" in keep else None,
        options=SimulationOptions(progress=ProgressMode(config.progress)),
    )


def open_grid(ranks: int, kernels: KernelSet) -> tuple[int, int] | None:
    """Return the grid to which a search is restricted: on devices, the grid without split layers; otherwise None.

    On devices, split layers exchange through host memory, and the predictions do not include the cost of these copies.
    """
    return None if kernels.arithmetic.on_host else (1, ranks)


def grid_shapes(space: SearchSpace, graph: Graph, ranks: int, batch: int) -> tuple[tuple[int, int], ...]:
    """Return (Pr, Pc) of all grids on which each split group has a sample and some layer has a part for each rank.

    Raises:
        ConfigError: there is no such grid; the message contains the nearest number of ranks that has one.
    """
    if space.fixed_grid is not None:
        return (space.fixed_grid,)
    most = _most_parts(graph)
    shapes = _shapes(ranks, batch, most)
    if space.uses is not None:
        with_uses = {1, *(rows for rows, _ in space.uses)}
        shapes = tuple(shape for shape in shapes if shape[0] in with_uses) or shapes
    if not shapes:
        legal = max(number for number in range(1, ranks) if _shapes(number, batch, most))
        raise ConfigError(
            f"batch is {batch}, fewer samples than the {ranks} ranks, and no grid lets ranks share a sample: grid.rows would "
            f"have to divide {ranks}, be at least {-(-ranks // batch)} and at most {most}, the maximum number of parts of a "
            f"layer; the nearest number of ranks with a grid is {legal}."
        )
    return shapes


def _shapes(ranks: int, batch: int, most_parts: int) -> tuple[tuple[int, int], ...]:
    divisors = (rows for rows in range(1, min(ranks, most_parts) + 1) if ranks % rows == 0)
    return tuple((rows, ranks // rows) for rows in divisors if ranks // rows <= batch)


def _most_parts(graph: Graph) -> int:
    """Return the maximum number of ranks over which a layer can be split: by image height or by output channels."""
    most = 1
    for node in graph.nodes:
        if isinstance(node.spec, LinearSpec):
            most = max(most, node.spec.features_out)
        elif isinstance(node.spec, Conv2dSpec):
            most = max(most, node.spec.channels_out, graph.tensors[node.output].shape[1])
    return most
