"""Watches what ranks must hold alike, as memory and links may flip bits unnoticed.

If every rank holds something, ranks compare it. In every step they compare sums of the parameters that the step has read,
taken before its update overwrites them. Every few steps they compare checksums of one part of everything in turn, and before
checkpoints those of everything. What only updates write, such as an owner's optimiser state (`optim/guarded.py`), running
statistics and frozen parameters, a rank compares by itself with the sums that it took after its last write.

`AgreedChecksums` compares the checksums within several groups of ranks by a few numbers in one sum over all ranks. n numbers h
are equal exactly if n times the sum of h^2 equals the square of the sum of h (Cauchy-Schwarz). A 32-bit checksum is sent as
two halves of 16 bits and their squares. Their float64 sums over fewer than 2^21 ranks are exact in any order.

`PartChecksums` and `PartGuard` take the checksums, `difference` makes one sentence of those of all ranks: who holds other bits
than the others, and of what.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.group_sums import ReadSums
from hpctrain.backend.arithmetic import Arithmetic, Array, Fetch, WatchedArrays
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.core.errors import CorruptedStateError
from hpctrain.core.intervals import even_intervals
from hpctrain.core.text import spans
from hpctrain.nn.network import ALL, Network
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.guarded import GuardedOptimizer
from hpctrain.parallel.groups import GridGroups
from hpctrain.train.evaluation import WeightAverage
from hpctrain.train.finiteness import Finding, Held

_PER_GROUP = 4  # both halves and their squares
_HALF_BITS = 16
_HALF = (1 << _HALF_BITS) - 1


class AgreedChecksums:
    """Makes the numbers of one rank, and interprets their sums over all ranks.

    Args:
        alike: by kind, groups of positions that must have the same checksum; each position is in one group of a kind.
        position: of this rank.

    Attributes:
        size: how many numbers there are.
    """

    def __init__(self, alike: Sequence[Sequence[Sequence[int]]], position: int) -> None:
        self._counts = [len(positions) for groups in alike for positions in groups]
        starts = np.cumsum([0, *map(len, alike)])
        self._places = [
            int(start) + next(place for place, positions in enumerate(groups) if position in positions)
            for start, groups in zip(starts, alike, strict=False)
        ]
        self.size = 1 + _PER_GROUP * len(self._counts)

    def numbers(self, checksums: Sequence[int], *, found: bool) -> np.ndarray:
        """Return this rank's numbers, float64 (size,).

        Args:
            checksums: of each kind, below 2^32. found: whether this rank has found damage by itself.
        """
        numbers = np.zeros(self.size, np.float64)
        for place, checksum in zip(self._places, checksums, strict=True):
            low, high = checksum & _HALF, checksum >> _HALF_BITS
            numbers[_PER_GROUP * place : _PER_GROUP * (place + 1)] = low, high, low * low, high * high
        numbers[-1] = float(found)
        return numbers

    def agree(self, sums: np.ndarray) -> bool:
        """Return whether the checksums within each group are equal and no rank has found damage.

        Args:
            sums: the sum of `numbers` over all ranks.
        """
        values: list[int] = [round(value) for value in sums.tolist()]
        for place, count in enumerate(self._counts):
            low, high, low_square, high_square = values[_PER_GROUP * place : _PER_GROUP * (place + 1)]
            if count * low_square != low * low or count * high_square != high * high:
                return False
        return values[-1] == 0


_HOST = HostArithmetic()


@dataclass(frozen=True)
class WatchedPiece:
    """Elements of an array that must be equal on several ranks.

    Attributes:
        name: of the whole array, in sentences. values: 1-D, of whole 32-bit words.
        parameter: its name, where that must be complete before they are read. arithmetic: of where they lie.
    """

    name: str
    values: Array
    parameter: str | None = None
    arithmetic: Arithmetic = _HOST


WatchedPart = tuple[WatchedPiece, ...]


def cut(arrays: Sequence[WatchedPiece], *, most: int, least_bytes: int) -> tuple[WatchedPart, ...]:
    """Return at most `most` parts of even size, in order, each of `least_bytes` or more if there are as many; at least one."""
    total_bytes = sum(piece.values.nbytes for piece in arrays)
    parts = max(1, min(most, total_bytes // max(1, least_bytes)))
    intervals = even_intervals(sum(piece.values.size for piece in arrays), parts)
    return tuple(tuple(_inside(arrays, begin, end)) for begin, end in intervals)


def _inside(arrays: Sequence[WatchedPiece], begin: int, end: int) -> Iterable[WatchedPiece]:
    """Yield pieces that make up elements [begin, end) of all arrays in a row."""
    start = 0
    for piece in arrays:
        low, high = max(begin - start, 0), min(end - start, piece.values.size)
        if low < high:
            yield replace(piece, values=piece.values[low:high])
        start += piece.values.size


class PartChecksums:
    """The checksums of a part's pieces, wherever they lie. Made at set-up; its memory is there from then on.

    Attributes:
        part: as given. names: of its pieces.
    """

    def __init__(self, part: WatchedPart) -> None:
        self.part, self.names = part, [piece.name for piece in part]
        self._tables = [(numbers, arrays.checksums()) for numbers, arrays in _by_place(part)]

    def fetch(self) -> PartDigests:
        """Take the checksums of what the pieces hold at this point of the work; does not wait."""
        return PartDigests(len(self.part), [(numbers, table.fetch()) for numbers, table in self._tables])


class PartDigests:
    """Implements `Fetch`: the checksums (CRC-32) of a part's pieces on their way; uint32 (pieces,)."""

    def __init__(self, count: int, fetches: Sequence[tuple[Sequence[int], Fetch]]) -> None:
        self._count, self._fetches = count, fetches

    def result(self) -> np.ndarray:
        """Wait for the checksums, and return them in the order of the pieces."""
        digests = np.zeros(self._count, np.uint32)
        for numbers, fetch in self._fetches:
            digests[numbers] = fetch.result()
        return digests


