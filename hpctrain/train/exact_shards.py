"""Shards of a training that has the same bits on any number of ranks: what it needs, and which of them a rank has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hpctrain.averaging.shard_gradients import ShardGradients
from hpctrain.backend.kernels.specs import BatchNormSpec
from hpctrain.comm.base import Communicator
from hpctrain.data.sampler import counts
from hpctrain.errors import ConfigError
from hpctrain.nn.network import Network
from hpctrain.parallel.groups import GridGroups
from hpctrain.summation_tree import ShardsOfRank


def ranks_fault(shards: int, ranks: int) -> str | None:
    """The sentence that refuses a number of ranks; None where each can have as many shards as the others."""
    if shards % ranks == 0:
        return None
    fitting = [fewer for fewer in range(1, shards + 1) if shards % fewer == 0]
    below, above = max(one for one in fitting if one < ranks), [one for one in fitting if one > ranks]
    nearest = f"{below} or {above[0]}" if above else str(below)
    return (
        f"exact.shards is {shards}, which {ranks} ranks cannot share out evenly; start {nearest} ranks, or set exact.shards to "
        f"{ranks * -(-shards // ranks)}, which has other bits."
    )


def split_fault(rows: int) -> str | None:
    """The sentence that refuses ranks that share samples."""
    if rows == 1:
        return None
    return (
        f"grid.rows is {rows}, but exact needs ranks that share no samples, as sums over the parts of a layer have an order of "
        "their own; set grid.rows to 1."
    )


def check_exact(shards: int, network: Network, groups: GridGroups, micro_batches: int) -> None:
    """Nothing, where a training can have the same bits on any number of ranks.

    Raises:
        ConfigError: it cannot.
    """
    sentences = (
        None if shards >= 1 else f"exact.shards is {shards}, but must be at least 1; the usual value is 8.",
        micro_batches_fault(micro_batches),
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


def check_counts(of_ranks: Sequence[int], shards: int) -> None:
    """Nothing, where a step's samples are shared out over shards, as a loader does that was told of them.

    Args:
        of_ranks: samples of each rank.

    Raises:
        ConfigError: they are shared out in another way; alike on every rank.
    """
    expected = counts(sum(of_ranks), len(of_ranks), shards=shards)
    if tuple(of_ranks) != expected:
        raise ConfigError(
            f"A step has {_listed(of_ranks)} samples on the ranks, but {shards} shards of {sum(of_ranks)} samples are "
            f"{_listed(expected)}; make the loader with the keywords of replica.place."
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def micro_batches_fault(micro_batches: int) -> str | None:
    """The sentence that refuses a rank's own micro-batches."""
    if micro_batches == 1:
        return None
    return (
        f"micro_batches is {micro_batches}, but with exact a rank's shards are its micro-batches; set micro_batches to 1, and "
        "exact.shards higher for smaller ones."
    )


def statistics_fault(names: Iterable[str]) -> str | None:
    """The sentence that refuses batch norms whose statistics are taken over several ranks. names: of these layers."""
    first = next(iter(names), None)
    if first is None:
        return None
    return (
        f"{first} has batch statistics over all ranks (synchronised), which would need all shards at once, but with exact a rank "
        "computes them one after another; set batch_norm.statistics to local, which takes those of a shard."
    )


def backend_fault(name: str) -> str:
    """The sentence that refuses a backend whose arrays do not lie on the host."""
    return f"The sums of exact are made on the host, which arrays of backend {name} do not reach; set backend to onednn or numpy."


def synchronised(network: Network) -> tuple[str, ...]:
    """The batch norms of a network whose statistics are those of several ranks."""
    nodes = network.graph(1).nodes
    return tuple(
        node.name for node in nodes if isinstance(node.spec, BatchNormSpec) and node.spec.synchronised and not node.spec.fixed
    )


def shards_among(comm: Communicator, each: int) -> ShardsOfRank:
    """This rank's shards, where the ranks of `comm` have so many each and nobody else has any."""
    return ShardsOfRank(comm.rank, comm.size, each * comm.size)


def shard_gradients(network: Network, groups: GridGroups, each: int, strategies: Iterable[str]) -> Mapping[str, ShardGradients]:
    """The sums over this rank's shards, by parameter group. each: shards of a rank."""
    return {name: ShardGradients(network.groups[name], shards_among(groups.gradients[name], each)) for name in strategies}
