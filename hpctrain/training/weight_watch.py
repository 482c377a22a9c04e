"""Detect flipped bits, in memory or on links, in values that ranks must hold alike.

Values that every rank holds are compared between ranks. In every step, ranks compare sums of the parameters that the step has
read, taken before its update overwrites them. Every few steps, they compare checksums of one part of all values; successive
checks cover successive parts. Before checkpoints, they compare checksums of all values. Values that only updates write, for
example an owner's optimiser state (`optim/guarded.py`), running statistics and frozen parameters, are compared locally with the
sums taken after the last write.

`AgreedChecksums` compares checksums within several groups of ranks by a few numbers in one sum over all ranks. n numbers h are
equal exactly if n times the sum of h^2 equals the square of the sum of h (Cauchy-Schwarz). A 32-bit checksum is sent as two
halves of 16 bits and their squares. Their float64 sums over fewer than 2^21 ranks are exact in any order.

`PartChecksums` and `PartGuard` compute the checksums. `difference` turns the checksums of all ranks into one sentence, which
names the ranks that hold different bits and the array.
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
from hpctrain.training.evaluation import WeightAverage
from hpctrain.training.finiteness import Finding, Held

_PER_GROUP = 4  # numbers: both halves and their squares
_HALF_BITS = 16
_HALF = (1 << _HALF_BITS) - 1


class AgreedChecksums:
    """Encodes checksums of one rank as numbers, and evaluates the sums of these numbers over all ranks.

    Args:
        alike: by kind, groups of positions that must have the same checksum; each position is in one group of a kind.
        position: position of this rank.

    Attributes:
        size: number of elements of a message.
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
        """Return the message of this rank, float64 (size,).

        Args:
            checksums: one checksum per kind, below 2^32.
            found: whether this rank has found local damage.
        """
        numbers = [0] * self.size
        for place, checksum in zip(self._places, checksums, strict=True):
            low, high = checksum & _HALF, checksum >> _HALF_BITS
            numbers[_PER_GROUP * place : _PER_GROUP * (place + 1)] = low, high, low * low, high * high
        numbers[-1] = found
        return np.array(numbers, np.float64)

    def agree(self, sums: np.ndarray) -> bool:
        """Return whether the checksums within each group are equal and no rank has found local damage.

        Args:
            sums: sum of `numbers` over all ranks.
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
        name: name of the whole array, for messages.
        values: elements, 1-D; whole 32-bit words.
        parameter: parameter that must be complete before the elements are read; None: none.
        arithmetic: arithmetic of the memory that holds the elements.
    """

    name: str
    values: Array
    parameter: str | None = None
    arithmetic: Arithmetic = _HOST


WatchedPart = tuple[WatchedPiece, ...]


