"""Run a function on virtual ranks, as most tests of parallel code do.

`VirtualWorld` has a thread for each rank; it runs one function on all ranks and returns the results, or raises the first failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hpctrain.comm.base import Handle, SingleCommunicator
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.errors import CommunicationTimeoutError, DeadlockError
from hpctrain_testing.virtual.communicator import Group, ThreadCommunicator
from hpctrain_testing.virtual.operations import RankEnded, RankState
from hpctrain_testing.virtual.scheduler import Adversary, Clocked, Prompt, Scheduler, describe_ranks

Result = TypeVar("Result")

_STACK_BYTES = 4 << 20  # stack size of a rank's thread, enough for compiled kernels
_UNWIND_SECONDS = 2.0  # maximum time for ranks to leave after a failure; a rank that still computes is abandoned


class VirtualWorld:
    """World of virtual ranks that runs one function once."""

    def __init__(
        self,
        size: int,
        *,
        seed: int | None = None,
        link: LinkModel | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        if size < 1 or (ranks_per_node is not None and ranks_per_node < 1):
            raise ValueError(f"A world must have at least 1 rank in all and per node, but got {size} and {ranks_per_node}.")
        without_time = Prompt() if seed is None else Adversary(seed, size)
        self.size = size
        self.seed = seed
        self.ranks_per_node = size if ranks_per_node is None else ranks_per_node
        self.scheduler = Scheduler(size, without_time if link is None else Clocked(link, size, seed))
        self._group = Group("world", self.scheduler.ranks)

    def run(self, function: Callable[[ThreadCommunicator], Result], deadline_seconds: float) -> list[Result]:
        """Run `function(comm)` on every rank, and return the results in rank order.

        The first failure of a rank is raised, with its rank and the seed as a note; the other ranks are ended.

        Raises:
            DeadlockError: no rank can continue, or all have ended with operations that others never posted.
            CommunicationTimeoutError: the run exceeds `deadline_seconds` of real time.
        """
        results: dict[int, Result] = {}
        threads = self._start(function, results)
        try:
            self.scheduler.begin()
            if not self.scheduler.over.wait(deadline_seconds):
                where = describe_ranks(self.scheduler.ranks)
                self.scheduler.fail(
                    CommunicationTimeoutError(f"{self.size} virtual ranks had not ended after {deadline_seconds:g} s:\n{where}")
                )
        except BaseException as interruption:
            self.scheduler.fail(interruption)
            raise
        self._join(threads)
        failure = self.scheduler.failure or self._unmatched()
        if failure is not None:
            failure.add_note(f"{self.size} virtual ranks, seed {self.seed}")
            raise failure
        return [results[rank] for rank in range(self.size)]

    def _start(self, function: Callable[[ThreadCommunicator], Result], results: dict[int, Result]) -> list[threading.Thread]:
        def live(state: RankState) -> None:
            try:
                self.scheduler.enter(state)
                comm = ThreadCommunicator(self.scheduler, self._group, state.rank, self.ranks_per_node)
                results[state.rank] = function(comm)
                self.scheduler.leave(state)
            except RankEnded:
                pass
            except BaseException as failure:  # re-raised by `run`
                self.scheduler.fail(failure, state)

        before = threading.stack_size(_STACK_BYTES)
        try:
            threads = [
                threading.Thread(target=live, args=(state,), name=f"virtual rank {state.rank}", daemon=True)
                for state in self.scheduler.ranks
            ]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        return threads

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the threads; after a failure only for a limited time, as a rank may still compute."""
        end = time.monotonic() + _UNWIND_SECONDS
        for thread in threads:
            thread.join(None if self.scheduler.failure is None else max(0.0, end - time.monotonic()))

    def _unmatched(self) -> DeadlockError | None:
        """Return an error that lists the operations which would hang or be lost at the end of MPI; None if there are none."""
        unmatched = self._group.unmatched()
        if not unmatched:
            return None
        listed = "\n".join(f"  rank {posting.owner.rank}: {posting}" for posting in unmatched)
        return DeadlockError(f"All {self.size} virtual ranks have ended, but these operations were never matched:\n{listed}")


def run_virtual(
    ranks: int,
    function: Callable[[ThreadCommunicator], Result],
    *,
    seed: int | None = None,
    link: LinkModel | None = None,
    deadline_seconds: float = 30,
    ranks_per_node: int | None = None,
) -> list[Result]:
    """Run `function(comm)` on each of `ranks` virtual ranks, and return the results in rank order.

    The first failure of a rank is raised, with its rank and the seed in a note; all other ranks are ended.

    Args:
        seed: seed of the adversarial scheduler, which delays and reorders everything that MPI may; None: ranks take turns without
            delays.
        link: model of the links; if it is set, `comm.now()` is a modelled time, advanced by `comm.compute(seconds)` and by
            transfers.
        deadline_seconds: limit on the real time of the whole run.
        ranks_per_node: number of ranks per node for `split_shared_memory`; None: all ranks are on one node.

    Raises:
        DeadlockError, CollectiveMismatchError, CommunicationTimeoutError: the message has the call and source line of every rank.
        SystemExit: a rank called `abort`.
    """
    world = VirtualWorld(ranks, seed=seed, link=link, ranks_per_node=ranks_per_node)
    return world.run(function, deadline_seconds)


def virtual_engine(comm: ThreadCommunicator, deadline_seconds: float = 1e9, **options: Any) -> ProgressEngine:
    """Return the progress engine of a virtual rank. It measures virtual time and never sleeps, as all ranks share one core.

    It does not yield its core either: the scheduler decides which rank runs, and yielding would be slow on a busy machine.

    Args:
        options: options of the engine.
        deadline_seconds: deadline of waits, in virtual time. Without a link no wait reaches it; endless waits are detected as
            deadlocks.
    """
    return ProgressEngine(
        rank=comm.rank,
        deadline_seconds=deadline_seconds,
        abort=comm.abort,
        clock=comm.now,
        sleep=lambda seconds: None,
        offer_core=lambda: None,
        **options,
    )


def lone_rank() -> tuple[SingleCommunicator, ProgressEngine]:
    """Return the communicator of a process without others, and its progress engine."""
    comm = SingleCommunicator()
    return comm, ProgressEngine(rank=0, deadline_seconds=60, abort=comm.abort)


def wait(*handles: Handle) -> None:
    """Poll until all handles are complete, in order. Serves code without a progress engine."""
    for handle in handles:
        while not handle.test():
            pass
