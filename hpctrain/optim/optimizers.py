"""The optimisers: SGD and LARS with momentum; Adam, AdamW and LAMB with two moments of the gradient.

`OPTIMIZERS` finds them by name ("sgd" is `Sgd`). Each element's result depends only on that element and on complete norms, so any
partition of the buffers produces the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar, Literal

from hpctrain.backend.arithmetic import Array, Corrections, Descent, MomentDescent, MomentRule, UpdateRun
from hpctrain.core.errors import OptionError
from hpctrain.core.registry import Registry
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Norms, Optimizer, Packing, UpdateCounts

#: number added to |g|, which may be 0
CLIP_EPSILON = 1e-6

DecayExclude = Literal["norm_and_bias", "none"]


def merged(runs: Iterable[UpdateRun]) -> list[UpdateRun]:
    """Return the same elements in fewer runs.

    Adjacent runs with the same scale and decay are joined; empty runs are dropped.
    """
    joined: list[UpdateRun] = []
    for run in runs:
        if run.start == run.stop:
            continue
        last = joined[-1] if joined else None
        if last is not None and (last.stop, last.gradient_scale, last.decay) == (run.start, run.gradient_scale, run.decay):
            joined[-1] = UpdateRun(last.start, run.stop, run.gradient_scale, run.decay)
        else:
            joined.append(run)
    return joined


# -- weight decay and clipping -------------------------------------------------------------------------------------------------


class _DecayingOptimizer(Optimizer):
    """Base of all optimisers with weight decay. Subclasses declare the options `weight_decay` and `decay_exclude`."""

    any_arrays = True

    weight_decay: float
    decay_exclude: DecayExclude

    def check_decay(self) -> None:
        """Raise unless `weight_decay` is a finite number of at least 0.

        Raises:
            OptionError: `weight_decay` is negative or not finite.
        """
        if not (self.weight_decay >= 0.0 and math.isfinite(self.weight_decay)):
            sentence = f"weight_decay is {self.weight_decay}, but must be a finite number of at least 0; the usual value is 1e-4."
            raise OptionError(sentence, "weight_decay")

    def decay(self, segment: Segment) -> float:
        """Return the segment's weight decay; 0 if `decay_exclude` excludes it."""
        return 0.0 if self.decay_excludes(segment) else float(self.weight_decay)

    def decay_excludes(self, segment: Segment) -> bool:
        """Return whether `decay_exclude` excludes this segment.

        "norm_and_bias" excludes biases and the parameters of batch norms; "none" excludes nothing.
        """
        return self.decay_exclude == "norm_and_bias" and not segment.decay


def check_clip_norm(clip_norm: float | None) -> None:
    """Raise unless `clip_norm` is positive or None.

    Raises:
        OptionError: `clip_norm` is not positive.
    """
    if clip_norm is not None and not clip_norm > 0.0:
        sentence = f"clip_norm is {clip_norm}, but must be positive; leave it out (null) to switch clipping off."
        raise OptionError(sentence, "clip_norm")


def clip_scale(clip_norm: float | None, norms: Norms | None) -> float:
    """Return min(1, clip_norm / (|g| + 1e-6)), with |g| over all parameters of `norms`; 1 if clipping is off.

    The product of gradient and scale is not finite if the gradient is not: |g| = nan results in 1, |g| = inf in 0, and 0 * inf is
    nan.
    """
    if clip_norm is None:
        return 1.0
    assert norms is not None, "clipping needs norms"
    return min(1.0, clip_norm / (norms.global_gradient() + CLIP_EPSILON))


# -- momentum ------------------------------------------------------------------------------------------------------------------


