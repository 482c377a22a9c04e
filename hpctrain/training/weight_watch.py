"""Detect flipped bits, in memory or on links, in values that ranks must hold alike.

In every step, ranks compare sums of the parameters that the step has read, taken before its update overwrites them. Each rank
also compares the values that it writes, such as optimiser state and running statistics, with the sums taken after the last write
(`optim/guarded.py`). Before checkpoints, ranks compare sums of all values that they must hold alike.

`AgreedChecksums` compares checksums within several groups of ranks by a few numbers in one sum over all ranks. n numbers h are
equal exactly if n times the sum of h^2 equals the square of the sum of h (Cauchy-Schwarz). A 32-bit checksum is sent as two
halves of 16 bits and their squares. Their float64 sums over fewer than 2^21 ranks are exact in any order.

`difference` turns the sums of all ranks into one sentence, which names the ranks that hold different bits and the array.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.backend.arithmetic import Arithmetic, Array, Fetch, WordSums
from hpctrain.backend.host_arithmetic import HostArithmetic, HostFetch
from hpctrain.core.errors import CorruptedStateError
from hpctrain.core.text import spans
from hpctrain.nn.network import ALL, Network
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.guarded import GuardedOptimizer, WriteGuard
from hpctrain.parallel.groups import GridGroups
from hpctrain.training.evaluation import WeightAverage
from hpctrain.training.finiteness import Finding, Held

_PER_GROUP = 4  # numbers: both halves and their squares
_HALF_BITS = 16
_HALF = (1 << _HALF_BITS) - 1
_KINDS = 2  # kinds of arrays: those that all ranks hold alike, and parts of split layers


class AgreedChecksums:
    """Encoding of one rank's checksums as numbers, whose sums over all ranks show whether checksums differ.

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


def alike_positions(ranks: int, splits: int) -> tuple[Sequence[Sequence[int]], ...]:
    """Return the groups of positions with equal values, by kind: for unsplit layers (0), and for parts of split layers (1).

    Args:
        splits: number of ranks that share samples.
    """
    return [range(ranks)], [range(split_rank, ranks, splits) for split_rank in range(splits)]


def agreed_checksums(groups: GridGroups) -> AgreedChecksums:
    """Return the encoding of the checksums that ranks compare in each step's message."""
    return AgreedChecksums(alike_positions(groups.messages.size, groups.split_size), groups.messages.rank)


@dataclass(frozen=True)
class Checksums:
    """Checksums of arrays that several ranks must hold alike.

    Attributes:
        names: names of the arrays, the same on each of the ranks.
        digests: checksum of each array, uint32.
        owned: for each array, whether this rank updates it; of two ranks that differ, the one that alone updates it is right.
    """

    names: Sequence[str]
    digests: np.ndarray
    owned: Sequence[bool]


@dataclass(frozen=True)
class RankReport:
    """Report of one rank.

    Attributes:
        checksums: checksums by kind.
        found: names of local arrays that changed between two writes.
    """

    checksums: Sequence[Checksums]
    found: tuple[str, ...] = ()


def difference(
    reports: Sequence[RankReport], alike: Sequence[Sequence[Sequence[int]]], world_ranks: Sequence[int], step: int
) -> tuple[str, tuple[int, ...]]:
    """Return text about the first fault in the reports, and the wrong ranks. Faults that a rank found itself come first.

    Args:
        reports: reports by position; at least one contains a fault.
        alike: by kind, groups of positions that must hold the same values.
        world_ranks: rank in the world of each position.
        step: number of steps done when the checksums were taken.
    """
    for report, rank in zip(reports, world_ranks, strict=True):
        if report.found:
            text = (
                f"On rank {rank} {report.found[0]}{_others(report.found)} changed between two updates, although nothing wrote to "
                f"it (detected after step {step}): the memory of this rank is damaged"
            )
            return text, (rank,)
    for kind, groups in enumerate(alike):
        for positions in groups:
            checksums = [reports[position].checksums[kind] for position in positions]
            found = _among(checksums, [world_ranks[position] for position in positions], step)
            if found is not None:
                return found
    return f"After step {step} ranks received different checksums, but hold equal values: a message between ranks was damaged", ()


