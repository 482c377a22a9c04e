"""Optimisers against definitions and torch's, on any partition of segments; averages of weights, watches over bits, counts."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend import host_arithmetic
from hpctrain.backend.arithmetic import UpdateRun
from hpctrain.core.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup, ParameterSpec, Segment
from hpctrain.optim.base import Norms, NormsNeeded, Optimizer, Packing, UpdateCounts
from hpctrain.optim.ema import EMA, EmaRule, with_ema
from hpctrain.optim.guarded import GuardedOptimizer, WriteGuard
from hpctrain.optim.optimizers import Adam, Adamw, Lamb, Lars, Sgd, clip_scale
from tests.support.sampling import amount

SHAPES = {"conv.weight": (7, 3, 3, 5), "norm.weight": (7,), "norm.bias": (7,), "fc.weight": (9, 25), "fc.bias": (25,)}
RATES = [0.01 / (1 + step % 7) for step in range(50)]
MAKERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: Sgd(momentum=0.9, weight_decay=0.05, clip_norm=0.5),
    "nesterov": lambda: Sgd(momentum=0.9, nesterov=True, weight_decay=0.05),
    "lars": lambda: Lars(weight_decay=0.05, clip_norm=0.5, trust_coefficient=0.02),
    "adamw": lambda: Adamw(weight_decay=0.05, clip_norm=0.5),
    "adam": lambda: Adam(weight_decay=0.05, clip_norm=0.5),
    "lamb": Lamb,
    "fast biases": lambda: Sgd(momentum=0.9, weight_decay=0.05, decay_exclude="none", norm_bias_rate=64.0),
    "average": lambda: with_ema(Adamw(), EmaRule(0.7)),
}


def make_group(dtype: str = "float64") -> FlatGroup:
    specs = {
        n: ParameterSpec(s, lambda random, shape: random.random(shape), decay=len(s) > 1, norm_bias=n == "norm.bias")
        for n, s in SHAPES.items()
    }
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
    go_on(optimizer, group, grads, rates)
    return group.data.copy()


def go_on(optimizer: Optimizer, group: FlatGroup, grads: Sequence[np.ndarray], rates: Sequence[float]) -> None:
    for grad, lr in zip(grads, rates, strict=True):
        group.grad[:] = grad
        optimizer.begin_step()
        if optimizer.needs_norms:
            optimizer.prepare_norms(group.segments)
        optimizer.update(group.segments, lr, norms_of(group) if optimizer.needs_norms else None)


def pieces(group: FlatGroup) -> list[tuple[Segment, slice]]:
    return [(segment, slice(segment.start, segment.stop)) for segment in group.segments]


def assert_near(ours: np.ndarray, expected: np.ndarray, dtype: str, tolerance: float) -> None:
    assert ours.dtype == np.dtype(dtype)
    assert np.linalg.norm(ours - expected) <= tolerance * np.linalg.norm(expected)


def descent(
    group: FlatGroup, grads: Sequence[np.ndarray], rates: Sequence[float], *, exclude: str, trust: tuple[float, float] | None,
    momentum: float, nesterov: bool, weight_decay: float, clip_norm: float | None,
) -> np.ndarray:  # fmt: skip
    """SGD, and LARS where there is `trust` (coefficient and epsilon), parameter by parameter in float64."""
    out = []
    for segment, piece in pieces(group):
        w = group.data[piece].astype(np.float64)
        buffer = np.zeros_like(w)
        excluded = exclude == "norm_and_bias" and not segment.decay
        decay = 0.0 if excluded else weight_decay
        for whole, lr in zip(grads, rates, strict=True):
            g = whole.astype(np.float64)
            g = (g if clip_norm is None else g * min(1.0, clip_norm / (np.linalg.norm(g) + 1e-6)))[piece]
            lengths = np.linalg.norm(w), np.linalg.norm(g)
            ratio = 1.0
            if trust and not excluded and all(lengths):
                ratio = trust[0] * lengths[0] / (lengths[1] + decay * lengths[0] + trust[1])
            update = ratio * (g + decay * w)
            buffer = momentum * buffer + update
            w = w - lr * (update + momentum * buffer if nesterov else buffer)
        out.append(w)
    return np.concatenate(out)


@pytest.mark.parametrize("trust", [None, (0.02, 1e-3)], ids=["sgd", "lars"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 3e-6)])
def test_sgd_and_lars_equal_their_definitions(dtype: str, tolerance: float, trust: tuple[float, float] | None) -> None:
    cases = itertools.product((0.0, 0.9), (False, True), (0.0, 0.05), ("norm_and_bias", "none"), (None, 0.5, 1e9))
    for momentum, nesterov, decay, exclude, clip in cases:
        if nesterov and not momentum:
            continue
        group = make_group(dtype)
        grads, rates = gradients(group, 5), [1.0, 2.0, 0.5, 0.0, 3.0] if trust else [0.1, 0.2, 0.05, 0.0, 0.3]
        if trust:
            group.parameters["fc.weight"].data[:] = 0.0  # a weight without a norm takes a plain step first
            grads[2][: group.segments[0].stop] = 0.0  # and a parameter without a gradient
        options: Any = {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay, "clip_norm": clip}
        expected = descent(group, grads, rates, exclude=exclude, trust=trust, **options)
        options["decay_exclude"] = exclude
        optimizer = Lars(trust_coefficient=trust[0], epsilon=trust[1], **options) if trust else Sgd(**options)
        assert_near(run(optimizer, group, grads, rates), expected, dtype, tolerance)


def test_biases_of_batch_norms_have_a_rate_of_their_own() -> None:
    """The factor applies to gradient, decay and momentum of these biases, and to no other parameters."""
    options: Any = {"momentum": 0.85, "nesterov": True, "weight_decay": 0.05, "decay_exclude": "none"}
    group, slow, fast = make_group(), make_group(), make_group()
    ours = run(Sgd(**options, norm_bias_rate=64.0), group, gradients(group, 5), [0.1, 0.2, 0.05, 0.0, 0.3])
    expected = run(Sgd(**options), slow, gradients(group, 5), [0.1, 0.2, 0.05, 0.0, 0.3])
    bias = group.segment("norm.bias")
    piece = slice(bias.start, bias.stop)
    expected[piece] = run(Sgd(**options), fast, gradients(group, 5), [6.4, 12.8, 3.2, 0.0, 19.2])[piece]
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


BETA1, BETA2 = 0.9, 0.99


def lamb_of_the_paper(group: FlatGroup, grads: list[np.ndarray], *, decay: float, exclude: str, epsilon: float) -> np.ndarray:
    """Algorithm 2 of the paper, parameter by parameter; phi is the identity, and the ratio is 1 where a norm is 0, as timm's."""
    out = []
    for segment, piece in pieces(group):
        w = group.data[piece].astype(np.float64)
        m, v = np.zeros_like(w), np.zeros_like(w)
        excluded = exclude == "norm_and_bias" and not segment.decay
        for t, (grad, lr) in enumerate(zip(grads, RATES, strict=False), 1):
            g = grad[piece].astype(np.float64)
            m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g**2
            r = m / (1 - BETA1**t) / (np.sqrt(v / (1 - BETA2**t)) + epsilon)
            u = r if excluded else r + decay * w
            lengths = np.linalg.norm(w), np.linalg.norm(u)
            w = w - lr * (lengths[0] / lengths[1] if all(lengths) and not excluded else 1.0) * u
        out.append(w)
    return np.concatenate(out)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-5)])
