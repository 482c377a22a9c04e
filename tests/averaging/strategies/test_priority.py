"""Priority-scheduled averaging: the words that stored schedules know it by, its slices and its window."""

from __future__ import annotations

import pytest

from hpctrain.averaging.collective_schedule import Stream
from hpctrain.averaging.strategies.priority import Priority, PriorityOptions
from hpctrain.comm.link import LinkModel
from hpctrain.errors import OptionError
from tests.support.averaging import make_group, planned


def test_words_are_those_of_schedules_that_earlier_versions_stored() -> None:
    for options, words in (
        ({}, "priority, slice_parameters None, replan True, window None; parameters "),
        ({"slice_parameters": 8, "window": 2}, "priority, slice_parameters 8, replan True, window 2; parameters "),
        ({"sizes": "measured"}, "priority, slice_parameters None, replan True, window None, sizes measured; parameters "),
    ):
        assert (planned(Priority, make_group(), 4, **options).request() or "").startswith(words)


@pytest.mark.parametrize("slice_parameters", [1, 5, 1000])
def test_slices_are_small_and_on_one_stream(slice_parameters: int) -> None:
    schedule = planned(Priority, make_group(), 3, slice_parameters=slice_parameters, window=2).plan(None)
    assert schedule is not None
    assert {operation.stream for operation in schedule.operations} == {Stream.GRADIENTS}
    assert all(piece.size <= slice_parameters for piece in schedule.slices if len(piece.parameters) == 1)


def test_the_window_is_given_or_follows_from_the_link() -> None:
    link = LinkModel(1e-4, 1e-8)
    given, measured = planned(Priority, make_group(), 3, window=2, replan=False), planned(Priority, make_group(), 3, replan=False)
    assert given.plan(link).window == 2  # type: ignore[union-attr]
    assert measured.plan(link).window > 2  # type: ignore[union-attr, operator]
    assert measured.plan(None).window is None  # type: ignore[union-attr]
    assert (given.needs_link(None), measured.needs_link(None)) == (False, True)


@pytest.mark.parametrize("option", ["slice_parameters", "window"])
def test_values_below_one_are_refused(option: str) -> None:
    with pytest.raises(OptionError, match=f"{option} is 0") as caught:
        PriorityOptions(**{option: 0})
    assert caught.value.option == option
