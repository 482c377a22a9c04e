"""The machine of a plan as data: nodes, cores, memory, links and rates. Its functions are pure.

The fields in `machine_file.py` describe the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hpctrain.core.errors import ConfigError
from hpctrain.core.text import counted

# Tolerance for rounding errors of cores_per_rank, which may be a fraction.
_ROUNDING = 1e-6
# Bytes read and written per byte that is copied (one read, one write) and that is added to a sum (two reads, one write).
_COPY_ACCESSES, _SUM_ACCESSES = 2, 3


class OperatorClass(StrEnum):
    """Class of operators with a common rate in one precision. Machines may lack the classes of bfloat16."""

    CONVOLUTION = "convolution"
    PRODUCT = "product"  # linear layers
    MEMORY = "memory"  # memory-bound: batch norm, ReLU, pooling, additions, copies, updates
    CONVOLUTION_BFLOAT16 = "convolution_bfloat16"
    PRODUCT_BFLOAT16 = "product_bfloat16"
    MEMORY_BFLOAT16 = "memory_bfloat16"

    def of_dtype(self, dtype: str) -> OperatorClass:
        """Return the class of the same operators for activations of a dtype."""
        plain = self.value.partition("_")[0]
        return OperatorClass(f"{plain}_bfloat16" if dtype == "bfloat16" else plain)


# Speed of convolutions in bfloat16 relative to float32, if they were not measured. With AVX512_BF16 the direct kernels take half
# the time (measured); AMX is faster.
_BFLOAT16_SPEED = 2.0


@dataclass(frozen=True)
class OperatorRate:
    """Rate of a class of operators on one rank while all ranks of its node compute.

    A call takes call_seconds + max(flops / flops_per_second, bytes / bytes_per_second). Bytes with a rate of their own are left
    out of this maximum and add their own time.

    Attributes:
        weight_bytes_per_second: rate of bytes of weights; None: they count as other bytes.
        transposed_bytes_per_second: rate of transposing copies of weights; None: they count as other bytes.
        winograd_flops_per_second: rate of Winograd convolutions; None: they take as long as direct ones.
    """

    flops_per_second: float
    bytes_per_second: float
    call_seconds: float
    weight_bytes_per_second: float | None = None
    transposed_bytes_per_second: float | None = None
    winograd_flops_per_second: float | None = None


def slowest_rate(rates: Sequence[OperatorRate], factor: float = 1.0) -> OperatorRate:
    """Return one rate with the lowest speeds and the longest call of several rates, for ranks `factor` times as fast.

    A speed is None if one of the rates lacks it.
    """

    def lowest(speeds: Sequence[float | None]) -> float | None:
        known = [speed for speed in speeds if speed is not None]
        return min(known) * factor if len(known) == len(speeds) else None

    return OperatorRate(
        min(one.flops_per_second for one in rates) * factor,
        min(one.bytes_per_second for one in rates) * factor,
        max(one.call_seconds for one in rates) / factor,
        lowest([one.weight_bytes_per_second for one in rates]),
        lowest([one.transposed_bytes_per_second for one in rates]),
        lowest([one.winograd_flops_per_second for one in rates]),
    )


def seconds_with_threads(one_thread: float, full_threads: float, full: int, threads: int) -> float:
    """Return the seconds of an operator with `threads` threads, by Amdahl's law a + b / threads through two known points.

    If the speed-up from one to `full` threads exceeds `full`, a is negative. In this case, the seconds beyond `full` threads
    are inversely proportional to the number of threads, so that they remain positive.

    The known points are `one_thread` seconds with one thread, and `full_threads` seconds with `full` threads, at least 2.
    """
    if threads in (1, full):
        return one_thread if threads == 1 else full_threads
    serial = (full * full_threads - one_thread) / (full - 1)
    if serial < 0 and threads > full:
        return full_threads * full / threads
    return serial + (one_thread - serial) / threads


@dataclass(frozen=True)
class LinkSegment:
    """Cost of messages of at least `from_bytes` bytes, up to the beginning of the next segment.

    A message of n bytes takes alpha_seconds + n beta_seconds_per_byte.

    Attributes:
        unattended_bytes: bytes of a message that move between two polls; None: all.
        polls: number of polls before the first byte moves.
    """

    from_bytes: int
    alpha_seconds: float
    beta_seconds_per_byte: float
    unattended_bytes: int | None = None
    polls: int = 0


@dataclass(frozen=True)
class Link:
    """Cost of a rank's messages within or between nodes; `machine_file.LinkFields` describes the numbers."""

    segments: tuple[LinkSegment, ...]
    operation_seconds: float = 0.0
    byte_seconds: float = 0.0
    sum_seconds: float = 0.0
    burst_bytes: int = 0
    buffered_bytes: int | None = None

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
        """Maximum seconds that a pause before a message saves: those of `burst_bytes` at the rate of the largest messages."""
        return self.burst_bytes * self.segments[-1].beta_seconds_per_byte