class PartGuard:
    """Detects changes of a part's pieces between two writes. Made at set-up.

    Attributes:
        changed_arrays: names of the pieces that had changed when a change was first seen; empty if none has.
        remembered: whether the right values are known.
    """

    def __init__(self, part: WatchedPart) -> None:
        self._part = tuple(piece for piece in part if piece.values.size)
        self._guards = [(numbers, arrays.guard()) for numbers, arrays in _by_place(self._part)]
        self._on_host = all(piece.arithmetic.on_host for piece in self._part)
        self._asked: list[tuple[Sequence[int], Fetch]] = []
        self.remembered = False
        self.changed_arrays: tuple[str, ...] = ()

    def remember(self) -> None:
        """Remember the current values as right, just after they were written."""
        for _, guard in self._guards:
            guard.remember()
        self.remembered = True

    def write(self, write: Callable[[], None]) -> None:
        """Compare the pieces, call `write`, which writes to them, and remember them."""
        self.compare()
        write()
        self.remember()

    def compare(self) -> None:
        """Compare the pieces with the remembered values; remember them if there are none."""
        if not self.remembered:
            self.remember()
            return
        for _, guard in self._guards:
            guard.compare()
        if self._on_host:  # the result needs no wait
            self.fetch_findings()
            self.read_findings()

    def fetch_findings(self) -> None:
        """Request the findings of all comparisons so far; `read_findings` waits for them, if pieces are not on the host."""
        self._asked = [(numbers, guard.fetch_changed()) for numbers, guard in self._guards]

    def read_findings(self) -> None:
        """Update `changed_arrays` from the latest `fetch_findings`."""
        changed = sorted(numbers[place] for numbers, fetch in self._asked for place in np.flatnonzero(fetch.result()).tolist())
        self.changed_arrays = self.changed_arrays or tuple(self._part[number].name for number in changed)
        self._asked = []

    def verify(self) -> None:
        """Compare now, and wait for the findings."""
        self.compare()
        self.fetch_findings()
        self.read_findings()

    def forget(self) -> None:
        """Forget the remembered values, after something else has written. The next comparison remembers new ones."""
        self.remembered = False


