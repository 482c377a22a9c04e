"""The passes that a rank splits its samples of a step into: micro-batches, shards of exact trainings, and the memory of one pass.

A training with `exact` has the same bits on any number of ranks: the samples of a step are shared out over shards, whose sums
have one order. `check_exact` refuses what cannot be so; `check_memory` names the batch that fits where a pass needs too much
memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.averaging.group_sums import ShardGradients
from hpctrain.backend.specs import BatchNormSpec
from hpctrain.comm.base import Communicator
from hpctrain.core.errors import BackendError, ConfigError
from hpctrain.core.intervals import ShardsOfRank, even
from hpctrain.data.loader import Share
from hpctrain.data.sampler import counts
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import FlatGroup
from hpctrain.parallel.groups import GridGroups


@dataclass(frozen=True)
class MicroBatch:
    """One of a step's passes: the samples of each rank of the split group.

    shared: where they lie among the split group's samples. own: where this rank's lie among its own.
    """

    counts: tuple[int, ...]
    shared: slice | np.ndarray
    own: slice


def micro_batches_of(share: Share, micro_batches: int) -> Iterator[MicroBatch]:
    """Yield a rank's share of a step in micro-batches; every rank of the split group makes the same ones."""
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
        yield MicroBatch(counts, shared, slice(own, own + counts[share.split_rank]))
        starts = [start + n for start, n in zip(starts, counts, strict=True)]


def ranks_fault(shards: int, ranks: int) -> str | None:
    """Return the sentence that refuses a number of ranks; None if all can have equally many shards."""
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
    """Return the sentence that refuses ranks that share samples; None if they do not."""
    if rows == 1:
        return None
    return (
        f"grid.rows is {rows}, but exact needs ranks that share no samples, as sums over the parts of a layer have an order of "
        "their own; set grid.rows to 1."
    )


def check_exact(shards: int, network: Network, groups: GridGroups) -> None:
    """Raise unless a training can have the same bits on any number of ranks.

    Raises:
        ConfigError: it cannot.
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


def check_counts(of_ranks: Sequence[int], shards: int) -> None:
    """Raise unless a step's samples are divided over shards as a loader does that knows of them.

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


def statistics_fault(names: Iterable[str]) -> str | None:
    """Return the sentence that refuses batch norms with statistics over several ranks. names: of these layers."""
    first = next(iter(names), None)
    if first is None:
        return None
    return (
        f"{first} has batch statistics over all ranks (synchronised), which would need all shards at once, but with exact a rank "
        "computes them one after another; set batch_norm.statistics to local, which takes those of a shard."
    )


def backend_fault(name: str) -> str:
    """Return the sentence that refuses a backend whose arrays do not lie on the host."""
    return f"The sums of exact are made on the host, which arrays of backend {name} do not reach; set backend to onednn or numpy."


def synchronised(network: Network) -> tuple[str, ...]:
    """Return the names of the batch norms of a network whose statistics are those of several ranks."""
    nodes = network.graph(1).nodes
    return tuple(
        node.name for node in nodes if isinstance(node.spec, BatchNormSpec) and node.spec.synchronised and not node.spec.fixed
    )


@dataclass(frozen=True)
class Passes:
    """The passes that a rank splits its samples of a step into.

    Attributes:
        micro_batches: parts of each rank's samples. together: neighbouring parts that are computed side by side; the last pass
            may have fewer. shards: the parts of all ranks, whose sums have one order; None: sums follow the ranks.
    """

    micro_batches: int = 1
    shards: int | None = None
    together: int = 1

    @staticmethod
    def of(micro_batches: int, shards: int | None, network: Network, groups: GridGroups) -> Passes:
        """Return the configured passes: with shards, a rank's are computed side by side, in at most `micro_batches` passes.

        Raises:
            ConfigError: with shards, what `check_exact` refuses.
        """
        if shards is None:
            return Passes(micro_batches)
        check_exact(shards, network, groups)
        return Passes.over(shards // groups.all_ranks.size, micro_batches, shards)

    @staticmethod
    def over(parts: int, passes: int, shards: int) -> Passes:
        """Return a rank's `parts` of all `shards`, in at most `passes` passes."""
        return Passes(parts, shards, -(-parts // min(parts, passes)))

    @property
    def following(self) -> int:
        """Passes that follow one another; memory is needed for one of them."""
        return -(-self.micro_batches // self.together)

    def among(self, comm: Communicator) -> ShardsOfRank | None:
        """Return this rank's shards, if the ranks of `comm` have all that count; None without shards."""
        return None if self.shards is None else ShardsOfRank(comm.rank, comm.size, self.micro_batches * comm.size)

    def gradients(self, group: FlatGroup, comm: Communicator) -> ShardGradients | None:
        """Return the sums of one group's gradients over this rank's shards. comm: the ranks that average the group."""
        shards = self.among(comm)
        return None if shards is None else ShardGradients(group, shards, homes=self.following == 1)

    def check(self, of_ranks: Sequence[int]) -> None:
        """Raise unless a step's samples are divided as passes need.

        Raises:
            ConfigError: as `check_counts`.
        """
        if self.shards is not None:
            check_counts(of_ranks, self.shards)


# The latest network of this process that was checked, with the samples of a pass.
_CHECKED: list[tuple[weakref.ref[Network], int]] = []


def check_memory(network: Network, batch: int, micro_batches: int) -> None:
    """Raise unless a step of `batch` samples fits into the device's memory, or no memory is limited.

    Parameters and gradients are allocated already; the optimiser's state, of the size of the parameters, is not.

    Raises:
        BackendError: it does not fit; the sentence names a batch that does.
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
    fitting = _fitting(network, samples, arena, free - state)
    if fitting:
        remedy = f"{fitting} fit: set micro_batches to {-(-batch // fitting)}, or batch to {fitting}"
    else:
        remedy = "not even one fits: take a smaller network or images, or a GPU with more memory"
    raise BackendError(
        f"A pass over {samples} samples needs {(arena + state) / 1e9:.2f} GB of the device's memory, "
        f"of which {free / 1e9:.2f} GB are free; {remedy}."
    )


def planned() -> str | None:
    """Return the memory needs, in words, of the network that this process trains; None if there is none, or no plan yet."""
    network = _CHECKED[-1][0]() if _CHECKED else None
    if network is None:
        return None
    samples = _CHECKED[-1][1]
    state = sum(group.data.nbytes for group in network.groups.values())
    with contextlib.suppress(Exception):  # there is little memory left, and nothing may hide the first error
        arena = network.arena_bytes(samples, training=True)
        return (
            f"the plan has {arena / 1e9:.3f} GB for a pass over {samples} samples and {3 * state / 1e9:.3f} GB for parameters, "
            "gradients and the optimiser's state"
        )
    return None


def _fitting(network: Network, samples: int, arena: int, available: int) -> int:
    """Return the largest number of samples found to fit, guessed from the bytes of larger ones; 0 if there is none."""
    while samples > 1 and arena > available:
        samples = max(1, min(samples - 1, samples * max(available, 0) // arena))
        arena = network.arena_bytes(samples, training=True)
    return samples if arena <= available else 0
