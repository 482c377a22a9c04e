"""Priority-scheduled averaging: the words that stored schedules know it by, its slices and its window; and that priority pays.

The last is held on virtual ranks with a modelled link and clock. Beside `priority` the same steps are run with mutants of it,
each without one thing that it is made of, and each must fail: so the tests cannot pass without that thing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hpctrain.averaging.collective_schedule import OperationKind, Stream
from hpctrain.averaging.compute_times import Times
from hpctrain.averaging.link_simulation import Urgency
from hpctrain.averaging.slice_traffic import SliceTraffic
from hpctrain.averaging.strategies.priority import Priority, PriorityOptions
from hpctrain.comm.link import LinkModel
from hpctrain.errors import OptionError
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.averaging.test_modelled_time import _Free
from tests.support.averaging import averaged, make_group, planned


def test_words_are_those_of_schedules_that_earlier_versions_stored() -> None:
    for options, words in (
        ({}, "priority, slice_parameters None, replan True, window None; parameters "),
        ({"slice_parameters": 8, "window": 2}, "priority, slice_parameters 8, replan True, window 2; parameters "),
        ({"sizes": "measured"}, "priority, slice_parameters None, replan True, window None, sizes measured; parameters "),
    ):
        assert (planned(Priority, make_group(), 4, **options).request() or "").startswith(words)


@pytest.mark.parametrize("slice_parameters", [1, 5, 1000])
def test_slices_are_small_and_gathers_have_a_stream_of_their_own(slice_parameters: int) -> None:
    schedule = planned(Priority, make_group(), 3, slice_parameters=slice_parameters, window=2).plan(None)
    assert schedule is not None
    for operation in schedule.operations:
        gather = operation.kind is OperationKind.ALLGATHER
        assert operation.stream is (Stream.PARAMETERS if gather else Stream.GRADIENTS)
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


STEPS = 9
OPERATOR_SECONDS = 0.05


class FirstComeFirstServed(Priority):
    """A mutant: whatever may be sent first is sent first."""

    @property
    def urgency(self) -> Urgency:
        return lambda order, ready, gather: (ready,)


class GathersNeverOvertake(Priority):
    """A mutant: every gather goes behind all reductions."""

    streams = (Stream.GRADIENTS,)

    def order(self, traffic: SliceTraffic, times: Times, link: LinkModel) -> list[tuple[int, bool]]:
        return sorted(super().order(traffic, times, link), key=lambda sent: sent[1])


class OneStream(Priority):
    """A mutant: gathers and reductions share a communicator, in the order of `priority`."""

    streams = (Stream.GRADIENTS,)


class OneStreamAsBefore(OneStream):
    """A mutant: one communicator, in the order that earlier versions planned for it."""

    def order(self, traffic: SliceTraffic, times: Times, link: LinkModel) -> list[tuple[int, bool]]:
        return super(Priority, self).order(traffic, times, link)


def _front_wait(kind: type[Priority], sizes: Sequence[int], beta: float, ranks: int, late_free: bool = False) -> float:
    """Seconds from the end of backward until the first layer's parameters are there, in the last step. Backward takes twice as
    long as forward, a layer like the other.

    Args:
        sizes: elements, by layer; a slice has 1000. late_free: in the step before, backward lets go of the last layer's data at
            its end only.
    """
    specs = {f"l{k}.weight": ParameterSpec((size,), lambda random, shape: np.zeros(shape)) for k, size in enumerate(sizes)}

    def program(comm: ThreadCommunicator) -> float:
        engine = virtual_engine(comm)
        averager = averaged(kind, FlatGroup(specs), _Free(), comm, engine, fc_exchange="never", slice_parameters=1000, window=2)
        layers = list(averager.group.parameters.values())

        def compute() -> None:
            for _ in range(2):
                comm.compute(OPERATOR_SECONDS / 2)
                engine.poll()

        end = wait = 0.0
        for step in range(STEPS + 1):
            averager.begin_step(0.1, (4,) * ranks)
            for parameter in layers:
                averager.before_forward([parameter])
                if parameter is layers[0]:
                    wait = comm.now() - end
                compute()
            for parameter in reversed(layers):
                compute()
                averager.grad_ready(parameter)
                compute()
                if not (late_free and step == STEPS - 1 and parameter is layers[-1]):
                    averager.data_free(parameter)
            averager.end_backward()
            end = comm.now()
        averager.drain()
        return wait

    return max(run_virtual(ranks, program, link=LinkModel(1e-4, beta)))


def _wire_seconds(elements: int, beta: float, ranks: int) -> float:
    """Seconds of a reduction, or of a gather, of so many."""
    return 4 * elements * beta * (ranks - 1) / ranks


LATE_ELEMENTS = 40_000
BUSY = (1000, 1000, 1000, LATE_ELEMENTS // 2, LATE_ELEMENTS // 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_front_layers_overtake_what_late_layers_have_left_to_send(ranks: int) -> None:
    """Late layers' gradients are ready first and keep the link busy long after backward.

    The first layer waits for a few slices, not for all that came before it. It does where operations go first come, first served
    (they wait for every reduction and for late gathers), and where no gather passes a reduction.
    """
    beta = 1.25e-5 * ranks / (ranks - 1)
    late = _wire_seconds(LATE_ELEMENTS, beta, ranks)
    assert late > 2 * 2 * len(BUSY) * OPERATOR_SECONDS  # twice as long as backward
    assert _front_wait(Priority, BUSY, beta, ranks) < 0.25 * late
    for mutant in (FirstComeFirstServed, GathersNeverOvertake):
        assert _front_wait(mutant, BUSY, beta, ranks) > 0.7 * late


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gather_that_cannot_start_holds_up_no_reduction(ranks: int) -> None:
    """The last layer's data is let go late, once. Its gather waits, while all gradients are summed: after backward gathers alone
    are left. On one stream its gather holds up the reductions behind it, which then cross the link after backward as well.
    """
    sizes = (2000,) * 6
    beta = 5e-6 * ranks / (ranks - 1)
    gathers = _wire_seconds(sum(sizes), beta, ranks)
    assert _front_wait(Priority, sizes, beta, ranks, late_free=True) < 1.15 * gathers
    for mutant in (OneStream, OneStreamAsBefore):
        assert _front_wait(mutant, sizes, beta, ranks, late_free=True) > 1.5 * gathers