def _by_place(part: WatchedPart) -> list[tuple[list[int], WatchedArrays]]:
    """Return the numbers and the watched arrays of the pieces on each arithmetic."""
    places: dict[int, list[int]] = {}
    for number, piece in enumerate(part):
        places.setdefault(id(piece.arithmetic), []).append(number)
    return [
        (numbers, part[numbers[0]].arithmetic.watched([part[number].values for number in numbers])) for numbers in places.values()
    ]


@dataclass(frozen=True)
class Checksums:
    """Checksums of what several ranks must hold alike.

    Attributes:
        names: of the arrays, the same on each of the ranks. digests: uint32, of each.
        equal_at: steps done when all of it was last found equal.
        step: steps done when the checksums were taken; None: as many as in the report.
        verified: by array, whether this rank owns it and knows that it is unchanged since it was written; empty if none is.
    """

    names: Sequence[str] = ()
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    equal_at: int = 0
    step: int | None = None
    verified: Sequence[bool] = ()

    def is_verified(self, place: int) -> bool:
        """Return whether this rank's array is known to be right, independently of other ranks."""
        return bool(self.verified) and self.verified[place]


@dataclass(frozen=True)
class RankReport:
    """One rank's checksums, by kind, and the names of what it found changed of its own between two updates."""

    checksums: tuple[Checksums, ...]
    found: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplicaDifference:
    """A sentence without its remedy, and the ranks of the world that are wrong; all that differ if there is no majority."""

    text: str
    ranks: tuple[int, ...]

    def sentence(self, kept_step: int | None) -> str:
        """Return the sentence of an error. kept_step: of the newest checkpoint; None if there is none."""
        remedy = "start again, as this run has no checkpoint yet"
        if kept_step is not None:
            remedy = f"resume from the checkpoint of step {kept_step}"
        return f"{self.text}; {remedy}."


def difference(
    reports: Sequence[RankReport], alike: Sequence[Sequence[Sequence[int]]], world_ranks: Sequence[int], step: int
) -> ReplicaDifference:
    """Return the first fault, in what one rank alone holds, then in what several hold.

    Args:
        reports: by position; something in them is wrong. alike: by kind, the positions that must hold the same.
        world_ranks: of the positions. step: steps done when the checksums were taken.
    """
    findings = [_of_owner(report, rank, step) for report, rank in zip(reports, world_ranks, strict=True)]
    for kind, classes in enumerate(alike):
        for positions in classes:
            checksums = [reports[position].checksums[kind] for position in positions]
            findings.append(_among(checksums, [world_ranks[position] for position in positions], step))
    nothing = ReplicaDifference(
        f"After step {step} ranks received different checksums, but all hold the same: a message between them was damaged", ()
    )
    return next((finding for finding in findings if finding is not None), nothing)


def _of_owner(report: RankReport, rank: int, step: int) -> ReplicaDifference | None:
    """Return the changes that a rank has found in what it alone holds; None if there are none."""
    if not report.found:
        return None
    text = (
        f"On rank {rank} {report.found[0]}{_others(report.found)} changed between two updates, as was seen after step {step}, "
        f"though nothing wrote there: that rank's memory is at fault"
    )
    return ReplicaDifference(text, (rank,))


