"""Passes over a rank's samples of a step: micro-batches, shards of exact trainings, and the memory of one pass.

A training with `exact` produces the same bits on any number of ranks: the samples of a step are distributed over shards, and the
sums over shards have a fixed order. `check_exact` rejects configurations in which this is impossible. `check_memory` rejects
passes that the device's memory cannot hold. `StatisticsSharing` finds batch norms with statistics over a single value.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hpctrain.averaging.group_sums import ShardGradients
from hpctrain.backend.graph import Graph, Node
from hpctrain.backend.specs import BatchNormSpec
from hpctrain.comm.base import Communicator
from hpctrain.core.errors import BackendError, ConfigError
from hpctrain.core.intervals import ShardsOfRank, even
from hpctrain.core.text import counted, size_text
from hpctrain.data.loader import Share
from hpctrain.data.sampler import counts
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import FlatGroup
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one pass, on each rank of the split group.

    Attributes:
        counts: number of samples of each rank.
        shared: indices of the pass's samples among all samples of the split group in the step.
        own: indices of this rank's samples of the pass among all its samples of the step.
    """

    counts: tuple[int, ...]
    shared: slice | np.ndarray
    own: slice


@lru_cache(maxsize=16)  # all steps but the last of an epoch are alike
def micro_batches_of(share: Share, micro_batches: int) -> tuple[MicroBatch, ...]:
    """Return a rank's share of a step in micro-batches; all ranks of the split group divide their samples alike."""
    parts: list[MicroBatch] = []
    sizes = [even(count, micro_batches) for count in share.counts]
    starts = [0] * len(share.counts)
    offsets = [sum(share.counts[:rank]) for rank in range(len(share.counts))]
    for number in range(micro_batches):
        counts = tuple(size[number] for size in sizes)
        runs = [range(offset + start, offset + start + n) for offset, start, n in zip(offsets, starts, counts, strict=True)]
        shared: slice | np.ndarray = slice(runs[0].start, runs[-1].stop)
        if micro_batches > 1 and len(runs) > 1:
            shared = np.concatenate([np.arange(run.start, run.stop) for run in runs])
        own = starts[share.split_rank]
        parts.append(MicroBatch(counts, shared, slice(own, own + counts[share.split_rank])))
        starts = [start + n for start, n in zip(starts, counts, strict=True)]
    return tuple(parts)


def ranks_fault(shards: int, ranks: int) -> str | None:
    """Return the error message for a number of ranks that does not divide the number of shards; None if it does."""
    if shards % ranks == 0:
        return None
    return (
        f"exact.shards is {shards}, which {ranks} ranks cannot share evenly; start a number of ranks that divides it, or set "
        f"exact.shards to {ranks * -(-shards // ranks)}, which changes the bits."
    )


def split_fault(rows: int) -> str | None:
    """Return the error message for ranks that share samples; None if they do not."""
    if rows == 1:
        return None
    return (
        f"grid.rows is {rows}, but exact does not support ranks that share samples, because sums over the parts of a layer "
        "depend on the number of parts; set grid.rows to 1."
    )


def check_exact(shards: int, network: Network, groups: GridGroups) -> None:
    """Raise unless the training produces the same bits on any number of ranks.

    Raises:
        ConfigError: the number of shards or ranks, the grid, a batch norm or the backend prevents this.
    """
    sentences = (
        None if shards >= 1 else f"exact.shards is {shards}, but must be at least 1; the usual value is 8.",
        split_fault(groups.split_size),
        statistics_fault(synchronised(network)),
        backend_fault(network.kernels.name) if not network.kernels.arithmetic.on_host else None,
    )
    for sentence in sentences:
        if sentence is not None:
            raise ConfigError(sentence)
    fault = ranks_fault(shards, groups.all_ranks.size)
    if fault is not None:
        raise ConfigError(fault)


