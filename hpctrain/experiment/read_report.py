"""The account of what a run has read: samples that could not be read, and where all others were read from."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.data.read_counts import summed
from hpctrain.run.build import Parts
from hpctrain.job.session import Session
from hpctrain.experiment.unreadable import UnreadableReport
from hpctrain.train.metrics_rest import Reporter
from hpctrain.train.progress_text import folded
from hpctrain.train.snapshot import Position

_WORDS: Mapping[str, str] = {
    "file": "from the data files",
    "local": "from the nodes' local copies",
    "memory": "from memory of the nodes",
    "nodes": "from other nodes",
}


class ReadReport:
    """Tells what a run has read. Its methods are collective.

    Args:
        reporter: of this rank.
    """

    def __init__(self, session: Session, parts: Parts, reporter: Reporter) -> None:
        self._world, self._reporter, self._cache = session.world, reporter, parts.cache
        self._gaps = UnreadableReport(session, parts.files, reporter)

    def tell(self, position: Position) -> None:
        """Record what all ranks have read since the start, by where it came from, and the samples that could not be read."""
        self._gaps.tell(position)
        total = self._total()
        if any(total.values()):
            self._reporter.record("reads", {"epoch": position.epoch, "step": position.global_step, **total})

    def finish(self, position: Position) -> None:
        """Say what all ranks have read, record samples that could not be read, and keep local copies."""
        for line in read_lines(self._total()):
            self._reporter.say(line)
        if self._cache is not None:
            self._cache.keep()
        self._gaps.finish(position)

    def _total(self) -> dict[str, int]:
        if self._cache is None:
            return {}
        return summed(self._world.allgather_object(self._cache.counts.values()))


def read_lines(total: Mapping[str, int]) -> list[str]:
    """The counts of a run in words, in short lines; none where nothing was read from a file."""
    parts = [
        f"{total[f'{name}_samples']:,} {text} ({total[f'{name}_bytes'] / 1e9:.3g} GB)"
        for name, text in _WORDS.items()
        if total.get(f"{name}_samples")
    ]
    return folded([f"samples read: {parts[0]}", *parts[1:]], between=", ") if parts else []
