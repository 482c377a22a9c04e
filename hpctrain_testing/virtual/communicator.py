"""Communicator of virtual ranks, which are threads of one process (run.py starts them).

It serves tests and simulations of communicating programs with any number of ranks on one core. Its semantics are MPI's. A policy
(scheduler.py) decides what MPI leaves open: promptly, adversarially by a seed, or by a modelled clock. Mistakes end the run with
an error instead of a hang: a deadlock names the call and line of every rank, mismatched collectives both postings.
"""

from __future__ import annotations

import pickle
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from hpctrain_testing.virtual.operations import (
    Allgather,
    Allreduce,
    Alltoall,
    Array,
    Barrier,
    Broadcast,
    Message,
    ObjectExchange,
    PostedOperation,
    Posting,
    RankEnded,
    RankState,
    ReduceScatter,
    source_line,
)
from hpctrain_testing.virtual.scheduler import Scheduler

#: dtype of a buffer -> its name, cached because NumPy builds the name at each access
_DTYPES = {np.dtype(name): name for name in ("float32", "float64", "int32", "int64", "uint8", "uint16")}


class VirtualHandle:
    """A posted operation of one virtual rank."""

    __slots__ = ("_done", "_posting", "_scheduler")

    def __init__(self, scheduler: Scheduler, posting: Posting) -> None:
        self._scheduler = scheduler
        self._posting = posting
        self._done = False

    def test(self) -> bool:
        """Return whether the operation is complete. If it is not, other ranks run first."""
        if not self._done:
            self._done = self._scheduler.poll(self._posting.owner, self._posting)
        return self._done

    def __str__(self) -> str:
        return str(self._posting)


