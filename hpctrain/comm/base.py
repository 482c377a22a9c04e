"""Transport interface of hpctrain: buffer operations among an ordered group of ranks.

A communicator has no notion of parameters, and posts operations only when it is called. Collectives on one communicator match by
posting order, so every rank posts the same collectives in the same order. Buffers are C-contiguous arrays of float32, float64,
int32, int64, uint8 or uint16. They must not be modified between posting and completion. 16-bit floats travel as their bits and
are never summed by the transport. Methods whose names end in `_object` pickle and are for start-up and shut-down only; they wait
with the same deadline as all other operations.

`SingleCommunicator` implements the protocol for one process, without MPI: every operation is complete when it returns.
`raise_on_all_ranks` raises the error of one rank on every rank, so that no rank waits for another forever. `compare` raises an
error on every rank if facts differ that ranks must share.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from hpctrain.core import user_code
from hpctrain.core.errors import CommunicationTimeoutError, ConfigError, HpctrainError
from hpctrain.core.text import counted
from hpctrain.launch.process_end import flush_to_reader

Array = Any


@runtime_checkable
class Handle(Protocol):
    """A posted operation."""

    def test(self) -> bool:
        """Advance the operation, and return at once whether it is complete."""


@runtime_checkable
class LateHandle(Handle, Protocol):
    """Handle of an operation that has been started but may be posted later.

    Attributes:
        operation: the posted operation with its size, as text; "" before it is posted.
    """

    operation: str


class GradientSums(Protocol):
    """Sums over ranks that may round messages (`SixteenBitSums`) or add in a fixed order (`TreeSums`).

    If a rank has several terms of a sum, sums in a fixed order take a tuple of arrays instead of one array.
    """

    def iallreduce(self, buffer: Array) -> Handle:
        """Sum `buffer` over the ranks, in place. Every rank receives the same bits. Collective."""

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        """Sum `send` over the ranks, and write piece r of the sum to `recv` on rank r. Collective.

        Args:
            send: this rank's terms of all pieces, in rank order.
            recv: buffer of this rank's piece.
            counts: elements of each piece.
        """


@runtime_checkable
class Communicator(Protocol):
    """An ordered group of ranks. Buffers of several pieces hold them in rank order; piece r has `counts[r]` elements.

    Implementations: MPI (`comm/mpi.py`), one process (`SingleCommunicator`), threads (hpctrain_testing). A new operation also
    goes into `ForwardingCommunicator`, the base of the wrappers, and into the wrappers that change it: sums in two levels
    (`comm/groups.py`), devices (`comm/transports.py`), and counters of tests (hpctrain_testing). A new sum of gradients goes into
    `GradientSums` and `comm/sums.py`.
    """

    rank: int
    size: int
    name: str  # in messages: "world", "split", "data", ...
    world_ranks: tuple[int, ...]  # world ranks of its ranks, in order

    def iallreduce(self, buffer: Array) -> Handle:
        """Sum `buffer` over the ranks, in place. Collective."""

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        """Sum `send` over the ranks, and write piece r of the sum to `recv` on rank r. Collective."""

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        """Gather all pieces on every rank, in rank order. Collective.

        Args:
            send: this rank's piece; None: it is already in place.
            recv: buffer of all pieces.
        """

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        """Send piece r of `send` to rank r, and receive piece r of `recv` from rank r. Collective."""

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        """Send `root`'s buffer to all ranks. Collective."""

    def ibarrier(self) -> Handle:
        """Post a barrier, which is complete once every rank has posted it. Collective."""

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        """Send `buffer` to one rank. Messages between two ranks with equal tags arrive in the order of posting."""

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        """Receive a message of `buffer`'s size and dtype from one rank."""

    def split(self, color: int | None, key: int, name: str) -> Communicator | None:
        """Return the communicator of the ranks with the same color, ordered by key; None for color None.

        Collective; at set-up only, because MPI limits the number of communicators.
        """

    def split_shared_memory(self, name: str) -> Communicator:
        """Return the communicator of the ranks on this rank's node, in rank order. Collective; at set-up only."""

    def allgather_object(self, value: Any) -> list[Any]:
        """Return every rank's picklable value, in rank order. Collective; waits."""

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return `root`'s picklable value. Collective; waits."""

    def abort(self, code: int) -> None:
        """End the whole job immediately, with exit code `code`."""


