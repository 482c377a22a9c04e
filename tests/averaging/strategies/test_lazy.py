"""Lazy averaging: what it refuses, and which layers it holds back."""

from __future__ import annotations

import pytest

from hpctrain.averaging.strategies.lazy import Lazy, LazyOptions
from hpctrain.errors import ConfigError, OptionError
from tests.support.averaging import make_group, planned


@pytest.mark.parametrize("option", ["layers", "max_interval", "check_every", "bucket_bytes"])
def test_values_below_one_are_refused(option: str) -> None:
    with pytest.raises(OptionError, match=f"{option} is 0") as caught:
        LazyOptions(**{option: 0})
    assert caught.value.option == option


def test_several_groups_of_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose sharded"):
        planned(Lazy, make_group(), several_groups=True)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_no_slice_holds_lazy_and_eager_parameters(layers: int) -> None:
    """The layers of the group are a, s, empty, unused, b."""
    group = make_group()
    schedule = planned(Lazy, group, 2, layers=layers, bucket_bytes=1 << 20).plan(None)
    assert schedule is not None
    front = list(dict.fromkeys(name.rpartition(".")[0] for name in group.parameters))[:layers]
    for piece in schedule.slices:
        assert len({name.rpartition(".")[0] in front for name in piece.parameters}) == 1