def test_lamb_equals_the_papers(dtype: str, tolerance: float) -> None:
    for decay, exclude, epsilon in itertools.product((0.0, 0.05), ("norm_and_bias", "none"), (1e-6, 1e-2)):
        group = make_group(dtype)
        group.parameters["fc.weight"].data[:] = 0.0  # a weight without a norm takes a step of AdamW first
        grads = gradients(group, 20)
        grads[0][: group.segments[0].stop] = 0.0  # and a parameter without a direction
        expected = lamb_of_the_paper(group, grads, decay=decay, exclude=exclude, epsilon=epsilon)
        optimizer = Lamb(beta1=BETA1, beta2=BETA2, weight_decay=decay, decay_exclude=exclude, epsilon=epsilon)  # type: ignore[arg-type]
        assert_near(run(optimizer, group, grads, RATES[:20]), expected, dtype, tolerance)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize(
    ("ours", "options", "theirs"),
    [
        *((Sgd, each, each) for each in ({"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True})),
        *(
            (kind, {"beta1": a, "beta2": b, "epsilon": e}, {"betas": (a, b), "eps": e, "foreach": False})
            for kind in (Adam, Adamw)
            for a, b, e in ((0.9, 0.999, 1e-8), (0.0, 0.9, 1e-3), (0.95, 0.0, 1e-6))
            # Without an average of squares, a decayed gradient that nearly cancels has a large relative error in both.
            if b or kind is Adamw
        ),
    ],
)
def test_fifty_updates_equal_torchs(ours: Any, options: dict[str, Any], theirs: dict[str, Any], clip: float | None) -> None:
    torch = pytest.importorskip("torch")
    group = make_group()
    grads, rates = gradients(group, 50), RATES if issubclass(ours, Adamw) else [10 * rate for rate in RATES]
    tensors = [torch.nn.Parameter(torch.tensor(p.data.copy())) for p in group.parameters.values()]
    groups = [
        {"params": [p for p, s in zip(tensors, group.segments, strict=True) if s.decay == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.05), (False, 0.0))
    ]
    optimizer = {Sgd: torch.optim.SGD, Adam: torch.optim.Adam, Adamw: torch.optim.AdamW}[ours](groups, lr=1.0, **theirs)
    for grad, lr in zip(grads, rates, strict=True):
        for tensor, (_, piece) in zip(tensors, pieces(group), strict=True):
            tensor.grad = torch.tensor(grad[piece]).reshape(tensor.shape)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(tensors, clip)
        for entry in optimizer.param_groups:
            entry["lr"] = lr
        optimizer.step()
    found = run(ours(weight_decay=0.05, clip_norm=clip, **options), group, grads, rates)
    expected = np.concatenate([tensor.detach().numpy().ravel() for tensor in tensors])
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=amount(10, 30))
@given(data=st.data(), dtype=st.sampled_from(["float32", "float64"]))
def test_any_partition_into_owners_produces_the_same_bits(name: str, data: st.DataObject, dtype: str) -> None:
    """Owners of cuts anywhere, in any order; SGD and LARS also in parts of parameters, with the norms of whole layers."""
    group = make_group(dtype)
    grads, start, whole = gradients(group, 3), group.data.copy(), MAKERS[name]()
    expected = run(whole, group, grads, RATES[:3])
    group.data[:] = start
    cuts = sorted(data.draw(st.sets(st.integers(0, group.size), max_size=6)) | {0, group.size})
    shards = [group.covering(a, b) for a, b in itertools.pairwise(cuts)]
    owned = [(MAKERS[name](), shard) for shard in shards]
    for owner, shard in owned:
        owner.bind(group, shard)
    for grad, lr in zip(grads, RATES, strict=False):
        group.grad[:] = grad
        for owner, shard in owned:
            owner.begin_step()
            if owner.needs_norms:
                owner.prepare_norms(shard)
        norms, summed = norms_of(group), Norms(group)
        for shard in shards:
            summed.add_partial(group, shard)
        np.testing.assert_allclose(summed.squares, norms.squares, rtol=1e-13 if dtype == "float64" else 1e-6)
        for owner, shard in owned:
            for segment in data.draw(st.permutations(shard)):
                middle = (segment.start + segment.stop) // 2 if name in ("sgd", "nesterov", "lars") else segment.stop
                for part in (segment.part(segment.start, middle), segment.part(middle, segment.stop)):
                    if part.size:
                        owner.update([part], lr, norms)
    assert group.data.tobytes() == expected.tobytes()
    for owner, shard in owned:
        for segment in shard:
            for kind, values in owner.state(segment).items():
                assert values.tobytes() == whole.state(segment)[kind].tobytes()


@pytest.mark.parametrize("name", MAKERS)
def test_a_restored_state_continues_to_the_same_bits(name: str) -> None:
    group, (whole, first, second) = make_group("float32"), (MAKERS[name]() for _ in range(3))
    grads, start = gradients(group, 6), group.data.copy()
    expected = run(whole, group, grads, RATES[:6])
    group.data[:] = start
    run(first, group, grads[:3], RATES[:3])
    second.bind(group, group.segments)
    for segment in group.segments:
        for kind, array in first.state(segment).items():
            second.state(segment)[kind][:] = array
    second.load_counters(first.counters())
    go_on(second, group, grads[3:], RATES[3:6])
    assert group.data.tobytes() == expected.tobytes()
    for segment in group.segments:
        assert all(values.tobytes() == whole.state(segment)[kind].tobytes() for kind, values in second.state(segment).items())


@pytest.mark.parametrize("chunk", [1, 7, 225])
@pytest.mark.parametrize("name", ["nesterov", "adam", "adamw"])
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, name: str, chunk: int) -> None:
    group = make_group("float32")
    grads, start = gradients(group, 3), group.data.copy()
    expected = run(MAKERS[name](), group, grads, RATES[:3])
    group.data[:] = start
    monkeypatch.setattr(host_arithmetic, "CHUNK", chunk)
    assert run(MAKERS[name](), group, grads, RATES[:3]).tobytes() == expected.tobytes()


def test_steps_of_layer_wise_rates_do_not_depend_on_the_gradients_length() -> None:
    group = make_group()
    (grad,), start = gradients(group, 1), group.data.copy()
    for optimizer, length in ((Lars(epsilon=0.0, decay_exclude="none"), 0.001), (Lamb(decay_exclude="none"), 1.0)):
        for factor in (1.0, 1e3, 1e-3) if length < 1 else (1.0,):
            group.data[:] = start
            run(optimizer, group, [factor * grad], [0.5])
            for _, piece in pieces(group):
                moved, weight = np.linalg.norm(group.data[piece] - start[piece]), np.linalg.norm(start[piece])
                assert moved == pytest.approx(0.5 * length * weight, rel=1e-9)


SAME = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05, "clip_norm": 0.5}


