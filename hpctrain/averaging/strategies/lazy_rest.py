"""Lazy averaging: front layers add up their gradients locally and are averaged every few steps only. It changes the optimisation.

Lee, Kang, Al-Bahrani, Agrawal, Choudhary and Liao, "Improving scalability of parallel CNN training by adaptively adjusting
parameter update frequency", JPDC 2022. The messages of front layers leave last, when no backward is left to hide them under.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager
from hpctrain.averaging.strategies.lazy import LazyAverager
from hpctrain.averaging.lazy_interval import LazyInterval
from hpctrain.averaging.options import check_at_least_one
from hpctrain.averaging.strategies.sharded import Sharded, ShardedOptions
from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine


@dataclass(frozen=True)
class LazyOptions(ShardedOptions):
    """Options of `lazy`, beside those of `sharded`.

    Args:
        layers: Number of layers, counted from the input, whose gradients are summed over several steps; of a network that has
            fewer, all.
        max_interval: Most steps between two averagings of these layers; 1 averages them in every step.
        check_every: Number of averagings from one check of the interval to the next.

    Raises:
        OptionError: a value below 1, or sizes given and to be measured.
    """

    layers: int = 8
    max_interval: int = 8
    check_every: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(layers=self.layers, max_interval=self.max_interval, check_every=self.check_every)


class Lazy(Sharded):
    """Sharded averaging that sums the gradients of front layers over several steps: it changes the optimisation.

    Slices of the front layers, which hold nothing else, are reduced, updated and gathered every `interval` steps, with the sum
    since the last time. In between these layers keep their parameters, and so does the optimiser's state of their owners. The
    interval starts at 1 and adapts (see `next_interval`): what one averaging finds holds from the next one on. Finding out costs
    a second reduce-scatter of these layers, so it is done every `check_every` averagings only.

    Linear layers among them never exchange inputs and errors: what is added up over steps is gradients.
    """

    sums_shards = False
    Options = LazyOptions
    options: LazyOptions

    def __init__(self, group: PlannedGroup, options: LazyOptions | None = None) -> None:
        super().__init__(group, options)
        self._lazy = self.apart = _front(group, self.options.layers)
        self.exchanging = {weight: biases for weight, biases in self.exchanging.items() if weight not in self._lazy}

    def words(self) -> str:
        _, _, options = super().words().partition(", ")
        return f"lazy, layers {self.options.layers} with {len(self._lazy)} parameters of this group, {options}"

    def interval(self, comm: Communicator, progress: ProgressEngine, members: int) -> LazyInterval:
        chosen = self.options
        return LazyInterval(comm, progress, members, max_interval=chosen.max_interval, check_every=chosen.check_every)

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        interval = setup.interval
        if interval is None:
            assert not self.group.several_groups, "the groups of a network share their interval"
            interval = self.interval(setup.comm, setup.progress, 1)
        return self._made(partial(LazyAverager, lazy=self._lazy, interval=interval), setup, agreement)


def _front(group: PlannedGroup, layers: int) -> frozenset[str]:
    """The group's parameters of the network's first so many layers: names that differ behind the last dot are of one layer."""
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in group.network_parameters))
    front = set(owners[:layers])
    return frozenset(name for name in group.layout.specs if name.rpartition(".")[0] in front)
