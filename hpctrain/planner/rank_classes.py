"""Ranks whose steps are alike, so that thousands of ranks are a few classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.core.intervals import even
from hpctrain.data.sampler import counts as counts_over
from hpctrain.nn.network import ALL, MODEL
from hpctrain.parallel.local_graph import LocalGraph, local_graphs, whole_graph
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.planner.group_schedules import GroupStrategy
from hpctrain.planner.job import Candidate, Job


@dataclass(frozen=True)
class AlikeRanks:
    """Ranks that do the same work and average the same parameters.

    first: the position of the first of them. ranks: how many. split_rank: r of the first.
    samples: of a rank. micro_batches: by micro-batch of a step, its graph. groups: by parameter group, the key of its averaging.
    """

    first: int
    ranks: int
    split_rank: int
    samples: int
    micro_batches: tuple[LocalGraph, ...]
    groups: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"rank {self.first}" if self.ranks == 1 else f"{self.ranks} ranks like {self.first}"


def group_keys(strategies: Sequence[GroupStrategy]) -> list[str]:
    """The key of each strategy: its group's name, with the first rank of the split group where several have such a group."""
    names = Counter(of_group.group for of_group in strategies)
    return [
        of_group.group if names[of_group.group] == 1 else f"{of_group.group}-row{of_group.split_ranks[0]}"
        for of_group in strategies
    ]


def alike_ranks(job: Job, candidate: Candidate, strategies: Sequence[GroupStrategy]) -> list[AlikeRanks]:
    """All ranks of a candidate in classes, by their first positions; there are a few, whatever the grid."""
    rows = candidate.plan.rows
    groups_of = _groups_of(strategies, rows)
    classes: dict[tuple[object, ...], AlikeRanks] = {}
    for share, column, many in _shares(job.batch, candidate):
        by_micro_batch = list(_graphs(job, candidate, share))
        for row, samples in enumerate(share):
            graphs = tuple(graphs[row] for graphs in by_micro_batch)
            key = samples, graphs, tuple(groups_of[row].items())
            before = classes.get(key)
            first = column * rows + row if before is None else before.first
            split_rank, ranks = (row, many) if before is None else (before.split_rank, before.ranks + many)
            classes[key] = AlikeRanks(first, ranks, split_rank, samples, graphs, groups_of[row])
    return sorted(classes.values(), key=lambda one: one.first)


def _groups_of(strategies: Sequence[GroupStrategy], rows: int) -> list[dict[str, str]]:
    """By split rank: parameter group -> key."""
    groups: list[dict[str, str]] = [{} for _ in range(rows)]
    for key, of_group in zip(group_keys(strategies), strategies, strict=True):
        for row in of_group.split_ranks:
            groups[row][of_group.group] = key
    assert all(names.keys() <= {ALL, MODEL} for names in groups)
    return groups


def _shares(batch: int, candidate: Candidate) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(samples of a split group's ranks, the first such group, how many there are); of two sizes at most."""
    rows, cols = candidate.plan.rows, candidate.plan.cols
    of_groups = counts_over(batch, cols)
    for samples, many in Counter(of_groups).items():
        yield even(samples, rows), of_groups.index(samples), many


def _graphs(job: Job, candidate: Candidate, share: Sequence[int]) -> Iterator[list[LocalGraph]]:
    """By micro-batch: the graphs of a split group's ranks; micro-batches of the same samples have the same."""
    known: dict[tuple[int, ...], list[LocalGraph]] = {}
    sizes = [even(count, candidate.micro_batches) for count in share]
    for number in range(candidate.micro_batches):
        counts = tuple(size[number] for size in sizes)
        if counts not in known:
            known[counts] = _graphs_of(job, candidate, counts)
        yield known[counts]


def _graphs_of(job: Job, candidate: Candidate, counts: tuple[int, ...]) -> list[LocalGraph]:
    graph = job.graph_of(sum(counts))
    if candidate.plan.rows == 1:
        return [whole_graph(graph)]
    return local_graphs(partition_graph(graph, candidate.plan, counts), range(len(counts)))