@pytest.mark.parametrize(
    ("layer_wise", "plain"), [(Lars(**SAME), Sgd(**SAME)), (Lamb(epsilon=1e-8), Adamw())], ids=["lars", "lamb"]
)
def test_excluded_parameters_move_as_without_layer_wise_rates(layer_wise: Optimizer, plain: Optimizer) -> None:
    group = make_group()
    grads, start = gradients(group, 4), group.data.copy()
    scaled = run(layer_wise, group, grads, RATES[:4])
    group.data[:] = start
    unscaled = run(plain, group, grads, RATES[:4])
    for segment, piece in pieces(group):
        assert np.allclose(scaled[piece], unscaled[piece], rtol=1e-14, atol=0) == (not segment.decay)


def test_a_watched_lamb_finds_nothing_but_a_bit_that_changes_between_updates() -> None:
    group, other = make_group("float32"), make_group("float32")
    grads = gradients(group, 4)
    expected = run(Lamb(), other, grads[:3], RATES[:3])
    optimizer = GuardedOptimizer(Lamb())
    optimizer.bind(group, group.segments)
    (guard,) = optimizer.watch([group.segments], parameters=True)
    go_on(optimizer, group, grads[:3], RATES[:3])
    guard.read()
    assert not guard.changed
    assert group.data.tobytes() == expected.tobytes()
    optimizer.state(group.segments[1])["second_moment"][2] += 1
    go_on(optimizer, group, grads[3:], RATES[3:4])
    guard.read()
    assert guard.changed == ("the second_moment of norm.weight",)


