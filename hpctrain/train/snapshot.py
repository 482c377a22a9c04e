"""The state of a replica as plain arrays and back: what a checkpoint holds, independent of how many ranks wrote it.

`Shards` makes whole arrays of split parameters, and parts of whole arrays: a checkpoint knows no grid. `take` gathers whole
tensors for one rank to write; `take_parts` copies the parts that each rank writes: everything once, whatever is split and
whatever all ranks hold.
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
from hpctrain.train.evaluation import WeightAverage
from hpctrain.train.metrics import RunningSums
from hpctrain.train.stopping import Stagnation


class Shards:
    """The tensors of one network, parameters or anything of their shape.

    Args:
        holders: the ranks that hold the parts, in order; None if nothing is split.
    """

    def __init__(self, network: Network, holders: Communicator | None, progress: ProgressEngine) -> None:
        self._network, self._holders, self._progress = network, holders, progress
        self._lengths: dict[str, list[int]] | None = None

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the parameter's shape, as the model declares it."""
        return self._network.parameter_specs[name].shape

    def is_whole(self, name: str) -> bool:
        """Return whether every rank holds all of it."""
        return self._network.shards[name] is None

    def box(self, name: str) -> Box:
        """Return the place of this rank's part in the whole."""
        shape, shard = self.whole_shape(name), self._network.shards[name]
        return whole(shape) if shard is None else replace_dim(whole(shape), shard.dim, shard.interval)

    def part(self, name: str, whole: np.ndarray) -> np.ndarray:
        """Return the part of it that this rank holds; a view."""
        shard = self._network.shards[name]
        return whole if shard is None else whole[shard.index]

    def whole(self, name: str, part: np.ndarray) -> np.ndarray:
        """Return all of it, from each rank's part in its parameter's shape; the part itself if nothing is split. Collective."""
        shard = self._network.shards[name]
        if shard is None:
            return part
        assert self._holders is not None, f"{name} is split, but no rank holds the rest"
        if self._lengths is None:
            self._lengths = self._agree(self._holders)
        lengths = self._lengths[name]
        # The split dim first, so that every rank's part is one block.
        block = np.ascontiguousarray(np.moveaxis(part, shard.dim, 0))
        joined = np.empty((sum(lengths), *block.shape[1:]), block.dtype)
        unit = int(np.prod(block.shape[1:]))
        handle = self._holders.iallgather(block.reshape(-1), joined.reshape(-1), [length * unit for length in lengths])
        self._progress.wait_handle(handle, f"parts of {name}")
        return np.ascontiguousarray(np.moveaxis(joined, 0, shard.dim))

    def most(self, name: str, counts: Sequence[int]) -> list[int]:
        """Return the greatest value on any rank of each of `counts`, which are of a split parameter. Collective."""
        assert self._holders is not None, f"{name} is split, but no rank holds the rest"
        of_ranks = np.empty((self._holders.size, len(counts)), np.int64)
        handle = self._holders.iallgather(np.array(counts, np.int64), of_ranks.reshape(-1), [len(counts)] * self._holders.size)
        self._progress.wait_handle(handle, f"counts of {name}")
        return [int(count) for count in of_ranks.max(axis=0)]

    def _agree(self, holders: Communicator) -> dict[str, list[int]]:
        """Return how much each rank holds of each split parameter."""
        split = {name: shard for name, shard in self._network.shards.items() if shard is not None}
        of_holders: list[dict[str, Shard]] = holders.allgather_object(split)
        for name in split:
            intervals = [shards[name].interval for shards in of_holders]
            assert all(before[1] == after[0] for before, after in pairwise(intervals)), f"parts of {name}: {intervals}"
        return {name: [shards[name].interval[1] - shards[name].interval[0] for shards in of_holders] for name in split}


def full_states(averager: GradientAverager, shards: Shards) -> Iterator[tuple[Parameter, dict[str, np.ndarray]]]:
    """Yield each parameter of the averager with its `full_state`. After a drain; collective if anything is sharded or split.

    The parts of a split parameter are in several averaging groups. As parts differ in size, a group may exchange or keep back
    gradients while another does not, and all ranks of a group may update its part while those of another own and round shares of
    theirs. If a part lacks a state that another part has, the state is zero for it.
    """
    for name, parameter in averager.group.parameters.items():
        state = averager.full_state(parameter)
        yield parameter, state if shards.is_whole(name) else _with_states_of_all_parts(averager, parameter, state, shards)