class Group:
    """State shared by the members of a communicator: operations that some of them have posted.

    Attributes:
        name: name in messages.
        members: world ranks of the members, in rank order.
        parts: groups that result from splits of this one, by (sequence, color).
    """

    def __init__(self, name: str, members: Sequence[RankState]) -> None:
        self.name = name
        self.members = tuple(members)
        self.parts: dict[tuple[int, int], Group] = {}
        self._collectives: dict[int, PostedOperation] = {}
        self._messages: dict[tuple[int, int, int], tuple[deque[PostedOperation], deque[PostedOperation]]] = {}

    def counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return counts as plain integers.

        Raises:
            ValueError: the number of counts is not that of the members, or a count is negative.
        """
        parts = tuple(int(count) for count in counts)
        if len(parts) != len(self.members) or min(parts) < 0:
            needed = f"{self.name} has {len(self.members)} ranks and needs as many counts of 0 or more"
            raise ValueError(f"{needed}, but got {_short(parts)}.")
        return parts

    def world_rank(self, rank: int) -> int:
        """Return the world rank of the member with this rank in the group.

        Raises:
            ValueError: there is no such member.
        """
        if not 0 <= rank < len(self.members):
            raise ValueError(f"{self.name} has ranks 0 to {len(self.members) - 1}, but got rank {rank}.")
        return self.members[rank].rank

    def collective(self, sequence: int, make: Callable[[], PostedOperation]) -> PostedOperation:
        """Return the operation with this sequence number; the first rank that posts it creates it."""
        if sequence not in self._collectives:
            self._collectives[sequence] = make()
        operation = self._collectives[sequence]
        if operation.missing == 1:
            del self._collectives[sequence]
        return operation

    def message(self, source: int, dest: int, tag: int, party: int, make: Callable[[], PostedOperation]) -> PostedOperation:
        """Return the oldest message of this channel without this party (0 sender, 1 receiver); messages do not overtake."""
        lacking = self._messages.setdefault((source, dest, tag), (deque(), deque()))
        if lacking[party]:
            return lacking[party].popleft()
        operation = make()
        lacking[1 - party].append(operation)
        return operation

    def unmatched(self) -> list[Posting]:
        """Return the postings of operations that other members have not posted, in this group and all parts."""
        messages = [operation for queues in self._messages.values() for queue in queues for operation in queue]
        operations = [*self._collectives.values(), *messages]
        own = [posting for operation in operations for posting in operation.postings if posting is not None]
        return own + [posting for part in self.parts.values() for posting in part.unmatched()]


class ThreadCommunicator:
    """One virtual rank's communicator. Reductions are summed in rank order, with the same bits on all ranks.

    In addition to `Communicator` it has the rank's virtual clock: `now` and `compute`. A progress engine on it uses `now` as its
    clock. Only the rank's own thread may call it. Other ranks run during `test`. A message and its receive must have equal
    lengths.
    """

    def __init__(self, scheduler: Scheduler, group: Group, rank: int, ranks_per_node: int) -> None:
        self.rank = rank
        self.size = len(group.members)
        self.name = group.name
        self.world_ranks = tuple(state.rank for state in group.members)
        self._scheduler = scheduler
        self._group = group
        self._ranks_per_node = ranks_per_node
        self._state = group.members[rank]
        self._sequence = 0

    def now(self) -> float:
        """Return this rank's virtual time in seconds. Only `compute` and, with a link, transfers advance it."""
        return self._scheduler.now(self._state)

    def compute(self, seconds: float) -> None:
        """Advance the virtual time, as a kernel would."""
        self._scheduler.compute(self._state, seconds)

    def iallreduce(self, buffer: Array) -> VirtualHandle:
        flat = _flat(buffer)
        posting = self._posting("iallreduce", _sizes(flat), (flat.dtype, flat.size), flat, flat)
        return self._collect(posting, Allreduce)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> VirtualHandle:
        parts = self._group.counts(counts)
        contribution, target = _flat(send, sum(parts)), _flat(recv, parts[self.rank])
        _check_apart(contribution, target)
        text = f"{_sizes(contribution)} in parts {_short(parts)}"
        posting = self._posting("ireduce_scatter", text, (contribution.dtype, parts), contribution, target)
        posting.send_counts = parts
        return self._collect(posting, ReduceScatter)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> VirtualHandle:
        parts = self._group.counts(counts)
        target = _flat(recv, sum(parts))
        if send is None:
            start = sum(parts[: self.rank])
            contribution = target[start : start + parts[self.rank]]
        else:
            contribution = _flat(send, parts[self.rank])
            _check_apart(contribution, target)
        text = f"{_sizes(target)} in parts {_short(parts)}"
        return self._collect(self._posting("iallgather", text, (target.dtype, parts), contribution, target), Allgather)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> VirtualHandle:
        sent, received = self._group.counts(send_counts), self._group.counts(recv_counts)
        contribution, target = _flat(send, sum(sent)), _flat(recv, sum(received))
        _check_apart(contribution, target)
        text = f"{_DTYPES[contribution.dtype]}, sending {_short(sent)}, receiving {_short(received)}"
        posting = self._posting("ialltoall", text, (contribution.dtype,), contribution, target)
        posting.send_counts, posting.recv_counts = sent, received
        return self._collect(posting, Alltoall)

    def ibroadcast(self, buffer: Array, root: int) -> VirtualHandle:
        self._group.world_rank(root)
        flat = _flat(buffer)
        contribution, target = (flat, None) if self.rank == root else (None, flat)
        text = f"{_sizes(flat)} from rank {self._group.world_rank(root)}"
        posting = self._posting("ibroadcast", text, (flat.dtype, flat.size, root), contribution, target)
        return self._collect(posting, Broadcast, root=root)

    def ibarrier(self) -> VirtualHandle:
        return self._collect(self._posting("ibarrier", "nothing"), Barrier)

    def isend(self, buffer: Array, dest: int, tag: int) -> VirtualHandle:
        flat = _flat(buffer)
        text = f"{_sizes(flat)} to rank {self._group.world_rank(dest)}, tag {tag}"
        return self._exchange_message(self._posting("isend", text, (flat.dtype, flat.size), flat), self.rank, dest, tag)

    def irecv(self, buffer: Array, source: int, tag: int) -> VirtualHandle:
        flat = _flat(buffer)
        text = f"{_sizes(flat)} from rank {self._group.world_rank(source)}, tag {tag}"
        return self._exchange_message(self._posting("irecv", text, (flat.dtype, flat.size), None, flat), source, self.rank, tag)

    def split(self, color: int | None, key: int, name: str) -> ThreadCommunicator | None:
        sequence = self._sequence
        entries = self._exchange_objects("split", (color, key))
        if color is None:
            return None
        members = [rank for _, rank in sorted((key, rank) for rank, (other, key) in enumerate(entries) if other == color)]
        if (sequence, color) not in self._group.parts:
            self._group.parts[sequence, color] = Group(name, [self._group.members[rank] for rank in members])
        part = self._group.parts[sequence, color]
        return ThreadCommunicator(self._scheduler, part, members.index(self.rank), self._ranks_per_node)

    def split_shared_memory(self, name: str) -> ThreadCommunicator:
        part = self.split(self._state.rank // self._ranks_per_node, self.rank, name)
        assert part is not None
        return part

    def allgather_object(self, value: Any) -> list[Any]:
        return self._exchange_objects("allgather_object", value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        self._group.world_rank(root)
        return self._exchange_objects("broadcast_object", value if self.rank == root else None, root)[root]

    def abort(self, code: int) -> NoReturn:
        """End the run, which then raises SystemExit(code). Its cause is the exception being handled, if there is one."""
        failure = SystemExit(code)
        failure.__cause__ = sys.exception()
        self._scheduler.fail(failure, self._state)
        raise RankEnded

    def _posting(
        self,
        kind: str,
        text: str,
        agreed: tuple[object, ...] = (),
        contribution: Array | None = None,
        target: Array | None = None,
    ) -> Posting:
        if target is not None and not target.flags.writeable:
            raise ValueError(f"{kind} writes to its buffer, but this one is read-only.")
        return Posting(kind, self._state, text, source_line(), agreed, contribution, target)

    def _collect(self, posting: Posting, kind: type[PostedOperation], root: int | None = None) -> VirtualHandle:
        """Post to the next collective of this communicator."""
        sequence = self._sequence
        self._sequence += 1

        def make() -> PostedOperation:
            synchronous = root is None or self._scheduler.policy.synchronous()
            return kind(self._group.members, f"{sequence} on {self.name}", root=root, synchronous=synchronous)

        operation = self._group.collective(sequence, make)
        self._scheduler.post(self._state, operation, self.rank, posting)
        return VirtualHandle(self._scheduler, posting)

    def _exchange_message(self, posting: Posting, source: int, dest: int, tag: int) -> VirtualHandle:
        if tag < 0:
            raise ValueError(f"The tag is {tag}, but must not be negative.")

        def make() -> PostedOperation:
            members = self._group.members[source], self._group.members[dest]
            return Message(members, f"on {self.name}", root=0, synchronous=self._scheduler.policy.synchronous())

        party = 0 if posting.kind == "isend" else 1
        operation = self._group.message(source, dest, tag, party, make)
        self._scheduler.post(self._state, operation, party, posting)
        return VirtualHandle(self._scheduler, posting)

    def _exchange_objects(self, kind: str, value: Any, *agreed: object) -> list[Any]:
        """Return the values of all ranks in rank order, as pickled copies. Waits for all ranks."""
        pickled = np.frombuffer(pickle.dumps(value), np.uint8)
        posting = self._posting(kind, "objects", agreed, pickled)
        self._collect(posting, ObjectExchange)
        self._scheduler.wait(self._state, posting)
        assert posting.operation is not None
        return [pickle.loads(part.tobytes()) for part in posting.operation.parts()]


def _flat(buffer: Array, size: int | None = None) -> Array:
    """Return a one-dimensional view of a buffer; raise if it does not have `size` elements."""
    if not isinstance(buffer, np.ndarray) or buffer.dtype not in _DTYPES or not buffer.flags.c_contiguous:
        what = f"{buffer.dtype}, strides {buffer.strides}" if isinstance(buffer, np.ndarray) else type(buffer).__name__
        raise ValueError(f"A buffer must be a C-contiguous array of {', '.join(_DTYPES.values())}, but this one is {what}.")
    if size is not None and buffer.size != size:
        raise ValueError(f"The buffer must have {size} elements, the sum of its counts, but has {buffer.size}.")
    return buffer.reshape(-1)


def _check_apart(contribution: Array, target: Array) -> None:
    if contribution.dtype != target.dtype:
        raise ValueError(f"Both buffers must have one dtype, but these are {contribution.dtype} and {target.dtype}.")
    if contribution.size and target.size and np.may_share_memory(contribution, target):
        raise ValueError("The send buffer must not overlap the receive buffer.")


def _sizes(flat: Array) -> str:
    return f"{flat.size} {_DTYPES[flat.dtype]}"


def _short(counts: Sequence[int]) -> str:
    most = 8
    return f"({', '.join(map(str, counts[:most]))}{', ...' if len(counts) > most else ''})"
