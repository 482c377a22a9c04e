"""Schedules: what an averager posts in a step, in posting order. Pure data, hashed and compared over the ranks at start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from hpctrain.averaging.slices import Slice, layer_slices
from hpctrain.comm.base import Communicator
from hpctrain.errors import CheckpointError, CollectiveMismatchError


class OperationKind(StrEnum):
    """What an operation moves."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALLGATHER = "allgather"
    INPUTS = "all-to-all of inputs"
    ERRORS = "allgather of errors"
    NORMS = "allreduce of norms"


class Stream(StrEnum):
    """The communicator that an operation is posted on; operations of different streams may overtake each other."""

    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


@dataclass(frozen=True)
class Operation:
    """One collective of a step.

    slice: position in the schedule's slices; -1 for norms, which are of all slices. Inputs and errors belong to all slices of a
    linear layer; theirs is the first.
    """

    kind: OperationKind
    slice: int
    stream: Stream


@dataclass(frozen=True)
class CollectiveSchedule:
    """All operations of a step; within a stream they are posted in this order on every rank.

    Attributes:
        request: what it was made for (strategy, options, parameters); a stored one is used again only for the same request.
        ranks: P. window: most operations in flight in a stream; None: no limit.
        timed: the order follows from measured times, and is not measured again.
    """

    request: str
    ranks: int
    slices: tuple[Slice, ...]
    operations: tuple[Operation, ...]
    window: int | None = None
    timed: bool = False

    def digest(self) -> str:
        """SHA-256 over everything, hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """As text that `from_json` reads; a slice and an operation a line, for people."""
        values = asdict(self)
        items = []
        for name, value in values.items():
            if isinstance(value, tuple):
                lines = ",\n".join(f"  {json.dumps(each)}" for each in value)
                items.append(f' "{name}": [\n{lines}\n ]')
            else:
                items.append(f' "{name}": {json.dumps(value)}')
        return "{\n" + ",\n".join(items) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> CollectiveSchedule:
        """The schedule that `to_json` wrote.

        Raises:
            CheckpointError: the text is no schedule.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            slices = tuple(
                Slice(**{**each, "parameters": tuple(each["parameters"]), "replicated": tuple(each["replicated"])})
                for each in values.pop("slices")
            )
            operations = tuple(
                Operation(OperationKind(each["kind"]), each["slice"], Stream(each["stream"])) for each in values.pop("operations")
            )
            return CollectiveSchedule(slices=slices, operations=operations, **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"A stored schedule cannot be read ({error!r}); delete it, and it is measured anew.") from error

    def lines(self) -> list[str]:
        """Every operation with its slice, and the window, as one line each: what ranks compare where digests differ."""
        lines = [f"{self.request}, {self.ranks} ranks, window {self.window}"]
        for operation in self.operations:
            where = ""
            if operation.slice >= 0:
                each = self.slices[operation.slice]
                replicated = f" with {', '.join(each.replicated)}" if each.replicated else ""
                where = f" of {each.name} [{each.start}, {each.stop}){replicated}"
            lines.append(f"{operation.kind}{where} on {operation.stream}")
        return lines

    def exchanged(self, rank: int, samples: Sequence[int]) -> Mapping[OperationKind, int]:
        """Elements that a rank exchanges with others in a step, by kind, in integers; norms left out.

        Args:
            samples: of the step, by rank.
        """
        moving = [operation for operation in self.operations if operation.kind is not OperationKind.NORMS]
        found: dict[OperationKind, int] = dict.fromkeys((operation.kind for operation in moving), 0)
        for operation in moving:
            each = self.slices[operation.slice]
            begin, end = each.part(rank, self.ranks)
            own = end - begin
            if operation.kind is OperationKind.ALLREDUCE:
                found[operation.kind] += 2 * (each.size - own)
            elif operation.kind is OperationKind.INPUTS:  # this rank's samples, the others' rows
                for piece in (self.slices[k] for k in layer_slices(self.slices, operation.slice)):
                    begin, end = piece.part(rank, self.ranks)
                    found[operation.kind] += samples[rank] * (piece.size - (end - begin)) // piece.unit
            elif operation.kind is OperationKind.ERRORS:
                found[operation.kind] += (sum(samples) - samples[rank]) * each.unit
            else:
                found[operation.kind] += each.size - own
        return found

    def table(self) -> str:
        """For people: position, stream, operation, slice, elements, priority."""
        rows = [("#", "stream", "operation", "slice", "elements", "order")]
        for position, operation in enumerate(self.operations):
            each = self.slices[operation.slice] if operation.slice >= 0 else None
            what = (each.name, f"{each.size:,}", str(each.order)) if each is not None else ("all", "", "")
            rows.append((str(position), operation.stream.value, operation.kind.value, *what))
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


def sharded_operations(
    slices: Sequence[Slice], sent: Sequence[tuple[int, bool]], gathers: Stream, *, norms: bool
) -> tuple[Operation, ...]:
    """A step of reductions and gathers: inputs in forward's order, then what a link sends, norms between the two where needed.

    Args:
        sent: (slice, whether it is its gather) in order. gathers: the stream of these; all else is on that of the gradients.
    """
    first = [layer_slices(slices, k)[0] == k for k in range(len(slices))]
    inputs = [Operation(OperationKind.INPUTS, k, Stream.GRADIENTS) for k, each in enumerate(slices) if each.factors and first[k]]
    order = [
        Operation(OperationKind.ALLGATHER, k, gathers)
        if gather
        else Operation(OperationKind.ERRORS if slices[k].factors else OperationKind.REDUCE_SCATTER, k, Stream.GRADIENTS)
        for k, gather in sent
    ]
    if not norms:
        return (*inputs, *order)
    late = sorted((each for each in order if each.kind is OperationKind.ALLGATHER), key=lambda each: slices[each.slice].order)
    reductions = (each for each in order if each.kind is not OperationKind.ALLGATHER)
    return (*inputs, *reductions, Operation(OperationKind.NORMS, -1, Stream.GRADIENTS), *late)


def agree(comm: Communicator, schedule: CollectiveSchedule) -> None:
    """Make sure that all ranks hold the same schedule. Collective; set-up only.

    Raises:
        CollectiveMismatchError: on every rank, with the first operation that differs and who has what.
    """
    if len(set(comm.allgather_object(schedule.digest()))) == 1:
        return
    every = comm.allgather_object(schedule.lines())
    for position in range(max(map(len, every))):
        found = [lines[position] if position < len(lines) else "nothing more" for lines in every]
        if len(set(found)) > 1:
            other = next(rank for rank, line in enumerate(found) if line != found[0])
            where = f"operation {position - 1}" if position else "the request"
            raise CollectiveMismatchError(
                f"The ranks' schedules differ, first in {where}: rank 0 has {found[0]}, but rank {other} has {found[other]}; "
                f"every rank must have the same model, options and posting order."
            )
    raise CollectiveMismatchError("The ranks' schedules differ in their slices; every rank must have the same model and options.")