class MomentumDescent:
    """Momentum descent: m := momentum * m + g'; w := w - lr * m, or w - lr * (g' + momentum * m) with `nesterov`.

    The semantics are those of torch.optim.SGD with dampening 0: the state starts at zero, so the first m is g'. The Nesterov form
    is that of Sutskever et al., ICML 2013. The gradient is only read. The state is one packed array of the owned segments, or
    none if momentum is 0.

    Args:
        group: parameters whose data is updated from their gradient.
        owned: segments that do not overlap, in any order.
        momentum: factor on m.
        nesterov: whether to use the Nesterov form.
    """

    def __init__(self, group: FlatGroup, owned: Sequence[Segment], momentum: float, nesterov: bool) -> None:
        self._factor, self._packing = float(momentum), Packing(owned)
        self._momentum: Array = group.arithmetic.zeros(self._packing.size if self._factor else 0, group.dtype)
        self._descent = group.arithmetic.descent(
            group.data, group.grad, self._momentum, factor=self._factor, nesterov=nesterov, shadow=group.shadow
        )
        #: (segments, scale, their runs) of the last update that began with a segment, by its start
        self._alike: dict[int, tuple[Sequence[Segment], float, list[UpdateRun]]] = {}

    def state(self, segment: Segment) -> dict[str, Array]:
        """Return {"momentum": view} of an owned segment or of a part of one; {} if momentum is 0."""
        if not self._factor:
            return {}
        return {"momentum": self._momentum[self._packing.place(segment)]}

    def update(self, runs: Iterable[UpdateRun], lr: float) -> None:
        """Update the data of `runs`, each inside owned segments."""
        self._descent.update(map(self._packing.placed, runs), lr)

    def update_alike(
        self,
        segments: Sequence[Segment],
        scale: float,
        decay: Callable[[Segment], float],
        lr: float,
        rate: Callable[[Segment], float] = lambda _: 1.0,
    ) -> None:
        """Update segments with gradients times `scale`, weight decay `decay(segment)` and learning rate `lr * rate(segment)`.

        The runs are reused while averagers pass the same sequence, which they never modify, with the same scale.
        """
        if not segments:
            return
        known, known_scale, runs = self._alike.get(segments[0].start, ((), scale, []))
        if known is not segments or known_scale != scale:
            made = (UpdateRun(s.start, s.stop, scale * rate(s), decay(s) * rate(s)) for s in segments)
            runs = list(map(self._packing.placed, merged(made)))
            self._alike[segments[0].start] = segments, scale, runs
        self._descent.update(runs, lr)


@dataclass(frozen=True, kw_only=True, eq=False)
class MomentumOptimizer(_DecayingOptimizer):
    """Momentum descent with weight decay and clipping, the base of SGD and LARS.

    Args:
        momentum: Factor on the previous update's direction in the next one, in [0, 1); 0 switches momentum off.
        nesterov: Whether to use Nesterov's momentum: w := w - lr * (g' + momentum * m), with the gradient g' and the momentum m.
        weight_decay: Factor of weight decay: weight_decay * w is added to the gradient (L2 regularisation).
        decay_exclude: Parameters without weight decay: "norm_and_bias" excludes biases and the parameters of batch norms, "none"
            excludes nothing.
        clip_norm: Maximum norm of the gradient of all parameters together; a larger gradient is scaled down to it. null switches
            clipping off.

    Raises:
        OptionError: a value is outside its range.
    """

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_exclude: DecayExclude = "norm_and_bias"
    clip_norm: float | None = None
    _bound: MomentumDescent | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise OptionError(f"momentum {self.momentum} is outside [0, 1); the usual value is 0.9.", "momentum")
        if self.nesterov and self.momentum == 0.0:
            raise OptionError(f"nesterov needs a momentum above 0, but momentum is {self.momentum}; 0.9 is usual.", "nesterov")
        self.check_decay()
        check_clip_norm(self.clip_norm)

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        # Options are frozen, but the state is not an option.
        object.__setattr__(self, "_bound", MomentumDescent(group, owned, self.momentum, self.nesterov))

    def state(self, segment: Segment) -> dict[str, Array]:
        return self.descent.state(segment)

    @property
    def passes(self) -> float:
        return 2.0 + bool(self.weight_decay) + 2.0 * self.nesterov

    @property
    def descent(self) -> MomentumDescent:
        """State and update of the bound segments."""
        assert self._bound is not None, "the optimiser is not bound"
        return self._bound


