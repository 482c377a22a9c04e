"""Conversion between the state of a replica and the tensors of a checkpoint, which does not depend on the number of ranks.

`Shards` gathers whole arrays of split parameters and extracts parts of whole arrays, so that a checkpoint does not depend on a
grid. `take` gathers whole tensors for one rank to write. `take_parts` copies the parts that this rank writes if every rank writes
some; together, the parts of all ranks contain each element once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from hpctrain.averaging.base import GradientAverager, for_holders
from hpctrain.averaging.sixteen_bits import PARAMETER_ERROR
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.errors import CheckpointError
from hpctrain.core.intervals import Box, relative, replace_dim, size_of, whole
from hpctrain.data.sampler import Reordering
from hpctrain.nn.network import Network, Shard
from hpctrain.nn.parameter import Parameter
from hpctrain.optim.ema import EMA
from hpctrain.optim.schedules import PlateauState
from hpctrain.optim.stagnation import Stagnation
from hpctrain.parallel.groups import GridGroups
from hpctrain.storage.checkpoint import (
    CheckpointContent,
    averaged_statistic_key,
    optimizer_key,
    parameter_key,
    restore,
    statistic_key,
)
from hpctrain.storage.shards import Part, WriteShares
from hpctrain.training.evaluation import WeightAverage
from hpctrain.training.metrics import RunningSums


class Shards:
    """Conversion between whole arrays and this rank's parts, for a network's parameters and for arrays with their shapes.

    Args:
        holders: ranks that hold the parts, in order; None if no parameter is split.
    """

    def __init__(self, network: Network, holders: Communicator | None, progress: ProgressEngine) -> None:
        self._network, self._holders, self._progress = network, holders, progress
        self._lengths: dict[str, list[int]] | None = None

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole parameter, as the model declares it."""
        return self._network.parameter_specs[name].shape

    def is_whole(self, name: str) -> bool:
        """Return whether every rank holds the whole parameter."""
        return self._network.shards[name] is None

    def box(self, name: str) -> Box:
        """Return the box of this rank's part in the whole parameter."""
        shape, shard = self.whole_shape(name), self._network.shards[name]
        return whole(shape) if shard is None else replace_dim(whole(shape), shard.dim, shard.interval)

    def part(self, name: str, whole: np.ndarray) -> np.ndarray:
        """Return this rank's part of a whole array, as a view."""
        shard = self._network.shards[name]
        return whole if shard is None else whole[shard.index]

    def whole(self, name: str, part: np.ndarray) -> np.ndarray:
        """Gather the whole array from the ranks' parts, each in the shape of its parameter. Collective.

        Return `part` itself if the parameter is not split.
        """
        shard = self._network.shards[name]
        if shard is None:
            return part
        assert self._holders is not None, f"{name} is split, but no rank holds the rest"
        if self._lengths is None:
            self._lengths = self._agree(self._holders)
        lengths = self._lengths[name]
        # The split dim comes first, so that every rank's part is one block.
        block = np.ascontiguousarray(np.moveaxis(part, shard.dim, 0))
        joined = np.empty((sum(lengths), *block.shape[1:]), block.dtype)
        unit = int(np.prod(block.shape[1:]))
        handle = self._holders.iallgather(block.reshape(-1), joined.reshape(-1), [length * unit for length in lengths])
        self._progress.wait_handle(handle, f"parts of {name}")
        return np.ascontiguousarray(np.moveaxis(joined, 0, shard.dim))

    def maxima(self, name: str, counts: Sequence[int]) -> list[int]:
        """Return the maximum over ranks of each of `counts`, which belong to a split parameter. Collective."""
        assert self._holders is not None, f"{name} is split, but no rank holds the rest"
        by_rank = np.empty((self._holders.size, len(counts)), np.int64)
        handle = self._holders.iallgather(np.array(counts, np.int64), by_rank.reshape(-1), [len(counts)] * self._holders.size)
        self._progress.wait_handle(handle, f"counts of {name}")
        return [int(count) for count in by_rank.max(axis=0)]

    def _agree(self, holders: Communicator) -> dict[str, list[int]]:
        """Return, for each split parameter, the length of each rank's part along the split dim. Collective."""
        split = {name: shard for name, shard in self._network.shards.items() if shard is not None}
        all_shards: list[dict[str, Shard]] = holders.allgather_object(split)
        for name in split:
            intervals = [shards[name].interval for shards in all_shards]
            assert all(before[1] == after[0] for before, after in pairwise(intervals)), f"parts of {name}: {intervals}"
        return {name: [shards[name].interval[1] - shards[name].interval[0] for shards in all_shards] for name in split}


