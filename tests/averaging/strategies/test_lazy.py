"""Lazy averaging: what it refuses, and which layers it holds back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.averaging.strategies.lazy import Lazy, LazyOptions
from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.errors import OptionError
from hpctrain.nn.parameter import GroupLayout
from tests.support.averaging import make_group, planned


@pytest.mark.parametrize("option", ["layers", "max_interval", "check_every", "bucket_bytes"])
def test_values_below_one_are_refused(option: str) -> None:
    with pytest.raises(OptionError, match=f"{option} is 0") as caught:
        LazyOptions(**{option: 0})
    assert caught.value.option == option


@pytest.mark.parametrize("exchange", ["never", "always"])
@pytest.mark.parametrize("layers", [1, 2, 3, 5, 99])
def test_no_slice_holds_lazy_and_eager_parameters(layers: int, exchange: str) -> None:
    """The layers of the group are a, s, empty, unused, b, and the parameter of no layer; more of them are all."""
    group = make_group()
    schedule = planned(Lazy, group, 2, layers=layers, bucket_bytes=1 << 20, fc_exchange=exchange).plan(None)
    assert schedule is not None
    front = list(dict.fromkeys(name.rpartition(".")[0] for name in group.parameters))[:layers]
    covered = 0
    for piece in schedule.slices:
        assert len({name.rpartition(".")[0] in front for name in piece.parameters}) == 1
        assert not (piece.sufficient_factors and piece.parameters[0].rpartition(".")[0] in front)
        covered += piece.size + sum(group.segment(name).size for name in piece.replicated)
    assert covered == group.size


def test_layers_are_counted_over_the_whole_network() -> None:
    """Of which a group of split parameters has some."""
    whole = list(make_group().parameters)
    layout = GroupLayout({name: make_group().specs[name] for name in whole if name.startswith(("b.", "unused."))})
    for layers, lazy in (
        (3, set()),
        (4, {"unused.weight", "unused.bias"}),
        (5, {"unused.weight", "unused.bias", "b.weight", "b.bias"}),
    ):
        options = LazyOptions(layers=layers, bucket_bytes=8)
        strategy = Lazy(PlannedGroup(layout, 2, several_groups=True, names=whole), options)
        assert f"layers {layers} with {len(lazy)} parameters" in strategy.request()


def test_another_number_of_layers_is_another_schedule_and_another_interval_is_not() -> None:
    two, three = (planned(Lazy, make_group(), 2, layers=layers, bucket_bytes=100) for layers in (2, 3))
    rarer = planned(Lazy, make_group(), 2, layers=2, bucket_bytes=100, max_interval=3, check_every=1)
    stored = two.plan(None)
    assert two.accepts(stored)
    assert not three.accepts(stored)
    assert rarer.accepts(stored)


def test_a_schedule_of_the_allreduces_that_it_once_had_is_not_used() -> None:
    strategy = planned(Lazy, make_group(), 2, layers=2, bucket_bytes=100)
    stored = strategy.plan(None)
    assert stored is not None
    words, _, parameters = stored.request.partition("; ")
    assert words != "lazy, layers 2, bucket_bytes 100"
    assert not strategy.accepts(replace(stored, request=f"lazy, layers 2, bucket_bytes 100; {parameters}"))
