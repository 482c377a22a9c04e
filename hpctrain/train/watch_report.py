"""One sentence from the checksums of all ranks: who holds other bits than the others, and of what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpctrain.rank_spans import spans


@dataclass(frozen=True)
class Checksums:
    """Checksums of what several ranks must hold alike.

    Attributes:
        names: of the arrays, the same on each of the ranks. digests: uint32, of each.
        equal_at: steps done when all of it was last found equal.
        step: steps done when the checksums were taken; None: as many as in the report.
        vouched: by array, whether this rank owns it and knows that it is unchanged since it was written; empty if none is.
    """

    names: Sequence[str] = ()
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    equal_at: int = 0
    step: int | None = None
    vouched: Sequence[bool] = ()

    def vouches(self, place: int) -> bool:
        """Return whether this rank's array is known to be right, independently of other ranks."""
        return bool(self.vouched) and self.vouched[place]


@dataclass(frozen=True)
class RankReport:
    """One rank's looks, by kind, and the names of what it found changed of its own between two updates."""

    looks: tuple[Checksums, ...]
    found: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplicaDifference:
    """A sentence that lacks its remedy, and the ranks of the world that are wrong; all that differ where no majority tells."""

    text: str
    ranks: tuple[int, ...]

    def sentence(self, kept_step: int | None) -> str:
        """The sentence of an error. kept_step: of the newest checkpoint; None where there is none."""
        remedy = "start again, as this run has no checkpoint yet"
        if kept_step is not None:
            remedy = f"resume from the checkpoint of step {kept_step}"
        return f"{self.text}; {remedy}."


def difference(
    reports: Sequence[RankReport], alike: Sequence[Sequence[Sequence[int]]], world_ranks: Sequence[int], step: int
) -> ReplicaDifference:
    """The first that is wrong, in what a rank alone holds, then in what several hold.

    Args:
        reports: by position; something in them is wrong. alike: by kind, the positions that must hold the same.
        world_ranks: of the positions. step: steps done when the checksums were taken.
    """
    findings = [_of_owner(report, rank, step) for report, rank in zip(reports, world_ranks, strict=True)]
    for kind, classes in enumerate(alike):
        for positions in classes:
            looks = [reports[position].looks[kind] for position in positions]
            findings.append(_among(looks, [world_ranks[position] for position in positions], step))
    nothing = ReplicaDifference(
        f"After step {step} ranks received different checksums, but all hold the same: a message between them was damaged", ()
    )
    return next((finding for finding in findings if finding is not None), nothing)


def _of_owner(report: RankReport, rank: int, step: int) -> ReplicaDifference | None:
    """The changes that a rank has found in what it alone holds; None where there are none."""
    if not report.found:
        return None
    text = (
        f"On rank {rank} {report.found[0]}{_others(report.found)} changed between two updates, as was seen after step {step}, "
        f"though nothing wrote there: that rank's memory is at fault"
    )
    return ReplicaDifference(text, (rank,))


def _among(looks: Sequence[Checksums], ranks: Sequence[int], step: int) -> ReplicaDifference | None:
    """The first thing that differs among some ranks, and on whom; None where nothing does."""
    table = np.array([look.digests for look in looks])
    differing = np.flatnonzero((table != table[0]).any(axis=0)).tolist()
    if not differing:
        return None
    step = step if looks[0].step is None else looks[0].step
    owners = [rank for look, rank in zip(looks, ranks, strict=True) if look.vouches(differing[0])]
    names = [looks[0].names[place] for place in differing]
    holders: dict[int, list[int]] = {}
    for rank, digest in zip(ranks, table[:, differing[0]].tolist(), strict=True):
        holders.setdefault(digest, []).append(rank)
    most = max(holders.values(), key=lambda members: (len(members), members == owners))
    what, since = f"{names[0]}{_others(names)}", f"all had the same after step {looks[0].equal_at}"
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
    """How many more there are than the first."""
    more = len(set(names)) - 1
    return f" (and {more} more)" if more > 0 else ""
