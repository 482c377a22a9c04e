"""Says in words why virtual ranks do not go on: who waits where, for what, and for whom."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hpctrain.core.errors import DeadlockError
from hpctrain_testing.virtual.operations import Posting, RankState
from hpctrain.virtual.rank import SourceLine, Status, source_line

_MOST_POSTINGS = 4


def deadlock_of(ranks: Sequence[RankState]) -> DeadlockError:
    """The error of a run in which no rank can go on."""
    return DeadlockError(f"Deadlock of {len(ranks)} virtual ranks, none of which can go on:\n{describe_ranks(ranks)}")


def describe_ranks(ranks: Sequence[RankState]) -> str:
    """One line per rank, then a cycle of the wait-for graph if there is one."""
    edges = {state.rank: waits_for(state) for state in ranks}
    lines = [f"  rank {state.rank} {_describe(state)}" for state in ranks]
    cycle = find_cycle(edges)
    if cycle:
        lines.append("  cycle: " + " -> ".join(f"rank {rank}" for rank in cycle))
    return "\n".join(lines)


def waits_for(state: RankState) -> list[int]:
    """The ranks that have not posted what this one waits for."""
    if state.status not in (Status.PARKED, Status.BLOCKED):
        return []
    absent = [rank for posting in state.stuck_on if not posting.complete for rank in _absent(posting)]
    return sorted(set(absent))


def find_cycle(edges: Mapping[int, Sequence[int]]) -> list[int]:
    """Nodes of a cycle, the first one again at the end; empty where there is none."""
    finished: set[int] = set()

    def walk(node: int, path: list[int]) -> list[int]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in finished:
            for other in edges.get(node, ()):
                if cycle := walk(other, [*path, node]):
                    return cycle
            finished.add(node)
        return []

    return next((cycle for node in edges if (cycle := walk(node, []))), [])


def _absent(posting: Posting) -> list[int]:
    return [] if posting.operation is None else posting.operation.absent()


def _describe(state: RankState) -> str:
    if state.status is Status.ENDED:
        return "has ended"
    if state.status in (Status.READY, Status.RUNNING):
        return f"is at {_current_line(state)}"
    pending = [posting for posting in state.stuck_on if not posting.complete]
    waits = [f"{posting}; {_who_is_absent(posting)}" for posting in pending[:_MOST_POSTINGS]]
    if len(pending) > _MOST_POSTINGS:
        waits.append(f"and {len(pending) - _MOST_POSTINGS} more")
    return f"waits at {state.line} for " + " | ".join(waits)


def _who_is_absent(posting: Posting) -> str:
    absent = _absent(posting)
    if not absent:
        return "posted by all"
    return f"not posted by rank{'s' * (len(absent) > 1)} {_ranges(absent)}"


def _ranges(ranks: Sequence[int]) -> str:
    """Ascending numbers with runs drawn together: "0, 2-63"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _current_line(state: RankState) -> SourceLine | str:
    frame = None if state.thread is None else sys._current_frames().get(state.thread)
    return "an unknown line" if frame is None else source_line(frame)
