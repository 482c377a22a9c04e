"""Policies: which rank runs next, and when an operation's data moves: at once, at the worst moment, or by a modelled clock.

A policy decides only what MPI leaves open. Matching (collectives by posting order, messages of one source and tag in their
order) is done before it is asked.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Protocol

from hpctrain.comm.link import LinkModel
from hpctrain.virtual.collectives import Message
from hpctrain_testing.virtual.operations import Moments, PostedOperation, Posting, RankState
from hpctrain.virtual.rank import Status


class Policy(Protocol):
    """Every method is called by the one rank that runs."""

    def moments(self) -> Moments:
        """When the buffers of the next posting are touched."""
        ...

    def synchronous(self) -> bool:
        """Whether the root of the next message or broadcast waits for the others."""
        ...

    def posted(self, operation: PostedOperation, party: int) -> Sequence[Posting]:
        """A party has posted. Returns what completed by that."""
        ...

    def preempts(self) -> bool:
        """Whether another rank may run after a posting."""
        ...

    def arrived(self, posting: Posting) -> bool:
        """Whether the owner's test finds it complete."""
        ...

    def stir(self) -> Sequence[Posting]:
        """Before a hand-over: let something happen, or not. Returns what completed."""
        ...

    def choose(self, ready: Sequence[RankState], ranks: Sequence[RankState]) -> RankState | None:
        """The next rank to run; None where nothing can before something happens."""
        ...

    def settle(self) -> Sequence[Posting] | None:
        """No rank can run: something pending happens now. Returns what completed; None where nothing is pending."""
        ...


class Prompt:
    """Everything completes as soon as all have posted, and ranks take turns. A send completes with its receive only."""

    def moments(self) -> Moments:
        return Moments()

    def synchronous(self) -> bool:
        return True

    def posted(self, operation: PostedOperation, party: int) -> Sequence[Posting]:
        return [operation.deliver(p) for p in range(len(operation.members))] if operation.may_move() else []

    def preempts(self) -> bool:
        return False

    def arrived(self, posting: Posting) -> bool:
        return posting.complete

    def stir(self) -> Sequence[Posting]:
        return ()

    def choose(self, ready: Sequence[RankState], ranks: Sequence[RankState]) -> RankState | None:
        return ready[0] if ready else None

    def settle(self) -> Sequence[Posting] | None:
        return None


class Adversary:
    """Delays and reorders whatever MPI may, by a seeded generator: the same seed, the same run.

    Data moves at any time between the last posting that it needs and completion, operations complete in any order, a
    message may or may not wait for its receive, some operations complete only when nothing else can happen, ranks are
    interrupted at postings and some are slow. How much of each is drawn once per seed, so that seeds differ in kind.
    """

    def __init__(self, seed: int, size: int) -> None:
        self._random = random.Random(seed)
        draw = self._random.choice
        self._stir = draw((0.05, 0.3, 0.9))
        self._preempt = draw((0.0, 0.1, 0.5))
        self._eager = draw((0.0, 0.5, 1.0))
        self._late = draw((0.0, 0.1, 0.5))
        self._oldest_last = draw((False, True))
        self._speeds = [draw((1.0, 0.3, 0.05)) for _ in range(size)]
        self._pending: list[tuple[PostedOperation, int | None]] = []  # a party's completion, or (None) the moving of the data
        self._starved: list[tuple[PostedOperation, int | None]] = []  # the same, when nothing else is left

    def moments(self) -> Moments:
        draw = self._random.random
        return Moments(read_early=draw() < 0.4, write_early=draw() < 0.4, scramble=draw() < 0.8)

    def synchronous(self) -> bool:
        return self._random.random() >= self._eager

    def posted(self, operation: PostedOperation, party: int) -> Sequence[Posting]:
        if operation.moved:
            self._add(operation, party)
        elif operation.may_move() and not operation.announced:
            operation.announced = True
            self._add(operation, None)
        return ()

    def preempts(self) -> bool:
        return self._random.random() < self._preempt

    def arrived(self, posting: Posting) -> bool:
        return posting.complete

    def stir(self) -> Sequence[Posting]:
        completed: list[Posting] = []
        while self._pending and self._random.random() < self._stir:
            completed += self._happen(self._pending)
        return completed

    def choose(self, ready: Sequence[RankState], ranks: Sequence[RankState]) -> RankState | None:
        if not ready:
            return None
        for _ in range(3):  # a slow rank is mostly passed over, but never without end
            rank = ready[int(self._random.random() * len(ready))]  # five times as fast as `randrange`
            if self._random.random() < self._speeds[rank.rank]:
                break
        return rank

    def settle(self) -> Sequence[Posting] | None:
        if self._pending or not self._starved:
            return self._happen(self._pending) if self._pending else None
        if self._oldest_last:
            return self._let(*self._starved.pop())
        return self._happen(self._starved)

    def _add(self, operation: PostedOperation, party: int | None) -> None:
        (self._starved if self._random.random() < self._late else self._pending).append((operation, party))

    def _happen(self, events: list[tuple[PostedOperation, int | None]]) -> list[Posting]:
        index = self._random.randrange(len(events))
        events[index], events[-1] = events[-1], events[index]
        return self._let(*events.pop())

    def _let(self, operation: PostedOperation, party: int | None) -> list[Posting]:
        if party is not None:
            return [operation.deliver(party)]
        operation.move()
        for other, posting in enumerate(operation.postings):
            if posting is not None:
                self._add(operation, other)
        return []


