"""The averagers of a replica, one for each group of parameters, and which slices of theirs hold which parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from hpctrain.averaging.agreement import make_averager
from hpctrain.averaging.base import AveragerSetup, GradientAverager
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.group_sums import JointNorms
from hpctrain.averaging.strategy import PlannedGroup, Strategy
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.transports_rest import Transport
from hpctrain.core.errors import BackendError
from hpctrain.nn.network import ALL, MODEL, Network
from hpctrain.optim.base import Optimizer
from hpctrain.optim.ema import EmaRule, with_ema
from hpctrain.optim.guarded import GuardedOptimizer, guarded
from hpctrain.parallel.groups import GridGroups
from hpctrain.train.passes import Passes
from hpctrain.train.tracing import timed_optimizer


@dataclass(frozen=True)
class Optimizers:
    """The optimisers of a replica, by group of parameters.

    unbound: for averagers to bind and own. guards: within these, what notices writes of others to their state.
    """

    unbound: dict[str, Optimizer] = field(default_factory=dict)
    guards: dict[str, GuardedOptimizer] = field(default_factory=dict)


def make_optimizers(
    make: Callable[[], Optimizer] | None, network: Network, progress: ProgressEngine, ema: EmaRule | None
) -> Optimizers:
    """One for each group of parameters; none where `make` is None.

    Args:
        make: gives one that is not bound yet. ema: of an average of the weights that they keep; None: there is none.

    Raises:
        BackendError: they cannot compute where the arrays of the network lie.
    """
    optimizers = Optimizers()
    if make is None:
        return optimizers
    for name in network.groups:
        guard = optimizers.guards[name] = guarded(with_ema(usable(make(), network), ema))
        optimizers.unbound[name] = timed_optimizer(guard, progress)
    return optimizers


def make_strategies(
    make: Callable[[PlannedGroup], Strategy] | None,
    optimizers: Optimizers,
    network: Network,
    groups: GridGroups,
    nominal_batch: int | None,
    passes: Passes,
) -> dict[str, Strategy]:
    """The strategy of each group of parameters that has an optimiser; none where `make` is None.

    Raises:
        ConfigError: a strategy that cannot do what is asked for. BackendError: one that the network's kernels do not take.
    """
    if make is None:
        return {}
    planned = partial(_planned_group, network, groups, nominal_batch, passes)
    strategies = {name: make(planned(name, optimizer)) for name, optimizer in optimizers.unbound.items()}
    for strategy in strategies.values():
        _check_rounding(strategy, network)
    return strategies


def _check_rounding(strategy: Strategy, network: Network) -> None:
    """Raise if parameters are rounded to 16 bits and do not lie on the host.

    Raises:
        BackendError: parameters travel in 16 bits and lie on a device, but an owner keeps rounding errors on the host only.
    """
    rounding = strategy.rounding
    if rounding is None or rounding.parameters == "float32" or network.kernels.arithmetic.on_host or strategy.group.ranks == 1:
        return
    raise BackendError(
        f"wire_parameters is {rounding.parameters}, but parameters of backend {network.kernels.name} travel as they are so far; "
        "set it to float32, or backend to onednn or numpy."
    )


def _planned_group(
    network: Network,
    groups: GridGroups,
    nominal_batch: int | None,
    passes: Passes,
    name: str,
    optimizer: Optimizer,
) -> PlannedGroup:
    """A group of parameters, by name, as a strategy plans for it. optimizer: not bound yet."""
    return PlannedGroup(
        network.groups[name],
        groups.gradients[name].size,
        groups.nodes[name],
        nominal_batch,
        passes.micro_batches,
        norms_needed=optimizer.norms_needed,
        several_groups=MODEL in network.groups,
        momentum=optimizer.momentum,
        names=network.trained,
        on_host=network.kernels.arithmetic.on_host,
        shards=passes.shards,
    )


def make_averagers(
    network: Network,
    groups: GridGroups,
    progress: ProgressEngine,
    strategies: Mapping[str, Strategy],
    optimizers: Optimizers,
    stored: Mapping[str, CollectiveSchedule],
    transport: Transport,
    passes: Passes,
) -> dict[str, GradientAverager]:
    """The averagers of all groups of parameters, which have agreed on what they post. Collective.

    Args:
        strategies: by group. optimizers: of the same groups. stored: schedules of an earlier run, by group; used where they fit.
        transport: of arrays that lie on a device.
        passes: of each rank, whose gradients averagers add up.

    Raises:
        CollectiveMismatchError: ranks with different schedules.
    """
    norms = None
    if MODEL in network.groups and any(optimizer.needs_norms for optimizer in optimizers.unbound.values()):
        norms = JointNorms(groups.norms, progress, tuple(network.groups.values()))
    interval = None
    if MODEL in network.groups and strategies:
        one_of_them = next(iter(strategies.values()))  # all have the same options
        interval = one_of_them.interval(groups.norms, progress, len(strategies))
    averagers: dict[str, GradientAverager] = {}
    for name, strategy in strategies.items():
        group, comm = network.groups[name], groups.gradients[name]
        gradients = passes.gradients(group, comm)
        of_group = _transport_of(name, network, transport)
        setup = AveragerSetup(group, optimizers.unbound[name], comm, progress, norms, interval, of_group, gradients)
        averagers[name] = make_averager(strategy, setup, stored.get(name))
    return averagers


def _transport_of(name: str, network: Network, transport: Transport) -> Transport:
    """The way of one group of parameters. NCCL takes one group alone, the one that all ranks hold alike where there is any.

    Two groups have a queue each, in which updates and gathers begin when sums are seen to be complete: another moment on each
    rank, so their operations could be enqueued in another order on another rank, where each then waits for the other.
    """
    by_nccl = ALL if ALL in network.groups else MODEL
    return "staged" if transport == "nccl" and name != by_nccl else transport


def usable(optimizer: Optimizer, network: Network) -> Optimizer:
    """The optimiser itself.

    Raises:
        BackendError: it cannot compute where the arrays of the network lie.
    """
    if not (optimizer.any_arrays or network.kernels.arithmetic.on_host):
        raise BackendError(
            f"The optimizer {type(optimizer).__name__} computes with NumPy, which does not reach arrays of backend "
            f"{network.kernels.name}; let it compute by group.arithmetic and say any_arrays = True, or set backend to onednn or "
            "numpy."
        )
    return optimizer


def slices_of(averagers: Mapping[str, GradientAverager]) -> dict[str, list[int]]:
    """By parameter, the slices of all schedules that hold some of it, numbered through; none where a rank is alone."""
    slices: dict[str, list[int]] = {}
    pieces = (piece for averager in averagers.values() if averager.comm.size > 1 for piece in _pieces(averager))
    for number, names in enumerate(pieces):
        for name in names:
            slices.setdefault(name, []).append(number)
    return slices


def _pieces(averager: GradientAverager) -> list[tuple[str, ...]]:
    """The parameters of each slice of a schedule; without one every parameter is a slice."""
    if averager.schedule is None:
        return [(name,) for name in averager.group.parameters]
    return [(*piece.parameters, *piece.replicated) for piece in averager.schedule.slices]
