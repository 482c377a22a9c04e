"""Weight decay: the parameters that have none, and values that are refused."""

from __future__ import annotations

import pytest

from hpctrain.errors import OptionError
from hpctrain.nn.parameter import Segment
from hpctrain.optim.decay import check_decay, is_excluded


@pytest.mark.parametrize("value", [-1e-4, float("nan"), float("inf")])
def test_a_decay_that_is_no_finite_number_of_at_least_0_is_refused(value: float) -> None:
    with pytest.raises(OptionError, match=f"weight_decay {value} must be"):
        check_decay(value, "none")


def test_an_unknown_exclusion_is_refused() -> None:
    with pytest.raises(OptionError, match="decay_exclude 'bias' is unknown; it is one of norm_and_bias, none"):
        check_decay(0.0, "bias")


def test_norms_and_biases_are_left_out_unless_nothing_is() -> None:
    check_decay(0.5, "norm_and_bias")
    weight, bias = Segment("a.weight", 0, 3, 0, True), Segment("a.bias", 3, 4, 1, False)
    assert [is_excluded(segment, "norm_and_bias") for segment in (weight, bias)] == [False, True]
    assert not is_excluded(bias, "none")