def check_counts(by_rank: Sequence[int], shards: int) -> None:
    """Raise unless the samples of a step are distributed over the ranks as loaders with the keyword `shards` distribute them.

    Args:
        by_rank: number of samples of each rank.
        shards: number of shards of all ranks.

    Raises:
        ConfigError: the distribution differs; the same error on every rank.
    """
    expected = counts(sum(by_rank), len(by_rank), shards=shards)
    if tuple(by_rank) != expected:
        raise ConfigError(
            f"The ranks have {_listed(by_rank)} samples of a step, but {shards} shards of {sum(by_rank)} samples require "
            f"{_listed(expected)}; create the loader with the keywords of replica.place."
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def statistics_fault(names: Iterable[str]) -> str | None:
    """Return the error message for batch norms with statistics over several ranks; None if there are none.

    Args:
        names: names of these batch norms.
    """
    first = next(iter(names), None)
    if first is None:
        return None
    return (
        f"{first} computes batch statistics over all ranks (synchronised), which needs all shards at once, but with exact a rank "
        "computes its shards one after another; set batch_norm.statistics to local, which computes them per shard."
    )


def backend_fault(name: str) -> str:
    """Return the error message for a backend whose arrays are not in host memory."""
    return (
        f"exact sums gradients on the host, but the arrays of backend {name} are in device memory; set backend to onednn or "
        "numpy."
    )


def synchronised(network: Network) -> tuple[str, ...]:
    """Return the names of the batch norms that compute statistics over several ranks."""
    nodes = network.graph(1).nodes
    return tuple(
        node.name for node in nodes if isinstance(node.spec, BatchNormSpec) and node.spec.synchronised and not node.spec.fixed
    )


@dataclass(frozen=True)
class Passes:
    """Division of a rank's samples of a step into passes.

    Attributes:
        micro_batches: number of parts of each rank's samples.
        shards: number of parts over all ranks, whose sums have a fixed order; None: the order of the sums depends on the ranks.
        together: number of consecutive parts that one pass computes side by side; the last pass may have fewer.
    """

    micro_batches: int = 1
    shards: int | None = None
    together: int = 1

    @staticmethod
    def of(micro_batches: int, shards: int | None, network: Network, groups: GridGroups) -> Passes:
        """Return the configured passes. With shards, a rank computes its shards side by side, in at most `micro_batches` passes.

        Raises:
            ConfigError: the training cannot be exact (see `check_exact`).
        """
        if shards is None:
            return Passes(micro_batches)
        check_exact(shards, network, groups)
        return Passes.over(shards // groups.all_ranks.size, micro_batches, shards)

    @staticmethod
    def over(parts: int, passes: int, shards: int) -> Passes:
        """Return the division of a rank's `parts` of all `shards` into at most `passes` passes."""
        return Passes(parts, shards, -(-parts // min(parts, passes)))

    @property
    def following(self) -> int:
        """Number of consecutive passes. The memory of one pass is reused by the next."""
        return -(-self.micro_batches // self.together)

    def among(self, comm: Communicator) -> ShardsOfRank | None:
        """Return this rank's shards, given a communicator whose ranks have equal numbers of shards; None without shards."""
        return None if self.shards is None else ShardsOfRank(comm.rank, comm.size, self.micro_batches * comm.size)

    def gradients(self, group: FlatGroup, comm: Communicator) -> ShardGradients | None:
        """Return the sums of one group's gradients over this rank's shards; None without shards.

        Args:
            comm: ranks that average the group.
        """
        shards = self.among(comm)
        return None if shards is None else ShardGradients(group, shards, homes=self.following == 1)

    def check(self, by_rank: Sequence[int]) -> None:
        """Raise unless the samples of a step are distributed as the passes require.

        Args:
            by_rank: number of samples of each rank.

        Raises:
            ConfigError: the distribution over the shards differs (see `check_counts`).
        """
        if self.shards is not None:
            check_counts(by_rank, self.shards)


#: scopes of images that share statistics: one shard, one rank, the ranks that share samples, or all ranks
_SHARD, _RANK, _GROUP, _ALL = "a shard", "a rank", "a split group", "the step"


@dataclass(frozen=True)
class SingleValue:
    """Batch norm with a single value per channel.

    Attributes:
        shape: (H, W) of the images.
        sharing: ranks or shard whose images share statistics, in words.
        fix: advice at the end of the message.
    """

    layer: str
    shape: tuple[int, ...]
    sharing: str
    fix: str

    def sentence(self, step: str) -> str:
        height, width = self.shape
        return (
            f"Batch norm {self.layer} has a single value per channel, so that it outputs only its bias, in {step}: images of "
            f"{height} x {width} are 1 x 1 there, and the statistics are those of {self.sharing}, which has 1 image"
        )


@dataclass(frozen=True)
class StatisticsSharing:
    """Division of the samples of a step into sets that share batch statistics.

    Attributes:
        plan: use of each layer on the grid.
        micro_batches: number of passes over a rank's samples.
        shards: number of shards of an exact training, else None.
    """

    plan: ParallelPlan
    micro_batches: int
    shards: int | None

    def single(self, graphs: Iterable[Graph], samples: int) -> SingleValue | None:
        """Return the first batch norm over a single value in a step of `samples` samples; None if there is none.

        The variance of one value is 0. Such a layer therefore outputs only its bias, and no layer before it is trained. Its
        running variance, by which evaluation divides, tends to 0.

        Args:
            graphs: the model, lowered for one image of each size.
        """
        sharing = {scope for scope in (_SHARD, _RANK, _GROUP, _ALL) if samples and self._fewest_samples(samples, scope) == 1}
        for graph in graphs if sharing else ():
            norms = (node for node in graph.nodes if isinstance(node.spec, BatchNormSpec) and not node.spec.fixed)
            for node in norms:
                scope = self._scope(node)
                if scope in sharing and math.prod(graph.tensors[node.output].shape[:-1]) == 1:
                    several = self.micro_batches > 1 and scope != _SHARD
                    in_passes = f"{scope} in one of {self.micro_batches} passes" if several else scope
                    return SingleValue(node.name, graph.tensors[0].shape[1:3], in_passes, self._fix(samples, scope))
        return None

    def _fewest_samples(self, samples: int, scope: str) -> int:
        """Return the smallest number of samples, other than 0, that share statistics in a step of `samples` samples."""
        if scope == _SHARD:
            return min(filter(None, even(samples, self.shards or 1)))
        plan = self.plan
        size = {_RANK: 1, _GROUP: plan.rows, _ALL: plan.rows * plan.cols}[scope]
        by_rank = counts(samples, plan.rows * plan.cols, plan.rows)
        teams = {by_rank[first : first + size] for first in range(0, len(by_rank), size)}  # a set: most are equal
        of_passes: set[int] = set()  # samples of a team in each of its passes
        for team in teams:
            shares = [(ranks, even(count, self.micro_batches)) for count, ranks in Counter(team).items()]
            of_passes.update(sum(ranks * share[number] for ranks, share in shares) for number in range(self.micro_batches))
        return min(filter(None, of_passes))

    def _scope(self, node: Node) -> str:
        assert isinstance(node.spec, BatchNormSpec)
        if self.shards is not None:
            return _SHARD
        if node.spec.synchronised:
            return _ALL
        return _RANK if self.plan.rows == 1 or self.plan.use_of(node.name) is Parallelism.BATCH else _GROUP

    def _fix(self, samples: int, scope: str) -> str:
        ranks = self.plan.rows * self.plan.cols
        parts = {_SHARD: 1, _RANK: ranks, _GROUP: self.plan.cols, _ALL: 1}[scope]
        parts *= (self.shards or 1) if scope == _SHARD else self.micro_batches
        others = ["use larger images"]
        if scope in (_RANK, _GROUP) and ranks > 1:
            others.insert(0, "set batch_norm.statistics to synchronised")
        if scope == _SHARD and samples > 1:
            others.insert(0, f"set exact.shards to at most {samples // 2}")
        return f"set batch to at least {2 * parts}, or {', or '.join(others)}"


# The latest network of this process that was checked, with the samples of a pass.
_CHECKED: list[tuple[weakref.ref[Network], int]] = []


def check_memory(network: Network, batch: int, micro_batches: int) -> None:
    """Raise unless a step of `batch` samples fits into the device's memory. Do nothing if memory is not limited.

    The step allocates activations and an optimiser state that is assumed to be as large as the parameters.

    Raises:
        BackendError: the step does not fit.
    """
    samples = -(-batch // micro_batches)
    _CHECKED[:] = [(weakref.ref(network), samples)]
    free = network.kernels.free_bytes()
    if free is None:
        return
    state = sum(group.data.nbytes for group in network.groups.values())
    arena = network.arena_bytes(samples, training=True)
    if arena + state <= free:
        return
    raise BackendError(
        f"A pass over {counted(samples, 'sample')} needs {size_text(arena + state)} of device memory, "
        f"but only {size_text(free)} are free; raise micro_batches, or use a smaller batch, smaller images or a smaller network."
    )


def planned() -> str | None:
    """Return the memory needs of the network that this process trains, as text; None if there is no network or no plan yet."""
    network = _CHECKED[-1][0]() if _CHECKED else None
    if network is None:
        return None
    samples = _CHECKED[-1][1]
    state = sum(group.data.nbytes for group in network.groups.values())
    with contextlib.suppress(Exception):  # memory is short here, and no second error may hide the first
        arena = network.arena_bytes(samples, training=True)
        return (
            f"the plan needs {size_text(arena)} for a pass over {counted(samples, 'sample')} and {size_text(3 * state)} for "
            "parameters, gradients and the optimiser's state"
        )
    return None
