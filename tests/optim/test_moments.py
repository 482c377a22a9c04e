"""The state of descents by two moments: packed, and of owned segments alone."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.optim.optimizers.adamw import Adamw
from tests.optim.optimizers.test_adamw import make_group


def test_the_state_is_packed_and_aliased() -> None:
    group = make_group()
    owned = (group.segments[3], group.segments[0])  # a gap between, out of order
    optimizer = Adamw(beta1=0.5, beta2=0.75)
    optimizer.bind(group, owned)
    states = [optimizer.state(segment) for segment in owned]
    assert [{name: view.size for name, view in state.items()} for state in states] == [
        {"first_moment": segment.size, "second_moment": segment.size} for segment in owned
    ]
    group.grad[:] = 2.0
    optimizer.begin_step()
    optimizer.update(owned, 0.1, None)
    for state in states:
        assert np.array_equal(state["first_moment"], np.full_like(state["first_moment"], 1.0))
        assert np.array_equal(state["second_moment"], np.full_like(state["second_moment"], 1.0))
    states[0]["first_moment"][:] = 4.0  # as a restore does
    optimizer.begin_step()
    optimizer.update(owned, 0.1, None)
    np.testing.assert_allclose(states[0]["first_moment"], 3.0)
    assert optimizer.state(group.segments[1].part(3, 3))["first_moment"].size == 0
    with pytest.raises(AssertionError, match="not owned"):
        optimizer.state(group.segments[1])


def test_gradients_are_left_alone_and_nothing_may_be_owned() -> None:
    group = make_group()
    optimizer = Adamw()
    optimizer.bind(group, ())
    before = group.data.copy()
    optimizer.begin_step()
    optimizer.update((), 0.1, None)
    assert np.array_equal(group.data, before)
    optimizer.bind(group, group.segments)
    group.grad[:] = before
    optimizer.update(group.segments, 0.1, None)
    assert np.array_equal(group.grad, before)
    assert not np.array_equal(group.data, before)