def _among(checksums: Sequence[Checksums], ranks: Sequence[int], step: int) -> ReplicaDifference | None:
    """Return the first thing that differs among some ranks, and on which; None if nothing does."""
    table = np.array([one.digests for one in checksums])
    differing = np.flatnonzero((table != table[0]).any(axis=0)).tolist()
    if not differing:
        return None
    step = step if checksums[0].step is None else checksums[0].step
    owners = [rank for one, rank in zip(checksums, ranks, strict=True) if one.is_verified(differing[0])]
    names = [checksums[0].names[place] for place in differing]
    holders: dict[int, list[int]] = {}
    for rank, digest in zip(ranks, table[:, differing[0]].tolist(), strict=True):
        holders.setdefault(digest, []).append(rank)
    most = max(holders.values(), key=lambda members: (len(members), members == owners))
    what, since = f"{names[0]}{_others(names)}", f"all had the same after step {checksums[0].equal_at}"
    if len(most) * 2 > len(ranks) or most == owners:
        odd = [rank for rank in ranks if rank not in most]
        verb = "holds" if len(odd) == 1 else "hold"
        owner = ", which owns it" if len(most) == len(odd) else ""
        text = f"After step {step} {_named(odd)} {verb} other bits of {what} than {_named(most)}{owner}; {since}"
        return ReplicaDifference(text, tuple(odd))
    different = " and ".join(_named(members) for members in sorted(holders.values()))
    text = f"After step {step} {different} hold different bits of {what}, and no majority tells who is wrong; {since}"
    return ReplicaDifference(text, tuple(ranks))


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def _others(names: Iterable[str]) -> str:
    """Return how many more there are than the first, in words."""
    more = len(set(names)) - 1
    return f" (and {more} more)" if more > 0 else ""


