"""Scaled costs agree with those of the scaled machine, where all costs follow from its rates."""

import pytest

from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.scaled_costs import ScaledCosts


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_rates_of_a_scaled_machine_are_scaled_rates(factor: float) -> None:
    plan, scaled, direct = _plan(2), ScaledCosts(RateCosts(MACHINE), factor), RateCosts(MACHINE.scaled(compute=factor))
    for action, k in (*plan.forward, *plan.backward):
        step, memory = plan.steps[k], plan.memory[k]
        assert scaled.seconds(step, action, memory) == pytest.approx(direct.seconds(step, action, memory))
    assert scaled.update_seconds(1000) == pytest.approx(direct.update_seconds(1000))
    assert scaled.step_seconds(1000, 7) == pytest.approx(direct.step_seconds(1000, 7))
    assert scaled.measured_share() == 0.0
