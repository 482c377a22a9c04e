"""Dependencies of the operations of a schedule: data, which follow from the schedule alone.

Within a stream the order of posting holds operations back too; here stands what an operation needs by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind
from hpctrain.averaging.norm_groups import covered_slices
from hpctrain.averaging.slicing import layer_slices


class EventKind(StrEnum):
    """The things that happen on this rank, to one parameter, once per step."""

    INPUTS = "inputs"
    GRADIENT = "gradient"
    LAST_READ = "backward's last use"


@dataclass(frozen=True)
class LocalEventKey:
    """An event of one parameter in one step."""

    kind: EventKind
    parameter: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.parameter}"


@dataclass(frozen=True)
class Dependencies:
    """The things that one operation starts after.

    Attributes:
        events: on this rank, in the same step. operations: positions in the schedule, of the same step.
        gathers_before: slices whose allgather of the step before must be complete.
    """

    events: tuple[LocalEventKey, ...] = ()
    operations: tuple[int, ...] = ()
    gathers_before: tuple[int, ...] = ()


def dependencies(schedule: CollectiveSchedule) -> tuple[Dependencies, ...]:
    """Those of each operation, by position.

    An operation that sums a slice needs its gradients (or its layer's inputs, or errors). It writes where the sums of the step
    before are used until their slices are gathered, so it comes after these gathers. The largest elements of a compressed slice
    are chosen from the sum within the node, or from the gradients where no operation makes one. Norms need the sums of the
    slices whose parameters they are of, and are written where updates of the step before read them until these slices are
    gathered; a step may leave out a slice, so that its sum does not say so. A gather writes the parameters, so it needs that
    backward has read them for the last time, beside the sums of its slice and, if any, the norms of its parameters.
    """
    summing: dict[int, list[int]] = {}  # by slice, the operations that give its sum
    covered = covered_slices(schedule)
    norms: dict[int, int] = {}  # by slice, the position of its parameters' norms
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