def _with_states_of_all_parts(
    averager: GradientAverager, parameter: Parameter, state: Mapping[str, np.ndarray], shards: Shards
) -> dict[str, np.ndarray]:
    """Return the state of this rank's part, sorted by name, with zeros for states that only other parts have. Collective.

    Gradients that are kept back have as many holders as in the part with the most.
    """
    kept_back = tuple(averager.by_holder)
    optional = kept_back if averager.rounded is None else (*kept_back, PARAMETER_ERROR)
    if not optional:
        return dict(state)
    same = {key: values for key, values in state.items() if key not in kept_back}
    counts = [(len(state[key]) if key in kept_back else 1) if key in state else 0 for key in optional]
    for key, count in zip(optional, shards.most(parameter.name, counts), strict=True):
        if count and key in kept_back:
            same[key] = np.zeros((count, parameter.size), averager.group.dtype)
            same[key][: len(state.get(key, ()))] = state.get(key, 0.0)
        elif count and key not in same:
            same[key] = np.zeros(parameter.size, averager.group.dtype)
    return dict(sorted(same.items()))


_COUNTERS = "averaging"  # key of the metadata: by parameter group, what its averager counts
#: fields of a position that a checkpoint has only where they are not empty: older programs do not know them
_LATER_FIELDS = ("skipped", "skipped_in_a_row", "reorderings", "stagnation")
_PENDING = "_gradient"  # a state of that ending belongs to the averager before it, see GradientAverager.pending


