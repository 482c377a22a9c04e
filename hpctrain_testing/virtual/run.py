"""Runs a function on virtual ranks: what most tests of parallel code start with.

`VirtualWorld` has a thread for each rank; it runs one function on all and returns results or raises the first failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hpctrain.comm.base import Handle
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.errors import CommunicationTimeoutError, DeadlockError
from hpctrain_testing.virtual.communicator import Group, ThreadCommunicator
from hpctrain_testing.virtual.operations import RankEnded, RankState
from hpctrain_testing.virtual.scheduler import Adversary, Clocked, Policy, Prompt, Scheduler, describe_ranks

Result = TypeVar("Result")

_STACK_BYTES = 4 << 20  # of a rank's thread; room for compiled kernels
_UNWIND_SECONDS = 2.0  # for ranks to leave after a failure; one that still computes is left alone


class VirtualWorld:
    """Runs one function on a number of virtual ranks, once.

    Args:
        size: ranks. seed: of the adversary; None: promptly and in turn. link: given, time is modelled, and the seed only decides
            when buffers are touched. stragglers: rank -> factor by which its link is slower.
        ranks_per_node: for `split_shared_memory`; None: all on one node.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int | None = None,
        link: LinkModel | None = None,
        stragglers: Mapping[int, float] | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        if size < 1 or (ranks_per_node is not None and ranks_per_node < 1):
            raise ValueError(f"A world has 1 or more ranks in all and on a node, but got {size} and {ranks_per_node}.")
        policy: Policy
        if link is not None:
            policy = Clocked(link, size, stragglers or {}, seed)
        elif stragglers:
            raise ValueError("Stragglers need a link whose time they stretch, but there is no link.")
        else:
            policy = Prompt() if seed is None else Adversary(seed, size)
        self.size = size
        self.seed = seed
        self.ranks_per_node = size if ranks_per_node is None else ranks_per_node
        self.scheduler = Scheduler(size, policy)
        self._group = Group("world", self.scheduler.ranks)

    def run(self, function: Callable[[ThreadCommunicator], Result], deadline_seconds: float) -> list[Result]:
        """Run `function(comm)` on every rank, and return the results in rank order.

        Raises:
            the first failure of a rank, with its rank and the seed as a note; the other ranks are ended.
            DeadlockError: no rank can continue, or all have ended with operations that others never posted.
            CommunicationTimeoutError: not over after `deadline_seconds` of real time.
        """
        results: dict[int, Result] = {}
        threads = self._start(function, results)
        try:
            self.scheduler.begin()
            if not self.scheduler.over.wait(deadline_seconds):
                where = describe_ranks(self.scheduler.ranks)
                self.scheduler.fail(
                    CommunicationTimeoutError(f"{self.size} virtual ranks were not over after {deadline_seconds:g} s:\n{where}")
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
            except BaseException as failure:  # whatever it is, the caller of `run` gets it
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
        """Wait for the threads; after a failure only for a while, as one may still compute."""
        end = time.monotonic() + _UNWIND_SECONDS
        for thread in threads:
            thread.join(None if self.scheduler.failure is None else max(0.0, end - time.monotonic()))

    def _unmatched(self) -> DeadlockError | None:
        """Return a text of operations that MPI would hang in at its end, or lose."""
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
    stragglers: Mapping[int, float] | None = None,
    ranks_per_node: int | None = None,
) -> list[Result]:
    """Run `function(comm)` on each of `ranks` virtual ranks, and return the results in rank order.

    Args:
        seed: of the adversarial scheduler, which delays and reorders whatever MPI may; None: ranks take turns, no delays.
        link: given, `comm.now()` is a modelled time, advanced by `comm.compute(seconds)` and by transfers.
        deadline_seconds: of real time, for the whole run.
        stragglers: rank -> factor by which its link is slower. ranks_per_node: for `split_shared_memory`; None: all on one.

    Raises:
        the first failure of a rank, with the rank and the seed in a note; all others are ended.
        DeadlockError, CollectiveMismatchError, CommunicationTimeoutError: with every rank's call and source line.
        SystemExit: a rank called `abort`.
    """
    world = VirtualWorld(ranks, seed=seed, link=link, stragglers=stragglers, ranks_per_node=ranks_per_node)
    return world.run(function, deadline_seconds)


def virtual_engine(comm: ThreadCommunicator, deadline_seconds: float = 1e9, **options: Any) -> ProgressEngine:
    """Return the progress engine of one virtual rank, which measures virtual time and never sleeps: all other ranks would, too.

    Nor does it offer its core, which on a busy machine takes longer than all else: the scheduler decides which rank runs.

    options: of the engine. Without a link no wait passes its deadline; a wait that cannot end is found as a deadlock.
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


def wait(*handles: Handle) -> None:
    """Poll until all are complete, in order. For code without a progress engine."""
    for handle in handles:
        while not handle.test():
            pass
