"""The average of weights against torch's and its definition, on any partition into owners, and where it begins."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.base import NormsNeeded, Optimizer
from hpctrain.optim.ema import EMA, EmaRule, with_ema
from hpctrain.optim.optimizers.adamw import Adamw
from hpctrain.optim.optimizers.lamb import Lamb
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from tests.optim.optimizers.test_adamw import gradients, make_group, norms_of


def _step(optimizer: Optimizer, group: FlatGroup, grad: np.ndarray) -> None:
    group.grad[:] = grad
    optimizer.begin_step()
    if optimizer.needs_norms:
        optimizer.prepare_norms(group.segments)
    optimizer.update(group.segments, 0.1, norms_of(group) if optimizer.needs_norms else None)


def _average(optimizer: Optimizer, group: FlatGroup) -> np.ndarray:
    return np.concatenate([optimizer.state(segment)[EMA] for segment in group.segments])


@pytest.mark.torch
def test_it_is_torchs() -> None:
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
@pytest.mark.parametrize("inner", [Sgd, Lars, Adamw, Lamb])
def test_it_is_its_definition_and_changes_no_update(inner: type[Optimizer], rule: EmaRule) -> None:
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


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_partition_into_owners_gives_the_same_bits(data: st.DataObject) -> None:
    group, rule = make_group("float32"), EmaRule(0.7)
    start, grads = group.data.copy(), gradients(group, 4)
    whole = with_ema(Sgd(), rule)
    whole.bind(group, group.segments)
    for grad in grads:
        _step(whole, group, grad)
    group.data[:] = start
    cuts = sorted(data.draw(st.sets(st.integers(0, group.size), max_size=6)) | {0, group.size})
    shards = [group.covering(a, b) for a, b in itertools.pairwise(cuts)]
    owners = [with_ema(Sgd(), rule) for _ in shards]
    for owner, shard in zip(owners, shards, strict=True):
        owner.bind(group, shard)
    for grad in grads:
        group.grad[:] = grad
        for owner, shard in zip(owners, shards, strict=True):
            owner.begin_step()
            owner.update(data.draw(st.permutations(shard)), 0.1, None)
    for owner, shard in zip(owners, shards, strict=True):
        for segment in shard:
            assert owner.state(segment)[EMA].tobytes() == whole.state(segment)[EMA].tobytes()


@pytest.mark.parametrize("inner", [Sgd, Adamw])
def test_it_goes_on_from_counters_and_state(inner: type[Optimizer]) -> None:
    group, rule = make_group("float32"), EmaRule(0.7)
    start, grads = group.data.copy(), gradients(group, 6)
    whole, first, second = (with_ema(inner(), rule) for _ in range(3))
    whole.bind(group, group.segments)
    for grad in grads:
        _step(whole, group, grad)
    group.data[:] = start
    first.bind(group, group.segments)
    for grad in grads[:3]:
        _step(first, group, grad)
    second.bind(group, group.segments)
    for segment in group.segments:
        for name, values in first.state(segment).items():
            second.state(segment)[name][:] = values
    second.load_counters(first.counters())
    for grad in grads[3:]:
        _step(second, group, grad)
    assert _average(second, group).tobytes() == _average(whole, group).tobytes()


def test_it_says_of_norms_what_the_optimiser_says() -> None:
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
