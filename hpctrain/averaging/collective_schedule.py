"""Schedules: the collectives of a step in posting order, and their dependencies, as pure data, the same on every rank.

At the start, the ranks compare the hashes of their schedules. The dependencies are derived from the schedule alone. Within a
stream, operations also follow each other in posting order; `Dependencies` contains only the requirements of each operation
itself.

The norms of several parameters travel in one message, so that a layer's update waits for few other layers. Such a group of norms
covers neighbouring slices with all their parameters. The groups follow from the slices by a rule and not from measured times,
because an allreduce of another length may add in another order and change the last bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hpctrain.averaging.sixteen_bits import Rounding
from hpctrain.averaging.slicing import INDEX_BYTES, Compression, Slice, layer_slices
from hpctrain.core.errors import CheckpointError, errors_as
from hpctrain.nn.parameter import GroupLayout

#: attribute of a slice -> its key in stored schedules
_STORED_KEYS = {"sufficient_factors": "factors"}
#: default values, which are not stored, so that schedules without these features keep their digests
_LEFT_OUT = (("compression", None), ("block", 1))

#: slice index of an operation on all slices
ALL_SLICES = -1


class OperationKind(StrEnum):
    """Collectives of a step, by the data that they move."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALLGATHER = "allgather"
    INPUTS = "all-to-all of inputs"
    ERRORS = "allgather of errors"
    NORMS = "allreduce of norms"
    SPARSE = "allgather of largest elements"


class Stream(StrEnum):
    """Communicator on which an operation is posted. Operations of different streams may overtake each other.

    NODES connects the ranks with the same local number on all nodes, for compressed slices. NORMS is for the norms of groups of
    slices, so that sums and gathers of other slices do not wait for them.
    """

    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    NODES = "nodes"
    NORMS = "norms"


@dataclass(frozen=True)
class Operation:
    """One collective of a step.

    Attributes:
        kind: the collective and the data that it moves.
        slice: index of the slice. Inputs and errors belong to all slices of a linear layer and have the index of the first one.
            Norms cover the parameters of all slices from this index up to the index of the next norms; -1 (`ALL_SLICES`) covers
            all.
        stream: the stream on which the operation is posted.
    """

    kind: OperationKind
    slice: int
    stream: Stream


