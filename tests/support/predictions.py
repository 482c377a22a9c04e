"""Predictions as a simulation would give them, for what is made of them."""

from __future__ import annotations

from hpctrain.planner.simulation.tasks import Prediction, SimulatedStep
from hpctrain.trace.time_table import Row, TimeTable
from hpctrain.trace.tracer import Category, Events, Tracer


def events(shift_ns: int = 0) -> Events:
    """A step of one class: a layer, and an operation that is waited for."""
    tracer = Tracer(9)
    tracer.add(Category.STEP, "step", 5_000_000 + shift_ns, 9_000_000 + shift_ns, "", 3)
    tracer.add(Category.FORWARD, "fc", 5_000_000 + shift_ns, 7_000_000 + shift_ns)
    tracer.add(Category.COMMUNICATION, "fc.weight", 6_000_000 + shift_ns, 9_000_000 + shift_ns, "gradients", 4)
    tracer.add(Category.WAIT, "fc.weight", 7_000_000 + shift_ns, 9_000_000 + shift_ns, "gradients", 4)
    return tracer.events()


def prediction(
    seconds: float, exposed_seconds: float = 0.0, *, memory_bytes: int = 10**8, measured_share: float = 0.0
) -> Prediction:
    """A prediction of a step with two classes of ranks."""
    total = Row("total", "total", compute_seconds=seconds - exposed_seconds, exposed_seconds=exposed_seconds)
    table = TimeTable((), total, 0.0, seconds, seconds, 1, 4.0)
    classes = {"first split rank": events(), "second split rank": events(1000)}
    return Prediction(SimulatedStep(seconds, table, classes), memory_bytes, 4 * 10**6, measured_share)
