"""Priority-scheduled averaging: slices in one planned order, front layers first, a few in flight at a time.

Jayarajan, Wei, Gibson, Fedorova and Pekhimenko, "Priority-based parameter propagation for distributed DNN training", MLSys 2019,
with the credit window of ByteScheduler (Peng et al., SOSP 2019), over sharded averaging. The order is fixed by simulating the
link once with measured times, so it is the same on every rank.
"""

from __future__ import annotations

from hpctrain.averaging import planning
from hpctrain.averaging.norms import JointNorms
from hpctrain.averaging.planning import Urgency
from hpctrain.averaging.sharding import FcExchange, ShardedAverager
from hpctrain.comm.base import Communicator
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.base import Optimizer

_CREDIT_PARAMETERS = 4_000_000


class Priority(ShardedAverager):
    """Sharded averaging in slices on one communicator: an early layer's allgather overtakes late layers' reduce-scatters.

    Args:
        slice_parameters: most parameters of a slice; smaller neighbours are fused up to half of it.
        window: most slices in flight. None: those of 4 M parameters (ByteScheduler's credit) or an eighth of the network, if
            that is more. The next slice starts between two operators, so the window must hold what the link sends under one; a
            smaller one lets it idle, a larger one lets urgent slices wait longer.
        fc_exchange, nominal_batch, micro_batches: as in `Sharded`.
        replan: order slices anew by times measured in the first steps.

    Raises:
        ConfigError: fc_exchange "always" with several micro-batches, or a size or window below 1.
    """

    _streams = 1
    _measures_link = False

    def __init__(
        self,
        group: FlatGroup,
        optimizer: Optimizer,
        comm: Communicator,
        progress: ProgressEngine,
        *,
        norms: JointNorms | None = None,
        slice_parameters: int = 50_000,
        window: int | None = None,
        fc_exchange: FcExchange = "auto",
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
        )
        self._slice_parameters = planning.check_positive("slice_parameters", slice_parameters)
        credit = max(_CREDIT_PARAMETERS, group.size // 8)
        self._window = max(4, -(-credit // slice_parameters)) if window is None else planning.check_positive("window", window)

    def _request(self) -> str:
        return f"priority, slice_parameters {self._slice_parameters}, replan {self._replan}"

    def _sizes(self, link: LinkModel | None) -> tuple[int, int]:
        return max(1, self._slice_parameters // 2), self._slice_parameters

    def _urgency(self) -> Urgency:
        return planning.front_first
