"""Hashes of all tensors that a replica goes on from, the same on any number of ranks, grid and strategy that hold the same bits.

Nothing is gathered. Each rank sums over elements that it holds, each element on one rank; the sums of all ranks are added in one
allreduce of a few integers (`element_hash`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.averaging.each_once import each_once
from hpctrain.backend.arithmetic import Array
from hpctrain.core.intervals import even_interval
from hpctrain.nn.parameter import Segment
from hpctrain.storage.checkpoint import optimizer_key, parameter_key
from hpctrain.train.element_hash import MODULUS, ElementHash, PartPosition, digest
from hpctrain.train.replica import Replica
from hpctrain.train.snapshot import statistics_of

_HALF_BITS = 32
_HALF = (1 << _HALF_BITS) - 1


@dataclass(frozen=True)
class _Piece:
    """Elements that this rank takes account of.

    key: of the tensor. values: 1-D, where kernels compute. start: in this rank's part of it. position: of the part in it.
    """

    key: str
    values: Array
    start: int
    position: PartPosition


class StateHashes:
    """The hashes of a replica's parameters, running statistics and optimiser state, and of the averages of these.

    The keys are those of a checkpoint, and the hash of each is that of the checkpoint's tensor (`element_hash.hash_of`).
    Gradients that `lazy` and `sparse` keep back are not among them, as each rank has its own, nor are counters, which follow from
    the steps done. All methods are collective.

    Args:
        replica: agreed.
    """

    def __init__(self, replica: Replica) -> None:
        self._comm, self._progress = replica.groups.all_ranks, replica.progress
        self._to_host = replica.network.kernels.arithmetic.to_host
        self._hash = ElementHash()
        states = self._agreed_states(replica)
        self._pieces = tuple(_pieces(replica, states))
        shapes = _shapes(replica, states)
        dtype = str(np.dtype(replica.network.parameter_dtype))
        self._headers = {key: (shape, dtype) for key, shape in shapes.items()}
        self._index = {key: number for number, key in enumerate(shapes)}

    def _agreed_states(self, replica: Replica) -> dict[str, list[str]]:
        """Return the parameters with each state on any rank. A rank without elements of a parameter does not know its states."""
        averagers = replica.averagers.values()
        known = {
            (state, segment.parameter) for averager in averagers for segment, states in each_once(averager) for state in states
        }
        anywhere = {pair for pairs in self._comm.allgather_object(sorted(known)) for pair in pairs}
        names = replica.network.parameter_specs
        return {state: [name for name in names if (state, name) in anywhere] for state in sorted({pair[0] for pair in anywhere})}

    def take(self) -> dict[str, str]:
        """The hash of each tensor, 16 hexadecimal digits, by key, parameters first and in forward order.

        Collective; between steps, after `settle` and `drain`.
        """
        sums = [0] * len(self._index)
        for piece in self._pieces:
            sums[self._index[piece.key]] += self._hash.sum_of(self._on_host(piece.values), piece.start, piece.position)
        # In halves, so that no sum over ranks leaves the range of the integers that travel.
        halves = np.array([[total & _HALF, total >> _HALF_BITS & _HALF] for total in sums], np.int64)
        self._progress.wait_handle(self._comm.iallreduce(halves.reshape(-1)), "hashes")
        totals = ((int(low) + (int(high) << _HALF_BITS)) % MODULUS for low, high in halves)
        return {key: digest(total, *header) for (key, header), total in zip(self._headers.items(), totals, strict=True)}

    def _on_host(self, values: Array) -> np.ndarray:
        """The values; they may lie on the host already, as statistics do."""
        return values if isinstance(values, np.ndarray) else self._to_host(values)


def state_hashes(replica: Replica) -> dict[str, str]:
    """The hashes of a replica once, as `StateHashes.take` gives them. Collective; between steps, after `settle` and `drain`."""
    return StateHashes(replica).take()


def _shapes(replica: Replica, states: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """The shape of each whole tensor by its key: parameters, statistics, states of optimisers, each in forward order."""
    shapes = {name: spec.shape for name, spec in replica.network.parameter_specs.items()}
    statistics = statistics_of(replica.network, replica.average)
    return {
        **{parameter_key(name): shape for name, shape in shapes.items()},
        **{key: values.shape for key, values in statistics.items()},
        **{optimizer_key(state, name): shapes[name] for state, names in states.items() for name in names},
    }


def _pieces(replica: Replica, with_state: Mapping[str, Sequence[str]]) -> Iterator[_Piece]:
    """Yield all elements that this rank accounts for.

    Args:
        with_state: by state, the parameters that have it on any rank. A part without it counts as zeros, as in `full_states`.
    """
    network, groups = replica.network, replica.groups
    for averager in replica.averagers.values():
        group = averager.group
        for segment, states in each_once(averager):
            name, start, position = _place(replica, segment, group.segment(segment.parameter))
            yield _Piece(parameter_key(name), group.data[segment.start : segment.stop], start, position)
            for state in (state for state, names in with_state.items() if name in names):
                values = states[state] if state in states else np.zeros(segment.size, group.dtype)
                yield _Piece(optimizer_key(state, name), values, start, position)
    for group_name, group in network.frozen_groups.items():
        comm = groups.gradients[group_name]
        for segment in group.covering(*even_interval(group.size, comm.size, comm.rank)):
            name, start, position = _place(replica, segment, group.segment(segment.parameter))
            yield _Piece(parameter_key(name), group.data[segment.start : segment.stop], start, position)
    yield from _statistics(replica)


def _place(replica: Replica, segment: Segment, whole: Segment) -> tuple[str, int, PartPosition]:
    """(name, place of the segment in this rank's part of the parameter, position of the part)."""
    name, shards = segment.parameter, replica.shards
    return name, segment.start - whole.start, PartPosition.of(shards.whole_shape(name), shards.box(name))


def _statistics(replica: Replica) -> Iterable[_Piece]:
    """Statistics are whole on every rank: each is taken account of on one, in turn. They lie on the host."""
    comm = replica.groups.all_ranks
    for number, (key, values) in enumerate(statistics_of(replica.network, replica.average).items()):
        if number % comm.size == comm.rank:
            yield _Piece(key, values.reshape(-1), 0, PartPosition(max(1, values.size), 0, 0))