def _among(checksums: Sequence[Checksums], ranks: Sequence[int], step: int) -> tuple[str, tuple[int, ...]] | None:
    """Return a sentence about the first difference among some ranks, and the wrong ranks; None if there is none."""
    table = np.array([one.digests for one in checksums])
    differing = np.flatnonzero((table != table[0]).any(axis=0)).tolist()
    if not differing:
        return None
    names = [checksums[0].names[place] for place in differing]
    owners = [rank for one, rank in zip(checksums, ranks, strict=True) if one.owned[differing[0]]]
    holders: dict[int, list[int]] = {}
    for rank, digest in zip(ranks, table[:, differing[0]].tolist(), strict=True):
        holders.setdefault(digest, []).append(rank)
    most = max(holders.values(), key=lambda members: (len(members), members == owners))
    what = f"{names[0]}{_others(names)}"
    if len(most) * 2 > len(ranks) or most == owners:
        odd = [rank for rank in ranks if rank not in most]
        verb = "holds" if len(odd) == 1 else "hold"
        owner = ", which owns it" if len(most) == len(odd) else ""
        return f"After step {step} {_named(odd)} {verb} other bits of {what} than {_named(most)}{owner}", tuple(odd)
    different = " and ".join(_named(members) for members in sorted(holders.values()))
    return f"After step {step} {different} hold different bits of {what}, and there is no majority", tuple(ranks)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def _others(names: Iterable[str]) -> str:
    """Return text with the number of names after the first, for example " (and 2 more)"; "" if there is one name."""
    more = len(set(names)) - 1
    return f" (and {more} more)" if more > 0 else ""


@dataclass(frozen=True)
class CheckCadence:
    """Cadence of the checks of values that ranks hold alike and of values that only one rank holds.

    Attributes:
        every_steps: steps between two checks of values that no step writes; on a device, also between two reads of the findings.
            0 disables all checks.
        hint: sentence appended to an error message.
    """

    every_steps: int = 0
    hint: str = ""


