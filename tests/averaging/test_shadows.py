"""Rounded copies of the parameters are fresh wherever a kernel reads them, whoever updates the parameters."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.arithmetic import Array, Descent
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.kernels.base import Operator, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import Spec, TensorSpec
from hpctrain.comm.base import Communicator
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.late_kernels import LateDescent, Queue
from tests.support.training import Task, batches, replica_of


class AtOnce(Queue):
    """Nothing is late."""

    def put(self, work, *arguments) -> None:
        super().put(work, *arguments)
        self.wait()


class ShadowArithmetic(HostArithmetic):
    """Descents write shadows too."""

    def descent(
        self, data: Array, gradient: Array, momentum: Array, *, factor: float, nesterov: bool, shadow: Array | None = None
    ) -> Descent:
        return LateDescent(AtOnce(), super().descent(data, gradient, momentum, factor=factor, nesterov=nesterov), data, shadow)


class Watching(NumpyKernelSet):
    """Operators compare their parameters with the shadows of these before they run. seen: how many were compared."""

    arithmetic = ShadowArithmetic()
    shadow_dtype = "float32"

    def __init__(self) -> None:
        self.seen = 0

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        operator = super().make(spec, inputs, training=training, input_gradient=input_gradient)
        forward = operator.forward

        def watched(context: StepContext) -> None:
            for role, data in operator.buffers.parameters.items():
                assert np.array_equal(operator.buffers.shadows[role], data.astype(np.float32)), (spec, role)
                self.seen += 1
            forward(context)

        operator.forward = watched  # type: ignore[method-assign]
        return operator


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("strategy", [Blocking, Bucketed, Lazy, Overlap, Priority, Sharded])
def test_shadows_are_fresh_in_every_forward_pass(strategy: type, ranks: int) -> None:
    def run(comm: Communicator) -> int:
        task = Task(nets.residual, Watching(), partial(Sgd, momentum=0.9), steps=4)
        replica = replica_of(task, comm, virtual_engine(comm), strategy)
        for batch in batches(task, replica.groups.position, comm.size, replica.tiles):
            replica.step(batch, task.lr)
        assert isinstance(task.kernels, Watching)
        return task.kernels.seen

    assert min(run_virtual(ranks, run, seed=2)) > 4 * 10