#: by kind: of what all ranks hold alike, and of what those with the same part of split layers do
_AllChecksums = tuple[Checksums, ...]
_Taken = tuple[Sequence[str], PartDigests]
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

    step: steps done before it. fetches: by kind. verified: by kind and piece, whether this rank owns it and knows it to be right.
    """

    step: int
    fetches: tuple[list[Fetch], ...]
    verified: tuple[Sequence[bool], ...]


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
        self._part_checksums: tuple[_Taken, ...] | None = None
        self._checksums_step = self._taken_step = self._sent_step = 0
        self._sent: _AllChecksums = ()
        self._has_sent_parts = False
        self._all_equal_at = -1
        self._read_names, self._read_owned = self._watch_reads()
        #: of steps whose sums are not sent yet. On a device, sums are sent one step late, so that nothing waits for them
        self._reads: list[_Read] = []
        self._steps_kept = 1 if network.kernels.arithmetic.on_host else 2
        self._read_equal_at = 0
        self._owned_known = dict.fromkeys(averagers, False)
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
        """Number of checks until each part was compared."""
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

    def take_checksums(self, step: int) -> None:
        """Take checksums of a part if one is due. Does not wait for them.

        Call it between forward and backward, when parameters hold all updates of `step` steps.
        """
        if step % self._every:
            return
        taken = []
        for parts in self._parts:
            table = parts[self._turn(step, parts)]
            _complete(self._averagers.values(), table.part)
            taken.append((table.names, table.fetch()))
        for guard in self._guards:
            guard.fetch_findings()
        self._part_checksums, self._checksums_step = tuple(taken), step

    def take_read_sums(self, step: int) -> None:
        """Take sums of the parameters that a step has read. Call it between backward and `end_backward`. Does not wait for them.

        Args:
            step: number of steps done before this one.
        """
        fetches: tuple[list[Fetch], ...] = tuple([] for _ in range(_KINDS))
        verified: list[Sequence[bool]] = [() for _ in range(_KINDS)]
        for name, averager in self._averagers.items():
            if averager.reads is None:
                continue
            averager.complete_parameters()
            fetches[_kind(name)].extend(averager.reads.complete())
            if averager.comm.size == _PAIR:
                # Whether they were known to be right before this step: its update has compared them with the remembered sums.
                if self._owned_known[name]:
                    verified[_kind(name)] = self._read_owned[_kind(name)]
                self._owned_known[name] = self._knows_owned(name)
        self._frozen.compare()
        self._reads = [*self._reads, _Read(step, fetches, tuple(verified))][-self._steps_kept :]
        self._taken_step = step

    def message(self) -> np.ndarray:
        """Return the numbers for a step's message; see `AgreedChecksums.numbers`."""
        self._has_sent_parts, taken = self._part_checksums is not None, self._part_checksums
        of_parts = [Checksums() for _ in self._parts]
        if taken is not None:
            equal_at = [steps[self._turn(self._checksums_step, steps)] for steps in self._equal_at]
            of_parts = [Checksums(names, digests.result(), at) for (names, digests), at in zip(taken, equal_at, strict=True)]
        self._part_checksums = None
        reads = self._next_reads() if len(self._reads) == self._steps_kept else [Checksums() for _ in range(_KINDS)]
        self._sent, self._sent_step = (*reads, *of_parts), self._taken_step
        return self._numbers()

    def read(self, sums: np.ndarray) -> bool:
        """Return whether all is well, given the sum over all ranks of the latest `message`."""
        if not self._agreed.agree(sums):
            return False
        if self._has_sent_parts:
            for parts, equal_at in zip(self._parts, self._equal_at, strict=True):
                equal_at[self._turn(self._checksums_step, parts)] = self._checksums_step
        step = self._sent[0].step
        self._read_equal_at = self._read_equal_at if step is None else step
        return True

    def _next_reads(self) -> list[Checksums]:
        """Remove the oldest pending sums of a step, and return them by kind. Waits for them."""
        read = self._reads.pop(0)
        digests = [np.concatenate([_NO_SUMS, *(fetch.result() for fetch in fetches)]) for fetches in read.fetches]
        kinds = zip(self._read_names, digests, read.verified, strict=True)
        return [Checksums(names, sums, self._read_equal_at, read.step, verified) for names, sums, verified in kinds]

    # -- between steps ---------------------------------------------------------------------------------------------------------

    def compare_all(self, step: int, *, schedules: bool = False) -> bool:
        """Compare everything, unless that was done after the same number of steps; return whether all is well. After a drain.

        Args:
            step: steps done. schedules: those of the averagers, too.
        """
        if self._all_equal_at == step:
            return True
        self.verify()
        self._owned_known = {name: self._knows_owned(name) for name in self._averagers}
        checksums = self._next_reads() if self._reads else [Checksums() for _ in range(_KINDS)]
        for kind, (whole, equal_at) in enumerate(zip(self._whole, self._equal_at, strict=True)):
            of_kind = Checksums(whole.names, whole.fetch().result(), min(equal_at))
            checksums.append(self._with_schedules(of_kind, kind) if schedules else of_kind)
        self._sent, self._sent_step = tuple(checksums), step
        if not self._compare_sent():
            return False
        self._equal_at = [[step] * len(parts) for parts in self._parts]
        self._all_equal_at = self._read_equal_at = step
        return True

    def verify(self) -> bool:
        """Return whether any values that only this rank writes differ from what it has written. After a drain."""
        for guard in self._guards:
            guard.verify()
        return any(guard.changed_arrays for guard in self._guards)

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
            if step is not None and step <= finite_until and not self._compare_sent():
                return True
        return False

    def forget(self) -> None:
        """Forget all remembered sums, because parameters and state were loaded."""
        self.forget_step()
        self.statistics.forget()
        self._frozen.forget()

    def forget_step(self) -> None:
        """Forget sums of parameters and optimiser state, because a step was undone. Statistics were not written."""
        self._all_equal_at, self._part_checksums = -1, None
        self._owned_known = dict.fromkeys(self._owned_known, False)
        for guard in self._guards:
            if guard not in (self.statistics, self._frozen):
                guard.forget()

    def error(self, kept_step: int | None) -> CorruptedStateError:
        """Return the error about the latest comparison, the same on every rank, with the ranks that are wrong. After a drain.

        Args:
            kept_step: of the newest checkpoint; None if there is none.
        """
        self.verify()  # an owner may not yet have compared its arrays with what it wrote
        changed = tuple(name for guard in self._guards for name in guard.changed_arrays)
        reports = self._comm.allgather_object(RankReport(self._sent, changed))
        found = difference(reports, (*self._alike, *self._alike), self._comm.world_ranks, self._sent_step)
        text = " ".join(filter(None, (found.sentence(kept_step), self._hint)))
        return CorruptedStateError(text, ranks=found.ranks)

    # -- parts of these --------------------------------------------------------------------------------------------------------

    def _compared(self, kind: int, parts: Sequence[WatchedPart]) -> WatchedPart:
        """Return all pieces of a kind, if there are others to compare them with."""
        alone = all(len(positions) == 1 for positions in self._alike[kind])
        return () if alone else tuple(piece for part in parts for piece in part)

    def _knows_owned(self, name: str) -> bool:
        """Return whether a group's owned parameters are known to hold the last update's values, or are reported as changed."""
        rounded = self._rounded.get(name)
        return self._optimizers[name].guards_all_parameters if rounded is None else all(guard.remembered for guard in rounded)

    def _turn(self, step: int, parts: Sequence[object]) -> int:
        """Return the index of the part that is compared after `step` steps."""
        return step // self._every % len(parts)

    def _with_schedules(self, checksums: Checksums, kind: int) -> Checksums:
        """Return checksums with those of the schedules of its kind's parameter groups."""
        schedules = {name: averager.schedule for name, averager in self._averagers.items() if _kind(name) == kind}
        sums = {name: zlib.crc32(one.digest().encode()) for name, one in schedules.items() if one is not None}
        names = [*checksums.names, *(f"the schedule of parameters {name}" for name in sums)]
        return Checksums(names, np.concatenate([checksums.digests, np.array([*sums.values()], np.uint32)]), checksums.equal_at)

    def _compare_sent(self) -> bool:
        """Return whether the checksums in `_sent` are equal and no rank has found damage by itself. Collective."""
        return self._agreed.agree(np.sum(self._comm.allgather_object(self._numbers()), axis=0))

    def _numbers(self) -> np.ndarray:
        """Return the numbers for the checksums in `_sent`, and for whether this rank has found damage by itself."""
        for guard in self._guards:
            guard.read_findings()
        kinds = (self._sent[kind::_KINDS] for kind in range(_KINDS))
        checksums = [zlib.crc32(b"".join(one.digests.tobytes() for one in kind)) for kind in kinds]
        return self._agreed.numbers(checksums, found=any(guard.changed_arrays for guard in self._guards))


