"""What computes costs is exchangeable: each kind answers for every action of every step of a plan."""

from __future__ import annotations

import inspect

from hpctrain.planner.compute_costs import ComputeCosts
from hpctrain.planner.rate_costs import RateCosts


def test_every_kind_of_costs_has_the_methods_of_the_seam() -> None:
    for name, method in inspect.getmembers(ComputeCosts, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(RateCosts, name)).parameters.keys() == inspect.signature(method).parameters.keys()
