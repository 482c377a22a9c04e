"""The machine of a plan as data: nodes, cores, memory, links and rates. Its functions are pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


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
        concurrency: slowdown of operators while all ranks of the node compute, compared with one rank alone, by class; `rates`
            include it.
        description: description for display.
        sources: source of each number by dotted key ("between.segments"): "measured" with date and processor, or the origin of
            the number.
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

    def nodes_of(self, ranks: int) -> int:
        """Return the number of nodes that `ranks` ranks occupy."""
        return -(-ranks // self.ranks_per_node)

    def scaled(self, *, bandwidth: float = 1.0, latency: float = 1.0, compute: float = 1.0) -> Machine:
        """Return the machine with the bandwidth and latency of links and the rates of operators multiplied by these factors."""
        rates = {
            name: OperatorRate(rate.flops_per_second * compute, rate.bytes_per_second * compute, rate.call_seconds / compute)
            for name, rate in self.rates.items()
        }
        within, between = (_scaled(link, bandwidth, latency) for link in (self.within, self.between))
        return replace(self, within=within, between=between, rates=rates)


def _scaled(link: Link, bandwidth: float, latency: float) -> Link:
    segments = tuple(
        replace(one, alpha_seconds=one.alpha_seconds * latency, beta_seconds_per_byte=one.beta_seconds_per_byte / bandwidth)
        for one in link.segments
    )
    return replace(link, segments=segments)
