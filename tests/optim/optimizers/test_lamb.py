"""LAMB against the algorithm of its paper in float64, and its laws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.base import Norms, NormsNeeded
from hpctrain.optim.guarded import guarded
from hpctrain.optim.optimizers.adamw import Adamw
from hpctrain.optim.optimizers.lamb import Lamb
from tests.optim.optimizers.test_adamw import RATES, gradients, make_group, norms_of, run

BETA1, BETA2 = 0.9, 0.99


def reference(group: FlatGroup, grads: list[np.ndarray], *, decay: float, exclude: str, epsilon: float) -> np.ndarray:
    """Algorithm 2 of the paper, parameter by parameter; phi is the identity, and the ratio is 1 where a norm is 0, as timm's."""
    out = []
    for segment in group.segments:
        w = group.data[segment.start : segment.stop].astype(np.float64)
        m, v = np.zeros_like(w), np.zeros_like(w)
        excluded = exclude == "norm_and_bias" and not segment.decay
        for t, (grad, lr) in enumerate(zip(grads, RATES, strict=False), 1):
            g = grad[segment.start : segment.stop].astype(np.float64)
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * g**2
            r = m / (1 - BETA1**t) / (np.sqrt(v / (1 - BETA2**t)) + epsilon)
            u = r if excluded else r + decay * w
            lengths = np.linalg.norm(w), np.linalg.norm(u)
            ratio = lengths[0] / lengths[1] if all(lengths) and not excluded else 1.0
            w = w - lr * ratio * u
        out.append(w)
    return np.concatenate(out)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-5)])
def test_updates_equal_the_papers(dtype: str, tolerance: float) -> None:
    for decay, exclude, epsilon in itertools.product((0.0, 0.05), ("norm_and_bias", "none"), (1e-6, 1e-2)):
        group = make_group(dtype)
        group.parameters["fc.weight"].data[:] = 0.0  # a weight without a norm takes a step of AdamW first
        grads = gradients(group, 20)
        grads[0][: group.segments[0].stop] = 0.0  # and a parameter without a direction
        expected = reference(group, grads, decay=decay, exclude=exclude, epsilon=epsilon)
        optimizer = Lamb(beta1=BETA1, beta2=BETA2, weight_decay=decay, decay_exclude=exclude, epsilon=epsilon)  # type: ignore[arg-type]
        ours = run(optimizer, group, grads, RATES[:20])
        assert ours.dtype == np.dtype(dtype)
        assert np.linalg.norm(ours - expected) <= tolerance * np.linalg.norm(expected)


def test_a_step_is_as_long_as_the_rate_says() -> None:
    group = make_group()
    start = group.data.copy()
    run(Lamb(decay_exclude="none"), group, gradients(group, 1), [0.5])
    for segment in group.segments:
        piece = slice(segment.start, segment.stop)
        assert np.linalg.norm(group.data[piece] - start[piece]) == pytest.approx(0.5 * np.linalg.norm(start[piece]), rel=1e-12)


def test_excluded_parameters_move_as_under_adamw() -> None:
    group = make_group()
    grads, start = gradients(group, 4), group.data.copy()
    lamb = run(Lamb(epsilon=1e-8), group, grads, RATES[:4])
    group.data[:] = start
    adamw = run(Adamw(), group, grads, RATES[:4])
    for segment in group.segments:
        piece = slice(segment.start, segment.stop)
        assert np.allclose(lamb[piece], adamw[piece], rtol=1e-14) == (not segment.decay)


def test_shards_with_the_norms_of_whole_layers_give_the_same_bits() -> None:
    group = make_group("float32")
    grads, start = gradients(group, 3), group.data.copy()
    expected = run(Lamb(), group, grads, RATES[:3])
    group.data[:] = start
    cuts = [0, 3, 220, 225, 430, group.size]
    shards = [group.covering(a, b) for a, b in itertools.pairwise(cuts)]
    owners = [Lamb() for _ in shards]
    for owner, shard in zip(owners, shards, strict=True):
        owner.bind(group, shard)
    for grad, lr in zip(grads, RATES, strict=False):
        group.grad[:] = grad
        for owner, shard in zip(owners, shards, strict=True):
            owner.begin_step()
            owner.prepare_norms(shard)
        summed = Norms(group)
        for shard in shards:
            summed.add_partial(group, shard)
        whole = norms_of(group)
        np.testing.assert_allclose(summed.squares, whole.squares, rtol=1e-14)
        for owner, shard in zip(owners, shards, strict=True):
            owner.update(shard, lr, whole)
    assert group.data.tobytes() == expected.tobytes()


def test_a_watched_one_finds_nothing_but_a_bit_that_changes_between_updates() -> None:
    group, other = make_group("float32"), make_group("float32")
    grads = gradients(group, 4)
    expected = run(Lamb(), other, grads[:3], RATES[:3])
    optimizer = guarded(Lamb())
    optimizer.bind(group, group.segments)
    optimizer.watch(parameters=True)
    for grad, lr in zip(grads, RATES, strict=False):
        group.grad[:] = grad
        optimizer.begin_step()
        optimizer.prepare_norms(group.segments)
        optimizer.update(group.segments, lr, norms_of(group))
        if grad is grads[2]:
            assert not optimizer.found
            assert group.data.tobytes() == expected.tobytes()
            optimizer.state(group.segments[1])["second_moment"][2] += 1
    assert optimizer.found == ("the second_moment of norm.weight",)


def test_norms_are_asked_for_and_demanded() -> None:
    group, optimizer = make_group(), Lamb()
    assert optimizer.norms_needed is NormsNeeded.LAYER
    assert optimizer.prepares_norms
    assert not Adamw().needs_norms
    assert Adamw(clip_norm=1.0).norms_needed is NormsNeeded.GLOBAL
    assert optimizer.momentum == 0.9
    optimizer.bind(group, group.segments)
    with pytest.raises(AssertionError, match="norms"):
        optimizer.update(group.segments, 0.1, None)
