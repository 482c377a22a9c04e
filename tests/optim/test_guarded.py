"""A watched optimiser computes what it did before, and notices each bit that changes between two of its updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.nn.parameter import FlatGroup, ParameterSpec, Segment
from hpctrain.optim.base import NormsNeeded, Optimizer
from hpctrain.optim.guarded import GuardedOptimizer, guarded
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "nothing": (0,), "b.weight": (7,), "b.bias": (1,)}


def _group(dtype: str) -> FlatGroup:
    group = FlatGroup(
        {name: ParameterSpec(shape, lambda random, shape: np.zeros(shape)) for name, shape in SHAPES.items()}, dtype
    )
    random = np.random.default_rng(1)
    group.data[...] = random.standard_normal(group.size)
    return group


def _bound(group: FlatGroup, owned: Sequence[Segment], *, parameters: bool = True, momentum: float = 0.9) -> GuardedOptimizer:
    optimizer = guarded(Sgd(momentum=momentum))
    optimizer.bind(group, owned)
    optimizer.watch(parameters=parameters)
    return optimizer


def _step(optimizer: Optimizer, group: FlatGroup, pieces: Sequence[Sequence[Segment]], number: int) -> None:
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
    watched = _bound(group, _owned(group))
    for number in range(4):
        _step(watched, group, _pieces(group), number)
        _step(plain, other, _pieces(other), number)
    watched.verify()
    assert group.data.tobytes() == other.data.tobytes()
    assert watched.found == ()


@given(place=st.integers(0, 24), bit=st.integers(0, 31), late=st.booleans())
def test_every_flipped_bit_is_found_with_its_parameter(place: int, bit: int, late: bool) -> None:
    """Of the momentum, at the next update or where all is compared."""
    group = _group("float32")
    watched = _bound(group, _owned(group))
    _step(watched, group, _pieces(group), 0)
    segments = [segment for segment in _owned(group) if segment.size]
    segment = [one for one in segments for _ in range(one.size)][place]
    watched.state(segment)["momentum"].view(np.uint32)[place % segment.size] ^= np.uint32(1 << bit)
    if late:
        watched.verify()
    else:
        _step(watched, group, _pieces(group), 1)
    assert watched.found == (f"the momentum of {segment.parameter}",)


@pytest.mark.parametrize(("parameters", "found"), [(True, ("parameter b.weight",)), (False, ())])
def test_parameters_are_watched_where_nothing_else_writes_them(parameters: bool, found: tuple[str, ...]) -> None:
    group = _group("float64")
    watched = _bound(group, _owned(group), parameters=parameters)
    _step(watched, group, _pieces(group), 0)
    group.parameters["b.weight"].data[2] += 1.0
    group.data[0] += 1.0  # which this rank does not own
    _step(watched, group, _pieces(group), 1)
    assert watched.found == found


def _forgets(watched: GuardedOptimizer, group: FlatGroup) -> None:
    group.data[...] = 0.0
    watched.forget()


def _overlaps(watched: GuardedOptimizer, group: FlatGroup) -> None:
    watched.update(_pieces(group)[1][1:], 0.1, None)


@pytest.mark.parametrize("change", [_forgets, _overlaps])
def test_what_is_loaded_or_updated_in_other_pieces_is_no_damage(change: Callable[[GuardedOptimizer, FlatGroup], None]) -> None:
    group = _group("float64")
    watched = _bound(group, _owned(group))
    for number in range(4):
        _step(watched, group, _pieces(group), number)
        change(watched, group)
    watched.verify()
    assert watched.found == ()


def test_without_state_and_parameters_there_is_nothing_to_watch() -> None:
    group = _group("float32")
    watched = _bound(group, _owned(group), parameters=False, momentum=0.0)
    for number in range(2):
        _step(watched, group, _pieces(group), number)
        group.data[5] = 0.0
    watched.verify()
    assert watched.found == ()


def test_an_optimiser_that_is_not_watched_compares_nothing() -> None:
    group = _group("float32")
    optimizer = guarded(Sgd(momentum=0.9))
    optimizer.bind(group, _owned(group))
    _step(optimizer, group, _pieces(group), 0)
    group.data[...] = 0.0
    _step(optimizer, group, _pieces(group), 1)
    optimizer.verify()
    assert optimizer.found == ()


@pytest.mark.parametrize("inner", [Sgd(momentum=0.5, clip_norm=0.3), Lars(), Sgd()])
def test_it_says_of_itself_what_the_optimiser_does(inner: Optimizer) -> None:
    optimizer = guarded(inner)
    said = (optimizer.norms_needed, optimizer.layer_norms, optimizer.clip_norm, optimizer.momentum)
    assert said == (inner.norms_needed, inner.layer_norms, inner.clip_norm, inner.momentum)
    assert optimizer.needs_norms == (inner.norms_needed is not NormsNeeded.NONE)
