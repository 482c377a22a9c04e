"""Watches what ranks must hold alike: every few steps a part of it is compared by checksums; before checkpoints, all of it.

Memory and links may flip bits unnoticed. Where every rank holds something, ranks compare. What one rank alone holds, the
optimiser's state of its part, is compared with sums that were taken when it was written (`optim/guarded.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.comm.progress import ProgressEngine, Ticket
from hpctrain.errors import CorruptedStateError
from hpctrain.nn.network import ALL, Network
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.guarded import GuardedOptimizer
from hpctrain.parallel.groups import GridGroups
from hpctrain.train.watch_report import Checksums, RankReport, difference
from hpctrain.train.watched_parts import Part, PartChecksums, PartDigests, WatchedPiece, cut

#: by kind: of what all ranks hold alike, and of what those with the same part of split layers do
_AllChecksums = tuple[Checksums, ...]
_Look = tuple[Sequence[str], PartDigests]


@dataclass(frozen=True)
class CheckCadence:
    """How often ranks compare, and how much at a time.

    Attributes:
        every_steps: from one check to the next; 0: never, and nothing is compared at all.
        most_parts: checks until all has been compared, at most. least_part_bytes: what one check looks at, where there is more.
        hint: a sentence behind that of an error.
    """

    every_steps: int = 0
    most_parts: int = 16
    least_part_bytes: int = 1 << 20
    hint: str = ""


class WeightWatch:
    """Compares this rank's replica with those of the others, and owned state with itself. `look` and `forget` are not collective.

    Args:
        guards: the optimisers, by parameter group. groups: of ranks; checksums travel beside the steps' messages.
        cadence: of checks, with `every_steps` above 0.
    """

    def __init__(
        self,
        network: Network,
        averagers: Mapping[str, GradientAverager],
        guards: Mapping[str, GuardedOptimizer],
        groups: GridGroups,
        progress: ProgressEngine,
        cadence: CheckCadence,
    ) -> None:
        self._averagers, self._guards, self._progress = averagers, guards, progress
        self._comm, self._every, self._hint = groups.messages, cadence.every_steps, cadence.hint
        ranks, splits = self._comm.size, groups.split_size
        #: by kind, the positions that hold the same
        self._alike = ([range(ranks)], [range(split_rank, ranks, splits) for split_rank in range(splits)])
        statistics = [
            WatchedPiece(f"running statistic {name}", view.reshape(-1)) for name, view in network.statistics.views.items()
        ]
        of_group = {name: _frozen_pieces(group) for name, group in network.frozen_groups.items()}
        for name, averager in averagers.items():
            of_group[name] = [*_pieces(averager), *of_group.get(name, [])]
        kinds = [*of_group.get(ALL, ()), *statistics], [piece for name in of_group if name != ALL for piece in of_group[name]]
        cuts = [cut(kind, most=cadence.most_parts, least_bytes=cadence.least_part_bytes) for kind in kinds]
        self._parts = tuple(tuple(map(PartChecksums, parts)) for parts in cuts)
        self._whole = tuple(PartChecksums(self._compared(kind, parts)) for kind, parts in enumerate(cuts))
        #: by kind and part, steps done when it was last found equal
        self._equal_at = [[0] * len(parts) for parts in self._parts]
        self._gathered = np.zeros((ranks, len(self._parts) + 1), np.int64)
        self._looks: tuple[_Look, ...] | None = None
        self._sent: _AllChecksums = ()
        self._ticket: Ticket | None = None
        self._look_step = self._sent_step = 0
        self._all_equal_at = -1
        for name, averager in averagers.items():
            if averager.comm.size == 1 or not _replicates_state(averager):
                guards[name].watch(parameters=_keeps_parameters(averager))

    @property
    def checks_to_see_all(self) -> int:
        """Checks until each part was looked at."""
        return max(map(len, self._parts))

    # -- in steps --------------------------------------------------------------------------------------------------------------

    def look(self, step: int) -> None:
        """Between forward and backward, when parameters hold all of `step` steps: take checksums, if it is time for it.

        Does not wait for them.
        """
        if step % self._every:
            return
        looks = []
        for parts in self._parts:
            table = parts[self._turn(step, parts)]
            self._complete(table.part)
            looks.append((table.names, table.fetch()))
        for guard in self._guards.values():
            guard.look()
        self._looks, self._look_step = tuple(looks), step

    def post(self) -> None:
        """Behind the step's message: send the checksums that this step took, if any. Does not wait for others."""
        if self._looks is None:
            return
        assert self._ticket is None, "the previous comparison has not been read"
        comm, gathered = self._comm, self._gathered
        equal_at = [steps[self._turn(self._look_step, steps)] for steps in self._equal_at]
        self._sent = tuple(Checksums(names, fetch.result(), at) for (names, fetch), at in zip(self._looks, equal_at, strict=True))
        self._sent_step, self._looks = self._look_step, None
        gathered[comm.rank] = self._summary(self._sent)
        counts = [gathered.shape[1]] * comm.size
        post = self._progress.queue(comm).post
        self._ticket = post(lambda: comm.iallgather(None, gathered.reshape(-1), counts), "comparison of replicas")

    def read(self) -> bool:
        """Wait for the checksums on their way, if any; whether all is well."""
        if self._ticket is None:
            return True
        self._progress.wait(self._ticket)
        self._ticket = None
        if not self._is_well(self._gathered.tolist()):
            return False
        for parts, equal_at in zip(self._parts, self._equal_at, strict=True):
            equal_at[self._turn(self._sent_step, parts)] = self._sent_step
        return True

    # -- between steps ---------------------------------------------------------------------------------------------------------

    def compare_all(self, step: int, *, schedules: bool = False) -> bool:
        """Compare everything, after a drain, unless that was done after the same number of steps; whether all is well.

        Args:
            step: steps done. schedules: those of the averagers, too.
        """
        if self._all_equal_at == step:
            return True
        for guard in self._guards.values():
            guard.verify()
        looks = []
        for kind, (whole, equal_at) in enumerate(zip(self._whole, self._equal_at, strict=True)):
            look = Checksums(whole.names, whole.fetch().result(), min(equal_at))
            looks.append(self._with_schedules(look, kind) if schedules else look)
        self._sent, self._sent_step = tuple(looks), step
        if not self._is_well(self._comm.allgather_object(self._summary(self._sent))):
            return False
        self._equal_at = [[step] * len(parts) for parts in self._parts]
        self._all_equal_at = step
        return True

    def forget(self) -> None:
        """Parameters and state were loaded, or a step was undone: what is remembered of them does not hold any more."""
        self._all_equal_at, self._looks = -1, None
        for guard in self._guards.values():
            guard.forget()

    def error(self, kept_step: int | None) -> CorruptedStateError:
        """The sentence about what was compared last, the same on every rank, with the ranks that are wrong; after a drain.

        Args:
            kept_step: of the newest checkpoint; None where there is none.
        """
        changed = tuple(name for guard in self._guards.values() for name in guard.found)
        reports = self._comm.allgather_object(RankReport(self._sent, changed))
        found = difference(reports, self._alike, self._comm.world_ranks, self._sent_step)
        text = " ".join(filter(None, (found.sentence(kept_step), self._hint)))
        return CorruptedStateError(text, ranks=found.ranks)

    # -- parts of these --------------------------------------------------------------------------------------------------------

    def _compared(self, kind: int, parts: Sequence[Part]) -> Part:
        """All pieces of a kind, where there is somebody to compare them with."""
        alone = all(len(positions) == 1 for positions in self._alike[kind])
        return () if alone else tuple(piece for part in parts for piece in part)

    def _turn(self, step: int, parts: Sequence[object]) -> int:
        """The part that a step looks at."""
        return step // self._every % len(parts)

    def _complete(self, part: Part) -> None:
        """Wait for parameters that this rank's forward did not use."""
        for averager in self._averagers.values():
            names = {piece.parameter: None for piece in part if piece.parameter in averager.group.parameters}
            averager.before_forward([averager.group.parameters[name] for name in names])

    def _with_schedules(self, look: Checksums, kind: int) -> Checksums:
        """A look, and the schedules of the parameter groups of its kind."""
        schedules = {name: averager.schedule for name, averager in self._averagers.items() if (name != ALL) == bool(kind)}
        sums = {name: zlib.crc32(one.digest().encode()) for name, one in schedules.items() if one is not None}
        names = [*look.names, *(f"the schedule of parameters {name}" for name in sums)]
        return Checksums(names, np.concatenate([look.digests, np.array([*sums.values()], np.uint32)]), look.equal_at)

    def _summary(self, looks: _AllChecksums) -> list[int]:
        """A checksum of each look, and whether this rank's owned state has changed by itself."""
        for guard in self._guards.values():
            guard.tell()
        return [*(zlib.crc32(look.digests.tobytes()) for look in looks), int(any(guard.found for guard in self._guards.values()))]

    def _is_well(self, summaries: Sequence[Sequence[int]]) -> bool:
        """Whether ranks hold alike what they must, by their summaries: the same on every rank."""
        different = any(
            summaries[position][kind] != summaries[positions[0]][kind]
            for kind, classes in enumerate(self._alike)
            for positions in classes
            for position in positions
        )
        return not different and not any(summary[-1] for summary in summaries)


