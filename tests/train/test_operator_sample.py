"""A sample of operators: a few whole steps, and the same training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.trace.tracer import Category, Events
from hpctrain.train.operator_sample import OperatorSample
from hpctrain.train.replica import Replica
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, batches, replica_of

TASK = Task(nets.plain, NumpyKernelSet(), Sgd, steps=20, samples=19)  # an epoch's third step is not whole


def _trained(comm: ThreadCommunicator, sample_of: Callable[[Replica], OperatorSample | None]) -> tuple[np.ndarray, Events | None]:
    replica = replica_of(TASK, comm, virtual_engine(comm), Blocking)
    sample = sample_of(replica)
    for batch in batches(TASK, replica.groups.position, comm.size):
        if sample is not None:
            sample.begin_step(whole=batch.global_count == TASK.batch)
        replica.step(batch, TASK.lr)
    replica.settle()
    replica.drain()
    parameters = np.concatenate([parameter.data.reshape(-1) for parameter in replica.network.parameters.values()])
    if sample is None:
        return parameters, None
    assert sample.complete
    return parameters, sample.events()


@pytest.mark.parametrize("threads", [1, 2])
def test_five_whole_steps_are_recorded_and_no_bit_changes(threads: int) -> None:
    sampled = run_virtual(2, lambda comm: _trained(comm, lambda replica: OperatorSample(replica, threads)))
    plain = run_virtual(2, lambda comm: _trained(comm, lambda replica: None))
    for (parameters, events), (others, _) in zip(sampled, plain, strict=True):
        assert np.array_equal(parameters, others)
        assert events is not None
        assert events.dropped == 0
        forward = events.of(Category.FORWARD)
        assert np.bincount(forward.name)[np.unique(forward.name)].tolist() == [5] * len(np.unique(forward.name))
        assert {"conv1", "fc2"} <= {events.names[index] for index in forward.name}
        assert np.all(events.stop_ns >= events.start_ns)