class Clocked:
    """Every rank has a clock, every operation its modelled time, every rank one link, full duplex, that serves in order.

    A transfer starts when all its ranks have posted it and their links are free, and holds these links for its modelled
    time, multiplied by the largest factor of its ranks. The rank with the least clock runs, so what happens follows
    from the model alone; `seed` only says when buffers are touched (None: at match).

    Args:
        stragglers: rank -> factor by which its link is slower.
    """

    def __init__(self, link: LinkModel, size: int, stragglers: Mapping[int, float], seed: int | None) -> None:
        self._link = link
        self._factors = [stragglers.get(rank, 1.0) for rank in range(size)]
        self._sending_until = [0.0] * size
        self._receiving_until = [0.0] * size
        self._random = None if seed is None else random.Random(seed)

    def moments(self) -> Moments:
        if self._random is None:
            return Moments()
        draw = self._random.random
        return Moments(read_early=draw() < 0.4, write_early=draw() < 0.4, scramble=draw() < 0.8)

    def synchronous(self) -> bool:
        return True

    def posted(self, operation: PostedOperation, party: int) -> Sequence[Posting]:
        if operation.missing:
            return ()
        end_seconds = self._transfer(operation)
        for posting in operation.postings:
            assert posting is not None
            posting.end_seconds = end_seconds
            heappush(posting.owner.wake_seconds, end_seconds)
        if self._random is None:
            operation.move()
        return ()

    def preempts(self) -> bool:
        return False

    def arrived(self, posting: Posting) -> bool:
        due = posting.end_seconds is not None and posting.end_seconds <= posting.owner.clock_seconds
        if due and not posting.complete:
            assert posting.operation is not None
            posting.operation.deliver(posting.operation.postings.index(posting))
        return posting.complete

    def stir(self) -> Sequence[Posting]:
        return ()

    def choose(self, ready: Sequence[RankState], ranks: Sequence[RankState]) -> RankState | None:
        candidates = [(state.clock_seconds, state.rank) for state in ready]
        for state in ranks:
            if state.status in (Status.PARKED, Status.BLOCKED) and state.wake_seconds:
                candidates.append((max(state.clock_seconds, state.wake_seconds[0]), state.rank))
        if not candidates:
            return None
        now, rank = min(candidates)
        chosen = ranks[rank]
        chosen.clock_seconds = now
        if chosen.status is not Status.READY:
            chosen.moves_on()
            while chosen.wake_seconds and chosen.wake_seconds[0] <= now:
                heappop(chosen.wake_seconds)
        return chosen

    def settle(self) -> Sequence[Posting] | None:
        return None

    def _transfer(self, operation: PostedOperation) -> float:
        """Reserve the links; returns when the transfer ends."""
        start = max(posting.posted_seconds for posting in operation.postings if posting is not None)
        members = [member.rank for member in operation.members]
        seconds = operation.seconds(self._link) * max(self._factors[rank] for rank in members)
        if not seconds:
            return start
        message = isinstance(operation, Message)
        senders, receivers = (members[:1], members[1:]) if message else (members, members)
        start = max([start, *(self._sending_until[r] for r in senders), *(self._receiving_until[r] for r in receivers)])
        for rank in senders:
            self._sending_until[rank] = start + seconds
        for rank in receivers:
            self._receiving_until[rank] = start + seconds
        return start + seconds