@dataclass(frozen=True, kw_only=True, eq=False)
class Sgd(MomentumOptimizer):
    """Stochastic gradient descent with momentum.

    g' = clip(g) + weight_decay * w; m := momentum * m + g'; w := w - lr * m (torch.optim.SGD, dampening 0).

    Args:
        momentum: Factor on the previous update's direction in the next one, in [0, 1); 0 is plain gradient descent.
        norm_bias_rate: Factor on the learning rate of the biases of batch norms, above 0; recipes for CIFAR-10 use up to 64.

    Raises:
        OptionError: a value is outside its range.
    """

    norm_bias_rate: float = 1.0
    _norm_biases: frozenset[str] = field(init=False, repr=False, default=frozenset())

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.norm_bias_rate > 0.0 and math.isfinite(self.norm_bias_rate)):
            sentence = f"norm_bias_rate is {self.norm_bias_rate}, but must be positive and finite; 1 changes nothing."
            raise OptionError(sentence, "norm_bias_rate")

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        super().bind(group, owned)
        object.__setattr__(self, "_norm_biases", frozenset(name for name, spec in group.specs.items() if spec.norm_bias))

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        self.descent.update_alike(segments, clip_scale(self.clip_norm, norms), self.decay, lr, self._rate)

    def _rate(self, segment: Segment) -> float:
        return float(self.norm_bias_rate) if segment.parameter in self._norm_biases else 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Lars(MomentumOptimizer):
    """Layer-wise adaptive rate scaling (LARS) for large batches: SGD that scales the step of each parameter by a ratio of norms.

    lambda = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon), with norms over the whole parameter; g' = lambda * (g
    + weight_decay * w); m := momentum * m + g'; w := w - lr * m (You, Gitman and Ginsburg, arXiv 1708.03888, equation 6).

    lambda is 1 if |w| or |g| is 0. A parameter that `decay_exclude` excludes (norms and biases) has neither decay nor ratio and
    is updated as by plain SGD. Clipping comes first: g and |g| above are those of the clipped gradient. As in `Sgd`, the learning
    rate is outside of the momentum, so a change of the rate acts on the whole sum at once. The paper's algorithm 1 has the rate
    inside; the two are equal while the rate is constant.

    Args:
        momentum: Factor on the previous update's direction in the next one, in [0, 1).
        decay_exclude: Parameters without weight decay and ratio: "norm_and_bias" excludes biases and the parameters of batch
            norms, "none" excludes nothing.
        clip_norm: Maximum norm of the gradient of all parameters together; a larger gradient is scaled down to it before the
            ratios are computed. null switches clipping off.
        trust_coefficient: Factor on all ratios (the paper's eta), above 0.
        epsilon: Number added to the denominators of the ratios, so that they stay finite.

    Raises:
        OptionError: a value is outside its range.
    """

    layer_norms = True

    trust_coefficient: float = 0.001
    epsilon: float = 1e-9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.trust_coefficient > 0.0:
            sentence = f"trust_coefficient is {self.trust_coefficient}, but must be positive; the usual value is 0.001."
            raise OptionError(sentence, "trust_coefficient")
        if not self.epsilon >= 0.0:
            raise OptionError(f"epsilon is {self.epsilon}, but must be at least 0; the usual value is 1e-9.", "epsilon")

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        assert norms is not None, "LARS needs norms"
        clip = clip_scale(self.clip_norm, norms)
        runs: list[UpdateRun] = []
        for segment in segments:
            ratio = self.trust_ratio(segment, norms, clip)
            runs.append(UpdateRun(segment.start, segment.stop, ratio * clip, ratio * self.decay(segment)))
        self.descent.update(merged(runs), lr)

    def trust_ratio(self, segment: Segment, norms: Norms, clip: float = 1.0) -> float:
        """Return lambda of the parameter of `segment`, with the gradient times `clip`; 1 if it is excluded or a norm is 0."""
        if self.decay_excludes(segment):
            return 1.0
        data, gradient = (math.sqrt(square) for square in norms.squares[norms.index[segment.parameter]])
        gradient *= clip
        if data == 0.0 or gradient == 0.0:
            return 1.0
        return float(self.trust_coefficient * data / (gradient + self.weight_decay * data + self.epsilon))


# -- two moments ---------------------------------------------------------------------------------------------------------------


