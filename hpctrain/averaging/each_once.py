"""Elements of a parameter group and of its optimiser's state, each on one rank: for what is summed over ranks, such as hashes."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.averaging.base import GradientAverager
from hpctrain.backend.arithmetic import Array
from hpctrain.core.intervals import even_interval
from hpctrain.nn.parameter import Segment


def each_once(averager: GradientAverager) -> Iterator[tuple[Segment, dict[str, Array]]]:
    """Segments that have each element of the group once over the ranks of its averager, with views of their state by name.

    Even shares where every rank has all. Gradients that are kept back are not among the states. Not collective; after `drain`.
    """
    if averager.counted is not None:
        yield from averager.counted()
        return
    assert type(averager).owned is GradientAverager.owned, "an averager whose ranks own parts says which of them count"
    group, comm = averager.group, averager.comm
    for segment in group.covering(*even_interval(group.size, comm.size, comm.rank)):
        whole = group.segment(segment.parameter)
        place = slice(segment.start - whole.start, segment.stop - whole.start)
        # Optimisers know whole segments that they were given, and need not know parts of these.
        yield segment, {name: values[place] for name, values in averager.optimizer.state(whole).items()}
