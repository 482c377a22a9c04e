"""Errors that every rank raises alike, so that none is left waiting for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hpctrain.comm.base import Communicator
from hpctrain.core.errors import CommunicationTimeoutError, HpctrainError, RankLostError

T = TypeVar("T")


def raise_on_all_ranks(comm: Communicator, work: Callable[[], T]) -> T:
    """The result of `work` on this rank, once every rank's is done. Collective.

    `work` communicates nothing on `comm`. An exception that is not ours propagates at once: it is a bug and ends the job.

    Raises:
        HpctrainError: where any rank's `work` raised one, every rank raises the lowest such rank's; the message names the
            ranks unless it is all of them, and so do the error's `ranks` where it has none of its own. The first rank says it.
    """
    failure: HpctrainError | None = None
    try:
        result = work()
    except (CommunicationTimeoutError, RankLostError):  # no other rank would answer
        raise
    except HpctrainError as error:
        failure = error
    outcomes = comm.allgather_object(None if failure is None else (type(failure), str(failure), failure.ranks))
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome is not None]
    if not failed:
        return result
    if failure is not None and len(failed) == comm.size and comm.rank == 0:
        raise failure.of_all_ranks(comm.world_ranks[0])
    kind, message, ranks = outcomes[failed[0]]
    if len(failed) < comm.size:
        ranks = ranks or [comm.world_ranks[rank] for rank in failed]
    raise kind(message + on_ranks(failed, comm.size), ranks=ranks).of_all_ranks(comm.world_ranks[0]) from failure


def on_ranks(failed: Sequence[int], size: int) -> str:
    """The end of a sentence that names the ranks, ' (on ranks 1 and 2 of 4)'; empty where it is all of them."""
    if len(failed) == size:
        return ""
    if len(failed) == 1:
        return f" (on rank {failed[0]} of {size})"
    if len(failed) > 8:
        return f" (on {len(failed)} of {size} ranks, the first is {failed[0]})"
    return f" (on ranks {', '.join(map(str, failed[:-1]))} and {failed[-1]} of {size})"