def test_norms_are_asked_for_and_demanded() -> None:
    none, layer, whole = NormsNeeded.NONE, NormsNeeded.LAYER, NormsNeeded.GLOBAL
    for kind, wanted in (
        (Sgd, (none, whole)),
        (Adam, (none, whole)),
        (Adamw, (none, whole)),
        (Lars, (layer, whole)),
        (Lamb, (layer,)),
    ):
        found = [kind(), kind(clip_norm=1.0)] if len(wanted) == 2 else [kind()]  # type: ignore[call-arg]
        assert tuple(one.norms_needed for one in found) == wanted
        assert [one.needs_norms for one in found] == [one is not none for one in wanted]
    assert Lamb().prepares_norms
    assert Lamb().momentum == 0.9
    assert Lars().layer_norms
    group = make_group()
    for optimizer in (Lars(), Lamb()):
        optimizer.bind(group, group.segments)
        with pytest.raises(AssertionError, match="norms"):
            optimizer.update(group.segments, 0.1, None)


def test_a_parameter_that_steps_leave_out_is_corrected_by_its_own_updates() -> None:
    """After its first update it has moved by the rate, whichever step that was in: the gradient's length does not matter."""
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
    np.testing.assert_allclose(np.abs(group.data - before)[first.start : first.stop], 0.1, rtol=1e-7)
    assert optimizer.counters() == {"updates": 4, f"left_out/{first.parameter}": 3}


def test_only_the_given_segments_change_and_gradients_are_left_alone() -> None:
    """Alone finds an update that repeats the runs of an earlier one because both begin with the same segment."""
    group = make_group()
    optimizer = Sgd(weight_decay=0.05, nesterov=True, clip_norm=0.1)
    optimizer.bind(group, group.segments)
    group.grad[:] = gradients(group, 1)[0]
    grad, norms = group.grad.copy(), norms_of(group)
    part = group.segments[1].part(318, 320)
    for chosen in ((part, group.segments[3]), (part,), (part, group.segments[2])):
        before, touched = group.data.copy(), np.zeros(group.size, bool)
        optimizer.update(chosen, 0.1, norms)
        for segment in chosen:
            touched[segment.start : segment.stop] = True
        assert np.array_equal(group.data != before, touched)
        assert np.array_equal(group.grad, grad)


