"""Descent over runs of flat memory: by momentum, which SGD and LARS share, and by two moments, which AdamW and LAMB share."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

from hpctrain.backend.arithmetic import Array, Corrections, MomentDescent, MomentRule, UpdateRun
from hpctrain.core.errors import OptionError
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import DecayExclude, Optimizer, Packing, UpdateCounts, check_clip_norm, check_decay, is_excluded


def merged(runs: Iterable[UpdateRun]) -> list[UpdateRun]:
    """The same elements in fewer runs: neighbours that touch and are updated alike become one; empty ones vanish."""
    out: list[UpdateRun] = []
    for run in runs:
        if run.start == run.stop:
            continue
        last = out[-1] if out else None
        if last is not None and (last.stop, last.gradient_scale, last.decay) == (run.start, run.gradient_scale, run.decay):
            out[-1] = UpdateRun(last.start, run.stop, run.gradient_scale, run.decay)
        else:
            out.append(run)
    return out


class MomentumDescent:
    """m := momentum * m + g'; w := w - lr * m, or w - lr * (g' + momentum * m) with `nesterov`.

    These are torch.optim.SGD's semantics with dampening 0: the state is zeroed, so the first m is g'. Sutskever et al., ICML
    2013, for the Nesterov form. Every element's result depends on that element alone, so any partition of the buffers gives the
    same bits. The gradient is read only. Owns the state of the owned segments, packed: one array of as many elements as they
    have, none where momentum is 0.

    Args:
        group: whose data is updated from its gradient. owned: segments that do not overlap, in any order.
    """

    def __init__(self, group: FlatGroup, owned: Sequence[Segment], momentum: float, nesterov: bool) -> None:
        self._factor, self._packing = float(momentum), Packing(owned)
        self._momentum: Array = group.arithmetic.zeros(self._packing.size if self._factor else 0, group.dtype)
        self._descent = group.arithmetic.descent(
            group.data, group.grad, self._momentum, factor=self._factor, nesterov=nesterov, shadow=group.shadow
        )

    def state(self, segment: Segment) -> dict[str, Array]:
        """{"momentum": view} of an owned segment or of a part of one; empty where momentum is 0."""
        if not self._factor:
            return {}
        return {"momentum": self._momentum[self._packing.place(segment)]}

    def update(self, runs: Iterable[UpdateRun], lr: float) -> None:
        """Update the data of `runs`, each inside owned segments; their places in the state are found here."""
        self._descent.update(map(self._packing.placed, runs), lr)


@dataclass(frozen=True, kw_only=True, eq=False)
class MomentumOptimizer(Optimizer):
    """Momentum descent with weight decay and clipping: what its kinds share.

    Args:
        momentum: Share of the previous update's direction that is kept, in [0, 1); 0 keeps nothing.
        nesterov: Nesterov's momentum: the update looks one step ahead, w := w - lr * (g' + momentum * m).
        weight_decay: Factor on the weights that is added to their gradient (L2 regularisation).
        decay_exclude: Parameters without weight decay: "norm_and_bias" leaves out biases and the parameters of batch norms,
            "none" leaves out nothing.
        clip_norm: Largest norm of the gradient of all parameters together, above which it is scaled down to it; null switches
            clipping off.

    Raises:
        OptionError: a value outside its range.
    """

    any_arrays: ClassVar[bool] = True

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
            raise OptionError("nesterov needs a momentum above 0; the usual value is 0.9.", "nesterov")
        check_decay(self.weight_decay, self.decay_exclude)
        check_clip_norm(self.clip_norm)

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        # The options are frozen; what is updated by them is no option.
        object.__setattr__(self, "_bound", MomentumDescent(group, owned, self.momentum, self.nesterov))

    def state(self, segment: Segment) -> dict[str, Array]:
        return self.descent.state(segment)

    @property
    def descent(self) -> MomentumDescent:
        """The state and the update of the bound segments."""
        assert self._bound is not None, "the optimiser is not bound"
        return self._bound

    def decay(self, segment: Segment) -> float:
        """The segment's weight decay; 0 for a norm's parameters and biases, where `decay_exclude` leaves them out."""
        return 0.0 if self.decay_excludes(segment) else float(self.weight_decay)

    def decay_excludes(self, segment: Segment) -> bool:
        """True for a norm's parameters and biases, where `decay_exclude` leaves them out."""
        return is_excluded(segment, self.decay_exclude)


