"""Sparse averaging: only the largest elements of gradients cross between nodes. It changes the optimisation.

Shi et al., "Towards scalable distributed training of deep learning on public cloud clusters", arXiv 2010.10458 (HiTopKComm). What
is not sent is added to the next step's gradient. It sends less where links between nodes are slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from hpctrain.averaging import slice_sizes
from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager
from hpctrain.averaging.collective_schedule import Operation, OperationKind, Stream
from hpctrain.averaging.step_times import Times
from hpctrain.averaging.link_simulation import Urgency, reductions_first
from hpctrain.averaging.options import check_at_least_one, check_sizes, words_of_sizes
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.slice_sizes import Sizes
from hpctrain.averaging.slicing import Compression, Slice, cut, fused
from hpctrain.averaging.sparse_averager import SparseAverager
from hpctrain.averaging.sparse_choice import SELECTION_SECONDS, PartOnLink, sparse_pays
from hpctrain.averaging.sparse_residual import SparseSettings
from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.averaging.sufficient_factors import FcExchange
from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import ConfigError, OptionError

Compress = Literal["auto", "always"]


@dataclass(frozen=True)
class SparseOptions:
    """Options of `sparse`.

    Args:
        density: Share of a gradient's elements that a node sends to the others, above 0 and at most 1.
        warmup_density: Share in the first step, from which it falls exponentially to `density` in `warmup_steps` steps.
        warmup_steps: Steps until `density` is reached; 0 starts with it.
        compress: Which of the large parameters are sent so: "auto" takes those for which it takes less time than sending them
            whole, by bytes and messages (and on a measured link by the work of choosing), "always" takes all.
        least_elements: Least elements of such a parameter; smaller ones, biases and the parameters of batch norms are sent whole.
        momentum_correction: Factor of a momentum that each node adds up before it chooses what to send, in [0, 1); it needs an
            optimizer without momentum. 0 leaves the momentum to the optimizer.
        factor_masking: With momentum correction, the momentum of elements that are sent starts again from zero.
        bucket_bytes: Least size of a slice of fused small layers, in bytes; null chooses it as `sizes` says.
        sizes: How sizes that are not given are found, and which slices are worth compressing: "rule" decides alike in every run
            on as many ranks, so that runs repeat bit by bit; "measured" follows the link, which is measured at the start.
        two_level: Ranks of a node sum their gradients before the node chooses, where all nodes have as many; without it, every
            rank chooses for itself.
        replan: The order of the allgathers is planned again after a few steps, by measured times.
        window: Most operations in flight on each communicator; null sets no limit.

    Raises:
        OptionError: a density outside of (0, 1], a warm-up that begins below the density, or another value out of range.
    """

    #: gradients of linear layers are chosen from like all others
    fc_exchange: ClassVar[FcExchange] = "never"

    density: float = 0.01
    warmup_density: float = 0.25
    warmup_steps: int = 0
    compress: Compress = "auto"
    least_elements: int = 2048
    momentum_correction: float = 0.0
    factor_masking: bool = True
    bucket_bytes: int | None = None
    sizes: Sizes = "rule"
    two_level: bool = True
    replan: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        check_at_least_one(least_elements=self.least_elements, bucket_bytes=self.bucket_bytes, window=self.window)
        check_sizes(self.sizes, bucket_bytes=self.bucket_bytes)
        if not 0.0 < self.density <= 1.0:
            raise OptionError(f"density is {self.density}, but must be above 0 and at most 1; a usual value is 0.01.", "density")
        if self.warmup_steps < 0:
            raise OptionError(f"warmup_steps is {self.warmup_steps}, but must be at least 0.", "warmup_steps")
        if self.warmup_steps and not self.density <= self.warmup_density <= 1.0:
            raise OptionError(
                f"warmup_density is {self.warmup_density}, but must be from density, {self.density}, to 1; "
                f"the nearest legal value is {1.0 if self.warmup_density > 1.0 else self.density}.",
                "warmup_density",
            )
        if not 0.0 <= self.momentum_correction < 1.0:
            raise OptionError(
                f"momentum_correction is {self.momentum_correction}, but must be in [0, 1); a usual value is 0.9.",
                "momentum_correction",
            )


class Sparse(ReduceScatterStrategy):
    """Send only the largest gradients between nodes, and add the rest to the next step's; it changes the optimisation.

    Gradients of large parameters are summed within a node to the ranks that own a part. A node sends the largest elements of
    each part with their positions. Ranks that own the same part on all nodes add these in the same order and update the part,
    and parameters are gathered within the node. Small parameters go as with `sharded`, and all of it overlaps as there.

    Raises:
        ConfigError: several ranks, all on one node. OptionError: momentum correction beside an optimizer's momentum.
    """

    sums_shards = False
    Options = SparseOptions
    options: SparseOptions
    streams = (Stream.GRADIENTS, Stream.NODES, Stream.PARAMETERS)

    def __init__(self, group: PlannedGroup, options: Any = None) -> None:
        super().__init__(group, options)
        chosen = self.options
        if chosen.momentum_correction and group.momentum:
            raise OptionError(
                f"momentum_correction is {chosen.momentum_correction}, but the optimizer has a momentum of {group.momentum}, "
                f"too; set optimizer.momentum of sgd or lars to 0, or leave momentum_correction out.",
                "momentum_correction",
            )
        if chosen.two_level and group.nodes is not None and group.ranks > 1 and len(set(group.nodes)) == 1:
            raise ConfigError(
                f"The averager sparse saves bytes between nodes, but all {group.ranks} ranks are on one node; choose sharded, or "
                f"set averager.two_level to false to treat every rank as a node."
            )

    def words(self) -> str:
        chosen = self.options
        return (
            f"sparse, density {chosen.density}, compress {chosen.compress}, least_elements {chosen.least_elements}, "
            f"bucket_bytes {chosen.bucket_bytes}, replan {chosen.replan}, window {chosen.window}{words_of_sizes(chosen.sizes)}"
        )

    def slice_elements(self, link: LinkModel | None) -> tuple[int, int]:
        group = self.group
        return slice_sizes.slice_elements(self.options.bucket_bytes, group.layout, group.ranks, link)

    @property
    def urgency(self) -> Urgency:
        return reductions_first

    def window(self, slices: Sequence[Slice], link: LinkModel | None, times: Times | None) -> int | None:
        return self.options.window

    @property
    def nodes(self) -> int:
        """Those that exchange: the ranks themselves, where there is one level."""
        return self.group.ranks if self.levels is None else self.levels.nodes

    def _slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        """Large parameters in compressed slices, where that pays; the others fused and cut as `sharded` does."""
        layout, (least, most) = self.group.layout, self.slice_elements(link)
        small = [one.parameter for one in layout.segments if not one.decay or one.size < self.options.least_elements]
        candidates = fused(layout, least, small if self.nodes > 1 else list(layout.specs))
        compressed: list[Slice] = []
        for candidate in candidates:
            pieces = cut(layout, [candidate], most)
            if self._pays(max(piece.size for piece in pieces), link):
                compression = Compression(self.nodes, self.options.density)
                compressed += [replace(piece, compression=compression) for piece in pieces]
        chosen = {name for piece in compressed for name in piece.parameters}
        dense = cut(layout, fused(layout, least, chosen), most)
        return tuple(sorted((*compressed, *dense), key=lambda piece: piece.start))

    def _pays(self, size: int, link: LinkModel | None) -> bool:
        """Whether a slice of `size` elements is sent in part: by the first rank's part, which is the largest."""
        if self.options.compress == "always":
            return True
        elements = -(-size * self.nodes // self.group.ranks)
        seconds = SELECTION_SECONDS if self.options.sizes == "measured" else 0.0  # the rule's link has no time of its own
        part = PartOnLink(elements, self.nodes, self.group.layout.item_bytes, seconds)
        return sparse_pays(part, link or slice_sizes.RULE_LINK, Compression(self.nodes, self.options.density).kept(elements))

    def _operations(self, slices: Sequence[Slice], times: Times, link: LinkModel | None) -> tuple[Operation, ...]:
        """Those of a reduce-scatter strategy; the exchange across nodes follows the sum within them, or is all there is."""
        operations: list[Operation] = []
        for operation in super()._operations(slices, times, link):
            within = operation.kind is OperationKind.REDUCE_SCATTER and slices[operation.slice].compression is not None
            if not within or self.nodes < self.group.ranks:
                operations.append(operation)
            if within:
                operations.append(Operation(OperationKind.SPARSE, operation.slice, Stream.NODES))
        return tuple(operations)

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        chosen = self.options
        settings = SparseSettings(
            chosen.density,
            chosen.warmup_density,
            chosen.warmup_steps,
            chosen.momentum_correction,
            chosen.factor_masking,
        )
        replan = partial(self.replan, link=agreement.link) if self.replans(agreement.schedule) else None
        return SparseAverager(setup, agreement, settings=settings, two=self.levels, replan=replan)
