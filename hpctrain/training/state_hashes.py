"""Hashes of all tensors of a replica. Equal bits have equal hashes on any number of ranks, grid and strategy.

No tensor is gathered. Each rank computes one number for each element that it accounts for, so that each element is counted on one
rank, and sums these numbers. One allreduce of a few integers adds the sums of all ranks. The hash of an array does not depend on
how it is split.

Elements are words of 32 bits; a number of 64 bits has two. The number of a word mixes its bits and its position in the array. It
is x := position * 2^32 + bits, then twice a product with an odd constant modulo 2^64, each followed by x := x xor x >> 32. This
function is one-to-one, so a change of one word always changes the hash. If several words change, the hash remains the same with a
probability of 2^-64, as far as the mix behaves like random numbers. It does not protect against deliberate collisions. Bellare
and Micciancio, "A new paradigm for collision-free hashing", EUROCRYPT 1997 (AdHash); the mix resembles that of MurmurHash3.
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
from hpctrain.training.replica import Replica
from hpctrain.training.snapshot import statistics_of

#: modulus of hash values
MODULUS = 1 << 64
#: words per chunk; two buffers and the positions take 384 KiB, which fit in a second-level cache (measured)
CHUNK = 1 << 14

_WORD = np.dtype(np.uint32)
_UPPER_HALF = np.uint64(32)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


@dataclass(frozen=True)
class PartPosition:
    """Positions of a part's elements in the whole array, both counted in C order. The part is split in one dim at most.

    Element i of the part is element i + i // run * gap + first of the whole.

    Attributes:
        run: number of consecutive elements of the part that are neighbours in the whole.
        gap: number of elements of other parts between two runs.
        first: number of elements before the first run.
    """

    run: int
    gap: int
    first: int

    @classmethod
    def of(cls, shape: Sequence[int], box: Box) -> PartPosition:
        """Return the positions of a box in an array of `shape`, split in one dim at most."""
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
    """Hash of parts of an array, computed in preallocated buffers. It is not thread-safe."""

    def __init__(self) -> None:
        self._mixed, self._spare = (np.empty(CHUNK, np.uint64) for _ in range(2))
        #: indices in a chunk, in the bits of a position
        self._places = np.arange(CHUNK, dtype=np.uint64) << _UPPER_HALF

    def sum_of(self, values: np.ndarray, start: int, position: PartPosition) -> int:
        """Return the hash of a part of an array: the sum of the hash values of its elements, modulo 2^64.

        The hash value depends on bits and position in the whole array, so the hashes of the parts add up to that of the array.

        Args:
            values: elements, 1-D, contiguous and in host memory, with a dtype of 4 or 8 bytes. An element of 8 bytes counts as
                two words of 4 bytes in machine order. The array is only read.
            start: index of the first element in the part.
            position: position of the part in the whole array.
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
            for factor in (_FIRST_FACTOR, _SECOND_FACTOR):
                np.multiply(mixed, factor, out=mixed)
                np.right_shift(mixed, _UPPER_HALF, out=spare)
                np.bitwise_xor(mixed, spare, out=mixed)
            total += int(mixed.sum())
        return total % MODULUS

    def _positions(self, size: int, begin: int, first: int, run: int, gap: int) -> np.ndarray:
        """Return the positions, times 2^32 and modulo 2^64, of `size` words of a part, starting with word `begin`."""
        mixed = self._mixed[:size]
        np.add(self._places[:size], np.uint64((begin + first) % (1 << 32) << 32), out=mixed)
        if gap and (begin + size - 1) // run:  # otherwise all words are in the first run
            before = (np.arange(begin, begin + size, dtype=np.uint64) // np.uint64(run)) * np.uint64(gap)
            np.add(mixed, before << _UPPER_HALF, out=mixed)
        return mixed


def digest(total: int, shape: Sequence[int], dtype: str) -> str:
    """Return the hash of a whole array, 16 hexadecimal digits, from the sum over its elements, its shape and its dtype."""
    header = hashlib.blake2b(f"{dtype} {tuple(shape)}".encode(), digest_size=8)
    return f"{(total + int.from_bytes(header.digest(), 'little')) % MODULUS:016x}"


def hash_of(values: np.ndarray) -> str:
    """Return the hash of a whole array in host memory with elements of 4 or 8 bytes, for example a tensor of a checkpoint."""
    flat = np.ascontiguousarray(values).reshape(-1)
    position = PartPosition.of(values.shape, tuple((0, size) for size in values.shape))
    return digest(ElementHash().sum_of(flat, 0, position), values.shape, str(values.dtype))


def hash_of_all(digests: Mapping[str, str]) -> str:
    """Return one hash, 16 hexadecimal digits, of the hashes of all tensors by key, in any order."""
    lines = "".join(f"{key} {digests[key]}\n" for key in sorted(digests))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


_HALF_BITS = 32
_HALF = (1 << _HALF_BITS) - 1


@dataclass(frozen=True)
class _Piece:
    """Elements that this rank accounts for.

    Attributes:
        key: key of the tensor.
        values: elements, 1-D, in the memory in which the kernels compute.
        start: index of the first element in this rank's part of the tensor.
        position: position of the part in the tensor.
    """

    key: str
    values: Array
    start: int
    position: PartPosition


class StateHashes:
    """Hashes of a replica's parameters, running statistics and optimiser state, and of their averages.

    Keys and hashes are those of the tensors in a checkpoint (`hash_of`). Gradients that `lazy` and `sparse` keep back are
    excluded, because they differ between ranks. Counters of updates and of the interval of `lazy` are excluded as well. Creation
    and `take` are collective.

    Args:
        replica: replica whose averagers have agreed.
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
        """Return, for each state, the parameters that have this state on any rank. Collective.

        A rank without elements of a parameter does not see the parameter's states.
        """
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

        Collective; call it between steps, after `settle` and `drain`.
        """
        sums = [0] * len(self._index)
        for piece in self._pieces:
            # Statistics are in host memory already.
            values = piece.values if isinstance(piece.values, np.ndarray) else self._to_host(piece.values)
            sums[self._index[piece.key]] += self._hash.sum_of(values, piece.start, piece.position)
        # Sums are sent as halves, so that no sum over ranks overflows int64.
        halves = np.array([[total & _HALF, total >> _HALF_BITS & _HALF] for total in sums], np.int64)
        self._progress.wait_handle(self._comm.iallreduce(halves.reshape(-1)), "hashes")
        totals = ((int(low) + (int(high) << _HALF_BITS)) % MODULUS for low, high in halves)
        return {key: digest(total, *header) for (key, header), total in zip(self._headers.items(), totals, strict=True)}


def state_hashes(replica: Replica) -> dict[str, str]:
    """Return the hashes of a replica (see `StateHashes.take`). Collective; call it between steps, after `settle` and `drain`."""
    return StateHashes(replica).take()


def _shapes(replica: Replica, states: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each whole tensor by key: parameters, statistics and optimiser states, each in forward order."""
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
        with_state: parameters that have a state on any rank, by state. A part without the state counts as zeros, as in
            `full_states`.
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
    """Return (name of the parameter, index of the segment in this rank's part, position of the part)."""
    name, shards = segment.parameter, replica.shards
    return name, segment.start - whole.start, PartPosition.of(shards.whole_shape(name), shards.box(name))


def _statistics(replica: Replica) -> Iterable[_Piece]:
    """Yield the statistics, which every rank holds whole in host memory. The ranks account for them in turn."""
    comm = replica.groups.all_ranks
    for number, (key, values) in enumerate(statistics_of(replica.network, replica.average).items()):
        if number % comm.size == comm.rank:
            yield _Piece(key, values.reshape(-1), 0, PartPosition(max(1, values.size), 0, 0))
