"""SGD against plain float64 references, torch, and itself on any partition of its segments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend import host_arithmetic
from hpctrain.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup, ParameterSpec, Segment
from hpctrain.optim.base import Norms
from hpctrain.optim.optimizers.sgd import Sgd

SHAPES = {"conv.weight": (7, 3, 3, 5), "norm.weight": (7,), "norm.bias": (7,), "fc.weight": (9, 25), "fc.bias": (25,)}


def make_group(dtype="float64", shapes=SHAPES, seed=0):
    specs = {
        name: ParameterSpec(shape, lambda rng, shape: rng.standard_normal(shape), decay=len(shape) > 1)
        for name, shape in shapes.items()
    }
    group = FlatGroup(specs, dtype)
    group.data[:] = np.random.default_rng(seed).standard_normal(group.size)
    return group


def gradients(group, steps, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(group.size).astype(group.dtype) for _ in range(steps)]


def norms_of(group):
    norms = Norms(group)
    norms.add_partial(group, group.segments)
    return norms


def run(optimizer, group, grads, rates, partition=None):
    """Bind to all segments, update in the parts of `partition` (all at once by default)."""
    optimizer.bind(group, group.segments)
    for grad, lr in zip(grads, rates, strict=True):
        group.grad[:] = grad
        norms = norms_of(group) if optimizer.needs_norms else None
        for part in [group.segments] if partition is None else partition:
            optimizer.update(part, lr, norms)
    return group.data.copy()


def reference(group, grads, rates, *, momentum, nesterov, weight_decay, exclude, clip_norm):
    """The definition, parameter by parameter, in float64."""
    out = []
    scales = [1.0 if clip_norm is None else min(1.0, clip_norm / (np.linalg.norm(g.astype(np.float64)) + 1e-6)) for g in grads]
    for segment in group.segments:
        w = group.data[segment.start : segment.stop].astype(np.float64)
        buffer = np.zeros_like(w)
        decay = 0.0 if exclude == "norm_and_bias" and not segment.decay else weight_decay
        for grad, lr, scale in zip(grads, rates, scales, strict=True):
            g = scale * grad[segment.start : segment.stop].astype(np.float64) + decay * w
            buffer = momentum * buffer + g
            w = w - lr * (g + momentum * buffer if nesterov else buffer)
        out.append(w)
    return np.concatenate(out)


CASES = list(itertools.product((0.0, 0.9), (False, True), (0.0, 0.05), ("norm_and_bias", "none"), (None, 0.5, 1e9)))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 3e-6)])
def test_update_equals_the_definition(dtype, tolerance):
    for momentum, nesterov, decay, exclude, clip in CASES:
        if nesterov and not momentum:
            continue
        group = make_group(dtype)
        grads, rates = gradients(group, 5), [0.1, 0.2, 0.05, 0.0, 0.3]
        options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
        expected = reference(group, grads, rates, exclude=exclude, clip_norm=clip, **options)
        got = run(Sgd(decay_exclude=exclude, clip_norm=clip, **options), group, grads, rates)
        assert got.dtype == np.dtype(dtype)
        assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.torch
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_update_equals_torch(momentum, nesterov, clip):
    torch = pytest.importorskip("torch")
    group = make_group("float64")
    grads, rates = gradients(group, 6), [0.1, 0.1, 0.01, 0.3, 0.3, 0.05]
    theirs = [torch.nn.Parameter(torch.tensor(p.data.copy())) for p in group.parameters.values()]
    decayed = [p for p, s in zip(theirs, group.segments, strict=True) if s.decay]
    others = [p for p, s in zip(theirs, group.segments, strict=True) if not s.decay]
    parts = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(parts, lr=1.0, momentum=momentum, nesterov=nesterov)
    for grad, lr in zip(grads, rates, strict=True):
        for p, segment in zip(theirs, group.segments, strict=True):
            p.grad = torch.tensor(grad[segment.start : segment.stop]).reshape(p.shape)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        for entry in optimizer.param_groups:
            entry["lr"] = lr
        optimizer.step()
    got = run(Sgd(momentum=momentum, nesterov=nesterov, weight_decay=0.05, clip_norm=clip), group, grads, rates)
    expected = np.concatenate([p.detach().numpy().ravel() for p in theirs])
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["float32", "float64"]), nesterov=st.booleans(), shuffled=st.booleans())
def test_any_partition_into_owners_gives_the_same_bits(data, dtype, nesterov, shuffled):
    group = make_group(dtype)
    grads, rates = gradients(group, 3), [0.1, 0.2, 0.05]
    options = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.05, "clip_norm": 0.5}
    start = group.data.copy()
    expected = run(Sgd(**options), group, grads, rates)
    whole_state = Sgd(**options)

    group.data[:] = start
    run(whole_state, group, grads, rates)
    group.data[:] = start
    cuts = sorted(data.draw(st.sets(st.integers(0, group.size), max_size=6)) | {0, group.size})
    shards = [group.covering(a, b) for a, b in itertools.pairwise(cuts)]
    owners = []
    for shard in shards:
        owners.append(Sgd(**options))
        owners[-1].bind(group, shard)
    for grad, lr in zip(grads, rates, strict=True):
        group.grad[:] = grad
        norms = norms_of(group)
        for owner, shard in zip(owners, shards, strict=True):
            order = list(shard)
            if shuffled:
                data.draw(st.randoms(use_true_random=False)).shuffle(order)
            for segment in order:  # one by one, and each in two parts
                middle = (segment.start + segment.stop) // 2
                owner.update([segment.part(segment.start, middle)], lr, norms)
                owner.update([segment.part(middle, segment.stop)], lr, norms)
    assert group.data.tobytes() == expected.tobytes()
    for owner, shard in zip(owners, shards, strict=True):
        for segment in shard:
            assert owner.state(segment)["momentum"].tobytes() == whole_state.state(segment)["momentum"].tobytes()


@pytest.mark.parametrize("chunk", [1, 7, 225])
def test_chunks_do_not_show(monkeypatch, chunk):
    group = make_group("float32")
    grads, rates, start = gradients(group, 3), [0.1, 0.2, 0.05], group.data.copy()
    expected = run(Sgd(weight_decay=0.05, nesterov=True), group, grads, rates)
    group.data[:] = start
    monkeypatch.setattr(host_arithmetic, "CHUNK", chunk)
    assert run(Sgd(weight_decay=0.05, nesterov=True), group, grads, rates).tobytes() == expected.tobytes()


def test_only_the_given_segments_change_and_gradients_are_left_alone():
    group = make_group()
    optimizer = Sgd(weight_decay=0.05, nesterov=True, clip_norm=0.1)
    optimizer.bind(group, group.segments)
    group.grad[:] = gradients(group, 1)[0]
    before, grad = group.data.copy(), group.grad.copy()
    chosen = group.segments[1].part(8, 12), group.segments[3]
    optimizer.update(chosen, 0.1, norms_of(group))
    touched = np.zeros(group.size, bool)
    for segment in chosen:
        touched[segment.start : segment.stop] = True
    touched[group.segments[1].start : 8] = False
    assert np.array_equal(group.data != before, touched)
    assert np.array_equal(group.grad, grad)


def test_state_is_packed_and_aliases_the_momentum():
    group = make_group()
    owned = (group.segments[3], group.segments[0])  # a gap between, out of order
    optimizer = Sgd(momentum=0.9)
    optimizer.bind(group, owned)
    states = [optimizer.state(segment)["momentum"] for segment in owned]
    assert [state.size for state in states] == [segment.size for segment in owned]
    assert not any(state.any() for state in states)
    assert states[0].base.size == sum(segment.size for segment in owned)
    group.grad[:] = 1.0
    optimizer.update(owned, 0.1, None)
    assert all(np.array_equal(state, np.ones_like(state)) for state in states)
    states[0][:] = 3.0  # as a restore does
    optimizer.update(owned, 0.1, None)
    np.testing.assert_allclose(states[0], 0.9 * 3.0 + 1.0)
    part = Segment("fc.weight", group.segments[3].start + 5, group.segments[3].start + 9, 3, True)
    assert np.shares_memory(optimizer.state(part)["momentum"], states[0])
    with pytest.raises(AssertionError, match="not owned"):
        optimizer.update([group.segments[1]], 0.1, None)


def test_a_restored_state_continues_to_the_same_bits():
    group = make_group("float32")
    grads, rates = gradients(group, 6), [0.1] * 6
    start = group.data.copy()
    expected = run(Sgd(weight_decay=0.05), group, grads, rates)
    group.data[:] = start
    first = Sgd(weight_decay=0.05)
    run(first, group, grads[:3], rates[:3])
    second = Sgd(weight_decay=0.05)
    second.bind(group, group.segments)
    for segment in group.segments:
        for name, array in first.state(segment).items():
            second.state(segment)[name][:] = array
    for grad, lr in zip(grads[3:], rates[3:], strict=True):
        group.grad[:] = grad
        second.update(group.segments, lr, None)
    assert group.data.tobytes() == expected.tobytes()


def test_no_momentum_keeps_no_state_and_empty_ownership_is_legal():
    group = make_group()
    optimizer = Sgd(momentum=0.0)
    optimizer.bind(group, group.segments)
    assert optimizer.state(group.segments[0]) == {}
    optimizer = Sgd(momentum=0.9)
    optimizer.bind(group, ())
    before = group.data.copy()
    optimizer.update((), 0.1, None)
    empty = group.segments[0].part(3, 3)
    optimizer.update([empty], 0.1, None)
    assert optimizer.state(empty)["momentum"].size == 0
    assert np.array_equal(group.data, before)


def test_overlapping_ownership_is_refused():
    group = make_group()
    with pytest.raises(AssertionError, match="overlap"):
        Sgd().bind(group, (group.segments[0], group.segments[0].part(3, 9)))


def test_a_numpy_float64_rate_keeps_float32_arithmetic():
    group = make_group("float32")
    grads, start = gradients(group, 2), group.data.copy()
    expected = run(Sgd(), group, grads, [0.1, 0.3])
    group.data[:] = start
    assert run(Sgd(), group, grads, [np.float64(0.1), np.float64(0.3)]).tobytes() == expected.tobytes()


def test_a_gradient_that_is_not_finite_is_not_hidden_by_clipping():
    for bad in (np.nan, np.inf):
        group = make_group()
        group.grad[:] = 1.0
        group.grad[4] = bad
        optimizer = Sgd(clip_norm=1.0)
        optimizer.bind(group, group.segments)
        with np.errstate(invalid="ignore"):
            optimizer.update(group.segments, 0.1, norms_of(group))
        assert not np.isfinite(group.data[4])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 1.0}, "momentum 1.0"),
        ({"momentum": -0.1}, "momentum -0.1"),
        ({"momentum": 0.0, "nesterov": True}, "nesterov"),
        ({"weight_decay": -1e-4}, "weight_decay -0.0001"),
        ({"weight_decay": float("nan")}, "weight_decay nan"),
        ({"clip_norm": 0.0}, "clip_norm 0.0"),
        ({"decay_exclude": "bias"}, "norm_and_bias, none"),
    ],
)
def test_values_outside_their_range_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Sgd(**options)