def piece(array: Array, counts: Sequence[int], rank: int) -> Array:
    """Return a rank's piece of a buffer as a 1-D view. Pieces have `counts` elements and lie in rank order."""
    begin = sum(counts[:rank])
    return array.reshape(-1)[begin : begin + counts[rank]]


class ForwardingCommunicator:
    """Base of communicators that forward operations to `inner`, of the same ranks. Subclasses change some operations."""

    def __init__(self, inner: Communicator) -> None:
        self.rank, self.size, self.name, self.world_ranks = inner.rank, inner.size, inner.name, inner.world_ranks
        self.inner = inner

    def wrap(self, part: Communicator) -> Communicator:
        """Return the communicator for `part`, which a split of `inner` created; default: `part`. Collective over the part."""
        return part

    def iallreduce(self, buffer: Array) -> Handle:
        return self.inner.iallreduce(buffer)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        return self.inner.ireduce_scatter(send, recv, counts)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        return self.inner.iallgather(send, recv, counts)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        return self.inner.ialltoall(send, recv, send_counts, recv_counts)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        return self.inner.ibroadcast(buffer, root)

    def ibarrier(self) -> Handle:
        return self.inner.ibarrier()

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        return self.inner.isend(buffer, dest, tag)

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        return self.inner.irecv(buffer, source, tag)

    def split(self, color: int | None, key: int, name: str) -> Communicator | None:
        part = self.inner.split(color, key, name)
        return None if part is None else self.wrap(part)

    def split_shared_memory(self, name: str) -> Communicator:
        return self.wrap(self.inner.split_shared_memory(name))

    def allgather_object(self, value: Any) -> list[Any]:
        return self.inner.allgather_object(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self.inner.broadcast_object(value, root)

    def abort(self, code: int) -> None:
        self.inner.abort(code)


class Complete:
    """Handle of an operation that is complete when it is posted."""

    def test(self) -> bool:
        return True

    def __str__(self) -> str:
        return "of one process"


class _Receive:
    """Handle of a receive from this rank itself, complete once the matching send has filled its buffer."""

    def __init__(self, buffer: Array, tag: int) -> None:
        self.buffer = buffer
        self.tag = tag
        self.filled = False

    def test(self) -> bool:
        return self.filled

    def __str__(self) -> str:
        return f"receive from 0, tag {self.tag}, of {self.buffer.size} elements"

    def fill(self, message: Array) -> None:
        assert (message.size, message.dtype) == (self.buffer.size, self.buffer.dtype), "message and receiver differ"
        _copy_flat(message, self.buffer)
        self.filled = True


_COMPLETE = Complete()


class SingleCommunicator:
    """Communicator of one process, which is rank 0.

    Sums return their input; gathers copy; messages to itself match by tag, in posting order.
    """

    rank = 0
    size = 1
    world_ranks: tuple[int, ...] = (0,)

    def __init__(self, name: str = "world") -> None:
        self.name = name
        self._sent: defaultdict[int, deque[Array]] = defaultdict(deque)
        self._expected: defaultdict[int, deque[_Receive]] = defaultdict(deque)

    def iallreduce(self, buffer: Array) -> Handle:
        _check_buffer(buffer)
        return _COMPLETE

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        return self._move(send, recv, counts)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        return self._move(recv if send is None else send, recv, counts)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        assert list(send_counts) == list(recv_counts)
        return self._move(send, recv, send_counts)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        assert root == 0
        _check_buffer(buffer)
        return _COMPLETE

    def ibarrier(self) -> Handle:
        return _COMPLETE

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        assert dest == 0
        _check_buffer(buffer)
        if self._expected[tag]:
            self._expected[tag].popleft().fill(buffer)
        else:
            self._sent[tag].append(buffer.copy())
        return _COMPLETE

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        assert source == 0
        _check_buffer(buffer)
        receive = _Receive(buffer, tag)
        if self._sent[tag]:
            receive.fill(self._sent[tag].popleft())
        else:
            self._expected[tag].append(receive)
        return receive

    def split(self, color: int | None, key: int, name: str) -> SingleCommunicator | None:
        return None if color is None else SingleCommunicator(name)

    def split_shared_memory(self, name: str) -> SingleCommunicator:
        return SingleCommunicator(name)

    def allgather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        assert root == 0
        return value

    def abort(self, code: int) -> None:
        """End this process immediately, without returning."""
        flush_to_reader(0.0)
        os._exit(code)

    def _move(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        _check_buffer(send)
        _check_buffer(recv)
        assert list(counts) == [send.size] == [recv.size]
        assert send.dtype == recv.dtype
        if send is not recv:
            _copy_flat(send, recv)
        return _COMPLETE


def _check_buffer(array: Array) -> None:
    flags = getattr(array, "flags", None)  # device arrays have no flags and are C-contiguous
    assert flags is None or flags.c_contiguous, "a buffer must be C-contiguous"


def _copy_flat(source: Array, target: Array) -> None:
    target.reshape(-1)[...] = source.reshape(-1)


T = TypeVar("T")


def raise_on_all_ranks(comm: Communicator, work: Callable[[], T]) -> T:
    """Return the result of `work` on this rank, once all ranks are done. Collective.

    `work` must not communicate on `comm`. An exception that is neither an HpctrainError nor one of user code is a bug; it
    propagates at once and ends the job. CommunicationTimeoutError also propagates at once, because the other ranks would not
    answer.

    Raises:
        HpctrainError: `work` raised an HpctrainError, or user code failed, on any rank. Every rank raises the error of the lowest
            such rank, marked so that only the first rank of `comm` prints it. Unless all ranks failed, the message names the
            failing ones, and `ranks` is set to them if it is empty.
    """
    failure: HpctrainError | None = None
    try:
        result = work()
    except CommunicationTimeoutError:  # the other ranks would not answer
        raise
    except HpctrainError as error:
        failure = error
    except Exception as error:
        failure = user_code.fault(error)
        if failure is None:
            raise
    outcomes = comm.allgather_object(None if failure is None else (type(failure), str(failure), failure.ranks))
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome is not None]
    if not failed:
        return result
    if failure is not None and len(failed) == comm.size and comm.rank == 0:
        raise failure.of_all_ranks(comm.world_ranks[0])
    kind, message, ranks = outcomes[failed[0]]
    if len(failed) < comm.size:
        ranks = ranks or [comm.world_ranks[rank] for rank in failed]
    first, *others = message.split("\n", 1)  # further faults, or frames of user code
    message = "\n".join([first + on_ranks(failed, comm.size), *others])
    raise kind(message, ranks=ranks).of_all_ranks(comm.world_ranks[0]) from failure


def on_ranks(failed: Sequence[int], size: int) -> str:
    """Return a suffix such as " (on ranks 1 and 2 of 4)", with only the number and the first of more than 8; "" if all failed."""
    if len(failed) == size:
        return ""
    if len(failed) == 1:
        return f" (on rank {failed[0]} of {size})"
    if len(failed) > 8:
        return f" (on {len(failed)} of {size} ranks, the first is {failed[0]})"
    return f" (on ranks {', '.join(map(str, failed[:-1]))} and {failed[-1]} of {size})"


def _difference_words(key: str, here: object, there: object) -> str:
    here, there = ("none" if value is None else value for value in (here, there))
    return f"{key} is {here}, not {there}"


@dataclass(frozen=True)
class Subject:
    """Facts that must be the same on all ranks.

    Attributes:
        name: name in an error message, after "has".
        remedy: instruction for removing a difference, at the end of the message.
        facts: facts of this rank, JSON-compatible; None: another rank of its node provides them.
        words: function that describes a difference, from the name of a fact, its value here, and its value on the reference
            ranks.
        partial: True: a fact that a rank lacks is unknown there and is compared among the other ranks only; facts are compared in
            their given order. False: a missing fact counts as None; facts are compared in the order of their names.
        error: type of the error.
    """

    name: str
    remedy: str
    facts: Mapping[Any, Any] | None
    words: Callable[[str, Any, Any], str] = _difference_words
    partial: bool = False
    error: type[HpctrainError] = ConfigError

    def first_difference(self, facts: Mapping[Any, Any], reference: Mapping[Any, Any]) -> Any:
        """Return the name of the first fact that differs; None if none does."""
        keys = [key for key in reference if key in facts] if self.partial else sorted({**reference, **facts})
        return next((key for key in keys if facts.get(key) != reference.get(key)), None)


def compare(world: Communicator, *subjects: Subject) -> None:
    """Compare subjects between ranks. Collective; every rank raises the same error.

    If all ranks agree, each sends a few dozen bytes per subject, in one message. Facts are sent only if they differ.

    Raises:
        HpctrainError: facts differ; the type is that of the subject. The message names the first rank outside the largest group
            of equal ranks (of equally large groups, the one with the lowest rank), the number of such ranks, and the first
            differing fact.
    """
    if world.size == 1:
        return
    digests = world.allgather_object([None if subject.facts is None else _digest(subject.facts) for subject in subjects])
    for number, subject in enumerate(subjects):
        if len({rank_digests[number] for rank_digests in digests} - {None}) > 1:
            _raise_difference(world, subject)


def _digest(facts: Mapping[Any, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _raise_difference(world: Communicator, subject: Subject) -> None:
    """Raise an error for the first difference between ranks. Collective.

    Return without an error if `subject` is partial and ranks differ only in facts that some of them lack.
    """
    gathered = world.allgather_object((platform.node(), subject.remedy, subject.facts))
    compared = [rank for rank, (_, _, facts) in enumerate(gathered) if facts is not None]
    groups: list[tuple[dict[Any, Any], list[int]]] = []
    for rank in compared:
        facts = gathered[rank][2]
        known, members = next((group for group in groups if subject.first_difference(facts, group[0]) is None), ({}, []))
        if not members:
            groups.append((known, members))
        members.append(rank)
        known.update({**facts, **known})
    if len(groups) == 1:
        return
    # Among equally large groups, `max` returns the first, which has the lowest rank.
    known, reference_ranks = max(groups, key=lambda group: len(group[1]))
    others = [rank for rank in compared if rank not in reference_ranks]
    host, remedy, facts = gathered[others[0]]
    key = subject.first_difference(facts, known)
    where = f" on {host}" if len({name for name, _, _ in gathered}) > 1 else ""
    words, reference = subject.words(key, facts.get(key), known.get(key)), str(reference_ranks[0])
    if reference_ranks[0] and len(reference_ranks) > 1:  # rank 0 is named alone
        reference += f" and {counted(len(reference_ranks) - 1, 'other')}"
    if len(others) == 1:
        sentence = f"Rank {others[0]}{where} has {subject.name} than rank {reference}: {words}; {remedy}."
    else:
        who = f"Rank {others[0]}{where} and {len(others) - 1} more of {world.size} ranks"
        sentence = f"{who} have {subject.name} than rank {reference}: {words}; {remedy}."
    raise subject.error(sentence, ranks=[world.world_ranks[rank] for rank in others]).of_all_ranks(world.world_ranks[0])
