"""A strategy of one's own is one class: the one of the docstring trains what blocking trains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from hpctrain.averaging.allreduce_strategy import AllreduceStrategy
from hpctrain.averaging.slices import Slice, fused
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategy import PlannedGroup, Strategy
from hpctrain.comm.link import LinkModel
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import OPTIMIZERS, Watched, averaged, make_group, planned, run_steps


class Halves(AllreduceStrategy):
    """Two allreduces, of half of the parameters each."""

    def words(self) -> str:
        return "halves"

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        return fused(self.group.layout, (self.group.layout.size + 1) // 2)


@dataclass(frozen=True)
class PartsOptions:
    """Options of `Parts`."""

    parts: int = 3


class Parts(AllreduceStrategy):
    """As many allreduces as an option says."""

    Options = PartsOptions
    options: PartsOptions

    def words(self) -> str:
        return f"parts {self.options.parts}"

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        return fused(self.group.layout, self.group.layout.size // self.options.parts)


@pytest.mark.parametrize("optimizer", ["nesterov", "lars, clipping"])
@pytest.mark.parametrize("kind", [Halves, Parts])
def test_a_strategy_of_ones_own_trains_as_blocking_does(kind: type[Strategy], optimizer: str) -> None:
    def program(comm: ThreadCommunicator, kind: type[Strategy]) -> np.ndarray:
        averager = averaged(kind, make_group(), OPTIMIZERS[optimizer](), comm, virtual_engine(comm))
        return run_steps(Watched(averager), 6)

    (alone,) = run_virtual(1, lambda comm: program(comm, Blocking))
    for ranks in (2, 3):
        for data in run_virtual(ranks, lambda comm: program(comm, kind)):
            assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


def test_the_docstring_shows_the_strategy_that_is_tested() -> None:
    assert Strategy.__doc__ is not None
    assert "return fused(self.group.layout, (self.group.layout.size + 1) // 2)" in Strategy.__doc__
    assert len(planned(Halves, make_group()).plan(None).slices) == 2  # type: ignore[union-attr]


def test_options_are_the_defaults_unless_given() -> None:
    group = PlannedGroup(make_group(), 2)
    assert Parts(group).options.parts == 3
    assert Parts(group, PartsOptions(5)).request() != Parts(group).request()


def test_a_schedule_is_accepted_for_the_same_words_parameters_and_ranks() -> None:
    schedule = planned(Parts, make_group(), 2).plan(None)
    assert planned(Parts, make_group(), 2).accepts(schedule)
    assert not planned(Parts, make_group(), 3).accepts(schedule)
    assert not planned(Parts, make_group(), 2, parts=4).accepts(schedule)
    assert not planned(Parts, make_group("float32"), 2).accepts(schedule)
    assert not planned(Blocking, make_group(), 2).accepts(schedule)
    assert not planned(Parts, make_group(), 2).accepts(None)
