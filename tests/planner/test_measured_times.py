"""Times as a run's clock takes them, and the link as it is measured."""

import pytest

from hpctrain.averaging.dependencies import EventKind, LocalEventKey
from hpctrain.nn.parameter import GroupLayout, ParameterSpec
from hpctrain.planner.measured_times import link_model, times_of
from hpctrain.planner.tasks import Compute, EndBackward, EndExchange, GroupPlacement, Happens, NeedsParameters, Task
from hpctrain.trace.tracer import Category
from tests.support.planned import machine


def spec(size: int) -> ParameterSpec:
    return ParameterSpec((size,), lambda random, shape: random.standard_normal(shape))


def test_waits_do_not_count_and_what_is_not_announced_ends_with_backward() -> None:
    def compute(seconds: float) -> Compute:
        return Compute("layer", Category.FORWARD, seconds)

    def happens(kind: EventKind, name: str) -> Happens:
        return Happens("all", LocalEventKey(kind, name))

    tasks: tuple[Task, ...] = (
        NeedsParameters("all", ("a", "empty")),
        compute(1.0),
        EndExchange(0),
        NeedsParameters("all", ("b",)),
        NeedsParameters("model", ("c",)),
        compute(2.0),
        NeedsParameters("all", ("b",)),  # a second micro-batch
        happens(EventKind.GRADIENT, "b"),
        compute(4.0),
        happens(EventKind.LAST_READ, "b"),
        EndBackward(),
        compute(8.0),
    )
    layout = GroupLayout({"a": spec(3), "b": spec(2), "empty": spec(0)}, "float64")
    times = times_of(tasks, "all", layout)
    assert times.needed == {"a": 0.0, "b": 1.0}
    assert times.ready == {"b": 3.0, "a": 7.0}
    assert times.free == {"b": 7.0, "a": 7.0}
    assert times.end_seconds == 7.0


def test_two_ranks_measure_their_link() -> None:
    link = link_model(machine(1), GroupPlacement(2, 2, 1), None)
    assert link.beta_seconds_per_byte == pytest.approx(1e-9, rel=0.05)
    assert link.alpha_seconds == pytest.approx(1e-5 - 512e-9, rel=0.01)  # posting takes longer than the message
    assert link_model(machine(1), GroupPlacement(1, 1, 1), None).alpha_seconds == 0.0
