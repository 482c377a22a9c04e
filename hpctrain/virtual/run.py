"""Runs a function on virtual ranks: what most tests of parallel code start with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hpctrain.comm.base import Handle
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import VirtualWorld

Result = TypeVar("Result")


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
    """`function(comm)` on each of `ranks` virtual ranks; the results in rank order.

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
    """The progress engine of one virtual rank: it measures virtual time, and never sleeps, as all other ranks would, too.

    Nor does it offer its core, which on a busy machine takes longer than all else: the scheduler says which rank runs.

    options: of the engine. Without a link no wait passes its deadline; a wait that cannot end is found as a deadlock.
    """
    return ProgressEngine(
        rank=comm.rank,
        deadline_seconds=deadline_seconds,
        abort=comm.abort,
        clock=comm.now,
        sleep=_no_sleep,
        offer_core=_keep_core,
        **options,
    )


def _no_sleep(seconds: float) -> None:
    return None


def _keep_core() -> None:
    return None


def wait(*handles: Handle) -> None:
    """Poll until all are complete, in order. For code without a progress engine."""
    for handle in handles:
        while not handle.test():
            pass
