"""The machine of a plan as data: nodes, cores, memory, links and rates. Its functions are pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hpctrain.core.errors import ConfigError
from hpctrain.core.text import counted

# Tolerance for products of fractions of cores.
_ROUNDING = 1e-6
# Bytes read and written per byte that is copied, and per byte that is added to a sum.
_COPY_ACCESSES, _SUM_ACCESSES = 2, 3


class OperatorClass(StrEnum):
    """Class of operators with a common rate."""

    CONVOLUTION = "convolution"
    PRODUCT = "product"  # linear layers
    MEMORY = "memory"  # memory-bound: batch norm, ReLU, pooling, additions, copies, updates


@dataclass(frozen=True)
class OperatorRate:
    """Rate of a class of operators on one rank while all ranks of a node compute.

    A call takes call_seconds + max(flops / flops_per_second, bytes / bytes_per_second).
    """

    flops_per_second: float
    bytes_per_second: float
    call_seconds: float

    def scaled(self, factor: float) -> OperatorRate:
        """Return the rate of a rank that computes `factor` times as fast."""
        return OperatorRate(self.flops_per_second * factor, self.bytes_per_second * factor, self.call_seconds / factor)


def seconds_with_threads(of_one: float, of_all: float, all_threads: int, threads: int) -> float:
    """Return the seconds of some work with `threads` threads: Amdahl's law a + b / threads through two measured points.

    If all threads were more than `all_threads` times as fast as one, a is negative. Beyond `all_threads`, the seconds are then
    inversely proportional to the threads instead.

    Args:
        of_one: seconds with one thread.
        of_all: seconds with `all_threads` threads, at least two.
    """
    if threads in (1, all_threads):
        return of_one if threads == 1 else of_all
    serial = (all_threads * of_all - of_one) / (all_threads - 1)
    if serial < 0 and threads > all_threads:
        return of_all * all_threads / threads
    return serial + (of_one - serial) / threads


@dataclass(frozen=True)
class LinkSegment:
    """Cost of messages of at least `from_bytes` bytes, up to the beginning of the next segment.

    A message of n bytes takes alpha_seconds + n beta_seconds_per_byte.

    Attributes:
        unattended_bytes: bytes of a message that move between two polls; None: all bytes.
        polls: number of polls before the first byte moves, as in a handshake.
    """

    from_bytes: int
    alpha_seconds: float
    beta_seconds_per_byte: float
    unattended_bytes: int | None = None
    polls: int = 0


@dataclass(frozen=True)
class Link:
    """Cost of a rank's messages on one level of the network.

    Attributes:
        segments: cost per range of message sizes, the first from 0 bytes on (eager and rendezvous protocols differ).
        operation_seconds: time of a core to post one operation and complete it.
        byte_seconds: time of a core per byte that a rank sends or receives; 0 if a card moves them.
        sum_seconds: additional time of a core per byte that a reduction adds up.
        burst_bytes: bytes that pass at once after a pause, before the rate of the link limits messages; a pause restores them at
            that rate.
    """

    segments: tuple[LinkSegment, ...]
    operation_seconds: float = 0.0
    byte_seconds: float = 0.0
    sum_seconds: float = 0.0
    burst_bytes: int = 0

    def segment(self, n_bytes: float) -> LinkSegment:
        """Return the segment that contains messages of `n_bytes` bytes."""
        return max((one for one in self.segments if one.from_bytes <= n_bytes), key=lambda one: one.from_bytes)

    def is_passed(self, segment: LinkSegment) -> bool:
        """Return whether shorter messages overtake messages of `segment`.

        This is the case if a segment of shorter messages moves in chunks and this one does not.
        """
        chunked = [one.from_bytes for one in self.segments if one.unattended_bytes is not None]
        return segment.unattended_bytes is None and segment.polls > 0 and min(chunked, default=math.inf) < segment.from_bytes

    @property
    def burst_seconds(self) -> float:
        """Maximum time on the wire that a pause saves, in seconds."""
        return self.burst_bytes * self.segments[-1].beta_seconds_per_byte


@dataclass(frozen=True)
class Machine:
    """Machine: nodes with equal numbers of ranks, links and rates.

    Attributes:
        name: name for display.
        nodes: number of nodes.
        ranks_per_node: number of ranks of a job on each node.
        cores_per_rank: number of cores of a rank; below 1 if ranks share a core.
        memory_bytes: memory of a rank.
        within: link between ranks of a node.
        between: link of a rank to other nodes, if no other rank uses the card of its node.
        ranks_per_card: number of ranks of a node that share one network card and its rate.
        rates: rates of one rank, by class of operators.
        single_thread_rates: rates of one rank with one thread while as many ranks compute, by class; empty if unknown, or if a
            rank has a single thread.
        node_bytes_per_second: bytes that all cores of a node together read and write per second; infinite if unknown.
        concurrency: slowdown of operators while all ranks of the node compute, compared with one rank alone, by class; `rates`
            include it.
        description: description for display.
        sources: source of each number by dotted key ("between.segments"): "measured" with date and processor, or the origin of
            the number.
        measured: machine with the measured number of ranks per node, from which this machine was derived; None: this one.
    """

    name: str
    nodes: int
    ranks_per_node: int
    cores_per_rank: float
    memory_bytes: int
    within: Link
    between: Link
    ranks_per_card: int
    rates: Mapping[OperatorClass, OperatorRate]
    concurrency: Mapping[OperatorClass, float] = field(default_factory=dict)
    description: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    single_thread_rates: Mapping[OperatorClass, OperatorRate] = field(default_factory=dict)
    node_bytes_per_second: float = math.inf
    measured: Machine | None = None

    @property
    def cores_per_node(self) -> int:
        return max(1, math.floor(self.cores_per_rank * self.ranks_per_node + _ROUNDING))

    @property
    def threads_per_rank(self) -> int:
        """Number of threads of a rank with one thread per core."""
        return max(1, math.floor(self.cores_per_rank + _ROUNDING))

    def nodes_of(self, ranks: int) -> int:
        """Return the number of nodes that `ranks` ranks occupy."""
        return -(-ranks // self.ranks_per_node)

    def scaled(self, *, bandwidth: float = 1.0, latency: float = 1.0, compute: float = 1.0) -> Machine:
        """Return the machine with the bandwidth and latency of links and the rates of operators multiplied by these factors."""
        within, between = (_scaled(link, bandwidth, latency) for link in (self.within, self.between))
        return replace(
            self,
            within=within,
            between=between,
            rates={kind: rate.scaled(compute) for kind, rate in self.rates.items()},
            single_thread_rates={kind: rate.scaled(compute) for kind, rate in self.single_thread_rates.items()},
            node_bytes_per_second=self.node_bytes_per_second * compute,
            measured=None
            if self.measured is None
            else self.measured.scaled(bandwidth=bandwidth, latency=latency, compute=compute),
        )

    def with_ranks_per_node(self, ranks_per_node: int, threads: int | None = None) -> Machine:
        """Return the machine with another number of ranks on the same nodes and cores.

        The ranks share the memory and the network cards of a node equally. The time of an operator follows Amdahl's law through
        `single_thread_rates` and `rates`. Additional ranks do not exceed the memory traffic of the node: its cores together read
        and write at most `node_bytes_per_second`, or as much as they did with the measured number of ranks.

        Args:
            ranks_per_node: number of ranks on each node.
            threads: number of threads of a rank; None: one per core.

        Raises:
            ConfigError: ranks and threads exceed the cores of a node, or `single_thread_rates` is empty.
        """
        origin = self.measured or self
        cores, most_threads = origin.cores_per_node, origin.threads_per_rank
        unchanged = ranks_per_node == origin.ranks_per_node
        threads = (most_threads if unchanged else max(1, cores // ranks_per_node)) if threads is None else threads
        if unchanged and threads == most_threads:
            return origin
        if ranks_per_node * threads > cores:
            most = (
                f"{counted(cores, 'rank')} with one thread"
                if ranks_per_node > cores
                else counted(cores // ranks_per_node, "thread")
            )
            raise ConfigError(
                f"{counted(ranks_per_node, 'rank')} per node with {counted(threads, 'thread')} each exceed the {cores} cores of "
                f"a node of machine {self.name}; the nearest legal choice is {most}."
            )
        if not origin.single_thread_rates:
            raise ConfigError(
                f"The effect of threads on machine {self.name} is unknown, because its file has no single_thread_rates; measure "
                f"them with `hpctrain calibrate` on ranks with several cores, or keep {counted(origin.ranks_per_node, 'rank')} "
                f"per node with {counted(most_threads, 'thread')} each."
            )
        cards = max(1, origin.ranks_per_node // origin.ranks_per_card)
        return replace(
            origin,
            ranks_per_node=ranks_per_node,
            cores_per_rank=origin.cores_per_rank * origin.ranks_per_node / ranks_per_node,
            memory_bytes=origin.memory_bytes * origin.ranks_per_node // ranks_per_node,
            within=origin._shared_link(origin.within, ranks_per_node, local=True),
            between=origin._shared_link(origin.between, ranks_per_node, local=False),
            ranks_per_card=-(-ranks_per_node // cards),
            rates={kind: origin._rate(kind, ranks_per_node, threads) for kind in origin.rates},
            concurrency={},
            measured=origin,
        )

    def _rate(self, kind: OperatorClass, ranks_per_node: int, threads: int) -> OperatorRate:
        one, every, most_threads = self.single_thread_rates[kind], self.rates[kind], self.threads_per_rank
        flop, byte, call = (
            seconds_with_threads(of_one, of_all, most_threads, threads)
            for of_one, of_all in (
                (1 / one.flops_per_second, 1 / every.flops_per_second),
                (1 / one.bytes_per_second, 1 / every.bytes_per_second),
                (one.call_seconds, every.call_seconds),
            )
        )
        return OperatorRate(1 / flop, 1 / self._byte_seconds(byte, 1 / every.bytes_per_second, 1, ranks_per_node), call)

    def _byte_seconds(self, seconds: float, measured_seconds: float, accesses: int, ranks_per_node: int) -> float:
        """Return the seconds per byte of a rank among `ranks_per_node` ranks that share the memory of a node.

        Args:
            seconds: seconds if the memory were unlimited.
            measured_seconds: seconds with the measured number of ranks.
            accesses: bytes that are read and written per byte.
        """
        as_measured = measured_seconds * ranks_per_node / self.ranks_per_node
        return max(seconds, min(as_measured, accesses * ranks_per_node / self.node_bytes_per_second))

    def _shared_link(self, link: Link, ranks_per_node: int, *, local: bool) -> Link:
        """Return the link if `ranks_per_node` ranks share the memory of a node; messages of a local link pass through it."""

        def shared(seconds: float, accesses: int) -> float:
            return self._byte_seconds(seconds, seconds, accesses, ranks_per_node)

        segments = tuple(
            replace(one, beta_seconds_per_byte=shared(one.beta_seconds_per_byte, _COPY_ACCESSES)) if local else one
            for one in link.segments
        )
        return replace(
            link,
            segments=segments,
            byte_seconds=shared(link.byte_seconds, _COPY_ACCESSES),
            sum_seconds=shared(link.sum_seconds, _SUM_ACCESSES),
        )


def _scaled(link: Link, bandwidth: float, latency: float) -> Link:
    segments = tuple(
        replace(one, alpha_seconds=one.alpha_seconds * latency, beta_seconds_per_byte=one.beta_seconds_per_byte / bandwidth)
        for one in link.segments
    )
    return replace(link, segments=segments)
