"""Priority-scheduled averaging: slices in one planned order, front layers first, a few in flight at a time.

Jayarajan, Wei, Gibson, Fedorova and Pekhimenko, "Priority-based parameter propagation for distributed DNN training", MLSys 2019,
with the credit window of ByteScheduler (Peng et al., SOSP 2019), over sharded averaging. The order is fixed by simulating the
link once with measured times, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.averaging import planning
from hpctrain.averaging.norms import JointNorms
from hpctrain.averaging.planning import Times, Urgency
from hpctrain.averaging.sharding import ShardedAverager
from hpctrain.averaging.slices import Slice
from hpctrain.averaging.sufficient_factors import FcExchange
from hpctrain.comm.base import Communicator
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.base import Optimizer

_LEAST_PARAMETERS = 50_000


class Priority(ShardedAverager):
    """Sharded averaging in small slices, front layers first: an early layer's allgather overtakes late layers' reduce-scatters.

    Args:
        slice_parameters: Most parameters of a slice; smaller neighbours are fused up to half of it. Null takes 50,000 as in the
            paper, or more where so small messages would pay a link's latency too often.
        sizes: How sizes that are not given are found: "rule" takes the same ones in every run on as many ranks, so that runs
            repeat bit by bit; "measured" follows the link, which is measured at the start.
        window: Most slices in flight. Null takes what the measured link sends between two looks at it: a smaller window lets the
            link idle, a larger one lets urgent slices wait longer.
        fc_exchange: Linear layers exchange inputs and errors instead of gradients: "auto" (where that moves less), "always" or
            "never".
        two_level: Where nodes have several ranks each, sums are made within a node first, and parameters gathered across nodes
            first.
        replan: The order of the slices is planned again after a few steps, by measured times.
        nominal_batch, micro_batches, nodes: as in `Sharded`.

    Raises:
        ConfigError: fc_exchange "always" with several micro-batches, a size or window below 1, sizes given and to be measured.
    """

    _streams = 1

    def __init__(
        self,
        group: FlatGroup,
        optimizer: Optimizer,
        comm: Communicator,
        progress: ProgressEngine,
        *,
        norms: JointNorms | None = None,
        slice_parameters: int | None = None,
        sizes: planning.Sizes = "rule",
        window: int | None = None,
        fc_exchange: FcExchange = "auto",
        two_level: bool = True,
        nodes: Sequence[int] | None = None,
        nominal_batch: int | None = None,
        micro_batches: int = 1,
        replan: bool = True,
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
        self._slice_parameters = planning.check_optional("slice_parameters", slice_parameters)
        self._window = planning.check_optional("window", window)
        self._sizes = planning.check_sizes(sizes, "slice_parameters", slice_parameters)
        self._measures_link = sizes == "measured" or window is None

    def _request(self) -> str:
        sizes = planning.in_request(self._sizes)
        return f"priority, slice_parameters {self._slice_parameters}, replan {self._replan}, window {self._window}{sizes}"

    def _slice_elements(self, link: LinkModel | None) -> tuple[int, int]:
        most = self._slice_parameters
        if most is None:
            item_bytes = self.group.grad.itemsize
            most = planning.slice_bytes(_LEAST_PARAMETERS * item_bytes, self.comm.size, link) // item_bytes
        return max(1, most // 2), most

    def _window_for(self, slices: Sequence[Slice], link: LinkModel | None, times: Times | None) -> int | None:
        if self._window is not None or not slices:
            return self._window
        mean_bytes = self.group.grad.nbytes // len(slices)
        return planning.credit_window(mean_bytes, self.comm.size, link, times)

    def _urgency(self) -> Urgency:
        return planning.front_first