@dataclass(frozen=True)
class CollectiveSchedule:
    """All operations of a step. Within a stream, every rank posts them in this order.

    Attributes:
        request: text with the strategy, options and parameters for which the schedule was made. A stored schedule is reused only
            for the same request.
        operations: operations in posting order.
        window: maximum number of operations in flight per stream; None: no limit.
        timed: whether the order follows from measured times; it is then not measured again.
        rounding: rounding of messages; None: nothing is rounded.
    """

    request: str
    ranks: int
    slices: tuple[Slice, ...]
    operations: tuple[Operation, ...]
    window: int | None = None
    timed: bool = False
    rounding: Rounding | None = None

    def digest(self) -> str:
        """Return the SHA-256 of the whole schedule, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the schedule as JSON for `from_json`, with one slice or operation per line."""
        values = asdict(self)
        values["slices"] = [
            {_STORED_KEYS.get(key, key): value for key, value in piece.items() if (key, value) not in _LEFT_OUT}
            for piece in values["slices"]
        ]
        if self.rounding is None:
            del values["rounding"]
        items = []
        for name, value in values.items():
            if isinstance(value, list | tuple):
                lines = ",\n".join(f"  {json.dumps(item)}" for item in value)
                items.append(f' "{name}": [\n{lines}\n ]')
            else:
                items.append(f' "{name}": {json.dumps(value)}')
        return "{\n" + ",\n".join(items) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> CollectiveSchedule:
        """Return the schedule that `to_json` wrote.

        Raises:
            CheckpointError: the text is not a schedule.
        """
        with errors_as(CheckpointError, lambda why: f"A schedule in the checkpoint cannot be read ({why}); use an older one."):
            values: dict[str, Any] = json.loads(text)
            slices = tuple(map(_stored_slice, values.pop("slices")))
            rounding = Rounding(**values.pop("rounding")) if "rounding" in values else None
            operations = tuple(
                Operation(OperationKind(item["kind"]), item["slice"], Stream(item["stream"])) for item in values.pop("operations")
            )
            # Release 0.1.0 could choose sizes for a measured link; its runs keep their slices.
            request = values.pop("request").replace(", sizes measured", "")
            return CollectiveSchedule(request, slices=slices, operations=operations, rounding=rounding, **values)

    def text(self, operation: Operation) -> str:
        """Return the name of an operation and its slice, for messages and traces."""
        if operation.slice == ALL_SLICES:
            return str(operation.kind)
        piece = self.slices[operation.slice]
        if operation.kind is OperationKind.NORMS:
            return f"{operation.kind} from {piece.name}"
        exchanges = operation.kind in (OperationKind.INPUTS, OperationKind.ERRORS)
        return f"{operation.kind} of {piece.parameters[0] if exchanges else piece.name}"

    def lines(self) -> list[str]:
        """Return the request with the window, and a line per operation with its slice. Ranks compare them if digests differ."""
        lines = [f"{self.request}, {self.ranks} ranks, window {self.window}"]
        for operation in self.operations:
            where = ""
            if operation.kind is OperationKind.NORMS and operation.slice >= 0:
                where = f" from {self.slices[operation.slice].name}"
            elif operation.slice >= 0:
                piece = self.slices[operation.slice]
                replicated = f" with {', '.join(piece.replicated)}" if piece.replicated else ""
                compressed = "" if piece.compression is None else f" at density {piece.compression.density:g}"
                where = f" of {piece.name} [{piece.start}, {piece.stop}){replicated}{compressed}"
            lines.append(f"{operation.kind}{where} on {operation.stream}")
        return lines

    def exchanged_by_rank(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Return the number of elements of all kinds that each rank exchanges with other ranks in a step. Norms are not counted.

        Elements count where sums and all-to-alls send them, and where gathers receive them. In a message with positions, each
        element counts twice. For compressed slices, the numbers are those of a step after the warm-up. The time is
        O(operations + ranks).

        Args:
            samples: number of samples of each rank.
        """
        constant, per_sample = _Elements(self.ranks), _Elements(self.ranks)
        constant.add(self._pairs_by_rank(), 2)
        for operation in self.operations:
            if operation.kind in (OperationKind.NORMS, OperationKind.SPARSE):
                continue
            piece = self.slices[operation.slice]
            if operation.kind is OperationKind.INPUTS:  # columns of each sample that other ranks own
                for k in layer_slices(self.slices, operation.slice):
                    per_sample.add_not_owned(self.slices[k].units, 1)
            elif operation.kind is OperationKind.ERRORS:
                constant.all_ranks += sum(samples) * piece.unit
                per_sample.all_ranks -= piece.unit
            else:
                weight = piece.unit * (2 if operation.kind is OperationKind.ALLREDUCE else 1)
                constant.add_not_owned(piece.units, weight, piece.copies)
        by_rank = zip(constant.by_rank(), samples, per_sample.by_rank(), strict=True)
        return tuple(n + count * m for n, count, m in by_rank)

    def exchanged_bytes_by_rank(self, samples: Sequence[int], item_bytes: int) -> tuple[int, ...]:
        """Return the bytes that each rank exchanges with other ranks in a step (see `exchanged_by_rank`).

        Args:
            item_bytes: bytes of an element; its position, if sent, takes 4 bytes.
        """
        elements, pairs = self.exchanged_by_rank(samples), self._pairs_by_rank().by_rank()
        full = (item_bytes * n + (INDEX_BYTES - item_bytes) * m for n, m in zip(elements, pairs, strict=True))
        return tuple(n_bytes - less for n_bytes, less in zip(full, self._saved_by_rank(item_bytes), strict=True))

    def _saved_by_rank(self, item_bytes: int) -> Sequence[int]:
        """Return, by rank, the bytes that rounding saves."""
        saved = np.zeros(self.ranks, np.int64)
        rounding = self.rounding
        if rounding is None or self.ranks == 1:
            return [0] * self.ranks
        for operation in self.operations:
            if operation.slice < 0:
                continue
            piece = self.slices[operation.slice]
            match operation.kind:
                case OperationKind.ALLREDUCE:
                    saved += rounding.saved_by_allreduce(piece.size, self.ranks, item_bytes)
                case OperationKind.REDUCE_SCATTER:
                    saved += rounding.saved_by_reduction(piece.counts(self.ranks), item_bytes)
                case OperationKind.ALLGATHER:
                    saved += rounding.saved_by_gather(piece.counts(self.ranks), item_bytes)
        return [int(less) for less in saved]

    def _pairs_by_rank(self) -> _Elements:
        """Return the number of (element, position) pairs of compressed slices that each rank exchanges."""
        pairs = _Elements(self.ranks)
        for operation in self.operations:
            if operation.kind is OperationKind.SPARSE:
                piece = self.slices[operation.slice]
                least, longer = divmod(piece.size, self.ranks // piece.copies)
                few = _exchanged_pairs(piece, least)
                pairs.add_by_limit(few, longer * piece.copies, _exchanged_pairs(piece, least + 1) - few)
        return pairs

    def table(self) -> str:
        """Return a printable table of the operations, with position, stream, operation, slice, elements and forward order."""
        rows = [("#", "stream", "operation", "slice", "elements", "order")]
        for position, operation in enumerate(self.operations):
            rows.append((str(position), operation.stream.value, operation.kind.value, *self._cells(operation)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        numbers = (0, 4, 5)
        aligned = (
            "  ".join(
                cell.rjust(width) if column in numbers else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )
        head = f"{self.request}: {self.ranks} ranks, {len(self.slices)} slices, window {self.window}, {self.digest()[:16]}"
        return "\n".join([head, *aligned])

    def _cells(self, operation: Operation) -> tuple[str, str, str]:
        """Return the cells of an operation in the columns slice, elements and order."""
        if operation.slice == ALL_SLICES:
            return "all", "", ""
        piece = self.slices[operation.slice]
        if operation.kind is OperationKind.NORMS:
            return f"from {piece.name}", "", ""
        return piece.name, f"{piece.size:,}", str(piece.order)


class _Elements:
    """Sum of element counts by rank, stored as a difference array.

    Attributes:
        all_ranks: count of every rank before corrections; a correction applies to all ranks below a limit.
    """

    def __init__(self, ranks: int) -> None:
        self.all_ranks = 0
        self._less = [0] * (ranks + 1)

    def add_not_owned(self, units: int, weight: int, copies: int = 1) -> None:
        """Add `weight` times the number of units that a rank does not own.

        Units are divided evenly; the first ranks may own one unit more. `copies` neighbouring ranks own the same units.
        """
        least, longer = divmod(units, (len(self._less) - 1) // copies)
        self.add_by_limit(weight * (units - least), longer * copies, -weight)

    def add_by_limit(self, elements: int, limit: int, more: int) -> None:
        """Add `elements` to each rank, and `more` to the ranks below a limit."""
        self.all_ranks += elements
        self._less[limit] -= more

    def add(self, other: _Elements, weight: int) -> None:
        """Add `weight` times another sum."""
        self.all_ranks += weight * other.all_ranks
        self._less = [less + weight * one for less, one in zip(self._less, other._less, strict=True)]

    def by_rank(self) -> list[int]:
        # A rank has the corrections whose limits are above it: their total minus those at limits up to the rank.
        below = accumulate(self._less[:-1])
        total = sum(self._less)
        return [self.all_ranks - (total - passed) for passed in below]


def _exchanged_pairs(piece: Slice, owned: int) -> int:
    """Return the number of (element, position) pairs of a compressed slice that the owner of a part exchanges with other nodes.

    Args:
        owned: number of elements of the part.
    """
    assert piece.compression is not None
    return (piece.compression.nodes - 1) * piece.compression.kept(owned)


def _stored_slice(stored: Mapping[str, Any]) -> Slice:
    values = dict(stored)
    for attribute, key in _STORED_KEYS.items():
        values[attribute] = values.pop(key)
    if "compression" in values:
        values["compression"] = Compression(**values["compression"])
    return Slice(**{**values, "parameters": tuple(stored["parameters"]), "replicated": tuple(stored["replicated"])})


# Each message costs latency and processor time. A group has at least two slices, of two operations each, so the messages of norms
# add at most a quarter to the number of messages. The front-most group is complete last and can only be gathered after backward,
# so groups become smaller towards the front.
_GROUPS_OF_EQUAL_SHARE = 8
_LEAST_SLICES_OF_A_GROUP = 2


def norm_groups(layout: GroupLayout, slices: Sequence[Slice]) -> tuple[int, ...]:
    """Return the index of the first slice of each group of norms, ascending.

    Groups are filled from the last slice to the first, in the order in which backward completes them. A group has at least two
    slices, and an eighth of all elements or half of the remaining ones, whichever is smaller; only the front-most group may be
    smaller. No parameter is in two groups, and the parameters of a group are neighbours.
    """
    place = {segment.parameter: position for position, segment in enumerate(layout.segments)}
    places = [[place[name] for name in (*piece.parameters, *piece.replicated)] for piece in slices]
    last_before = list(accumulate((max(positions) for positions in places), max))
    first_from = list(accumulate((min(positions) for positions in reversed(places)), min))[::-1]
    left = sum(piece.size for piece in slices)
    share = left / _GROUPS_OF_EQUAL_SHARE
    starts, size, count = [], 0, 0
    for k in reversed(range(len(slices))):
        size, count = size + slices[k].size, count + 1
        large = size >= min(share, left / 2) and count >= _LEAST_SLICES_OF_A_GROUP
        if k == 0 or (large and last_before[k - 1] < first_from[k]):
            starts.append(k)
            left -= size
            size = count = 0
    return tuple(reversed(starts))


def slices_of_groups(starts: Sequence[int], count: int) -> Mapping[int, range]:
    """Return the slices of each group by its first slice.

    Args:
        starts: first slice of each group, ascending; or only `ALL_SLICES`.
        count: number of all slices.
    """
    if tuple(starts) == (ALL_SLICES,):
        return {ALL_SLICES: range(count)}
    assert all(0 <= low < high for low, high in pairwise((*starts, count))), "groups of norms must be ascending and not empty"
    return {low: range(low, high) for low, high in pairwise((*starts, count))}


def covered_slices(schedule: CollectiveSchedule) -> Mapping[int, range]:
    """Return the slices whose norms each norms operation completes, by the slice index of the operation."""
    starts = sorted(operation.slice for operation in schedule.operations if operation.kind is OperationKind.NORMS)
    covered = slices_of_groups(starts, len(schedule.slices)) if starts else {}
    names = [{name for k in group for name in schedule.slices[k].parameters} for group in covered.values()]
    assert sum(map(len, names)) == len(set().union(*names)), "a parameter's norm must be completed once"
    return covered


class EventKind(StrEnum):
    """Events of one parameter on this rank; each happens at most once per step."""

    INPUTS = "inputs"
    GRADIENT = "gradient"
    LAST_READ = "backward's last use"


@dataclass(frozen=True)
class LocalEventKey:
    """Key of an event of one parameter."""

    kind: EventKind
    parameter: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.parameter}"


@dataclass(frozen=True)
class Dependencies:
    """Dependencies of one operation.

    Attributes:
        events: events on this rank in the same step.
        operations: positions of operations in the same step.
        gathers_before: slices whose allgather of the previous step must be complete.
    """

    events: tuple[LocalEventKey, ...] = ()
    operations: tuple[int, ...] = ()
    gathers_before: tuple[int, ...] = ()


def dependencies(schedule: CollectiveSchedule) -> tuple[Dependencies, ...]:
    """Return the dependencies of each operation, by position.

    - A sum of a slice needs its gradients, or its layer's inputs or errors. It overwrites the sums of the previous step, which
      are in use until their slices are gathered, so it also needs these gathers.
    - The largest elements of a compressed slice are chosen from the sum within the node, or from the gradients if there is no
      such sum.
    - Norms need the sums of their parameters' slices. They overwrite norms that the updates of the previous step read, so they
      need the gathers of these slices, too. The sums alone do not imply these gathers, because a step may leave out a slice.
    - A gather writes the parameters. It needs the last read by backward, the sums of its slice and, if any, the norms of its
      parameters.
    """
    summing: dict[int, list[int]] = {}  # operations that compute a slice's sum, by slice
    covered = covered_slices(schedule)
    norms: dict[int, int] = {}  # position of the norms of a slice's parameters, by slice
    needs: list[Dependencies] = []
    for position, operation in enumerate(schedule.operations):
        if operation.kind is OperationKind.NORMS:
            slices = covered[operation.slice]
            norms |= dict.fromkeys(slices, position)
            sums = tuple(dict.fromkeys(one for k in slices for one in summing[k]))
            needs.append(Dependencies(operations=sums, gathers_before=tuple(slices)))
            continue
        piece = schedule.slices[operation.slice]
        if operation.kind is OperationKind.ALLGATHER:
            events = _keys(EventKind.LAST_READ, (*piece.parameters, *piece.replicated))
            complete = (norms[operation.slice],) if covered else ()
            needs.append(Dependencies(events, (*summing[operation.slice], *complete)))
            continue
        if operation.kind is OperationKind.SPARSE:
            within = tuple(summing.get(operation.slice, ()))
            events = () if within else _keys(EventKind.GRADIENT, piece.parameters)
            needs.append(Dependencies(events, within, gathers_before=(operation.slice,)))
            summing.setdefault(operation.slice, []).append(position)
            continue
        kind = EventKind.INPUTS if operation.kind is OperationKind.INPUTS else EventKind.GRADIENT
        together = layer_slices(schedule.slices, operation.slice)
        before = () if operation.kind is OperationKind.ALLREDUCE else together
        needs.append(Dependencies(_keys(kind, piece.parameters), gathers_before=before))
        for k in together:
            summing.setdefault(k, []).append(position)
    return tuple(needs)


def _keys(kind: EventKind, parameters: Iterable[str]) -> tuple[LocalEventKey, ...]:
    return tuple(LocalEventKey(kind, name) for name in parameters)
