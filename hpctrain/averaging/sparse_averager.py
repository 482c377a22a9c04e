"""Runs a schedule with compressed slices: reduce-scatters, exchanges of largest elements, own updates and allgathers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hpctrain.averaging.base import Agreement, AveragerSetup
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.step_times import Times
from hpctrain.averaging.reduce_scatter import ReduceScatterAverager, ReduceScatterStep
from hpctrain.averaging.strategies.sparse import SparseOperations
from hpctrain.averaging.sparse_residual import SparseSettings
from hpctrain.comm.base import Array
from hpctrain.comm.groups import Levels
from hpctrain.nn.parameter import Parameter

_RESIDUAL, _VELOCITY = "sparse_gradient", "sparse_momentum"
_STEPS = "sparse_steps"


class SparseAverager(ReduceScatterAverager):
    """Each rank updates its part of every slice: its own 1/P of a dense one, its node's share of a compressed one.

    Holders of what is kept back are the nodes; each rank has its part of its node's.

    Args:
        two: levels of the streams; None: every rank is a node. replan: as `ReduceScatterAverager` has it.
    """

    pending = _RESIDUAL

    def __init__(
        self,
        setup: AveragerSetup,
        agreement: Agreement,
        *,
        settings: SparseSettings,
        two: Levels | None,
        replan: Callable[[CollectiveSchedule, Times], CollectiveSchedule] | None,
    ) -> None:
        assert agreement.schedule is not None
        self._sparse = SparseOperations(setup, agreement.schedule, agreement.streams, settings, two)
        super().__init__(
            setup,
            agreement,
            exchanging={},
            nominal_batch=0,
            order=None if two is None else two.order,
            replan=replan,
            operations=self._sparse,
        )
        self.holders = self._sparse.nodes
        self._has_velocity = settings.momentum_correction > 0.0
        self._number = 0

    def _new_step(self, lr: float) -> ReduceScatterStep:
        self._sparse.begin_step()
        step = super()._new_step(lr)
        step.update = replace(step.update, number=self._number)
        self._number += 1
        return step

    def changed(self) -> Sequence[Array]:
        return [*super().changed(), *self._sparse.kept_back()]

    def undone(self) -> None:
        self._sparse.undo()

    # -- gradients that are kept back, in a checkpoint -------------------------------------------------------------------------

    @property
    def by_holder(self) -> Collection[str]:
        return (_RESIDUAL, _VELOCITY) if self._has_velocity else (_RESIDUAL,)

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """Also what each node keeps back of the gradient, and its momentum before the choice. Collective."""
        state = super().full_state(parameter)
        if self._sparse.keeps_back(parameter.name):
            state[_RESIDUAL] = self._sparse.residual(parameter.name, self.progress)
        if self._has_velocity:
            state[_VELOCITY] = self._sparse.velocity(parameter.name, self.progress)
        return state

    def state_names(self, parameter: Parameter) -> Collection[str]:
        """Also what an earlier run kept back of a parameter that is sent whole now: the first step adds it."""
        return {**dict.fromkeys(super().state_names(parameter)), **dict.fromkeys(self.by_holder)}

    def load_state(self, parameter: Parameter, state: Mapping[str, np.ndarray]) -> None:
        super().load_state(parameter, state)
        if _RESIDUAL in state:
            self._sparse.load_residual(parameter.name, state[_RESIDUAL])
        if self._has_velocity and _VELOCITY in state:
            self._sparse.load_velocity(parameter.name, state[_VELOCITY])

    def counters(self) -> dict[str, int]:
        return {**super().counters(), _STEPS: self._number}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        super().load_counters(counters)
        self._number = counters.get(_STEPS, 0)