@pytest.mark.parametrize(
    ("make", "after"),  # values of the state after a first gradient of 1, and after a second one where the state was set to 3
    [(lambda: Sgd(momentum=0.5), {"momentum": (1.0, 2.5)}),
     (lambda: Adamw(beta1=0.5, beta2=0.75), {"first_moment": (0.5, 2.0), "second_moment": (0.25, 2.5)})],
)  # fmt: skip
def test_the_state_is_packed_and_aliased(make: Callable[[], Optimizer], after: dict[str, tuple[float, float]]) -> None:
    group = make_group()
    owned = (group.segments[3], group.segments[0])  # a gap between, out of order
    optimizer = make()
    optimizer.bind(group, owned)
    states = [optimizer.state(segment) for segment in owned]
    for state, segment in zip(states, owned, strict=True):
        assert {kind: view.size for kind, view in state.items()} == dict.fromkeys(after, segment.size)
        assert not any(view.any() for view in state.values())
    group.grad[:] = 1.0
    for turn in range(2):
        optimizer.begin_step()
        optimizer.update(owned, 0.1, None)
        for kind, values in after.items():
            for state in states:
                np.testing.assert_allclose(state[kind], values[turn])
                state[kind][:] = 3.0  # as a restore does
    part = owned[0].part(owned[0].start + 5, owned[0].start + 9)
    assert np.shares_memory(next(iter(optimizer.state(part).values())), next(iter(states[0].values())))
    assert next(iter(optimizer.state(group.segments[1].part(3, 3)).values())).size == 0
    with pytest.raises(AssertionError, match="not owned"):
        optimizer.state(group.segments[1])
    with pytest.raises((AssertionError, KeyError)):
        optimizer.update([group.segments[1]], 0.1, None)


@pytest.mark.parametrize("optimizer", [Sgd(momentum=0.9), Adamw(), Sgd(momentum=0.0)])
def test_nothing_may_be_owned_and_no_momentum_keeps_no_state(optimizer: Optimizer) -> None:
    group = make_group()
    optimizer.bind(group, ())
    before = group.data.copy()
    optimizer.begin_step()
    optimizer.update((), 0.1, None)
    optimizer.update([group.segments[0].part(3, 3)], 0.1, None)
    assert np.array_equal(group.data, before)
    assert (optimizer.state(group.segments[0].part(3, 3)) == {}) == (optimizer.momentum == 0)


def test_a_numpy_float64_rate_keeps_float32_arithmetic() -> None:
    group = make_group("float32")
    grads, start = gradients(group, 2), group.data.copy()
    expected = run(Sgd(), group, grads, [0.1, 0.3])
    group.data[:] = start
    assert run(Sgd(), group, grads, [np.float64(0.1), np.float64(0.3)]).tobytes() == expected.tobytes()


def test_a_gradient_that_is_not_finite_is_not_hidden_by_clipping() -> None:
    for bad in (np.nan, np.inf):
        group = make_group()
        grad = np.ones(group.size)
        grad[4] = bad
        with np.errstate(invalid="ignore"):
            assert not np.isfinite(run(Sgd(clip_norm=1.0), group, [grad], [0.1])[4])


def test_the_clipped_gradient_has_at_most_the_asked_norm() -> None:
    norms = norms_of(make_group())
    for length in (1e-8, 0.3, 0.999, 1.0, 1.001, 25.0, 1e12):
        norms.squares[:, 1] = 0
        norms.squares[:2, 1] = np.square([0.6 * length, 0.8 * length])
        scale = clip_scale(1.0, norms)
        assert 0.0 < scale <= 1.0
        assert scale * length <= 1.0
        assert scale == pytest.approx(min(1.0, 1.0 / (length + 1e-6)), rel=1e-12)
    norms.squares[:] = 0
    assert clip_scale(None, None) == clip_scale(0.5, norms) == 1.0
    with pytest.raises(AssertionError, match="norms"):
        clip_scale(0.5, None)


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
        go_on(optimizer, group, [grad], [0.1])
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
        go_on(optimizer, group, [grad], [0.1])
        go_on(plain, other, [grad], [0.1])
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


@pytest.mark.parametrize(("kind", "option"), [(Sgd, "weight_decay"), (Adamw, "beta2")])
def test_values_that_are_not_finite_are_refused(kind: Any, option: str) -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(ConfigError, match=option):
            kind(**{option: value})


GUARDED_SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "nothing": (0,), "b.weight": (7,), "b.bias": (1,)}


def _group(dtype: str) -> FlatGroup:
    group = FlatGroup(
        {name: ParameterSpec(shape, lambda random, shape: np.zeros(shape)) for name, shape in GUARDED_SHAPES.items()}, dtype
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
