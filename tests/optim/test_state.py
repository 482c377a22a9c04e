"""Parts around an update: averages of weights, watches over bits, packed state, and counts of updates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.arithmetic import UpdateRun
from hpctrain.core.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup, ParameterSpec, Segment
from hpctrain.optim.base import NormsNeeded, Optimizer, Packing, UpdateCounts
from hpctrain.optim.ema import EMA, EmaRule, with_ema
from hpctrain.optim.guarded import GuardedOptimizer, WriteGuard
from hpctrain.optim.optimizers import Adam, Adamw, Lamb, Lars, Sgd
from tests.optim.test_optimizers import gradients, make_group, norms_of


def _step(optimizer: Optimizer, group: FlatGroup, grad: np.ndarray) -> None:
    group.grad[:] = grad
    optimizer.begin_step()
    if optimizer.needs_norms:
        optimizer.prepare_norms(group.segments)
    optimizer.update(group.segments, 0.1, norms_of(group) if optimizer.needs_norms else None)


def _average(optimizer: Optimizer, group: FlatGroup) -> np.ndarray:
    return np.concatenate([optimizer.state(segment)[EMA] for segment in group.segments])


@pytest.mark.torch
def test_the_average_of_weights_is_torchs() -> None:
    """Torch's begins with the first weights that it is shown; the program's with those before the first update."""
    torch = pytest.importorskip("torch")
    group = make_group()
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(p.data.copy())) for p in group.parameters.values()])
    theirs = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95))
    theirs.update_parameters(model)
    optimizer = with_ema(Sgd(), EmaRule(0.95, warm_up=False))
    optimizer.bind(group, group.segments)
    for grad in gradients(group, 30):
        _step(optimizer, group, grad)
        with torch.no_grad():
            for parameter, ours in zip(model, group.parameters.values(), strict=True):
                parameter.copy_(torch.tensor(ours.data))
        theirs.update_parameters(model)
    expected = np.concatenate([parameter.detach().numpy().ravel() for parameter in theirs.module])
    np.testing.assert_allclose(_average(optimizer, group), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", [EmaRule(0.9, warm_up=False), EmaRule(0.6)])
@pytest.mark.parametrize("inner", [Sgd, Lars, Adam, Adamw, Lamb])
def test_the_average_of_weights_is_its_definition_and_changes_no_update(inner: type[Optimizer], rule: EmaRule) -> None:
    group, other = make_group(), make_group()
    optimizer, plain = with_ema(inner(), rule), with_ema(inner(), None)
    optimizer.bind(group, group.segments)
    plain.bind(other, other.segments)
    group.data[:] = other.data[:] = 0.5 * group.data  # loaded since
    expected = group.data.copy()
    for t, grad in enumerate(gradients(group, 12), 1):
        _step(optimizer, group, grad)
        _step(plain, other, grad)
        kept = min(rule.decay, (1 + t) / (10 + t)) if rule.warm_up else rule.decay
        expected = kept * expected + (1 - kept) * group.data
    assert group.data.tobytes() == other.data.tobytes()
    np.testing.assert_allclose(_average(optimizer, group), expected, rtol=1e-13, atol=1e-14)


def test_the_average_of_weights_needs_the_norms_of_its_optimiser() -> None:
    rule = EmaRule(0.9)
    assert with_ema(Sgd(), rule).norms_needed is NormsNeeded.NONE
    assert with_ema(Sgd(clip_norm=1.0), rule).norms_needed is NormsNeeded.GLOBAL
    assert with_ema(Lamb(), rule).norms_needed is NormsNeeded.LAYER
    assert with_ema(Lamb(), rule).prepares_norms
    assert with_ema(Lamb(), rule).layer_norms


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, float("nan")])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=f"decay {decay} of the average of weights is outside"):
        EmaRule(decay)


SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "nothing": (0,), "b.weight": (7,), "b.bias": (1,)}


def _group(dtype: str) -> FlatGroup:
    group = FlatGroup(
        {name: ParameterSpec(shape, lambda random, shape: np.zeros(shape)) for name, shape in SHAPES.items()}, dtype
    )
    random = np.random.default_rng(1)
    group.data[...] = random.standard_normal(group.size)
    return group


def _bound(group: FlatGroup, *, parameters: bool = True, momentum: float = 0.9) -> tuple[GuardedOptimizer, list[WriteGuard]]:
    optimizer = GuardedOptimizer(Sgd(momentum=momentum))
    optimizer.bind(group, _owned(group))
    return optimizer, optimizer.watch(_pieces(group), parameters=parameters)


def _changed(guards: Sequence[WriteGuard]) -> list[str]:
    for guard in guards:
        guard.read()
    return [name for guard in guards for name in guard.changed]


def _watched_step(optimizer: Optimizer, group: FlatGroup, pieces: Sequence[Sequence[Segment]], number: int) -> None:
    group.grad[...] = np.random.default_rng(number).standard_normal(group.size)
    for segments in pieces:
        optimizer.update(segments, 0.1, None)


def _pieces(group: FlatGroup) -> list[tuple[Segment, ...]]:
    """Two updates of a step, of parts of parameters with a gap between them."""
    weight, bias, nothing, other, last = group.segments
    return [(weight.part(3, 15), bias, nothing), (other, last)]


def _owned(group: FlatGroup) -> list[Segment]:
    return [segment for segments in _pieces(group) for segment in segments]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_updates_are_those_of_the_optimiser_and_nothing_is_found(dtype: str) -> None:
    group, other = _group(dtype), _group(dtype)
    plain = Sgd(momentum=0.9)
    plain.bind(other, _owned(other))
    watched, guards = _bound(group)
    for number in range(4):
        _watched_step(watched, group, _pieces(group), number)
        _watched_step(plain, other, _pieces(other), number)
    assert group.data.tobytes() == other.data.tobytes()
    assert not _changed(guards)


@given(place=st.integers(0, 24), bit=st.integers(0, 31), late=st.booleans())
def test_every_flipped_bit_is_found_with_its_parameter(place: int, bit: int, late: bool) -> None:
    """Of the momentum, at the next update or where all is compared."""
    group = _group("float32")
    watched, guards = _bound(group)
    _watched_step(watched, group, _pieces(group), 0)
    segments = [segment for segment in _owned(group) if segment.size]
    segment = [one for one in segments for _ in range(one.size)][place]
    watched.state(segment)["momentum"].view(np.uint32)[place % segment.size] ^= np.uint32(1 << bit)
    if late:
        for guard in guards:
            guard.compare()
    else:
        with np.errstate(all="ignore"):  # a flipped exponent may overflow
            _watched_step(watched, group, _pieces(group), 1)
    assert _changed(guards) == [f"the momentum of {segment.parameter}"]


@pytest.mark.parametrize(("parameters", "found"), [(True, ["parameter b.weight"]), (False, [])])
def test_parameters_are_watched_where_nothing_else_writes_them(parameters: bool, found: list[str]) -> None:
    group = _group("float64")
    watched, guards = _bound(group, parameters=parameters)
    _watched_step(watched, group, _pieces(group), 0)
    group.parameters["b.weight"].data[2] += 1.0
    group.data[0] += 1.0  # which this rank does not own
    _watched_step(watched, group, _pieces(group), 1)
    assert _changed(guards) == found


def test_remembered_changes_are_no_damage() -> None:
    group = _group("float64")
    watched, guards = _bound(group)
    for number in range(4):
        _watched_step(watched, group, _pieces(group), number)
        group.data[...] = 0.0
        for guard in guards:
            guard.remember()
    assert not _changed(guards)


def test_without_state_and_parameters_there_is_nothing_to_watch() -> None:
    assert _bound(_group("float32"), parameters=False, momentum=0.0)[1] == []


@pytest.mark.parametrize("inner", [Sgd(momentum=0.5, clip_norm=0.3), Lars(), Sgd()])
def test_a_guarded_optimiser_has_the_attributes_of_its_optimiser(inner: Optimizer) -> None:
    optimizer = GuardedOptimizer(inner)
    said = (optimizer.norms_needed, optimizer.layer_norms, optimizer.clip_norm, optimizer.momentum)
    assert said == (inner.norms_needed, inner.layer_norms, inner.clip_norm, inner.momentum)
    assert optimizer.needs_norms == (inner.norms_needed is not NormsNeeded.NONE)


def _segment(start: int, stop: int) -> Segment:
    return Segment("a", start, stop, 0, True)


@given(st.sets(st.integers(0, 40), min_size=2), st.data())
def test_places_are_those_of_the_elements_in_order(cuts: set[int], data: st.DataObject) -> None:
    owned = [_segment(a, b) for a, b in pairwise(sorted(cuts)) if data.draw(st.booleans())]
    elements = np.concatenate([np.arange(s.start, s.stop) for s in owned] or [np.arange(0)])
    packing = Packing(data.draw(st.permutations(owned)))
    assert packing.size == elements.size
    for segment in owned:
        low = data.draw(st.integers(segment.start, segment.stop - 1))
        part = segment.part(low, segment.stop)
        assert np.array_equal(elements[packing.place(part)], np.arange(low, segment.stop))
        run = packing.placed(UpdateRun(low, segment.stop, 0.5, 0.25))
        assert elements[run.start + run.offset] == low
        assert (run.stop, run.gradient_scale, run.decay) == (segment.stop, 0.5, 0.25)


def test_what_is_not_owned_has_no_place() -> None:
    packing = Packing([_segment(3, 5), _segment(8, 9)])
    assert packing.place(_segment(4, 4)).start == packing.place(_segment(4, 4)).stop
    for segment in (_segment(2, 4), _segment(4, 6), _segment(4, 9)):
        with pytest.raises(AssertionError, match="not owned"):
            packing.place(segment)
    with pytest.raises(AssertionError, match="overlap"):
        Packing([_segment(3, 5), _segment(4, 9)])


NAMES = ("a", "b", "c")


def _group_of(names: tuple[str, ...] = NAMES) -> FlatGroup:
    return FlatGroup({name: ParameterSpec((4,), lambda random, shape: np.zeros(shape)) for name in names})


@given(st.lists(st.sets(st.sampled_from(NAMES))), st.lists(st.sets(st.sampled_from(NAMES)), min_size=1))
def test_a_rank_that_goes_on_counts_as_one_that_owns_all(before: list[set[str]], after: list[set[str]]) -> None:
    """The first steps on a rank that owns nothing, and on one that owns all; then on owners of a part each."""
    group = _group_of()
    nothing, everything = UpdateCounts(group, ()), UpdateCounts(group, group.segments)
    for left_out in before:
        for counts in (nothing, everything):
            counts.begin_step(left_out)
        for segment in group.segments:
            if segment.parameter not in left_out:
                everything.count(segment)
    assert nothing.counters() == everything.counters()
    stored = json.loads(json.dumps(nothing.counters() | {"interval": 7}))
    part = UpdateCounts(group, [segment.part(1, 6) for segment in group.segments])
    part.load_counters(stored)
    for left_out in after:
        for counts in (everything, part):
            counts.begin_step(left_out)
        for segment in group.segments:
            piece = segment.part(1, 6)
            if segment.parameter not in left_out:
                number = everything.count(segment)
                assert not piece.size or part.count(piece) == number
    assert part.counters() == everything.counters()


def test_updates_may_come_in_a_later_step() -> None:
    group = _group_of()
    counts = UpdateCounts(group, group.segments)
    counts.begin_step(())
    counts.begin_step(())
    assert [counts.count(group.segments[0]), counts.count(group.segments[0])] == [1, 2]


def test_names_of_another_group_are_left_alone() -> None:
    counts = UpdateCounts(_group_of(("b",)), ())
    counts.load_counters({"updates": 3, "left_out/a": 2, "left_out/b": 1})
    assert counts.counters() == {"updates": 3, "left_out/b": 1}
    counts.load_counters({})
    assert counts.counters() == {"updates": 0}
