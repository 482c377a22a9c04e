"""The sentence names the ranks that differ from most, else all, what differs first, since when, and the way back."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.train.watch_report import Checksums, RankReport, ReplicaDifference, difference

NAMES = ("parameter conv.weight", "the momentum of conv.weight", "parameter fc.weight")


def _report(*digests: int, split: int = 0, found: tuple[str, ...] = ()) -> RankReport:
    of_split = Checksums(("parameter fc2.weight",), np.array([split], np.uint32), 7)
    return RankReport((Checksums(NAMES, np.array(digests, np.uint32), 3), of_split), found)


def _difference(*reports: RankReport, splits: int = 1) -> ReplicaDifference:
    ranks = range(len(reports))
    classes = [ranks[split::splits] for split in range(splits)]
    return difference(reports, ([ranks], classes), [rank + 10 for rank in ranks], 9)


@pytest.mark.parametrize(
    ("reports", "ranks", "text"),
    [
        (
            [_report(1, 2, 3), _report(1, 2, 4), _report(1, 2, 3)],
            (11,),
            "After step 9 rank 11 holds other bits of parameter fc.weight than ranks 10, 12; all had the same after step 3",
        ),
        (
            [_report(1, 2, 3), _report(1, 4, 4), _report(1, 2, 3)],
            (11,),
            "After step 9 rank 11 holds other bits of the momentum of conv.weight (and 1 more) than ranks 10, 12; "
            "all had the same after step 3",
        ),
        (
            [_report(1, 2, 3), _report(2, 2, 3), _report(1, 2, 3), _report(3, 2, 3), _report(1, 2, 3)],
            (11, 13),
            "After step 9 ranks 11, 13 hold other bits of parameter conv.weight than ranks 10, 12, 14; "
            "all had the same after step 3",
        ),
        (
            [_report(1, 2, 3), _report(2, 2, 3)],
            (10, 11),
            "After step 9 rank 10 and rank 11 hold different bits of parameter conv.weight, and no majority tells who is wrong; "
            "all had the same after step 3",
        ),
        (
            [_report(1, 2, 3), _report(1, 2, 3), _report(2, 2, 3), _report(2, 2, 3)],
            (10, 11, 12, 13),
            "After step 9 ranks 10-11 and ranks 12-13 hold different bits of parameter conv.weight, and no majority tells who is "
            "wrong; all had the same after step 3",
        ),
        (
            [_report(1, 2, 3), _report(1, 2, 4), _report(1, 2, 3, found=("the momentum of fc.weight", "parameter fc.weight"))],
            (12,),
            "On rank 12 the momentum of fc.weight (and 1 more) changed between two updates, as was seen after step 9, "
            "though nothing wrote there: that rank's memory is at fault",
        ),
    ],
)
def test_what_is_said(reports: list[RankReport], ranks: tuple[int, ...], text: str) -> None:
    found = _difference(*reports)
    assert found.sentence(5) == f"{text}; resume from the checkpoint of step 5."
    assert found.sentence(None) == f"{text}; start again, as this run has no checkpoint yet."
    assert found.ranks == ranks


@pytest.mark.parametrize(("vouched", "ranks"), [((True, False), (11,)), ((False, True), (10,)), ((True, True), (10, 11))])
def test_of_two_ranks_the_owner_is_right(vouched: tuple[bool, bool], ranks: tuple[int, ...]) -> None:
    """The owner is right if it vouches for its values. If both ranks vouch, both are named."""
    looks = [Checksums(NAMES[:1], np.array([rank], np.uint32), 3, 8, (vouched[rank],)) for rank in range(2)]
    found = difference([RankReport((look,)) for look in looks], ([range(2)],), [10, 11], 9)
    assert found.ranks == ranks
    assert found.text.startswith("After step 8 ")
    assert ("which owns it" in found.text) == (len(ranks) == 1)


def test_a_message_that_was_damaged_blames_no_rank() -> None:
    found = _difference(_report(1, 2, 3), _report(1, 2, 3))
    assert found.ranks == ()
    assert found.text.endswith("a message between them was damaged")


def test_split_parameters_are_compared_among_those_that_hold_the_same_part() -> None:
    reports = [_report(1, 2, 3, split=number) for number in (1, 2, 1, 2, 1, 3)]
    text = "After step 9 rank 15 holds other bits of parameter fc2.weight than ranks 11, 13; all had the same after step 7"
    found = _difference(*reports, splits=2)
    assert (found.text, found.ranks) == (text, (15,))