def cut(arrays: Sequence[WatchedPiece], *, most: int, least_bytes: int) -> tuple[WatchedPart, ...]:
    """Divide arrays into at least one and at most `most` parts of even size, in order.

    There are fewer parts if they would otherwise be smaller than `least_bytes`.
    """
    total_bytes = sum(piece.values.nbytes for piece in arrays)
    parts = max(1, min(most, total_bytes // max(1, least_bytes)))
    intervals = even_intervals(sum(piece.values.size for piece in arrays), parts)
    return tuple(tuple(_inside(arrays, begin, end)) for begin, end in intervals)


def _inside(arrays: Sequence[WatchedPiece], begin: int, end: int) -> Iterable[WatchedPiece]:
    """Yield the pieces that form elements [begin, end) of the concatenation of all arrays."""
    start = 0
    for piece in arrays:
        low, high = max(begin - start, 0), min(end - start, piece.values.size)
        if low < high:
            yield replace(piece, values=piece.values[low:high])
        start += piece.values.size


class PartChecksums:
    """Computes the checksums of a part's pieces in any memory. All buffers are allocated in the constructor.

    Attributes:
        part: same as the argument.
        names: names of the pieces.
    """

    def __init__(self, part: WatchedPart) -> None:
        self.part, self.names = part, [piece.name for piece in part]
        self._tables = [(numbers, arrays.checksums()) for numbers, arrays in _by_place(part)]

    def fetch(self) -> PartDigests:
        """Start computing the checksums of the current values of the pieces, without waiting."""
        return PartDigests(len(self.part), [(numbers, table.fetch()) for numbers, table in self._tables])


class PartDigests:
    """Pending checksums (CRC-32) of a part's pieces, uint32 (pieces,). Implements `Fetch`."""

    def __init__(self, count: int, fetches: Sequence[tuple[Sequence[int], Fetch]]) -> None:
        self._count, self._fetches = count, fetches

    def result(self) -> np.ndarray:
        """Wait for the checksums, and return them in the order of the pieces."""
        digests = np.zeros(self._count, np.uint32)
        for numbers, fetch in self._fetches:
            digests[numbers] = fetch.result()
        return digests


class PartGuard:
    """Detects changes of a part's pieces between two writes. All buffers are allocated in the constructor.

    Attributes:
        changed_arrays: names of the pieces that had changed when a change was first detected; empty if none has.
        remembered: whether the correct values are known.
    """

    def __init__(self, part: WatchedPart) -> None:
        self._part = tuple(piece for piece in part if piece.values.size)
        self._guards = [(numbers, arrays.guard()) for numbers, arrays in _by_place(self._part)]
        self._on_host = all(piece.arithmetic.on_host for piece in self._part)
        self._asked: list[tuple[Sequence[int], Fetch]] = []
        self.remembered = False
        self.changed_arrays: tuple[str, ...] = ()

    def remember(self) -> None:
        """Remember the current values as correct. Call it just after they were written."""
        for _, guard in self._guards:
            guard.remember()
        self.remembered = True

    def write(self, write: Callable[[], None]) -> None:
        """Compare the pieces, call `write`, which modifies them, and remember the new values."""
        self.compare()
        write()
        self.remember()

    def compare(self) -> None:
        """Compare the pieces with the remembered values. If there are none, remember the current ones."""
        if not self.remembered:
            self.remember()
            return
        for _, guard in self._guards:
            guard.compare()
        if self._on_host:  # the result needs no wait
            self.fetch_findings()
            self.read_findings()

    def fetch_findings(self) -> None:
        """Request the findings of all comparisons so far. `read_findings` waits for them if pieces are not in host memory."""
        self._asked = [(numbers, guard.fetch_changed()) for numbers, guard in self._guards]

    def read_findings(self) -> None:
        """Update `changed_arrays` from the latest `fetch_findings`."""
        if not self._asked:
            return
        found = [(numbers, fetch.result()) for numbers, fetch in self._asked]
        self._asked = []
        if any(any(changed.tolist()) for _, changed in found) and not self.changed_arrays:
            places = sorted(numbers[place] for numbers, changed in found for place in np.flatnonzero(changed).tolist())
            self.changed_arrays = tuple(self._part[number].name for number in places)

    def verify(self) -> None:
        """Compare the pieces and wait for the findings."""
        self.compare()
        self.fetch_findings()
        self.read_findings()

    def forget(self) -> None:
        """Forget the remembered values, after other code has written. The next comparison remembers new ones."""
        self.remembered = False


def _by_place(part: WatchedPart) -> list[tuple[list[int], WatchedArrays]]:
    """Group the pieces by their arithmetic. Return the indices of the pieces and the watched arrays of each group."""
    places: dict[int, list[int]] = {}
    for number, piece in enumerate(part):
        places.setdefault(id(piece.arithmetic), []).append(number)
    return [
        (numbers, part[numbers[0]].arithmetic.watched([part[number].values for number in numbers])) for numbers in places.values()
    ]


@dataclass(frozen=True)
class Checksums:
    """Checksums of arrays that several ranks must hold alike.

    Attributes:
        names: names of the arrays, the same on each of the ranks.
        digests: checksum of each array, uint32.
        equal_at: number of steps done when all arrays were last found equal.
        step: number of steps done when the checksums were taken; None: the `step` of `difference`.
        verified: for each array, whether this rank owns it and knows that it is unchanged since it was written; empty if none is.
    """

    names: Sequence[str] = ()
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    equal_at: int = 0
    step: int | None = None
    verified: Sequence[bool] = ()

    def is_verified(self, place: int) -> bool:
        """Return whether this rank's array is known to be correct, independently of other ranks."""
        return bool(self.verified) and self.verified[place]


@dataclass(frozen=True)
class RankReport:
    """Report of one rank.

    Attributes:
        checksums: checksums by kind.
        found: names of local arrays that changed between two updates.
    """

    checksums: tuple[Checksums, ...]
    found: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplicaDifference:
    """Difference between ranks.

    Attributes:
        text: message without a remedy.
        ranks: world ranks that are wrong; all that differ if there is no majority.
    """

    text: str
    ranks: tuple[int, ...]

    def sentence(self, kept_step: int | None) -> str:
        """Return the error message, with a remedy.

        Args:
            kept_step: step of the newest checkpoint; None if there is none.
        """
        remedy = "restart the run, because it has no checkpoint yet"
        if kept_step is not None:
            remedy = f"resume from the checkpoint of step {kept_step}"
        return f"{self.text}; {remedy}."


def difference(
    reports: Sequence[RankReport], alike: Sequence[Sequence[Sequence[int]]], world_ranks: Sequence[int], step: int
) -> ReplicaDifference:
    """Return the first fault in the reports. Faults that a rank found in arrays that only it holds come first.

    Args:
        reports: reports by position; at least one contains a fault.
        alike: by kind, groups of positions that must hold the same values.
        world_ranks: world rank of each position.
        step: number of steps done when the checksums were taken.
    """
    findings = [_of_owner(report, rank, step) for report, rank in zip(reports, world_ranks, strict=True)]
    for kind, classes in enumerate(alike):
        for positions in classes:
            checksums = [reports[position].checksums[kind] for position in positions]
            findings.append(_among(checksums, [world_ranks[position] for position in positions], step))
    nothing = ReplicaDifference(
        f"After step {step} ranks received different checksums, but hold equal values: a message between ranks was damaged", ()
    )
    return next((finding for finding in findings if finding is not None), nothing)


def _of_owner(report: RankReport, rank: int, step: int) -> ReplicaDifference | None:
    """Return the changes that a rank found in arrays that only it holds; None if there are none."""
    if not report.found:
        return None
    text = (
        f"On rank {rank} {report.found[0]}{_others(report.found)} changed between two updates, although nothing wrote to it "
        f"(detected after step {step}): the memory of this rank is damaged"
    )
    return ReplicaDifference(text, (rank,))


def _among(checksums: Sequence[Checksums], ranks: Sequence[int], step: int) -> ReplicaDifference | None:
    """Return the first difference among some ranks; None if there is none."""
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
    what, since = f"{names[0]}{_others(names)}", f"all were equal after step {checksums[0].equal_at}"
    if len(most) * 2 > len(ranks) or most == owners:
        odd = [rank for rank in ranks if rank not in most]
        verb = "holds" if len(odd) == 1 else "hold"
        owner = ", which owns it" if len(most) == len(odd) else ""
        text = f"After step {step} {_named(odd)} {verb} other bits of {what} than {_named(most)}{owner}; {since}"
        return ReplicaDifference(text, tuple(odd))
    different = " and ".join(_named(members) for members in sorted(holders.values()))
    text = f"After step {step} {different} hold different bits of {what}, and there is no majority; {since}"
    return ReplicaDifference(text, tuple(ranks))


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def _others(names: Iterable[str]) -> str:
    """Return text with the number of names after the first, for example " (and 2 more)"; "" if there is one name."""
    more = len(set(names)) - 1
    return f" (and {more} more)" if more > 0 else ""


#: checksums by kind: of layers that all ranks hold alike, and of parts of split layers
_AllChecksums = tuple[Checksums, ...]
_Taken = tuple[Sequence[str], PartDigests]
_KINDS = 2
_PAIR = 2  # number of ranks without a majority
_NO_SUMS = np.zeros(0, np.uint32)
_NO_CHECKSUMS = Checksums()


@dataclass(frozen=True)
class CheckCadence:
    """Interval of the comparisons between ranks, and size of the parts that are compared.

    Attributes:
        every_steps: steps between two checks of a part; 0 disables all comparisons, including those of parameters that steps
            read.
        most_parts: maximum number of checks until everything has been compared.
        least_part_bytes: minimum size of a part.
        hint: sentence appended to an error message.
    """

    every_steps: int = 0
    most_parts: int = 16
    least_part_bytes: int = 1 << 20
    hint: str = ""


@dataclass(frozen=True)
class _Read:
    """Pending sums of the parameters that a step has read.

    Attributes:
        step: number of steps done before this step.
        fetches: pending sums, by kind.
        verified: by kind and piece, whether this rank owns the piece and knows that it is correct.
    """

    step: int
    fetches: tuple[list[Fetch], ...]
    verified: tuple[Sequence[bool], ...]


def alike_positions(ranks: int, splits: int) -> tuple[Sequence[Sequence[int]], ...]:
    """Return, by kind, the groups of positions with equal contents: of unsplit layers, and of the parts of split layers.

    Args:
        splits: number of ranks that share samples.
    """
    return [range(ranks)], [range(split_rank, ranks, splits) for split_rank in range(splits)]


def agreed_checksums(groups: GridGroups) -> AgreedChecksums:
    """Return the checksums by kind that ranks compare in each step's message."""
    return AgreedChecksums(alike_positions(groups.messages.size, groups.split_size), groups.messages.rank)


class WeightWatch:
    """Compares this rank's replica with the replicas of other ranks, and guards the values that only this rank writes.

    Only `compare_all`, `explains` and `error` are collective: the checksums of steps are sent in the steps' messages.

    Args:
        guards: optimisers by parameter group.
        average: average of the weights; None: there is none.
        groups: communicators of the grid.
        cadence: cadence of the checks; its `every_steps` must be above 0.

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
        self._averagers, self._optimizers, self._agreed = averagers, guards, agreed_checksums(groups)
        self._facts = 0
        self._comm, self._every, self._hint = groups.messages, cadence.every_steps, cadence.hint
        self._alike = alike_positions(groups.messages.size, groups.split_size)
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
        #: number of steps done when a part was last found equal, by kind and part
        self._equal_at = [[0] * len(parts) for parts in self._parts]
        self._part_checksums: tuple[_Taken, ...] | None = None
        self._checksums_step = self._taken_step = self._sent_step = 0
        self._sent: _AllChecksums = ()
        self._has_sent_parts = False
        self._all_equal_at = -1
        self._read_names, self._read_owned = self._watch_reads()
        #: sums of steps that are not sent yet. On a device they are sent one step late, to avoid a wait
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
        """Number of checks until each part has been compared."""
        return max(map(len, self._parts))

    def _watch_reads(self) -> tuple[tuple[list[str], ...], tuple[list[bool], ...]]:
        """Let the averagers sum the parameters that steps read, if other ranks have copies.

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
        """Start computing the checksums of a part if a check is due, without waiting.

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
        """Start summing the parameters that a step has read, without waiting. Call it between backward and `end_backward`.

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
                # The update of the previous step has compared the owned parameters with the remembered sums.
                if self._owned_known[name]:
                    verified[_kind(name)] = self._read_owned[_kind(name)]
                self._owned_known[name] = self._knows_owned(name)
        self._frozen.compare()
        self._reads = [*self._reads, _Read(step, fetches, tuple(verified))][-self._steps_kept :]
        self._taken_step = step

    def message(self, facts: int = 0) -> np.ndarray:
        """Return the numbers for a step's message (see `AgreedChecksums.numbers`), with the checksum of further equal facts."""
        self._facts = facts
        self._has_sent_parts, taken = self._part_checksums is not None, self._part_checksums
        of_parts = [_NO_CHECKSUMS] * len(self._parts)
        if taken is not None:
            equal_at = [steps[self._turn(self._checksums_step, steps)] for steps in self._equal_at]
            of_parts = [Checksums(names, digests.result(), at) for (names, digests), at in zip(taken, equal_at, strict=True)]
        self._part_checksums = None
        reads = self._next_reads() if len(self._reads) == self._steps_kept else [_NO_CHECKSUMS] * _KINDS
        self._sent, self._sent_step = (*reads, *of_parts), self._taken_step
        return self._numbers()

    def read(self, sums: np.ndarray) -> bool:
        """Return whether all compared values are equal and undamaged.

        Args:
            sums: sum of the latest `message` over all ranks.
        """
        if not self._agreed.agree(sums):
            return False
        if self._has_sent_parts:
            for parts, equal_at in zip(self._parts, self._equal_at, strict=True):
                equal_at[self._turn(self._checksums_step, parts)] = self._checksums_step
        step = self._sent[0].step
        self._read_equal_at = self._read_equal_at if step is None else step
        return True

    def _next_reads(self) -> list[Checksums]:
        """Remove the oldest pending sums of a step, wait for them, and return them by kind."""
        read = self._reads.pop(0)
        digests = [np.concatenate([fetch.result() for fetch in fetches]) if fetches else _NO_SUMS for fetches in read.fetches]
        kinds = zip(self._read_names, digests, read.verified, strict=True)
        return [Checksums(names, sums, self._read_equal_at, read.step, verified) for names, sums, verified in kinds]

    # -- between steps ---------------------------------------------------------------------------------------------------------

    def compare_all(self, step: int, *, schedules: bool = False) -> bool:
        """Compare everything, unless that was done after the same number of steps. Collective; after a drain.

        Args:
            step: number of steps done.
            schedules: whether to compare the schedules of the averagers as well.

        Returns:
            Whether everything is equal and undamaged.
        """
        if self._all_equal_at == step:
            return True
        self.verify()
        self._owned_known = {name: self._knows_owned(name) for name in self._averagers}
        checksums = self._next_reads() if self._reads else [_NO_CHECKSUMS] * _KINDS
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
        """Return whether any values that only this rank writes have changed without a write. After a drain."""
        for guard in self._guards:
            guard.verify()
        return any(guard.changed_arrays for guard in self._guards)

    def explains(self, findings: Sequence[Finding | None]) -> bool:
        """Return whether damage on some ranks explains non-finite values. Collective; after a drain, and before `error`.

        Compare again the sums taken while parameters were finite, and the sums that are not sent yet. Once all ranks of a group
        hold non-finite parameters, their sums may differ without damage, because the sum of two NaN is the first of them.

        Args:
            findings: first finding of each rank, by position; at least one is not None.
        """
        if any(self._comm.allgather_object(self.verify())):
            return True
        first = min(one.step for one in findings if one is not None)
        bad = [bool(one and one.step == first and one.fault and one.fault.held is Held.PARAMETERS) for one in findings]
        everywhere = any(all(bad[position] for position in group) for kind in self._alike for group in kind if len(group) > 1)
        finite_until = first - everywhere
        no_parts = [_NO_CHECKSUMS] * len(self._parts)
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
        """Forget the sums of parameters and optimiser state, because a step was undone.

        The sums of statistics and frozen parameters are kept, because an undone step has not written them.
        """
        self._all_equal_at, self._part_checksums = -1, None
        self._owned_known = dict.fromkeys(self._owned_known, False)
        for guard in self._guards:
            if guard not in (self.statistics, self._frozen):
                guard.forget()

    def error(self, kept_step: int | None) -> CorruptedStateError:
        """Return the error about the latest comparison, with the wrong ranks.

        Collective, after a drain; every rank returns the same error.

        Args:
            kept_step: step of the newest checkpoint; None if there is none.
        """
        self.verify()  # an owner may not yet have compared its arrays with the values that it wrote
        changed = tuple(name for guard in self._guards for name in guard.changed_arrays)
        reports = self._comm.allgather_object(RankReport(self._sent, changed))
        found = difference(reports, (*self._alike, *self._alike), self._comm.world_ranks, self._sent_step)
        text = " ".join(filter(None, (found.sentence(kept_step), self._hint)))
        return CorruptedStateError(text, ranks=found.ranks)

    # -- helpers ---------------------------------------------------------------------------------------------------------------

    def _compared(self, kind: int, parts: Sequence[WatchedPart]) -> WatchedPart:
        """Return all pieces of a kind; none if no other rank holds them."""
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
        """Return checksums, extended by those of the schedules of the kind's parameter groups."""
        schedules = {name: averager.schedule for name, averager in self._averagers.items() if _kind(name) == kind}
        sums = {name: zlib.crc32(one.digest().encode()) for name, one in schedules.items() if one is not None}
        names = [*checksums.names, *(f"the schedule of parameters {name}" for name in sums)]
        return Checksums(names, np.concatenate([checksums.digests, np.array([*sums.values()], np.uint32)]), checksums.equal_at)

    def _compare_sent(self) -> bool:
        """Return whether the checksums in `_sent` are equal and no rank has found local damage. Collective."""
        return self._agreed.agree(np.sum(self._comm.allgather_object(self._numbers()), axis=0))

    def _numbers(self) -> np.ndarray:
        """Return the numbers that encode the checksums in `_sent` and whether this rank has found local damage."""
        for guard in self._guards:
            guard.read_findings()
        kinds = (self._sent[kind::_KINDS] for kind in range(_KINDS))
        joined = (b"".join(one.digests.tobytes() for one in kind) for kind in kinds)
        checksums = [zlib.crc32(digests, first) for digests, first in zip(joined, (self._facts, 0), strict=True)]
        return self._agreed.numbers(checksums, found=any(guard.changed_arrays for guard in self._guards))


def _complete(averagers: Iterable[GradientAverager], part: WatchedPart) -> None:
    """Wait until all parameters of a part are complete, including those that this rank's forward did not use."""
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
    """Return the arrays that the averager keeps equal on its ranks: parameters and replicated optimiser state."""
    group, pieces = averager.group, list[WatchedPiece]()
    for segment in group.segments:
        values = group.data[segment.start : segment.stop]
        pieces.append(WatchedPiece(f"parameter {segment.parameter}", values, segment.parameter, group.arithmetic))
    for segment in group.segments if _replicates_state(averager) else ():
        for state, view in averager.optimizer.state(segment).items():
            pieces.append(WatchedPiece(f"the {state} of {segment.parameter}", view, segment.parameter, group.arithmetic))
    return pieces


def _frozen_pieces(group: FlatGroup) -> list[WatchedPiece]:
    """Return the pieces of a group's frozen parameters, which must never change."""
    of_segments = ((segment, group.data[segment.start : segment.stop]) for segment in group.segments)
    return [WatchedPiece(f"parameter {segment.parameter}", data, arithmetic=group.arithmetic) for segment, data in of_segments]


def _replicates_state(averager: GradientAverager) -> bool:
    """Return whether every rank of the averager owns all parameters and therefore holds the whole optimiser state."""
    return type(averager).owned is GradientAverager.owned


def _keeps_parameters(averager: GradientAverager) -> bool:
    """Return whether this rank's parameters remain unchanged from one update to the next."""
    rounding = None if averager.schedule is None else averager.schedule.rounding
    return averager.comm.size == 1 or rounding is None or rounding.parameters == "float32"