def full_states(averager: GradientAverager, shards: Shards) -> Iterator[tuple[Parameter, dict[str, np.ndarray]]]:
    """Yield each parameter of the averager with its `full_state`. Call it after a drain; collective if one is sharded or split.

    The parts of a split parameter belong to several averaging groups. Because parts differ in size, one group may exchange or
    keep back gradients while another does not. Likewise, all ranks of one group may update their part while the ranks of another
    group own and round shares of it. If a part lacks a state that another part has, the state is zero for it.
    """
    for name, parameter in averager.group.parameters.items():
        state = averager.full_state(parameter)
        yield parameter, state if shards.is_whole(name) else _with_states_of_all_parts(averager, parameter, state, shards)


def _with_states_of_all_parts(
    averager: GradientAverager, parameter: Parameter, state: Mapping[str, np.ndarray], shards: Shards
) -> dict[str, np.ndarray]:
    """Return the states of this rank's part, sorted by name, with zeros for states that only other parts have. Collective.

    For gradients that are kept back, the number of holders is the maximum over all parts.
    """
    kept_back = tuple(averager.by_holder)
    optional = kept_back if averager.rounded is None else (*kept_back, PARAMETER_ERROR)
    if not optional:
        return dict(state)
    same = {key: values for key, values in state.items() if key not in kept_back}
    counts = [(len(state[key]) if key in kept_back else 1) if key in state else 0 for key in optional]
    for key, count in zip(optional, shards.maxima(parameter.name, counts), strict=True):
        if count and key in kept_back:
            same[key] = np.zeros((count, parameter.size), averager.group.dtype)
            same[key][: len(state.get(key, ()))] = state.get(key, 0.0)
        elif count and key not in same:
            same[key] = np.zeros(parameter.size, averager.group.dtype)
    return dict(sorted(same.items()))


_COUNTERS = "averaging"  # key of the metadata: counters of averagers by parameter group
#: fields of a position that are stored only if they are not empty
_OPTIONAL_FIELDS = ("skipped", "skipped_in_a_row", "reorderings", "stagnation", "plateau")
_PENDING = "_gradient"  # suffix of states of an averager, after its name (see GradientAverager.pending)


