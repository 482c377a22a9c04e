"""Watches what ranks must hold alike, as memory and links may flip bits unnoticed.

If every rank holds something, ranks compare it. In every step they compare sums of the parameters that the step has read, taken
before its update overwrites them. Every few steps they compare checksums of one part of everything in turn, and before
checkpoints those of everything. What only updates write, such as an owner's optimiser state (`optim/guarded.py`), running
statistics and frozen parameters, a rank compares by itself with the sums that it took after its last write.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.read_sums import ReadSums
from hpctrain.backend.arithmetic import Fetch
from hpctrain.core.errors import CorruptedStateError
from hpctrain.nn.network import ALL, Network
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.guarded import GuardedOptimizer
from hpctrain.parallel.groups import GridGroups
from hpctrain.train.agreed_checksums import AgreedChecksums
from hpctrain.train.finiteness import Finding, Held
from hpctrain.train.watch_report import Checksums, RankReport, difference
from hpctrain.train.watched_parts import Part, PartChecksums, PartDigests, PartGuard, WatchedPiece, cut
from hpctrain.train.weight_average import WeightAverage

#: by kind: of what all ranks hold alike, and of what those with the same part of split layers do
_AllChecksums = tuple[Checksums, ...]
_Look = tuple[Sequence[str], PartDigests]
_KINDS = 2
_PAIR = 2  # ranks; without a majority that shows which one is wrong
_NO_SUMS = np.zeros(0, np.uint32)


@dataclass(frozen=True)
class CheckCadence:
    """How often ranks compare a part of everything, and how large the part is.

    Attributes:
        every_steps: from one check of a part to the next; 0 switches all comparisons off, including those of what steps read.
        most_parts: maximum number of checks until everything has been compared. least_part_bytes: minimum size of a part.
        hint: a sentence that follows that of an error.
    """

    every_steps: int = 0
    most_parts: int = 16
    least_part_bytes: int = 1 << 20
    hint: str = ""


@dataclass(frozen=True)
class _Read:
    """Pending sums of the parameters that a step has read.

    step: steps done before it. fetches: by kind. vouched: by kind and piece, whether this rank owns it and knows it to be right.
    """

    step: int
    fetches: tuple[list[Fetch], ...]
    vouched: tuple[Sequence[bool], ...]


def alike_positions(groups: GridGroups) -> tuple[Sequence[Sequence[int]], ...]:
    """Return, by kind, the groups of positions with equal contents: of unsplit layers, and of the parts of split layers."""
    ranks, splits = groups.messages.size, groups.split_size
    return [range(ranks)], [range(split_rank, ranks, splits) for split_rank in range(splits)]


def message_size(groups: GridGroups, cadence: CheckCadence) -> int:
    """Return the size of `WeightWatch.message`; 0 if nothing is compared."""
    return _agreed(groups).size if cadence.every_steps else 0


def _agreed(groups: GridGroups) -> AgreedChecksums:
    return AgreedChecksums(alike_positions(groups), groups.messages.rank)


class WeightWatch:
    """Compares this rank's replica with those of the others, and guards what only this rank writes.

    Only `compare_all` and `error` are collective: checksums of steps are sent in the steps' messages.

    Args:
        guards: the optimisers, by parameter group. average: of the weights; None: there is none. groups: of ranks.
        cadence: of checks, with `every_steps` above 0.

    Attributes:
        statistics: guard of the running statistics and their averages; every write to them must go through its `write`.
    """

    def __init__(
        self,
        network: Network,
        averagers: Mapping[str, GradientAverager],
        guards: Mapping[str, GuardedOptimizer],
        average: WeightAverage | None,
        groups: GridGroups,
        cadence: CheckCadence,
    ) -> None:
        self._averagers, self._optimizers, self._agreed = averagers, guards, _agreed(groups)
        self._comm, self._every, self._hint = groups.messages, cadence.every_steps, cadence.hint
        self._alike = alike_positions(groups)
        statistics = _statistics(network, average)
        of_group = {name: _frozen_pieces(group) for name, group in network.frozen_groups.items()}
        frozen = tuple(piece for pieces in of_group.values() for piece in pieces)
        self.statistics, self._frozen = PartGuard(tuple(statistics)), PartGuard(frozen)
        self._guards: list[GuardedOptimizer | PartGuard] = [*guards.values(), self.statistics, self._frozen]
        for name, averager in averagers.items():
            of_group[name] = [*_pieces(averager), *of_group.get(name, [])]
        kinds = [*of_group.get(ALL, ()), *statistics], [piece for name in of_group if name != ALL for piece in of_group[name]]
        cuts = [cut(kind, most=cadence.most_parts, least_bytes=cadence.least_part_bytes) for kind in kinds]
        self._parts = tuple(tuple(map(PartChecksums, parts)) for parts in cuts)
        self._whole = tuple(PartChecksums(self._compared(kind, parts)) for kind, parts in enumerate(cuts))
        #: by kind and part, steps done when it was last found equal
        self._equal_at = [[0] * len(parts) for parts in self._parts]
        self._looks: tuple[_Look, ...] | None = None
        self._look_step = self._taken_step = self._sent_step = 0
        self._sent: _AllChecksums = ()
        self._has_sent_looks = False
        self._all_equal_at = -1
        self._read_names, self._read_owned = self._watch_reads()
        #: of steps whose sums are not sent yet. On a device, sums are sent one step late, so that nothing waits for them
        self._reads: list[_Read] = []
        self._steps_kept = 1 if network.kernels.arithmetic.on_host else 2
        self._read_equal_at = 0
        self._vouches = dict.fromkeys(averagers, False)
        self._rounded: dict[str, list[PartGuard]] = {}
        for name, averager in averagers.items():
            if averager.comm.size == 1 or not _replicates_state(averager):
                guards[name].watch(parameters=_keeps_parameters(averager), updates=averager.update_parts)
            if averager.rounded is not None:
                self._rounded[name] = [PartGuard(tuple(starmap(WatchedPiece, arrays))) for arrays in averager.rounded.guarded()]
                averager.rounded.guards = self._rounded[name]
                self._guards += self._rounded[name]

    @property
    def checks_to_see_all(self) -> int:
        """Number of checks until each part was looked at."""
        return max(map(len, self._parts))

    def _watch_reads(self) -> tuple[tuple[list[str], ...], tuple[list[bool], ...]]:
        """Make averagers sum the parameters that steps read, if other ranks have copies.

        Returns:
            By kind, the name of each piece, and whether this rank owns it.
        """
        names: tuple[list[str], ...] = tuple([] for _ in range(_KINDS))
        owned: tuple[list[bool], ...] = tuple([] for _ in range(_KINDS))
        for name, averager in self._averagers.items():
            parts = averager.read_parts
            if averager.comm.size == 1 or not parts:
                continue
            # Between two ranks there is no majority; the owner of a piece decides who is wrong.
            own = [segment for segment in averager.owned() if segment.size] if averager.comm.size == _PAIR else []
            places = sorted({place for segment in own for place in (segment.start, segment.stop)})
            averager.reads = ReadSums(averager.group, parts, places)
            for piece in averager.reads.pieces:
                names[_kind(name)].append(f"parameter {piece.parameter}")
                owned[_kind(name)].append(any(one.start <= piece.start and piece.stop <= one.stop for one in own))
        return names, owned

    # -- in steps --------------------------------------------------------------------------------------------------------------

    def look(self, step: int) -> None:
        """Take checksums of a part if one is due. Does not wait for them.

        Call it between forward and backward, when parameters hold all updates of `step` steps.
        """
        if step % self._every:
            return
        looks = []
        for parts in self._parts:
            table = parts[self._turn(step, parts)]
            _complete(self._averagers.values(), table.part)
            looks.append((table.names, table.fetch()))
        for guard in self._guards:
            guard.look()
        self._looks, self._look_step = tuple(looks), step

    def take(self, step: int) -> None:
        """Take sums of the parameters that a step has read. Call it between backward and `end_backward`. Does not wait for them.

        Args:
            step: number of steps done before this one.
        """
        fetches: tuple[list[Fetch], ...] = tuple([] for _ in range(_KINDS))
        vouched: list[Sequence[bool]] = [() for _ in range(_KINDS)]
        for name, averager in self._averagers.items():
            if averager.reads is None:
                continue
            averager.complete_parameters()
            fetches[_kind(name)].extend(averager.reads.complete())
            if averager.comm.size == _PAIR:
                # Whether they were known to be right before this step: its update has compared them with the remembered sums.
                if self._vouches[name]:
                    vouched[_kind(name)] = self._read_owned[_kind(name)]
                self._vouches[name] = self._knows_owned(name)
        self._frozen.compare()
        self._reads = [*self._reads, _Read(step, fetches, tuple(vouched))][-self._steps_kept :]
        self._taken_step = step

    def message(self) -> np.ndarray:
        """Return the numbers for a step's message; see `AgreedChecksums.numbers`."""
        self._has_sent_looks, looks = self._looks is not None, self._looks
        of_parts = [Checksums() for _ in self._parts]
        if looks is not None:
            equal_at = [steps[self._turn(self._look_step, steps)] for steps in self._equal_at]
            of_parts = [Checksums(names, digests.result(), at) for (names, digests), at in zip(looks, equal_at, strict=True)]
        self._looks = None
        reads = self._next_reads() if len(self._reads) == self._steps_kept else [Checksums() for _ in range(_KINDS)]
        self._sent, self._sent_step = (*reads, *of_parts), self._taken_step
        return self._numbers()

    def read(self, sums: np.ndarray) -> bool:
        """Return whether all is well, given the sum over all ranks of the latest `message`."""
        if not self._agreed.are_well(sums):
            return False
        if self._has_sent_looks:
            for parts, equal_at in zip(self._parts, self._equal_at, strict=True):
                equal_at[self._turn(self._look_step, parts)] = self._look_step
        step = self._sent[0].step
        self._read_equal_at = self._read_equal_at if step is None else step
        return True

    def _next_reads(self) -> list[Checksums]:
        """Remove the oldest pending sums of a step, and return them by kind. Waits for them."""
        read = self._reads.pop(0)
        digests = [np.concatenate([_NO_SUMS, *(fetch.result() for fetch in fetches)]) for fetches in read.fetches]
        kinds = zip(self._read_names, digests, read.vouched, strict=True)
        return [Checksums(names, sums, self._read_equal_at, read.step, vouched) for names, sums, vouched in kinds]

    # -- between steps ---------------------------------------------------------------------------------------------------------

    def compare_all(self, step: int, *, schedules: bool = False) -> bool:
        """Compare everything, unless that was done after the same number of steps; return whether all is well. After a drain.

        Args:
            step: steps done. schedules: those of the averagers, too.
        """
        if self._all_equal_at == step:
            return True
        self.verify()
        self._vouches = {name: self._knows_owned(name) for name in self._averagers}
        looks = self._next_reads() if self._reads else [Checksums() for _ in range(_KINDS)]
        for kind, (whole, equal_at) in enumerate(zip(self._whole, self._equal_at, strict=True)):
            look = Checksums(whole.names, whole.fetch().result(), min(equal_at))
            looks.append(self._with_schedules(look, kind) if schedules else look)
        self._sent, self._sent_step = tuple(looks), step
        if not self._are_well():
            return False
        self._equal_at = [[step] * len(parts) for parts in self._parts]
        self._all_equal_at = self._read_equal_at = step
        return True

    def verify(self) -> bool:
        """Return whether any values that only this rank writes differ from what it has written. After a drain."""
        for guard in self._guards:
            guard.verify()
        return any(guard.found for guard in self._guards)

    def explains(self, findings: Sequence[Finding | None]) -> bool:
        """Return whether damage to some ranks explains non-finite values. Collective; after a drain, and before `error`.

        Compare the sums again that were taken while parameters were finite, and those that are not sent yet. Once all ranks of a
        group hold non-finite parameters, their sums may differ without damage: the sum of two NaN is the first of them.

        Args:
            findings: by position, what each rank has seen first; at least one is not None.
        """
        if any(self._comm.allgather_object(self.verify())):
            return True
        first = min(one.step for one in findings if one is not None)
        bad = [bool(one and one.step == first and one.fault and one.fault.held is Held.PARAMETERS) for one in findings]
        everywhere = any(all(bad[position] for position in group) for kind in self._alike for group in kind if len(group) > 1)
        finite_until = first - everywhere
        no_parts = [Checksums() for _ in self._parts]
        taken = [(self._sent_step, self._sent), (self._sent[0].step, (*self._sent[:_KINDS], *no_parts))] if self._sent else []
        while self._reads:
            taken.append((self._reads[0].step, (*self._next_reads(), *no_parts)))
        for step, sums in taken:
            self._sent = sums
            if step is not None and step <= finite_until and not self._are_well():
                return True
        return False

    def forget(self) -> None:
        """Forget all remembered sums, because parameters and state were loaded."""
        self.step_undone()
        self.statistics.forget()
        self._frozen.forget()

    def step_undone(self) -> None:
        """Forget sums of parameters and optimiser state, because a step was undone. Statistics were not written."""
        self._all_equal_at, self._looks = -1, None
        self._vouches = dict.fromkeys(self._vouches, False)
        for guard in self._guards:
            if guard not in (self.statistics, self._frozen):
                guard.forget()

    def error(self, kept_step: int | None) -> CorruptedStateError:
        """Return the error about the latest comparison, the same on every rank, with the ranks that are wrong. After a drain.

        Args:
            kept_step: of the newest checkpoint; None where there is none.
        """
        self.verify()  # an owner may not yet have compared its arrays with what it wrote
        changed = tuple(name for guard in self._guards for name in guard.found)
        reports = self._comm.allgather_object(RankReport(self._sent, changed))
        found = difference(reports, (*self._alike, *self._alike), self._comm.world_ranks, self._sent_step)
        text = " ".join(filter(None, (found.sentence(kept_step), self._hint)))
        return CorruptedStateError(text, ranks=found.ranks)

    # -- parts of these --------------------------------------------------------------------------------------------------------

    def _compared(self, kind: int, parts: Sequence[Part]) -> Part:
        """All pieces of a kind, where there is somebody to compare them with."""
        alone = all(len(positions) == 1 for positions in self._alike[kind])
        return () if alone else tuple(piece for part in parts for piece in part)

    def _knows_owned(self, name: str) -> bool:
        """Return whether a group's owned parameters are known to hold the last update's values, or are reported as changed."""
        rounded = self._rounded.get(name)
        return self._optimizers[name].vouches if rounded is None else all(guard.remembered for guard in rounded)

    def _turn(self, step: int, parts: Sequence[object]) -> int:
        """Return the index of the part that a step looks at."""
        return step // self._every % len(parts)

    def _with_schedules(self, look: Checksums, kind: int) -> Checksums:
        """Return a look with the checksums of the schedules of its kind's parameter groups."""
        schedules = {name: averager.schedule for name, averager in self._averagers.items() if _kind(name) == kind}
        sums = {name: zlib.crc32(one.digest().encode()) for name, one in schedules.items() if one is not None}
        names = [*look.names, *(f"the schedule of parameters {name}" for name in sums)]
        return Checksums(names, np.concatenate([look.digests, np.array([*sums.values()], np.uint32)]), look.equal_at)

    def _are_well(self) -> bool:
        """Return whether the checksums in `_sent` are equal and no rank has found damage by itself. Collective."""
        return self._agreed.are_well(np.sum(self._comm.allgather_object(self._numbers()), axis=0))

    def _numbers(self) -> np.ndarray:
        """Return the numbers for the checksums in `_sent`, and for whether this rank has found damage by itself."""
        for guard in self._guards:
            guard.tell()
        kinds = (self._sent[kind::_KINDS] for kind in range(_KINDS))
        checksums = [zlib.crc32(b"".join(look.digests.tobytes() for look in looks)) for looks in kinds]
        return self._agreed.numbers(checksums, found=any(guard.found for guard in self._guards))


def _complete(averagers: Iterable[GradientAverager], part: Part) -> None:
    """Wait for parameters that this rank's forward did not use."""
    for averager in averagers:
        names = {piece.parameter: None for piece in part if piece.parameter in averager.group.parameters}
        averager.before_forward([averager.group.parameters[name] for name in names])


def _kind(group: str) -> int:
    """Return the kind of a parameter group: 0 for unsplit layers, 1 for parts of split layers."""
    return int(group != ALL)


def _statistics(network: Network, average: WeightAverage | None) -> list[WatchedPiece]:
    """Return the pieces of the running statistics and of their averages."""
    pieces = [WatchedPiece(f"running statistic {name}", view.reshape(-1)) for name, view in network.statistics.views.items()]
    averages = {} if average is None else average.views
    return [
        *pieces,
        *(WatchedPiece(f"the average of running statistic {name}", view.reshape(-1)) for name, view in averages.items()),
    ]


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