def _pieces(averager: GradientAverager) -> list[WatchedPiece]:
    """All that an averager keeps equal on its ranks: parameters, and the optimiser's state where every rank has all of it."""
    group, pieces = averager.group, list[WatchedPiece]()
    for segment in group.segments:
        values = group.data[segment.start : segment.stop]
        pieces.append(WatchedPiece(f"parameter {segment.parameter}", values, segment.parameter, group.arithmetic))
    for segment in group.segments if _replicates_state(averager) else ():
        for state, view in averager.optimizer.state(segment).items():
            pieces.append(WatchedPiece(f"the {state} of {segment.parameter}", view, segment.parameter, group.arithmetic))
    return pieces


def _frozen_pieces(group: FlatGroup) -> list[WatchedPiece]:
    """Parameters that nothing writes to."""
    of_segments = ((segment, group.data[segment.start : segment.stop]) for segment in group.segments)
    return [WatchedPiece(f"parameter {segment.parameter}", data, arithmetic=group.arithmetic) for segment, data in of_segments]


def _replicates_state(averager: GradientAverager) -> bool:
    """Whether every rank of its communicator holds all of the optimiser's state, and the same: so where it owns all there is."""
    return type(averager).owned is GradientAverager.owned


def _keeps_parameters(averager: GradientAverager) -> bool:
    """Whether nothing but the next update changes what an update has made of this rank's part of the parameters."""
    rounding = None if averager.schedule is None else averager.schedule.rounding
    return averager.comm.size == 1 or rounding is None or rounding.parameters == "float32"