@dataclass
class Position:
    """Progress of a training: all state except tensors. The sample order and masks follow from it.

    It counts samples, not steps, so that training can continue with a different batch.

    Attributes:
        epoch: epoch of the next step, counted from 0.
        samples: number of samples of this epoch that steps have used.
        sums: sums of the current epoch so far.
        skipped: total number of steps that changed nothing.
        skipped_in_a_row: number of consecutive steps, up to the latest, that changed nothing.
        reorderings: positions at which the run went back and changed the sample order (see `Sampler`).
        stagnation: state of early stopping; None without it and before the first evaluation.
        plateau: state of a learning rate that evaluations reduce; None without it and before the first evaluation.
    """

    epoch: int = 0
    samples: int = 0
    global_step: int = 0
    sums: RunningSums = field(default_factory=RunningSums)
    skipped: int = 0
    skipped_in_a_row: int = 0
    reorderings: tuple[Reordering, ...] = ()
    stagnation: Stagnation | None = None
    plateau: PlateauState | None = None

    def in_steps(self, samples_per_epoch: int, batch: int) -> float:
        """Return the progress in steps of `batch` samples, as if all steps had this batch.

        The result is a whole number, without rounding errors, if all steps really had this batch.
        """
        return self.epoch * -(-samples_per_epoch // batch) + self.samples / batch

    def to_meta(self) -> dict[str, Any]:
        """Return the position as metadata of a checkpoint, for `from_meta`."""
        values = asdict(self)
        empty = [name for name in _OPTIONAL_FIELDS if not values[name]]
        return {name: value for name, value in values.items() if name not in empty}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Position:
        """Return the position stored in a checkpoint's metadata."""
        values = dict(meta["position"])
        values["sums"] = RunningSums(**values["sums"])
        values["reorderings"] = tuple(Reordering(*each) for each in values.get("reorderings", ()))
        if values.get("stagnation") is not None:
            values["stagnation"] = Stagnation(**values["stagnation"])
        if values.get("plateau") is not None:
            values["plateau"] = PlateauState.from_meta(values["plateau"])
        return cls(**values)


def take(
    network: Network,
    averagers: Mapping[str, GradientAverager],
    shards: Shards,
    position: Position,
    meta: Mapping[str, Any],
    *,
    average: WeightAverage | None = None,
    keep: bool = True,
    copied: bool = False,
) -> CheckpointContent:
    """Return the state for a resume, one whole array per tensor. Call it after a drain; collective if `full_states` is.

    Args:
        keep: False on ranks that do not write: their content has no tensors, and they hold only one whole tensor at a time.
        copied: whether all tensors are copies, so that training may continue.
    """
    kept = np.array if copied else np.asarray
    tensors: dict[str, np.ndarray] = {}
    for each in _held(network, averagers, shards, average):
        value = each.values
        if each.name is not None and value.ndim > len(shards.whole_shape(each.name)):
            value = np.stack([shards.whole(each.name, part) for part in value])
        elif each.name is not None:
            value = shards.whole(each.name, value)
        if keep:
            tensors[each.key] = kept(value)
    first = [*map(parameter_key, network.parameters), *statistics_of(network, average)]  # states of the optimiser follow
    ordered = {key: tensors[key] for key in first if key in tensors} | tensors
    return CheckpointContent(ordered, full_meta(averagers, position, meta))


def statistics_of(network: Network, average: WeightAverage | None) -> dict[str, np.ndarray]:
    """Return running statistics, and their averages if there are any, by key of a checkpoint."""
    statistics = {statistic_key(name): statistic for name, statistic in network.statistics.views.items()}
    averaged = {} if average is None else average.views
    return statistics | {averaged_statistic_key(name): statistic for name, statistic in averaged.items()}


def full_meta(averagers: Mapping[str, GradientAverager], position: Position, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a checkpoint: `meta`, the position, and the averagers' counters."""
    counters = {group: counts for group, averager in averagers.items() if (counts := averager.counters())}
    return {**meta, "position": position.to_meta(), _COUNTERS: counters}


def put(
    content: CheckpointContent,
    network: Network,
    averagers: Mapping[str, GradientAverager],
    shards: Shards,
    average: WeightAverage | None = None,
) -> Position:
    """Restore a snapshot taken on any grid and with any plan, and return its position.

    If the snapshot has no average of weights, the average is initialised with the snapshot's weights. Not collective.

    Raises:
        CheckpointError: a tensor is missing, has another shape or dtype, or is not part of this replica's state.
    """
    put_weights(content, network, shards)
    states: dict[str, list[str]] = {}
    for averager in averagers.values():
        states |= {name: list(averager.state_names(parameter)) for name, parameter in averager.group.parameters.items()}
    settled = _put_exact(content, network, shards, {name for name, keys in states.items() if PARAMETER_ERROR not in keys})
    _refuse_leftovers(content, settled | {optimizer_key(state, name) for name, keys in states.items() for state in keys})
    for averager in averagers.values():
        for name, parameter in averager.group.parameters.items():
            state = {}
            for key in states[name]:
                if key == EMA and optimizer_key(key, name) not in content.tensors:
                    state[key] = _exact(content, name, network, shards).reshape(-1)
                elif key == PARAMETER_ERROR and optimizer_key(key, name) not in content.tensors:  # the parameter was not rounded
                    state[key] = np.zeros(parameter.size, network.parameter_dtype)
                elif key in averager.by_holder:
                    state[key] = _kept_back(content, optimizer_key(key, name), name, network, shards, averager.holders)
                else:
                    state[key] = _part(content, optimizer_key(key, name), name, network, shards).reshape(-1)
            averager.load_state(parameter, state)
    stored: Mapping[str, Mapping[str, int]] = content.meta.get(_COUNTERS) or {}  # type: ignore[assignment]
    # Another grid has other groups; counters of one name are equal in all of them.
    counts = {name: count for counters in stored.values() for name, count in counters.items()}
    for group, averager in averagers.items():
        averager.load_counters({**counts, **stored.get(group, {})})
    if average is not None:
        for name, statistic in average.views.items():
            key = averaged_statistic_key(name)
            key = key if key in content.tensors else statistic_key(name)
            statistic[...] = restore(content, key, statistic.shape, network.parameter_dtype)
        average.loaded()
    return Position.from_meta(content.meta)


def _put_exact(content: CheckpointContent, network: Network, shards: Shards, names: Collection[str]) -> set[str]:
    """Restore the exact values of rounded parameters whose averagers now keep no rounding errors.

    Returns:
        The keys of these rounding errors.
    """
    keys = {name: optimizer_key(PARAMETER_ERROR, name) for name in names}
    rounded = {name: key for name, key in keys.items() if key in content.tensors}
    for name in rounded:
        network.kernels.arithmetic.from_host(network.parameters[name].data, _exact(content, name, network, shards))
    if rounded:
        network.parameters_changed()
    return set(rounded.values())


def _exact(content: CheckpointContent, name: str, network: Network, shards: Shards) -> np.ndarray:
    """Return this rank's part of a parameter, with its rounding error added if it was rounded."""
    values = _part(content, parameter_key(name), name, network, shards)
    key = optimizer_key(PARAMETER_ERROR, name)
    return values + _part(content, key, name, network, shards) if key in content.tensors else values


def _kept_back(content: CheckpointContent, key: str, name: str, network: Network, shards: Shards, holders: int) -> np.ndarray:
    """Return the gradients of parameter `name` that are kept back, (holders, elements of this rank's part).

    They are zeros if the checkpoint has none. If the number of holders is unchanged, each receives its own gradients. Otherwise
    the first holder receives the sum.
    """
    shape, dtype = shards.whole_shape(name), network.parameter_dtype
    stored = content.tensors.get(key)
    if stored is None:
        by_writer = np.zeros((holders, *shape), dtype)
    else:
        has_writers = stored.ndim > len(shape)  # older checkpoints hold the sum over writers
        writers = stored.shape[0] if has_writers else 1
        by_writer = restore(content, key, (writers, *shape) if has_writers else shape, dtype).reshape(writers, *shape)
    return for_holders(np.stack([shards.part(name, gradient).reshape(-1) for gradient in by_writer]), holders)


def _refuse_leftovers(content: CheckpointContent, expected: set[str]) -> None:
    """Raise if the checkpoint has a nonzero state that this replica does not have. Averages of weights may be dropped.

    Raises:
        CheckpointError: gradients or momentum would be lost; the message names them and a remedy.
    """
    prefix = optimizer_key("", "")[:-1]
    averages = optimizer_key(EMA, "")
    others = (key for key in content.tensors if key.startswith(prefix) and key not in expected and not key.startswith(averages))
    lost = sorted(key for key in others if np.any(content.tensors[key]))
    if not lost:
        return
    state, _, name = lost[0].removeprefix(prefix).partition("/")
    many = sum(key.startswith(optimizer_key(state, "")) for key in lost)
    strategy = state.removesuffix(_PENDING)
    if strategy != state:
        raise CheckpointError(
            f"The checkpoint holds gradients of {many} parameters ({name} first) that the averager {strategy} has not applied "
            f"yet and that the current averager would drop. First continue for one step (--steps 1) with the averager "
            f"{strategy} and its options, but with the value that makes it apply all gradients (max_interval 1 of lazy, "
            f"density 1 of sparse); then change the averager."
        )
    raise CheckpointError(
        f"The checkpoint holds the {state} of {many} parameters ({name} first), for which neither optimizer nor averager has a "
        f"place; use the options that the checkpoint was written with."
    )


def put_weights(content: CheckpointContent, network: Network, shards: Shards, *, averaged: bool = False) -> None:
    """Restore parameters and running statistics only, for evaluation or to start from trained weights.

    Args:
        averaged: whether to restore the averages of weights and statistics in place of their latest values.

    Raises:
        CheckpointError: the tensors belong to another model, or averages were requested and there are none.
    """
    keys = averaged_keys(content) if averaged else {}
    expected = {parameter_key(name) for name in network.parameters}
    extra = sorted(key for key in content.tensors if key.startswith("parameters/") and key not in expected)
    if extra:
        raise CheckpointError(
            f"The checkpoint holds {extra[0]}, which the configured model does not have ({len(extra)} such tensors); "
            f"use the model that the checkpoint was written with."
        )
    for name, parameter in network.parameters.items():
        key = keys.get(parameter_key(name), parameter_key(name))
        network.kernels.arithmetic.from_host(parameter.data, _part(content, key, name, network, shards))
    for name, statistic in network.statistics.views.items():
        key = keys.get(statistic_key(name), statistic_key(name))
        statistic[...] = restore(content, key, statistic.shape, network.parameter_dtype)
    network.parameters_changed()


def averaged_keys(content: CheckpointContent) -> dict[str, str]:
    """Return the keys of the averages in a checkpoint, by the keys of the averaged tensors.

    Frozen layers have no separate averages.

    Raises:
        CheckpointError: the checkpoint has no averages.
    """
    weights, statistics = optimizer_key(EMA, ""), averaged_statistic_key("")
    keys = {parameter_key(key.removeprefix(weights)): key for key in content.tensors if key.startswith(weights)}
    if not keys:
        raise CheckpointError("The checkpoint has no average of weights; use the weights themselves, or train with ema.decay.")
    return keys | {statistic_key(key.removeprefix(statistics)): key for key in content.tensors if key.startswith(statistics)}


def _part(content: CheckpointContent, key: str, name: str, network: Network, shards: Shards) -> np.ndarray:
    """Return this rank's part of a tensor that has the shape of parameter `name`."""
    return restore(content, key, shards.whole_shape(name), network.parameter_dtype, shards.box(name))


def take_parts(
    network: Network,
    averagers: Mapping[str, GradientAverager],
    shards: Shards,
    groups: GridGroups,
    average: WeightAverage | None = None,
) -> dict[str, Part]:
    """Return copies of the parts that this rank writes, by key. Call it after a drain; collective if `full_states` is."""
    everyone = groups.all_ranks
    all_shares, group_shares = _shares(everyone), {group: _shares(comm) for group, comm in groups.gradients.items()}
    parts: dict[str, Part] = {}
    for each in _held(network, averagers, shards, average):
        shape, box, shares = each.values.shape, whole(each.values.shape), all_shares
        if each.name is not None:
            own_box = shards.box(each.name)
            holders = each.values.shape[: each.values.ndim - len(own_box)]
            shape, box = (*holders, *shards.whole_shape(each.name)), (*whole(holders), *own_box)
            shares = all_shares if shards.is_whole(each.name) else group_shares[each.group]
        own = shares.own(box, each.values.itemsize) if size_of(box) else None
        if 0 in shape and everyone.rank == 0:  # rank 0 writes name and shape of a tensor without elements
            own = whole(shape)
        if own is not None:
            parts[each.key] = Part(shape, own, np.array(each.values[relative(own, box)], order="C"))
    return parts


@dataclass(frozen=True)
class _Held:
    """This rank's part of one tensor.

    Attributes:
        key: key of the tensor.
        values: values of the part; with a leading dim of holders for gradients that are kept back.
        name: parameter whose shape the tensor has, apart from holders; None: a running statistic, whole on every rank.
        group: group of this parameter; "" for a statistic.
    """

    key: str
    values: np.ndarray
    name: str | None = None
    group: str = ""


def _held(
    network: Network, averagers: Mapping[str, GradientAverager], shards: Shards, average: WeightAverage | None
) -> Iterator[_Held]:
    """Yield this rank's parts of all tensors of a checkpoint. Collective if `full_states` is."""
    to_host = network.kernels.arithmetic.to_host
    for group, averager in averagers.items():
        for parameter, states in full_states(averager, shards):
            name, shape = parameter.name, parameter.spec.shape
            yield _Held(parameter_key(name), to_host(parameter.data), name, group)
            for state, values in states.items():
                holders = (len(values),) if state in averager.by_holder else ()
                yield _Held(optimizer_key(state, name), values.reshape(*holders, *shape), name, group)
    for groups in (network.groups, network.frozen_groups):
        for group, members in groups.items():
            if groups is network.groups and group in averagers:
                continue
            for name, parameter in members.parameters.items():
                yield _Held(parameter_key(name), to_host(parameter.data), name, group)
    for key, statistic in statistics_of(network, average).items():
        yield _Held(key, statistic)


def _shares(comm: Communicator) -> WriteShares:
    return WriteShares(comm.rank, comm.size)