class BoundMoments:
    """The moments of owned segments, zeroed and packed, and the number of their updates; see `Arithmetic.moment_descent`.

    Every element's result depends on that element alone, so any partition of the buffers gives the same bits.
    """

    def __init__(self, group: FlatGroup, owned: Sequence[Segment], rule: MomentRule) -> None:
        self._rule, self._packing = rule, Packing(owned)
        self.counts = UpdateCounts(group, owned)
        self._first, self._second = (group.arithmetic.zeros(self._packing.size, group.dtype) for _ in range(2))
        self.descent: MomentDescent = group.arithmetic.moment_descent(
            group.data, group.grad, self._first, self._second, rule, shadow=group.shadow
        )

    def state(self, segment: Segment) -> dict[str, Array]:
        """{"first_moment": view, "second_moment": view} of an owned segment, or of one without elements."""
        place = self._packing.place(segment)
        return {"first_moment": self._first[place], "second_moment": self._second[place]}

    def counted(self, runs: Sequence[tuple[Segment, UpdateRun]]) -> Iterator[tuple[list[UpdateRun], Corrections]]:
        """Count an update of each segment, and give the runs of those that have had as many together, with their corrections."""
        numbered = [(self.counts.count(segment), run) for segment, run in runs if segment.size]
        for number, of_number in groupby(sorted(numbered, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
            yield [self._packing.placed(run) for run in merged(run for _, run in of_number)], self._corrections(number)

    def _corrections(self, number: int) -> Corrections:
        """Behind the update of that number, counted from 1."""
        first, second = 1.0 - self._rule.beta1**number, 1.0 - self._rule.beta2**number
        return Corrections(1.0 / first, 1.0 / math.sqrt(second))


@dataclass(frozen=True, kw_only=True, eq=False)
class MomentOptimizer(Optimizer):
    """Descent by two moments with weight decay: what its kinds share.

    Args:
        beta1: Share of the mean of gradients that is kept in an update, in [0, 1).
        beta2: Share of the mean of squared gradients that is kept in an update, in [0, 1).
        epsilon: Number added to the root of the mean of squares, above 0.
        weight_decay: Factor on the weights that is added to the direction of the update, and not to the gradient.
        decay_exclude: Parameters without weight decay: "norm_and_bias" leaves out biases and the parameters of batch norms,
            "none" leaves out nothing.

    Raises:
        OptionError: a value outside its range.
    """

    any_arrays: ClassVar[bool] = True

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    decay_exclude: DecayExclude = "norm_and_bias"
    _bound: BoundMoments | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        for name, usual in (("beta1", 0.9), ("beta2", 0.999)):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise OptionError(f"{name} {getattr(self, name)} is outside [0, 1); the usual value is {usual}.", name)
        if not (self.epsilon > 0.0 and math.isfinite(self.epsilon)):
            raise OptionError(f"epsilon {self.epsilon} must be a positive number; the usual value is 1e-8.", "epsilon")
        check_decay(self.weight_decay, self.decay_exclude)
        object.__setattr__(self, "momentum", self.beta1)  # what strategies ask of every optimiser; no option here

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        # The options are frozen; what is updated by them is no option.
        rule = MomentRule(self.beta1, self.beta2, self.epsilon)
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
    def bound(self) -> BoundMoments:
        """The state of the bound segments."""
        assert self._bound is not None, "the optimiser is not bound"
        return self._bound

    def run(self, segment: Segment, gradient_scale: float = 1.0) -> tuple[Segment, UpdateRun]:
        """A segment, and how its elements are updated."""
        decay = 0.0 if self.decay_excludes(segment) else float(self.weight_decay)
        return segment, UpdateRun(segment.start, segment.stop, gradient_scale, decay)

    def decay_excludes(self, segment: Segment) -> bool:
        """True for a norm's parameters and biases, where `decay_exclude` leaves them out."""
        return is_excluded(segment, self.decay_exclude)
