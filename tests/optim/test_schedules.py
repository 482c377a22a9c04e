"""Learning-rate schedules: boundary values, continuity, monotony."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.optim.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    LearningRateSchedule,
    OneCycle,
    Plateau,
    PlateauState,
    Polynomial,
    Step,
)

COMMON = {"base_lr": 0.4, "epochs": 9, "steps_per_epoch": 7}


def make(name: str, options: dict, base_lr: float, epochs: int, steps_per_epoch: int, warmup_epochs: float):
    return SCHEDULES.create(
        name, options, base_lr=base_lr, epochs=epochs, steps_per_epoch=steps_per_epoch, warmup_epochs=warmup_epochs
    )


@st.composite
def schedules(draw: st.DrawFn) -> LearningRateSchedule:
    epochs = draw(st.integers(1, 12))
    base = draw(st.floats(1e-4, 10.0))
    warmup = draw(st.floats(0.0, epochs))
    name = draw(st.sampled_from(["constant", "step", "cosine", "polynomial", "one_cycle"]))
    warmup = 0.0 if name == "one_cycle" else warmup
    options: dict[str, object] = {"warmup_start": draw(st.floats(0.0, 1.0))}
    if name == "step":
        options["milestones_epochs"] = sorted(draw(st.sets(st.floats(max(warmup, 0.01), 15.0), max_size=3)))
        options["gamma"] = draw(st.floats(0.05, 1.0))
    elif name == "one_cycle":
        options |= {key: draw(st.floats(0.0, 1.0)) for key in ("peak", "final_factor")}
        options["anneal"] = draw(st.sampled_from(["cosine", "linear"]))
    elif name != "constant":
        options["final_lr"] = draw(st.floats(0.0, 1.0)) * base
    if name == "polynomial":
        options["power"] = draw(st.floats(0.25, 4.0))
    return make(name, options, base, epochs, draw(st.integers(1, 11)), warmup)


@given(schedules())
def test_rises_through_the_warm_up_then_never_rises_again(schedule):
    rates = [schedule.lr(step) for step in range(schedule.total_steps + 3)]
    slack = 1e-12 * schedule.base_lr
    warmup = schedule.warmup_steps
    assert all(b >= a - slack for a, b in pairwise(rates[:warmup]))
    assert all(b <= a + slack for a, b in pairwise(rates[warmup:]))
    assert all(-slack <= rate <= schedule.base_lr + slack for rate in rates)
    assert rates == [schedule.lr(step) for step in range(schedule.total_steps + 3)]


@given(schedules())
def test_warm_up_begins_at_its_factor_and_is_linear(schedule):
    warmup = schedule.warmup_steps
    if not warmup:
        return
    assert schedule.lr(0) == pytest.approx(schedule.base_lr * schedule.warmup_start)
    slope = schedule.base_lr * (1.0 - schedule.warmup_start) / warmup
    for step in range(0 if isinstance(schedule, OneCycle) and schedule.anneal == "cosine" else warmup - 1):
        assert schedule.lr(step + 1) - schedule.lr(step) == pytest.approx(slope, abs=1e-12)
    if not isinstance(schedule, Step) and warmup < schedule.total_steps:  # a milestone may lie where the warm-up ends
        assert schedule.lr(warmup) == pytest.approx(schedule.base_lr)


@given(schedules())
def test_past_the_end_the_last_value_holds(schedule):
    last = schedule.lr(schedule.total_steps)
    assert schedule.lr(100 * schedule.total_steps + 1000) <= last
    if isinstance(schedule, Cosine | Polynomial):
        assert last == pytest.approx(schedule.final_lr, abs=1e-12)


def test_smooth_schedules_have_no_jump():
    """A step changes the rate by at most the steepest slope times one step; no jump where warm-up and decay meet."""
    common = {**COMMON, "steps_per_epoch": 1000, "warmup_epochs": 2}
    steep = {Cosine: math.pi / 2, Polynomial: 2.0}
    for schedule in (Cosine(**common, final_lr=0.01), Polynomial(**common, final_lr=0.01)):
        bound = 0.4 * max(steep[type(schedule)] / 7000, 1 / 2000) * 1.001
        rates = [schedule.lr(step) for step in range(9001)]
        assert max(abs(b - a) for a, b in pairwise(rates)) <= bound


def test_step_drops_at_the_first_step_of_each_milestone_counted_from_the_start():
    schedule = Step(**COMMON, milestones_epochs=(3, 5.5), gamma=0.5, warmup_epochs=1)
    assert schedule.lr(7) == schedule.lr(3 * 7 - 1) == 0.4
    assert schedule.lr(3 * 7) == 0.2
    assert schedule.lr(37) == 0.2
    assert schedule.lr(38) == 0.1  # 5.5 epochs of 7 steps are 38.5, rounded to even
    assert schedule.lr(62) == 0.1


def test_cosine_boundary_values():
    schedule = Cosine(**COMMON, final_lr=0.04, warmup_epochs=1, warmup_start=0.0)
    assert schedule.lr(0) == 0.0
    assert schedule.lr(7) == 0.4
    assert schedule.lr(7 + 28) == pytest.approx(0.22)  # half of the remaining 56 steps
    assert schedule.lr(63) == pytest.approx(0.04)
    assert schedule.lr(62) > schedule.lr(63)


def test_polynomial_boundary_values():
    schedule = Polynomial(**COMMON, final_lr=0.04, power=2.0, warmup_epochs=1)
    assert schedule.lr(7) == pytest.approx(0.4)
    assert schedule.lr(7 + 28) == pytest.approx(0.04 + 0.36 / 4)
    assert schedule.lr(63) == pytest.approx(0.04)


VALUES = st.lists(st.one_of(st.integers(0, 8).map(float), st.just(math.nan)), min_size=1, max_size=16)


@given(VALUES, st.integers(1, 3), st.sampled_from([0.0, 1.5]), st.booleans())
def test_a_plateau_reduces_the_rate_as_defined(values: list[float], patience: int, min_delta: float, of_loss: bool) -> None:
    """A reduction resets the count; a second evaluation of an epoch, or a checkpoint, does not change it."""
    metric, sign = ("ema_loss", -1) if of_loss else ("top1", 1)
    schedule = Plateau(**COMMON, factor=0.5, patience=patience, metric=metric, min_delta=min_delta, min_lr=0.06)
    state, best, waited, expected = None, -math.inf, 0, 0.4
    for epoch, value in enumerate(values, 1):
        better = math.isfinite(value) and sign * value > best + min_delta
        best, waited = (sign * value, 0) if better else (best, waited + 1)
        if waited == patience:
            expected, waited = max(0.06, expected / 2), 0
        for _ in range(2):
            state = schedule.observed(state, epoch, {metric: value})
            state = PlateauState.from_meta(json.loads(json.dumps(asdict(state))))
        assert schedule.rate(3, state) == pytest.approx(expected)
    assert schedule.rate(3, None) == schedule.lr(3) == 0.4
    assert Constant(**COMMON).observed(state, len(values) + 1, {metric: 0.0}) is state  # for a plateau after another resume


@pytest.mark.torch
def test_a_plateau_equals_torchs() -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    kind = torch.optim.lr_scheduler.ReduceLROnPlateau
    theirs = kind(optimizer, "max", 0.5, patience=1, threshold=0.1, threshold_mode="abs", min_lr=0.05)
    ours, state = Plateau(**COMMON, factor=0.5, patience=2, metric="top1", min_delta=0.1, min_lr=0.05), None
    for epoch, value in enumerate((0.1, 0.3, 0.35, 0.2, 0.5, 0.55, 0.5, 0.5, 0.5, 0.4, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6), 1):
        theirs.step(value)
        state = ours.observed(state, epoch, {"top1": value})
        assert ours.rate(epoch, state) == pytest.approx(optimizer.param_groups[0]["lr"])


@pytest.mark.torch
def test_equal_to_torch():
    torch = pytest.importorskip("torch")
    pairs = [
        (Cosine(**COMMON, final_lr=0.04), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 63, 0.04)),
        (Polynomial(**COMMON, power=1.5), lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 63, 1.5)),
        (Step(**COMMON, milestones_epochs=(2, 5)), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [14, 35], 0.1)),
        (Constant(**COMMON, warmup_epochs=3), lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 21)),
    ]
    # PyTorch's cycle has its peak and its end in the last step of each part, so its 64 steps are our 63 and the step after them.
    cycle = {"max_lr": 0.4, "total_steps": 64, "pct_start": 22 / 64, "cycle_momentum": False, "final_div_factor": 2.0}
    for shape, theirs in (("cosine", "cos"), ("linear", "linear")):
        torch_cycle = partial(torch.optim.lr_scheduler.OneCycleLR, **cycle, anneal_strategy=theirs)
        pairs.append((OneCycle(**COMMON, peak=1 / 3, final_factor=0.02, anneal=shape), torch_cycle))
    for schedule, theirs in pairs:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
        scheduler = theirs(optimizer)
        for step in range(63):
            assert schedule.lr(step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9, abs=1e-12), (schedule, step)
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("anneal", ["cosine", "linear"])
def test_one_cycle_boundary_values(anneal):
    """The peak is at its share of all steps, and the first and last rates are the factors of the base rate."""
    schedule = OneCycle(**COMMON, peak=1 / 3, warmup_start=0.1, final_factor=0.01, anneal=anneal)
    assert schedule.lr(0) == pytest.approx(0.04)
    assert schedule.lr(21) == 0.4
    assert schedule.lr(21 + 21) == pytest.approx(0.4 * (1 + 0.01) / 2)  # half of the fall, for both shapes
    assert schedule.lr(63) == pytest.approx(0.004)
    assert OneCycle(**COMMON, peak=0.0).lr(0) == 0.4


@pytest.mark.parametrize("number", [np.float16, np.float32, np.float64, np.int64, np.array])
def test_rates_are_plain_numbers(number):
    """A schedule of a user may compute with NumPy; records and messages need numbers of Python."""

    class Computed(Constant):
        def rise(self, progress):
            return number(progress)

        def after_warmup(self, step, progress):
            return number(1)

    schedule = Computed(base_lr=0.5, epochs=4, steps_per_epoch=2, warmup_epochs=1, warmup_start=0.0)
    assert json.dumps([schedule.lr(step) for step in (0, 2, 5)]) == "[0.0, 1.0, 1.0]"


def test_training_that_is_all_warm_up():
    for schedule in (Constant(**COMMON, warmup_epochs=9), Cosine(**COMMON, warmup_epochs=9, final_lr=0.1)):
        assert schedule.lr(62) == pytest.approx(0.4 * (0.1 + 0.9 * 62 / 63))
    assert Cosine(**COMMON, warmup_epochs=9, final_lr=0.1).lr(63) == pytest.approx(0.1)
