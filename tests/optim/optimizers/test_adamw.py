"""AdamW against torch, and itself on any partition of its segments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend import host_arithmetic
from hpctrain.errors import OptionError
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.base import Norms, Optimizer
from hpctrain.optim.optimizers.adamw import Adamw

SHAPES = {"conv.weight": (7, 3, 3, 5), "norm.weight": (7,), "norm.bias": (7,), "fc.weight": (9, 25), "fc.bias": (25,)}


def make_group(dtype: str = "float64") -> FlatGroup:
    specs = {n: ParameterSpec(s, lambda random, shape: random.random(shape), decay=len(s) > 1) for n, s in SHAPES.items()}
    group = FlatGroup(specs, dtype)
    group.data[:] = np.random.default_rng(0).standard_normal(group.size)
    return group


def gradients(group: FlatGroup, steps: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.standard_normal(group.size).astype(group.dtype) for _ in range(steps)]


def norms_of(group: FlatGroup) -> Norms:
    norms = Norms(group)
    norms.add_partial(group, group.segments)
    return norms


def run(optimizer: Optimizer, group: FlatGroup, grads: Sequence[np.ndarray], rates: Sequence[float]) -> np.ndarray:
    optimizer.bind(group, group.segments)
    _go_on(optimizer, group, grads, rates)
    return group.data.copy()


def _go_on(optimizer: Optimizer, group: FlatGroup, grads: Sequence[np.ndarray], rates: Sequence[float]) -> None:
    for grad, lr in zip(grads, rates, strict=True):
        group.grad[:] = grad
        optimizer.begin_step()
        if optimizer.needs_norms:
            optimizer.prepare_norms(group.segments)
        optimizer.update(group.segments, lr, norms_of(group) if optimizer.needs_norms else None)


RATES = [0.01 / (1 + step % 7) for step in range(50)]


@pytest.mark.torch
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize(("beta1", "beta2", "epsilon"), [(0.9, 0.999, 1e-8), (0.0, 0.9, 1e-3), (0.95, 0.0, 1e-6)])
def test_fifty_updates_equal_torchs(beta1: float, beta2: float, epsilon: float, clip: float | None) -> None:
    torch = pytest.importorskip("torch")
    group = make_group()
    grads = gradients(group, 50)
    theirs = [torch.nn.Parameter(torch.tensor(p.data.copy())) for p in group.parameters.values()]
    groups = [
        {"params": [p for p, s in zip(theirs, group.segments, strict=True) if s.decay == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.05), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(beta1, beta2), eps=epsilon, foreach=False)
    for grad, lr in zip(grads, RATES, strict=True):
        for p, segment in zip(theirs, group.segments, strict=True):
            p.grad = torch.tensor(grad[segment.start : segment.stop]).reshape(p.shape)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        for entry in optimizer.param_groups:
            entry["lr"] = lr
        optimizer.step()
    ours = run(Adamw(beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=0.05, clip_norm=clip), group, grads, RATES)
    expected = np.concatenate([p.detach().numpy().ravel() for p in theirs])
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["float32", "float64"]))
def test_any_partition_into_owners_gives_the_same_bits(data: st.DataObject, dtype: str) -> None:
    group, options = make_group(dtype), {"weight_decay": 0.05, "clip_norm": 0.5}
    grads, start = gradients(group, 3), group.data.copy()
    whole = Adamw(**options)
    expected = run(whole, group, grads, RATES[:3])
    group.data[:] = start
    cuts = sorted(data.draw(st.sets(st.integers(0, group.size), max_size=6)) | {0, group.size})
    shards = [group.covering(a, b) for a, b in itertools.pairwise(cuts)]
    owners = [Adamw(**options) for _ in shards]
    for owner, shard in zip(owners, shards, strict=True):
        owner.bind(group, shard)
    for grad, lr in zip(grads, RATES, strict=False):
        group.grad[:] = grad
        for owner, shard in zip(owners, shards, strict=True):
            owner.begin_step()
            for segment in data.draw(st.permutations(shard)):
                owner.update([segment], lr, norms_of(group))
    assert group.data.tobytes() == expected.tobytes()
    for owner, shard in zip(owners, shards, strict=True):
        for segment in shard:
            for name, values in owner.state(segment).items():
                assert values.tobytes() == whole.state(segment)[name].tobytes()


@pytest.mark.parametrize("chunk", [1, 7, 225])
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    group = make_group("float32")
    grads, start = gradients(group, 3), group.data.copy()
    expected = run(Adamw(), group, grads, RATES[:3])
    group.data[:] = start
    monkeypatch.setattr(host_arithmetic, "CHUNK", chunk)
    assert run(Adamw(), group, grads, RATES[:3]).tobytes() == expected.tobytes()


def test_a_restored_state_continues_to_the_same_bits() -> None:
    group = make_group("float32")
    grads, start = gradients(group, 6), group.data.copy()
    expected = run(Adamw(), group, grads, RATES[:6])
    group.data[:] = start
    first, second = Adamw(), Adamw()
    run(first, group, grads[:3], RATES[:3])
    second.bind(group, group.segments)
    for segment in group.segments:
        for name, array in first.state(segment).items():
            second.state(segment)[name][:] = array
    second.load_counters(first.counters())
    _go_on(second, group, grads[3:], RATES[3:6])
    assert group.data.tobytes() == expected.tobytes()


def test_a_parameter_that_steps_leave_out_is_corrected_by_its_own_updates() -> None:
    """Behind its first update it has moved by the rate, whichever step that was in: the gradient's length does not matter."""
    group = make_group()
    optimizer = Adamw(weight_decay=0.0, epsilon=1e-12)
    optimizer.bind(group, group.segments)
    group.grad[:] = gradients(group, 1)[0]
    first, *others = group.segments
    for _ in range(3):
        optimizer.begin_step({first.parameter})
        optimizer.update(others, 0.1, None)
    before = group.data.copy()
    optimizer.begin_step()
    optimizer.update(group.segments, 0.1, None)
    moved = np.abs(group.data - before)
    np.testing.assert_allclose(moved[first.start : first.stop], 0.1, rtol=1e-7)
    assert optimizer.counters() == {"updates": 4, f"left_out/{first.parameter}": 3}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta1": 1.0}, "beta1 1.0 is outside"),
        ({"beta2": -0.1}, "beta2 -0.1 is outside"),
        ({"beta2": float("nan")}, "beta2 nan is outside"),
        ({"epsilon": 0.0}, "epsilon 0.0 must be"),
        ({"weight_decay": -1.0}, "weight_decay -1.0"),
        ({"decay_exclude": "bias"}, "norm_and_bias, none"),
        ({"clip_norm": 0.0}, "clip_norm 0.0"),
    ],
)
def test_values_outside_their_range_are_refused(options: dict[str, float | str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Adamw(**options)  # type: ignore[arg-type]
