"""Hashes of all tensors that a replica continues from, the same on any number of ranks, grid and strategy with the same bits.

Nothing is gathered. Each rank sums one number for each element that it holds, each element on one rank; the sums of all ranks
are added in one allreduce of a few integers. No cut of an array changes its hash.

The number of an element is a mix of its bits and of its position in the whole array: x := position * 2^32 + bits, then twice a
product with an odd constant modulo 2^64, each followed by x := x xor x >> 32. That maps different x to different numbers, so
one element that changed always shows. Where several changed, the hash stays what it was with a probability of 2^-64, as far as
the mix behaves like random numbers; two arrays of one hash can be made on purpose. Bellare and Micciancio, "A new paradigm for
collision-free hashing", EUROCRYPT 1997 (AdHash); the mix is of the kind of MurmurHash3's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.averaging.averager_state import unique_segments
from hpctrain.backend.arithmetic import Array
from hpctrain.core.intervals import Box, Interval, even_interval
from hpctrain.nn.parameter import Segment
from hpctrain.storage.checkpoint import optimizer_key, parameter_key
from hpctrain.train.replica import Replica
from hpctrain.train.snapshot import statistics_of

#: hash values are modulo this
MODULUS = 1 << 64
#: words that are mixed at once; two buffers and the positions are 384 KiB, which stay in a second-level cache (measured)
CHUNK = 1 << 14

_WORD = np.dtype(np.uint32)
_UPPER_HALF = np.uint64(32)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


@dataclass(frozen=True)
class PartPosition:
    """The positions of a part's elements in the whole array, both counted in C order; the part is split in one dim at most.

    Element i of the part is element i + i // run * gap + first of the whole.

    Attributes:
        run: elements of the part that are neighbours in the whole. gap: elements of others between two runs. first: before all.
    """

    run: int
    gap: int
    first: int

    @classmethod
    def of(cls, shape: Sequence[int], box: Box) -> PartPosition:
        """Return the positions of a box in an array of that shape, cut in one dim at most."""
        split = [dim for dim, (interval, size) in enumerate(zip(box, shape, strict=True)) if interval != (0, size)]
        assert len(split) <= 1, f"the box {box} is cut in several dims of {tuple(shape)}"
        if not split:
            return cls(max(1, math.prod(shape)), 0, 0)
        return cls._cut(shape, split[0], box[split[0]])

    @classmethod
    def _cut(cls, shape: Sequence[int], dim: int, interval: Interval) -> PartPosition:
        inner = math.prod(shape[dim + 1 :])
        held = (interval[1] - interval[0]) * inner
        return cls(max(1, held), shape[dim] * inner - held, interval[0] * inner)


class ElementHash:
    """Sums of elements' numbers, by buffers that are made once. Not for several threads at once."""

    def __init__(self) -> None:
        self._mixed, self._spare = (np.empty(CHUNK, np.uint64) for _ in range(2))
        #: places in a chunk, where a mix has the position
        self._places = np.arange(CHUNK, dtype=np.uint64) << _UPPER_HALF

    def sum_of(self, values: np.ndarray, start: int, position: PartPosition) -> int:
        """Return the sum of the numbers of some elements, modulo 2^64; sums over parts of an array add up to that of the array.

        Args:
            values: 1-D and contiguous, on the host, of a dtype of 4 or 8 bytes; it is read only. An element of 8 bytes is two
                words of 4 in the order of the machine.
            start: place in the part of the first of them. position: of the part in the whole array.
        """
        words, per_element = values.view(_WORD), values.itemsize // _WORD.itemsize
        run, gap = position.run * per_element, position.gap * per_element
        begin, first = start * per_element, position.first * per_element
        total = 0
        for low in range(0, words.size, CHUNK):
            chunk = words[low : low + CHUNK]
            mixed = self._positions(chunk.size, begin + low, first, run, gap)
            spare = self._spare[: chunk.size]
            spare[...] = chunk
            np.add(mixed, spare, out=mixed)
            total += self._mixed_sum(mixed, spare)
        return total % MODULUS

    def _positions(self, size: int, begin: int, first: int, run: int, gap: int) -> np.ndarray:
        """Return positions times 2^32, modulo 2^64, of the words of a part from its word `begin` on."""
        mixed = self._mixed[:size]
        np.add(self._places[:size], np.uint64((begin + first) % (1 << 32) << 32), out=mixed)
        if gap and (begin + size - 1) // run:  # else all of them are in the first run
            before = (np.arange(begin, begin + size, dtype=np.uint64) // np.uint64(run)) * np.uint64(gap)
            np.add(mixed, before << _UPPER_HALF, out=mixed)
        return mixed

    def _mixed_sum(self, mixed: np.ndarray, spare: np.ndarray) -> int:
        for factor in (_FIRST_FACTOR, _SECOND_FACTOR):
            np.multiply(mixed, factor, out=mixed)
            np.right_shift(mixed, _UPPER_HALF, out=spare)
            np.bitwise_xor(mixed, spare, out=mixed)
        return int(mixed.sum())


def digest(total: int, shape: Sequence[int], dtype: str) -> str:
    """Return the hash of a whole array from the sum over its elements: 16 hexadecimal digits, of its shape and dtype, too."""
    header = hashlib.blake2b(f"{dtype} {tuple(shape)}".encode(), digest_size=8)
    return f"{(total + int.from_bytes(header.digest(), 'little')) % MODULUS:016x}"


def hash_of(values: np.ndarray) -> str:
    """Return the hash of a whole array of the host, such as a tensor of a checkpoint."""
    flat = np.ascontiguousarray(values).reshape(-1)
    position = PartPosition.of(values.shape, tuple((0, size) for size in values.shape))
    return digest(ElementHash().sum_of(flat, 0, position), values.shape, str(values.dtype))


def hash_of_all(digests: Mapping[str, str]) -> str:
    """Return one hash of all tensors from each one's by its key, in any order: 16 hexadecimal digits."""
    lines = "".join(f"{key} {digests[key]}\n" for key in sorted(digests))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


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
            (state, segment.parameter)
            for averager in averagers
            for segment, states in unique_segments(averager)
            for state in states
        }
        anywhere = {pair for pairs in self._comm.allgather_object(sorted(known)) for pair in pairs}
        names = replica.network.parameter_specs
        return {state: [name for name in names if (state, name) in anywhere] for state in sorted({pair[0] for pair in anywhere})}

    def take(self) -> dict[str, str]:
        """Return the hash of each tensor, 16 hexadecimal digits, by key, parameters first and in forward order.

        Collective; between steps, after `settle` and `drain`.
        """
        sums = [0] * len(self._index)
        for piece in self._pieces:
            # Statistics lie on the host already.
            values = piece.values if isinstance(piece.values, np.ndarray) else self._to_host(piece.values)
            sums[self._index[piece.key]] += self._hash.sum_of(values, piece.start, piece.position)
        # In halves, so that no sum over ranks leaves the range of the integers that travel.
        halves = np.array([[total & _HALF, total >> _HALF_BITS & _HALF] for total in sums], np.int64)
        self._progress.wait_handle(self._comm.iallreduce(halves.reshape(-1)), "hashes")
        totals = ((int(low) + (int(high) << _HALF_BITS)) % MODULUS for low, high in halves)
        return {key: digest(total, *header) for (key, header), total in zip(self._headers.items(), totals, strict=True)}


def state_hashes(replica: Replica) -> dict[str, str]:
    """Return the hashes of a replica as `StateHashes.take`. Collective; between steps, after `settle` and `drain`."""
    return StateHashes(replica).take()


def _shapes(replica: Replica, states: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each whole tensor by its key: parameters, statistics, states of optimisers, each in forward order."""
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
        for segment, states in unique_segments(averager):
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
    """Return (name, place of the segment in this rank's part of the parameter, position of the part)."""
    name, shards = segment.parameter, replica.shards
    return name, segment.start - whole.start, PartPosition.of(shards.whole_shape(name), shards.box(name))


def _statistics(replica: Replica) -> Iterable[_Piece]:
    """Yield statistics, which are whole on every rank and lie on the host: each one on one rank, in turn."""
    comm = replica.groups.all_ranks
    for number, (key, values) in enumerate(statistics_of(replica.network, replica.average).items()):
        if number % comm.size == comm.rank:
            yield _Piece(key, values.reshape(-1), 0, PartPosition(max(1, values.size), 0, 0))