class BoundMoments:
    """Moments of owned segments, packed and initially zero, and the number of their updates; see `Arithmetic.moment_descent`."""

    def __init__(self, group: FlatGroup, owned: Sequence[Segment], rule: MomentRule) -> None:
        self._rule, self._packing = rule, Packing(owned)
        self.counts = UpdateCounts(group, owned)
        self._first, self._second = (group.arithmetic.zeros(self._packing.size, group.dtype) for _ in range(2))
        self.descent: MomentDescent = group.arithmetic.moment_descent(
            group.data, group.grad, self._first, self._second, rule, shadow=group.shadow
        )

    def state(self, segment: Segment) -> dict[str, Array]:
        """Return {"first_moment": view, "second_moment": view} of an owned or empty segment."""
        place = self._packing.place(segment)
        return {"first_moment": self._first[place], "second_moment": self._second[place]}

    def counted(self, runs: Sequence[tuple[Segment, UpdateRun]]) -> Iterator[tuple[list[UpdateRun], Corrections]]:
        """Count an update of each segment, and yield the runs with their bias corrections, grouped by number of updates."""
        numbered = [(self.counts.count(segment), run) for segment, run in runs if segment.size]
        for number, same_number in groupby(sorted(numbered, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
            # The moments start at 0, so after this number of updates they are too small by these factors.
            first, second = 1.0 - self._rule.beta1**number, 1.0 - self._rule.beta2**number
            corrections = Corrections(1.0 / first, 1.0 / math.sqrt(second))
            yield [self._packing.placed(run) for run in merged(run for _, run in same_number)], corrections


@dataclass(frozen=True, kw_only=True, eq=False)
class MomentOptimizer(_DecayingOptimizer):
    """Descent by two moments with weight decay, the base of Adam, AdamW and LAMB.

    Args:
        beta1: Decay rate per update of the moving average of gradients, in [0, 1).
        beta2: Decay rate per update of the moving average of squared gradients, in [0, 1).
        epsilon: Number added to the root of the average of squared gradients, above 0.
        weight_decay: Factor of weight decay: weight_decay * w is added to the direction of the update, not to the gradient.
        decay_exclude: Parameters without weight decay: "norm_and_bias" excludes biases and the parameters of batch norms, "none"
            excludes nothing.

    Raises:
        OptionError: a value is outside its range.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    decay_exclude: DecayExclude = "norm_and_bias"
    _bound: BoundMoments | None = field(init=False, repr=False, default=None)
    #: whether the decay is added to the direction of the update, not to the gradient
    decoupled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, usual in (("beta1", 0.9), ("beta2", 0.999)):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise OptionError(f"{name} {getattr(self, name)} is outside [0, 1); the usual value is {usual}.", name)
        if not (self.epsilon > 0.0 and math.isfinite(self.epsilon)):
            raise OptionError(f"epsilon is {self.epsilon}, but must be positive and finite; the usual value is 1e-8.", "epsilon")
        self.check_decay()
        object.__setattr__(self, "momentum", self.beta1)  # strategies read it from every optimiser; it is not an option here

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        # Options are frozen, but the state is not an option.
        rule = MomentRule(self.beta1, self.beta2, self.epsilon, self.decoupled)
        object.__setattr__(self, "_bound", BoundMoments(group, owned, rule))

    def state(self, segment: Segment) -> dict[str, Array]:
        return self.bound.state(segment)

    def begin_step(self, left_out: Collection[str] = ()) -> None:
        self.bound.counts.begin_step(left_out)

    def counters(self) -> dict[str, int]:
        return self.bound.counts.counters()

    def load_counters(self, counters: Mapping[str, int]) -> None:
        self.bound.counts.load_counters(counters)

    @property
    def passes(self) -> float:  # both moments, a root and a quotient, which take as long as 1.5 additions each (measured)
        return 5.0 + bool(self.weight_decay)

    @property
    def bound(self) -> BoundMoments:
        """State of the bound segments."""
        assert self._bound is not None, "the optimiser is not bound"
        return self._bound

    def run(self, segment: Segment, gradient_scale: float = 1.0) -> tuple[Segment, UpdateRun]:
        """Return the segment with the run that updates it."""
        return segment, UpdateRun(segment.start, segment.stop, gradient_scale, self.decay(segment))


@dataclass(frozen=True, kw_only=True, eq=False)
class Adamw(MomentOptimizer):
    """Adam with decoupled weight decay (AdamW): each element's step follows from the means of its gradient and squared gradient.

    m := beta1 * m + (1 - beta1) * g; v := beta2 * v + (1 - beta2) * g^2; w := w - lr * (m / (1 - beta1^t) / (sqrt(v / (1 -
    beta2^t)) + epsilon) + weight_decay * w), in the t-th update of a parameter (torch.optim.AdamW; Loshchilov and Hutter, ICLR
    2019, algorithm 2).

    Args:
        clip_norm: Maximum norm of the gradient of all parameters together; a larger gradient is scaled down to it. null switches
            clipping off.
    """

    clip_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip_norm(self.clip_norm)

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        scale = clip_scale(self.clip_norm, norms)
        for runs, corrections in self.bound.counted([self.run(segment, scale) for segment in segments]):
            self.bound.descent.update(runs, corrections, lr)


@dataclass(frozen=True, kw_only=True, eq=False)
class Adam(Adamw):
    """Adam: as AdamW, but with weight decay in the gradient (L2 regularisation), which the moments then contain.

    g' = clip(g) + weight_decay * w; the moments m and v are those of g'; w := w - lr * m / (1 - beta1^t) / (sqrt(v / (1 -
    beta2^t)) + epsilon), in the t-th update of a parameter (torch.optim.Adam; Kingma and Ba, ICLR 2015, algorithm 1).

    Args:
        weight_decay: Factor of weight decay: weight_decay * w is added to the gradient.
    """

    weight_decay: float = 0.0
    decoupled: ClassVar[bool] = False

    @property
    def passes(self) -> float:  # the decayed gradient is computed first, in two passes
        return super().passes + bool(self.weight_decay)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lamb(MomentOptimizer):
    """Layer-wise adaptive moments (LAMB) for large batches: AdamW that scales the step of each parameter by a ratio of norms.

    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * w, with the moments of AdamW; w := w - lr * |w| /
    |u| * u, with norms over the whole parameter (You et al., ICLR 2020, arXiv 1904.00962, algorithm 2; the paper's phi is the
    identity).

    The ratio is 1 if |w| or |u| is 0. A parameter that `decay_exclude` excludes (norms and biases) has neither decay nor ratio
    and is updated as by AdamW. There is no clipping, because the length of a step does not depend on the length of the gradient.

    Args:
        epsilon: Number added to the root of the average of squared gradients, above 0.
        decay_exclude: Parameters without weight decay and ratio: "norm_and_bias" excludes biases and the parameters of batch
            norms, "none" excludes nothing.
    """

    layer_norms = True

    epsilon: float = 1e-6
    _descent: Descent | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "prepares_norms", True)

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        super().bind(group, owned)
        no_state = group.arithmetic.zeros(0, group.dtype)
        descent = group.arithmetic.descent(group.data, group.grad, no_state, factor=0.0, nesterov=False, shadow=group.shadow)
        object.__setattr__(self, "_descent", descent)

    @property
    def passes(self) -> float:  # the ratio scales u, and w moves along it
        return super().passes + 2.0

    def prepare_norms(self, segments: Sequence[Segment]) -> None:
        """Update the moments, and replace the gradient by u, so that the norms are those of u."""
        for runs, corrections in self.bound.counted([self.run(segment) for segment in segments]):
            self.bound.descent.direct(runs, corrections)

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        assert norms is not None, "LAMB needs norms"
        assert self._descent is not None, "the optimiser is not bound"
        runs = (UpdateRun(segment.start, segment.stop, self.trust_ratio(segment, norms), 0.0) for segment in segments)
        self._descent.update(merged(runs), lr)

    def trust_ratio(self, segment: Segment, norms: Norms) -> float:
        """Return |w| / |u| of the parameter of `segment`; 1 if the parameter is excluded or a norm is 0."""
        if self.decay_excludes(segment):
            return 1.0
        data, direction = (math.sqrt(square) for square in norms.squares[norms.index[segment.parameter]])
        return data / direction if data > 0.0 and direction > 0.0 else 1.0


OPTIMIZERS: Registry[Optimizer] = Registry(__name__, "optimizer", Optimizer)
