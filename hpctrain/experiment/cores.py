"""The cores that each rank of a job may run on, in one line: whether the launcher has bound them as the user meant."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby

from hpctrain.comm.base import Communicator

Cpus = frozenset[int]

_MOST_RANKS = 8  # of a node, written out one by one
_MOST_PATTERNS = 4  # nodes that differ, written out


def cores_of_ranks(world: Communicator, node_of: Sequence[int]) -> str:
    """The line for all ranks. Collective over `world`.

    Args:
        node_of: for each world rank, the number of its node.
    """
    return describe_cores(world.allgather_object(frozenset(os.sched_getaffinity(0))), node_of)


def describe_cores(cpus: Sequence[Cpus], node_of: Sequence[int]) -> str:
    """One line from each rank's logical CPUs; nodes whose ranks have the same ones are told once."""
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        ranks_of.setdefault(node, []).append(rank)
    patterns: dict[tuple[Cpus, ...], list[int]] = {}  # ranks of all nodes of a kind
    for ranks in ranks_of.values():
        patterns.setdefault(tuple(cpus[rank] for rank in ranks), []).extend(ranks)
    if len(patterns) == 1:
        alike = f" on each of {len(ranks_of)} nodes" if len(ranks_of) > 1 else ""
        return f"cores of the ranks: {_of_a_node(next(iter(patterns)))}{alike}"
    texts = [f"{_of_a_node(pattern)} ({_ranks(ranks)})" for pattern, ranks in patterns.items()]
    left_out = [f"and {len(texts) - _MOST_PATTERNS} more kinds of node"] if len(texts) > _MOST_PATTERNS else []
    return "cores of the ranks: " + "; ".join(texts[:_MOST_PATTERNS] + left_out)


def _of_a_node(cpus: Sequence[Cpus]) -> str:
    if len(cpus) > 1 and len(set(cpus)) == 1:
        return f"{ranges(cpus[0])}, shared by {len(cpus)} ranks"
    texts = [ranges(mask) for mask in cpus]
    if len(texts) > _MOST_RANKS:
        texts = [*texts[: _MOST_RANKS - 1], "...", texts[-1]]
    return " | ".join(texts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people write them: {0, 1, 2, 5} -> "0-2,5"."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(runs)