def _complete(averagers: Iterable[GradientAverager], part: WatchedPart) -> None:
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
    """Return all that an averager keeps equal on its ranks: parameters, and optimiser state that every rank has whole."""
    group, pieces = averager.group, list[WatchedPiece]()
    for segment in group.segments:
        values = group.data[segment.start : segment.stop]
        pieces.append(WatchedPiece(f"parameter {segment.parameter}", values, segment.parameter, group.arithmetic))
    for segment in group.segments if _replicates_state(averager) else ():
        for state, view in averager.optimizer.state(segment).items():
            pieces.append(WatchedPiece(f"the {state} of {segment.parameter}", view, segment.parameter, group.arithmetic))
    return pieces


def _frozen_pieces(group: FlatGroup) -> list[WatchedPiece]:
    """Return parameters that nothing writes to."""
    of_segments = ((segment, group.data[segment.start : segment.stop]) for segment in group.segments)
    return [WatchedPiece(f"parameter {segment.parameter}", data, arithmetic=group.arithmetic) for segment, data in of_segments]


def _replicates_state(averager: GradientAverager) -> bool:
    """Return whether every rank of its communicator holds the same optimiser state, all of it: so if it owns all there is."""
    return type(averager).owned is GradientAverager.owned


def _keeps_parameters(averager: GradientAverager) -> bool:
    """Return whether only the next update changes what an update has made of this rank's part of the parameters."""
    rounding = None if averager.schedule is None else averager.schedule.rounding
    return averager.comm.size == 1 or rounding is None or rounding.parameters == "float32"
