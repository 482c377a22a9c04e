"""LARS against a plain float64 reference, and its laws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpctrain.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.base import Norms, NormsNeeded
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd

SHAPES = {"conv.weight": (7, 3, 3, 5), "norm.weight": (7,), "norm.bias": (7,), "fc.weight": (9, 25), "fc.bias": (25,)}


def make_group(dtype="float64"):
    specs = {n: ParameterSpec(s, lambda rng, shape: rng.random(shape), decay=len(s) > 1) for n, s in SHAPES.items()}
    group = FlatGroup(specs, dtype)
    group.data[:] = np.random.default_rng(0).standard_normal(group.size)
    return group


def gradients(group, steps):
    rng = np.random.default_rng(1)
    return [rng.standard_normal(group.size).astype(group.dtype) for _ in range(steps)]


def norms_of(group):
    norms = Norms(group)
    norms.add_partial(group, group.segments)
    return norms


def run(optimizer, group, grads, rates):
    optimizer.bind(group, group.segments)
    for grad, lr in zip(grads, rates, strict=True):
        group.grad[:] = grad
        optimizer.update(group.segments, lr, norms_of(group))
    return group.data.copy()


def reference(group, grads, rates, *, momentum, nesterov, weight_decay, exclude, clip_norm, eta, epsilon):
    out = []
    for segment in group.segments:
        w = group.data[segment.start : segment.stop].astype(np.float64)
        v = np.zeros_like(w)
        excluded = exclude == "norm_and_bias" and not segment.decay
        decay = 0.0 if excluded else weight_decay
        for grad, lr in zip(grads, rates, strict=True):
            g = grad.astype(np.float64)
            if clip_norm is not None:
                g = g * min(1.0, clip_norm / (np.linalg.norm(g) + 1e-6))
            g = g[segment.start : segment.stop]
            wn, gn = np.linalg.norm(w), np.linalg.norm(g)
            ratio = 1.0 if excluded or wn == 0 or gn == 0 else eta * wn / (gn + decay * wn + epsilon)
            update = ratio * (g + decay * w)
            v = momentum * v + update
            w = w - lr * (update + momentum * v if nesterov else v)
        out.append(w)
    return np.concatenate(out)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 3e-6)])
def test_update_equals_the_definition(dtype, tolerance):
    cases = itertools.product((0.0, 0.9), (False, True), (0.0, 0.05), ("norm_and_bias", "none"), (None, 0.5))
    for momentum, nesterov, decay, exclude, clip in cases:
        if nesterov and not momentum:
            continue
        group = make_group(dtype)
        group.parameters["fc.weight"].data[:] = 0.0  # a weight without a norm takes a plain step first
        grads, rates = gradients(group, 5), [1.0, 2.0, 0.5, 0.0, 3.0]
        grads[2][: group.segments[0].stop] = 0.0  # and a parameter without a gradient
        options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay, "clip_norm": clip}
        expected = reference(group, grads, rates, exclude=exclude, eta=0.02, epsilon=1e-3, **options)
        got = run(Lars(decay_exclude=exclude, trust_coefficient=0.02, epsilon=1e-3, **options), group, grads, rates)
        assert got.dtype == np.dtype(dtype)
        assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)


def test_without_decay_the_step_does_not_depend_on_the_gradients_length():
    group = make_group()
    (grad,), start = gradients(group, 1), group.data.copy()
    results = []
    for factor in (1.0, 1e3, 1e-3):
        group.data[:] = start
        results.append(run(Lars(epsilon=0.0, decay_exclude="none"), group, [factor * grad], [0.5]))
        for segment in group.segments:
            piece = slice(segment.start, segment.stop)
            moved, length = np.linalg.norm(results[-1][piece] - start[piece]), np.linalg.norm(start[piece])
            assert moved == pytest.approx(0.5 * 0.001 * length, rel=1e-9)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-12)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-12)


def test_excluded_parameters_move_as_under_sgd():
    group = make_group()
    grads, rates, start = gradients(group, 4), [0.1] * 4, group.data.copy()
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05, "clip_norm": 0.5}
    lars = run(Lars(**options), group, grads, rates)
    group.data[:] = start
    sgd = run(Sgd(**options), group, grads, rates)
    for segment in group.segments:
        piece = slice(segment.start, segment.stop)
        assert np.array_equal(lars[piece], sgd[piece]) == (not segment.decay)


def test_shards_with_the_norms_of_whole_layers_give_the_same_bits():
    group = make_group("float32")
    grads, rates, start = gradients(group, 3), [1.0, 2.0, 0.5], group.data.copy()
    options = {"weight_decay": 0.05, "clip_norm": 0.5, "trust_coefficient": 0.02}
    expected = run(Lars(**options), group, grads, rates)
    group.data[:] = start
    cuts = [0, 3, 220, 225, 430, group.size]
    shards = [group.covering(a, b) for a, b in itertools.pairwise(cuts)]
    owners = [Lars(**options) for _ in shards]
    for owner, shard in zip(owners, shards, strict=True):
        owner.bind(group, shard)
    for grad, lr in zip(grads, rates, strict=True):
        group.grad[:] = grad
        whole = norms_of(group)
        summed = Norms(group)
        for shard in shards:
            partial = Norms(group)
            partial.add_partial(group, shard)
            summed.squares += partial.squares
        np.testing.assert_allclose(summed.squares, whole.squares, rtol=1e-14)
        for owner, shard in zip(owners, shards, strict=True):
            for segment in reversed(shard):
                owner.update([segment], lr, whole)
    assert group.data.tobytes() == expected.tobytes()


def test_norms_are_asked_for_and_demanded():
    group = make_group()
    optimizer = Lars()
    assert optimizer.needs_norms
    assert optimizer.layer_norms
    assert not Sgd().needs_norms
    assert Sgd(clip_norm=1.0).needs_norms
    needed = [one.norms_needed for one in (Sgd(), optimizer, Sgd(clip_norm=1.0), Lars(clip_norm=1.0))]
    assert needed == [NormsNeeded.NONE, NormsNeeded.LAYER, NormsNeeded.GLOBAL, NormsNeeded.GLOBAL]
    optimizer.bind(group, group.segments)
    with pytest.raises(AssertionError, match="norms"):
        optimizer.update(group.segments, 0.1, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trust_coefficient": 0.0}, "trust_coefficient 0.0"),
        ({"epsilon": -1e-9}, "epsilon -1e-09"),
        ({"momentum": 2}, "momentum 2"),
        ({"clip_norm": -1.0}, "clip_norm -1.0"),
    ],
)
def test_values_outside_their_range_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Lars(**options)
