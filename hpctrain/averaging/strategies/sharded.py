"""Sharded averaging, the default: reduce-scatter, an own 1/P of the update, allgather of parameters under the next forward.

Lee, Agrawal, Balaprakash, Choudhary and Liao, "Communication-efficient parallelization strategy for deep convolutional neural
network training", MLHPC 2018. Moves what an allreduce moves, half of it under the next forward; the update costs 1/P.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.averaging import planning
from hpctrain.averaging.norms import JointNorms
from hpctrain.averaging.planning import Urgency
from hpctrain.averaging.sharding import ShardedAverager
from hpctrain.averaging.sufficient_factors import FcExchange
from hpctrain.comm.base import Communicator
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.base import Optimizer


class Sharded(ShardedAverager):
    """Each rank updates its own part of the parameters: a reduce-scatter of gradients under backward, an allgather of the
    updated parameters under the next forward.

    Reduce-scatters go in backward's order on one communicator, allgathers on another; these may overtake those. Small layers
    are fused, large ones cut. Allgathers go front layers first; those of late layers go under backward where the link would
    otherwise idle (by times measured in the first steps).

    Args:
        fc_exchange: Linear layers exchange inputs and errors instead of gradients: "auto" (where that moves less), "always" or
            "never".
        bucket_bytes: Least size of a slice of fused small layers, in bytes; null chooses it as `sizes` says.
        sizes: How sizes that are not given are found: "rule" takes the same ones in every run on as many ranks, so that runs
            repeat bit by bit; "measured" follows the link, which is measured at the start.
        two_level: Where nodes have several ranks each, sums are made within a node first, and parameters gathered across nodes
            first.
        replan: The order of the allgathers is planned again after a few steps, by measured times.
        window: Most operations in flight on each communicator; null sets no limit.
        nominal_batch: samples of a step over all ranks, given by the program.
        micro_batches, nodes (of the ranks): likewise.

    Raises:
        ConfigError: fc_exchange "always" with several micro-batches, a size or window below 1, sizes given and to be measured.
    """

    def __init__(
        self,
        group: FlatGroup,
        optimizer: Optimizer,
        comm: Communicator,
        progress: ProgressEngine,
        *,
        norms: JointNorms | None = None,
        fc_exchange: FcExchange = "auto",
        bucket_bytes: int | None = None,
        sizes: planning.Sizes = "rule",
        two_level: bool = True,
        nodes: Sequence[int] | None = None,
        nominal_batch: int | None = None,
        micro_batches: int = 1,
        replan: bool = True,
        window: int | None = None,
    ) -> None:
        super().__init__(
            group,
            optimizer,
            comm,
            progress,
            norms=norms,
            fc_exchange=fc_exchange,
            nominal_batch=nominal_batch,
            micro_batches=micro_batches,
            replan=replan,
            nodes=nodes,
            two_level=two_level,
        )
        self._bucket_bytes = planning.check_optional("bucket_bytes", bucket_bytes)
        self._sizes = planning.check_sizes(sizes, "bucket_bytes", bucket_bytes)
        self._measures_link = sizes == "measured"
        self._window = None if window is None else planning.check_positive("window", window)

    def _request(self) -> str:
        sizes = planning.in_request(self._sizes)
        return f"sharded, bucket_bytes {self._bucket_bytes}, replan {self._replan}, window {self._window}{sizes}"

    def _slice_elements(self, link: LinkModel | None) -> tuple[int, int]:
        size_bytes = self._bucket_bytes
        if size_bytes is None:
            assert link is not None
            size_bytes = planning.bucket_bytes(self.group.grad.nbytes, self.comm.size, link)
        item_bytes = self.group.grad.itemsize
        return max(1, size_bytes // item_bytes), max(1, planning.largest_bytes(size_bytes) // item_bytes)

    def _urgency(self) -> Urgency:
        return planning.reductions_first