@dataclass
class Position:
    """Progress of a training: everything that is not a tensor. Sample order and masks follow from it alone.

    It counts samples, not steps, so that training can continue with another batch.

    epoch: the next step's. samples: of this epoch, in its order, that steps have taken. global_step: steps done. sums: of the
    current epoch so far. skipped: steps that changed nothing, of all. skipped_in_a_row: of the latest ones.
    reorderings: where the run went back and took another order, as `Sampler` has them.
    stagnation: the evaluations so far, where the run may end early by these.
    """

    epoch: int = 0
    samples: int = 0
    global_step: int = 0
    sums: RunningSums = field(default_factory=RunningSums)
    skipped: int = 0
    skipped_in_a_row: int = 0
    reorderings: tuple[Reordering, ...] = ()
    stagnation: Stagnation | None = None

    def in_steps(self, samples_per_epoch: int, batch: int) -> float:
        """Return how far training is, in steps of `batch`, had all been of it: a whole number if they were, to the last bit."""
        return self.epoch * -(-samples_per_epoch // batch) + self.samples / batch

    def to_meta(self) -> dict[str, Any]:
        """Return the position as a checkpoint's metadata holds it, for `from_meta`."""
        values = asdict(self)
        empty = [name for name in _LATER_FIELDS if not values[name]]
        return {name: value for name, value in values.items() if name not in empty}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Position:
        """Return the position in a checkpoint's metadata."""
        values = dict(meta["position"])
        values["sums"] = RunningSums(**values["sums"])
        values["reorderings"] = tuple(Reordering(*each) for each in values.get("reorderings", ()))
        if values.get("stagnation") is not None:
            values["stagnation"] = Stagnation(**values["stagnation"])
        if "step_in_epoch" in values:  # format version 1 counted steps; the sums were complete when it was written
            del values["step_in_epoch"]
            values["samples"] = values["sums"].count
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
    """Return all that a resume needs, one whole array per tensor. After a drain; collective if anything is sharded.

    keep: False on ranks that do not write: they get no tensors, and hold one at a time.
    copied: no array is one that training continues with.
    """
    kept = np.array if copied else np.asarray
    tensors: dict[str, np.ndarray] = {}
    to_host = network.kernels.arithmetic.to_host
    for name, parameter in network.parameters.items():
        value = shards.whole(name, to_host(parameter.data))
        if keep:
            tensors[parameter_key(name)] = kept(value)
    if keep:
        tensors |= {key: kept(statistic) for key, statistic in statistics_of(network, average).items()}
    for averager in averagers.values():
        for parameter, states in full_states(averager, shards):
            name, shape = parameter.name, parameter.spec.shape
            for state, values in states.items():
                if state in averager.by_holder:
                    value = np.stack([shards.whole(name, of_holder.reshape(shape)) for of_holder in values])
                else:
                    value = shards.whole(name, values.reshape(shape))
                if keep:
                    tensors[optimizer_key(state, name)] = kept(value)
    return CheckpointContent(tensors, full_meta(averagers, position, meta))


def statistics_of(network: Network, average: WeightAverage | None) -> dict[str, np.ndarray]:
    """Return running statistics, and their averages if there are any, by key."""
    statistics = {statistic_key(name): statistic for name, statistic in network.statistics.views.items()}
    averaged = {} if average is None else average.views
    return statistics | {averaged_statistic_key(name): statistic for name, statistic in averaged.items()}


def full_meta(averagers: Mapping[str, GradientAverager], position: Position, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a checkpoint: what is not a tensor."""
    counters = {group: counts for group, averager in averagers.items() if (counts := averager.counters())}
    return {**meta, "position": position.to_meta(), _COUNTERS: counters}


def put(
    content: CheckpointContent,
    network: Network,
    averagers: Mapping[str, GradientAverager],
    shards: Shards,
    average: WeightAverage | None = None,
) -> Position:
    """Restore a snapshot, whatever grid and plan it was taken on; return the position in it.

    An average of weights that the snapshot does not have begins with its weights.

    Raises:
        CheckpointError: a tensor that is missing, of another shape or dtype, or that nothing here has a place for.
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
                elif key == PARAMETER_ERROR and optimizer_key(key, name) not in content.tensors:  # they were not rounded
                    state[key] = np.zeros(parameter.size, network.parameter_dtype)
                elif key in averager.by_holder:
                    state[key] = _kept_back(content, optimizer_key(key, name), name, network, shards, averager.holders)
                else:
                    state[key] = _part(content, optimizer_key(key, name), name, network, shards).reshape(-1)
            averager.load_state(parameter, state)
    _put_counters(content, averagers)
    if average is not None:
        for name, statistic in average.views.items():
            key = averaged_statistic_key(name)
            key = key if key in content.tensors else statistic_key(name)
            statistic[...] = restore(content, key, statistic.shape, network.parameter_dtype)
        average.go_on()
    return Position.from_meta(content.meta)


def _put_exact(content: CheckpointContent, network: Network, shards: Shards, names: Collection[str]) -> set[str]:
    """Make parameters exact that were rounded, where no averager keeps the errors now; the keys of these."""
    keys = {name: optimizer_key(PARAMETER_ERROR, name) for name in names}
    rounded = {name: key for name, key in keys.items() if key in content.tensors}
    for name in rounded:
        network.kernels.arithmetic.from_host(network.parameters[name].data, _exact(content, name, network, shards))
    if rounded:
        network.parameters_changed()
    return set(rounded.values())


def _exact(content: CheckpointContent, name: str, network: Network, shards: Shards) -> np.ndarray:
    """Return this rank's part of a parameter, with what rounding took away if it was rounded."""
    values = _part(content, parameter_key(name), name, network, shards)
    key = optimizer_key(PARAMETER_ERROR, name)
    return values + _part(content, key, name, network, shards) if key in content.tensors else values


def _put_counters(content: CheckpointContent, averagers: Mapping[str, GradientAverager]) -> None:
    """Load counters by parameter group; those of any group serve groups of another grid, as names in several count alike."""
    stored: Mapping[str, Mapping[str, int]] = content.meta.get(_COUNTERS) or {}  # type: ignore[assignment]
    of_all = {name: count for counters in stored.values() for name, count in counters.items()}
    for group, averager in averagers.items():
        averager.load_counters({**of_all, **stored.get(group, {})})


def _kept_back(content: CheckpointContent, key: str, name: str, network: Network, shards: Shards, holders: int) -> np.ndarray:
    """Return gradients of parameter `name` that are kept back, (holders, elements of this rank's part); zeros without any.

    Each holder's own, where as many wrote the checkpoint; else the first one gets the sum.
    """
    shape, dtype = shards.whole_shape(name), network.parameter_dtype
    stored = content.tensors.get(key)
    if stored is None:
        by_writer = np.zeros((holders, *shape), dtype)
    else:
        has_writers = stored.ndim > len(shape)  # else a sum, before checkpoints had every holder's
        writers = stored.shape[0] if has_writers else 1
        by_writer = restore(content, key, (writers, *shape) if has_writers else shape, dtype).reshape(writers, *shape)
    return for_holders(np.stack([shards.part(name, of_writer).reshape(-1) for of_writer in by_writer]), holders)


def _refuse_leftovers(content: CheckpointContent, expected: set[str]) -> None:
    """Raise unless all state of the checkpoint that is not zero has a place, or is an average of weights.

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
            f"The averager {strategy} has added up gradients of {many} parameters ({name} first) that are not applied yet, and "
            f"that the averager of now would drop. First go on for one step (--steps 1) with the averager {strategy} and its "
            f"options as they were, but for one with which it keeps nothing back (max_interval 1 of lazy, density 1 of sparse), "
            f"which applies them; then change it."
        )
    raise CheckpointError(
        f"The checkpoint holds the {state} of {many} parameters ({name} first), which neither optimizer nor averager has a "
        f"place for now; give them the options that it was written with."
    )


def put_weights(content: CheckpointContent, network: Network, shards: Shards, *, averaged: bool = False) -> None:
    """Restore parameters and running statistics only: for evaluation, or to start from trained weights.

    averaged: their averages in place of them.

    Raises:
        CheckpointError: tensors of another model, or no averages where these are asked for.
    """
    keys = averaged_keys(content) if averaged else {}
    expected = {parameter_key(name) for name in network.parameters}
    extra = sorted(key for key in content.tensors if key.startswith("parameters/") and key not in expected)
    if extra:
        raise CheckpointError(
            f"The checkpoint holds {extra[0]}, which the configured model does not have ({len(extra)} such tensors); "
            f"use the model that it was written with."
        )
    for name, parameter in network.parameters.items():
        key = keys.get(parameter_key(name), parameter_key(name))
        network.kernels.arithmetic.from_host(parameter.data, _part(content, key, name, network, shards))
    for name, statistic in network.statistics.views.items():
        key = keys.get(statistic_key(name), statistic_key(name))
        statistic[...] = restore(content, key, statistic.shape, network.parameter_dtype)
    network.parameters_changed()


def averaged_keys(content: CheckpointContent) -> dict[str, str]:
    """Return the keys of the averages in a checkpoint, by the keys of what they are of. Frozen layers are their own average.

    Raises:
        CheckpointError: it holds none.
    """
    weights, statistics = optimizer_key(EMA, ""), averaged_statistic_key("")
    keys = {parameter_key(key.removeprefix(weights)): key for key in content.tensors if key.startswith(weights)}
    if not keys:
        raise CheckpointError("The checkpoint has no average of weights; take the weights themselves, or train with ema.decay.")
    return keys | {statistic_key(key.removeprefix(statistics)): key for key in content.tensors if key.startswith(statistics)}


def _part(content: CheckpointContent, key: str, name: str, network: Network, shards: Shards) -> np.ndarray:
    """Return the part that this rank holds of a tensor that has the shape of parameter `name`."""
    return restore(content, key, shards.whole_shape(name), network.parameter_dtype, shards.box(name))


def take_parts(
    network: Network,
    averagers: Mapping[str, GradientAverager],
    shards: Shards,
    groups: GridGroups,
    average: WeightAverage | None = None,
) -> dict[str, Part]:
    """Return copies of this rank's parts. After a drain; collective if optimiser state is sharded."""
    everyone = groups.all_ranks
    parts: dict[str, Part] = {}
    for key, shape, held, values, shares in _held(network, averagers, shards, groups, average):
        empty = size_of(held) == 0
        box = shares.own(held, values.itemsize) if not empty else None
        if 0 in shape and everyone.rank == 0:  # of a tensor without elements, its name and shape
            box = whole(shape)
        if box is not None:
            parts[key] = Part(shape, box, np.array(values[relative(box, held)], order="C"))
    return parts


def _held(
    network: Network,
    averagers: Mapping[str, GradientAverager],
    shards: Shards,
    groups: GridGroups,
    average: WeightAverage | None,
) -> Iterator[tuple[str, tuple[int, ...], Box, np.ndarray, WriteShares]]:
    """Yield (key, shape of the tensor, box that this rank holds, its values, those that hold it, too)."""
    to_host, for_all = network.kernels.arithmetic.to_host, _shares(groups.all_ranks)
    for averager in averagers.values():
        of_group = _shares(averager.comm)
        for parameter, states in full_states(averager, shards):
            name = parameter.name
            shares = for_all if shards.is_whole(name) else of_group
            shape, box = shards.whole_shape(name), shards.box(name)
            yield parameter_key(name), shape, box, to_host(parameter.data), shares
            for state, values in states.items():
                if state in averager.by_holder:
                    count = len(values)
                    holders = values.reshape(count, *parameter.spec.shape)
                    yield optimizer_key(state, name), (count, *shape), ((0, count), *box), holders, shares
                else:
                    yield optimizer_key(state, name), shape, box, values.reshape(parameter.spec.shape), shares
    for group, frozen in network.frozen_groups.items():
        for name, parameter in frozen.parameters.items():
            shares = for_all if shards.is_whole(name) else _shares(groups.gradients[group])
            yield parameter_key(name), shards.whole_shape(name), shards.box(name), to_host(parameter.data), shares
    for key, statistic in statistics_of(network, average).items():
        yield key, statistic.shape, whole(statistic.shape), statistic, for_all


def _shares(comm: Communicator) -> WriteShares:
    return WriteShares(comm.rank, comm.size)