class _Taken:
    """Pending sums of arrays by kind, taken after `step` steps."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._kinds = [(list[str](), list[bool](), list[Fetch]()) for _ in range(_KINDS)]

    def add(self, kind: int, names: Sequence[str], fetches: Sequence[Fetch], owned: Sequence[bool] = ()) -> None:
        """Add pending sums of the arrays `names`, held alike by the ranks of a kind. By default this rank owns none of them."""
        lists = self._kinds[kind]
        lists[0].extend(names)
        lists[1].extend(owned or [False] * len(names))
        lists[2].extend(fetches)

    def checksum(self, kind: int, first: int) -> int:
        """Wait for the sums of a kind, and return their CRC-32, continued from `first`."""
        for fetch in self._kinds[kind][2]:
            first = zlib.crc32(fetch.result().tobytes(), first)
        return first

    def checksums(self) -> list[Checksums]:
        """Wait for all sums, and return them by kind."""
        return [
            Checksums(names, np.concatenate([np.zeros(0, np.uint32), *(fetch.result() for fetch in fetches)]), owned)
            for names, owned, fetches in self._kinds
        ]


class WeightWatch:
    """Comparison of this rank's replica with those of other ranks, and guards of the values that this rank writes.

    Only `compare_all`, `explains` and `error` are collective: the checksums of steps are sent in the steps' messages.

    Args:
        averagers: averagers by parameter group, created with `AveragerSetup.watched`.
        average: average of the weights; None: there is none.
        cadence: cadence of the checks; its `every_steps` must be above 0.

    Attributes:
        statistics: guard of the running statistics and their averages; every write to them must go through its `write`.
    """

    def __init__(
        self,
        network: Network,
        averagers: Mapping[str, GradientAverager],
        optimizers: Mapping[str, GuardedOptimizer],
        average: WeightAverage | None,
        groups: GridGroups,
        cadence: CheckCadence,
    ) -> None:
        self._averagers, self._comm = averagers, groups.messages
        self._every, self._hint = cadence.every_steps, cadence.hint
        self._alike, self._agreed = alike_positions(groups.messages.size, groups.split_size), agreed_checksums(groups)
        self._facts = 0
        self._sent = _Taken(0)
        #: sums of steps that are not sent yet. On a device they are sent one step late, to avoid a wait
        self._pending = deque[_Taken](maxlen=1 if network.kernels.arithmetic.on_host else 2)
        #: names and sums of other arrays than those of `GradientAverager.reads` that ranks must hold alike, with their kind
        self._others: list[tuple[int, list[str], WordSums]] = []
        views = {f"running statistic {name}": view for name, view in network.statistics.views.items()}
        if average is not None:
            views |= {f"the average of running statistic {name}": view for name, view in average.views.items()}
        statistics, host = {name: view.reshape(-1) for name, view in views.items()}, HostArithmetic()
        self.statistics = WriteGuard(statistics, host)
        self._hold_alike(0, statistics, host)
        self._frozen = []
        for name, group in network.frozen_groups.items():
            self._frozen.append(WriteGuard(_parameters(group), group.arithmetic))
            self._hold_alike(_kind(name), _parameters(group), group.arithmetic)
        self._guards = [self.statistics, *self._frozen]
        for name, averager in averagers.items():
            group, rounded = averager.group, averager.rounded
            self._guards += optimizers[name].watch(averager.update_parts, parameters=rounded is None)
            self._guards += [] if rounded is None else rounded.guards
            alike = {} if averager.reads is not None else _parameters(group)
            for segment in group.segments if type(averager).owned is GradientAverager.owned else ():  # every rank updates all
                state = averager.optimizer.state(segment)
                alike |= {f"the {key} of {segment.parameter}": view for key, view in state.items()}
            self._hold_alike(_kind(name), alike, group.arithmetic)

    def _hold_alike(self, kind: int, arrays: Mapping[str, Array], arithmetic: Arithmetic) -> None:
        if arrays:
            self._others.append((kind, list(arrays), arithmetic.word_sums(list(arrays.values()))))

    # -- in steps --------------------------------------------------------------------------------------------------------------

    def take(self, step: int) -> None:
        """Start summing the parameters that a step has read, without waiting. Call it between backward and `end_backward`.

        Args:
            step: number of steps done before this one.
        """
        self._pending.append(self._taken(step))
        if step % self._every:
            return
        for guard in self._frozen:
            guard.compare()
        for guard in self._guards:
            guard.fetch()

    def message(self, facts: int = 0) -> np.ndarray:
        """Return the numbers for a step's message. `facts` is a checksum of further values that all ranks must hold alike."""
        self._facts = facts
        full = len(self._pending) == self._pending.maxlen
        self._sent = self._pending.popleft() if full else _Taken(self._sent.step)
        return self._numbers()

    # -- between steps ---------------------------------------------------------------------------------------------------------

    def compare_all(self, step: int, *, schedules: bool = False) -> bool:
        """Compare all watched values, and return whether they are equal and undamaged. Collective; call it after a drain.

        Args:
            step: number of steps done.
            schedules: whether to compare the schedules of the averagers as well.
        """
        self.verify()
        now = self._taken(step)
        for kind, names, sums in self._others:
            now.add(kind, names, [sums.fetch()])
        for name, averager in self._averagers.items() if schedules else ():
            if averager.schedule is not None:
                digest = np.array([zlib.crc32(averager.schedule.digest().encode())], np.uint32)
                now.add(_kind(name), [f"the schedule of parameters {name}"], [HostFetch(digest)])
        return all(map(self._is_equal, (*self._pending, now)))

    def verify(self) -> bool:
        """Return whether any values that only this rank writes have changed without a write. Call it after a drain."""
        for guard in self._guards:
            guard.compare()
            guard.fetch()
            guard.read()
        return any(guard.changed for guard in self._guards)

    def explains(self, findings: Sequence[Finding | None]) -> bool:
        """Return whether damage on some ranks explains non-finite values. Collective; call it before `error`, after a drain.

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
        taken = [one for one in (self._sent, *self._pending) if one.step <= first - everywhere]
        return not all(map(self._is_equal, taken))

    def remember(self) -> None:
        """Take the current values as correct, because parameters or state were loaded or a step was undone."""
        for guard in self._guards:
            guard.remember()

    def error(self, kept_step: int | None) -> CorruptedStateError:
        """Return the error about the latest comparison, with the wrong ranks.

        Collective, after a drain; every rank returns the same error.

        Args:
            kept_step: step of the newest checkpoint; None if there is none.
        """
        self.verify()  # an owner may not yet have compared its arrays with the values that it wrote
        changed = tuple(name for guard in self._guards for name in guard.changed)
        reports = self._comm.allgather_object(RankReport(self._sent.checksums(), changed))
        text, ranks = difference(reports, self._alike, self._comm.world_ranks, self._sent.step)
        remedy = "restart the run, because it has no checkpoint yet"
        if kept_step is not None:
            remedy = f"resume from the checkpoint of step {kept_step}"
        return CorruptedStateError(" ".join(filter(None, (f"{text}; {remedy}.", self._hint))), ranks=ranks)

    # -- helpers ---------------------------------------------------------------------------------------------------------------

    def _taken(self, step: int) -> _Taken:
        """Start summing the parameters that several ranks hold."""
        taken = _Taken(step)
        for name, averager in self._averagers.items():
            if averager.reads is not None:
                averager.complete_parameters()
                taken.add(_kind(name), averager.reads.names, averager.reads.complete(), averager.reads.owned)
        return taken

    def _is_equal(self, taken: _Taken) -> bool:
        """Return whether these sums are equal and no rank has found local damage. Collective."""
        self._sent = taken
        return self._agreed.agree(np.sum(self._comm.allgather_object(self._numbers()), axis=0))

    def _numbers(self) -> np.ndarray:
        """Return the numbers that encode the checksums in `_sent` and whether this rank has found local damage."""
        for guard in self._guards:
            guard.read()
        checksums = [self._sent.checksum(kind, first) for kind, first in enumerate((self._facts, 0))]
        return self._agreed.numbers(checksums, found=any(guard.changed for guard in self._guards))


def _kind(group: str) -> int:
    """Return the kind of a parameter group: 0 for unsplit layers, 1 for parts of split layers."""
    return int(group != ALL)


def _parameters(group: FlatGroup) -> dict[str, Array]:
    return {f"parameter {one.parameter}": group.data[one.start : one.stop] for one in group.segments if one.size}
