"""Lazy averaging: front layers add up their gradients locally and are averaged every few steps only. It changes the optimisation.

Lee, Kang, Al-Bahrani, Agrawal, Choudhary and Liao, "Improving scalability of parallel CNN training by adaptively adjusting
parameter update frequency", JPDC 2022. The messages of front layers leave last, when no backward is left to hide them under.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.averaging.allreduce_strategy import AllreduceStrategy
from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager
from hpctrain.averaging.lazy_averager import LazyAverager
from hpctrain.averaging.options import check_at_least_one, check_sizes, words_of_sizes
from hpctrain.averaging.slice_sizes import Sizes
from hpctrain.averaging.slices import Slice, fused
from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.comm.link import LinkModel
from hpctrain.errors import ConfigError
from hpctrain.nn.parameter import GroupLayout


@dataclass(frozen=True)
class LazyOptions:
    """Options of `lazy`.

    Args:
        layers: Number of layers, counted from the input, whose gradients are summed over several steps.
        max_interval: Most steps between two averagings of these layers; 1 makes it `bucketed`.
        check_every: Number of averagings from one check of the interval to the next.
        bucket_bytes: Least size of a bucket, in bytes; null chooses it as `sizes` says.
        sizes: How sizes that are not given are found: "rule" takes the same ones in every run on as many ranks, so that runs
            repeat bit by bit; "measured" follows the link, which is measured at the start.

    Raises:
        OptionError: a value below 1, or sizes given and to be measured.
    """

    layers: int = 8
    max_interval: int = 8
    check_every: int = 4
    bucket_bytes: int | None = None
    sizes: Sizes = "rule"

    def __post_init__(self) -> None:
        counts = {"layers": self.layers, "max_interval": self.max_interval, "check_every": self.check_every}
        check_at_least_one(**counts, bucket_bytes=self.bucket_bytes)
        check_sizes(self.sizes, bucket_bytes=self.bucket_bytes)


class Lazy(AllreduceStrategy):
    """Bucketed averaging that sums the gradients of front layers over several steps: it changes the optimisation.

    Overlapped, fused allreduces; those of the front layers every `interval` steps, of the sum since the last time. In between
    these layers keep their parameters. The interval starts at 1 and adapts (see `next_interval`): what one averaging finds holds
    from the next one on. Finding out costs a second allreduce of these layers, so it is done every `check_every` averagings
    only. With `max_interval` 1 this is `bucketed`.

    Raises:
        ConfigError: a network with several groups of parameters.
    """

    Options = LazyOptions
    options: LazyOptions

    def __init__(self, group: PlannedGroup, options: LazyOptions | None = None) -> None:
        if group.several_groups:
            raise ConfigError(
                "The averager lazy holds back the first layers of one group of parameters, but this network has several, as its "
                "layers are split over grid.rows ranks; choose sharded, or set grid.rows to 1."
            )
        super().__init__(group, options)
        self._lazy = _front(group.layout, self.options.layers)

    def words(self) -> str:
        chosen = self.options
        return f"lazy, layers {chosen.layers}, bucket_bytes {chosen.bucket_bytes}{words_of_sizes(chosen.sizes)}"

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        layout, least = self.group.layout, self.least_elements(link)
        eager = [name for name in layout.specs if name not in self._lazy]
        return (*fused(layout, least, eager), *fused(layout, least, self._lazy))

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        chosen = self.options
        return LazyAverager(setup, agreement, lazy=self._lazy, max_interval=chosen.max_interval, check_every=chosen.check_every)


def _front(layout: GroupLayout, layers: int) -> frozenset[str]:
    """The parameters of the first so many layers: names that differ in what follows the last dot belong to one layer."""
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in layout.specs))
    front = set(owners[:layers])
    return frozenset(name for name in layout.specs if name.rpartition(".")[0] in front)