@dataclass(frozen=True)
class Machine:
    """Nodes with equal numbers of ranks, their links and their rates.

    Attributes:
        sources: source of each number by dotted key ("between.segments"): "measured" with date and processor, or the origin of
            the number.
        origin: the machine as its file describes it, if this one was derived from it for another number of ranks per node; it has
            the same sources and `single_thread_rates`. None: this is the machine of the file.
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
    description: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    single_thread_rates: Mapping[OperatorClass, OperatorRate] = field(default_factory=dict)
    node_bytes_per_second: float = math.inf
    origin: Machine | None = None

    @property
    def cores_per_node(self) -> int:
        """Number of cores of a node on which ranks run."""
        return max(1, math.floor(self.cores_per_rank * self.ranks_per_node + _ROUNDING))

    @property
    def threads_per_rank(self) -> int:
        """Number of threads of a rank that has one thread per core."""
        return max(1, math.floor(self.cores_per_rank + _ROUNDING))

    def nodes_of(self, ranks: int) -> int:
        """Return the number of nodes that `ranks` ranks occupy."""
        return -(-ranks // self.ranks_per_node)

    def scaled(self, *, bandwidth: float = 1.0, latency: float = 1.0, compute: float = 1.0) -> Machine:
        """Return the machine with the bandwidth and latency of links and the rates of operators multiplied by these factors.

        The factor `compute` also applies to the memory traffic of a node.
        """
        within, between = (_scaled(link, bandwidth, latency) for link in (self.within, self.between))
        return replace(
            self,
            within=within,
            between=between,
            rates={kind: slowest_rate([rate], compute) for kind, rate in self.rates.items()},
            single_thread_rates={kind: slowest_rate([rate], compute) for kind, rate in self.single_thread_rates.items()},
            node_bytes_per_second=self.node_bytes_per_second * compute,
            origin=None if self.origin is None else self.origin.scaled(bandwidth=bandwidth, latency=latency, compute=compute),
        )

    def with_ranks_per_node(self, ranks_per_node: int, threads: int | None = None) -> Machine:
        """Return the machine with another number of ranks per node on the same nodes and cores.

        The ranks share the memory and the network cards of a node equally. The time of an operator follows Amdahl's law through
        `single_thread_rates` and `rates`. The ranks of a node together read and write at most `node_bytes_per_second`, or at
        most as much as the ranks of the file's machine if that is more.

        Args:
            threads: number of threads of a rank; None: one per core.

        Raises:
            ConfigError: ranks times threads exceed the cores of a node, or `single_thread_rates` is empty; neither is raised for
                the ranks per node of the file's machine with one thread per core.
        """
        origin = self.origin or self
        cores, full = origin.cores_per_node, origin.threads_per_rank
        unchanged = ranks_per_node == origin.ranks_per_node
        threads = (full if unchanged else max(1, cores // ranks_per_node)) if threads is None else threads
        if unchanged and threads == full:
            return origin
        if ranks_per_node * threads > cores:
            raise ConfigError(
                f"A node of machine {self.name} has {counted(cores, 'core')}, too few for {counted(ranks_per_node, 'rank')} per "
                f"node with {counted(threads, 'thread')} per rank."
            )
        if not origin.single_thread_rates:
            raise ConfigError(
                f"The effect of threads on machine {self.name} is unknown, because its file has no single_thread_rates; measure "
                f"them with `hpctrain calibrate` on ranks with several cores, or keep {counted(origin.ranks_per_node, 'rank')} "
                f"per node with {counted(full, 'thread')} per rank."
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
            rates={
                kind: origin._rate(kind, ranks_per_node, threads) for kind in origin.rates if kind in origin.single_thread_rates
            },
            origin=origin,
        )

    def rate(self, kind: OperatorClass) -> OperatorRate:
        """Return the rate of a class.

        A missing rate of a class of bfloat16 is that of float32, for convolutions with twice the operations per second.
        """
        rate = self.rates.get(kind)
        if rate is not None:
            return rate
        of_float32 = self.rates[kind.of_dtype("float32")]
        if kind is not OperatorClass.CONVOLUTION_BFLOAT16:
            return of_float32
        return replace(of_float32, flops_per_second=_BFLOAT16_SPEED * of_float32.flops_per_second)

    def estimate_note(self, dtype: str) -> str:
        """Return a sentence if the rates for activations of a dtype are estimated from those of float32; otherwise ""."""
        if dtype != "bfloat16" or OperatorClass.CONVOLUTION_BFLOAT16 in self.rates:
            return ""
        return f"The rates of bfloat16 are estimated from those of float32, because machine {self.name} has none of bfloat16."

    def with_threads(self, threads: int | None) -> Machine:
        """Return the machine whose ranks have this number of threads, or itself if their effect is unknown.

        A node keeps its number of ranks if its cores suffice, and otherwise has as many as they suffice for.

        Args:
            threads: number of threads of a rank; None: as before.

        Raises:
            ConfigError: a node has fewer cores than a rank has threads.
        """
        if threads is None or not self.single_thread_rates:
            return self
        return self.with_ranks_per_node(min(self.ranks_per_node, max(1, self.cores_per_node // threads)), threads)

    def _rate(self, kind: OperatorClass, ranks_per_node: int, threads: int) -> OperatorRate:
        """Return a class's rate on a rank with `threads` threads while `ranks_per_node` ranks of a node compute."""
        one, full = self.single_thread_rates[kind], self.rates[kind]

        def between(one_thread: float, full_threads: float) -> float:
            return seconds_with_threads(one_thread, full_threads, self.threads_per_rank, threads)

        def flops(one_thread: float, full_threads: float) -> float:
            return 1 / between(1 / one_thread, 1 / full_threads)

        def n_bytes(one_thread: float, full_threads: float) -> float:
            seconds = between(1 / one_thread, 1 / full_threads)
            return 1 / self._byte_seconds(seconds, 1 / full_threads, 1, ranks_per_node)

        def known(speed: Callable[[float, float], float], name: str) -> float | None:
            """Return a speed that both rates have; None if one of them lacks it."""
            of_one, of_full = getattr(one, name), getattr(full, name)
            return None if of_one is None or of_full is None else speed(of_one, of_full)

        return OperatorRate(
            flops(one.flops_per_second, full.flops_per_second),
            n_bytes(one.bytes_per_second, full.bytes_per_second),
            between(one.call_seconds, full.call_seconds),
            known(n_bytes, "weight_bytes_per_second"),
            known(n_bytes, "transposed_bytes_per_second"),
            known(flops, "winograd_flops_per_second"),
        )

    def _byte_seconds(self, seconds: float, present_seconds: float, accesses: int, ranks_per_node: int) -> float:
        """Return the seconds per byte of each of `ranks_per_node` ranks that share the memory of a node.

        Args:
            seconds: seconds per byte if the traffic of the node had no limit.
            present_seconds: seconds per byte with this machine's ranks per node; the node sustains at least their traffic.
            accesses: bytes that are read and written per byte.
        """
        at_present_traffic = present_seconds * ranks_per_node / self.ranks_per_node
        return max(seconds, min(at_present_traffic, accesses * ranks_per_node / self.node_bytes_per_second))

    def _shared_link(self, link: Link, ranks_per_node: int, *, local: bool) -> Link:
        """Return the link of each of `ranks_per_node` ranks that share the memory of a node, used by `local` messages."""

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
