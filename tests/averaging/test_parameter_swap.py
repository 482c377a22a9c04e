"""Parameters and their averages exchanged, and back, whatever owns what: all ranks have the owners' values, bit by bit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.parameter_swap import copy_parameters, swap_parameters
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.progress import ProgressEngine
from hpctrain.experiment.averager import make_strategy
from hpctrain.optim.ema import EMA, EmaRule
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support import nets
from tests.support.training import Task, batches, replica_of

TASK = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.9), samples=19, batch=8, steps=3, ema=EmaRule(0.8))


def _swapped(comm: ThreadCommunicator, averager: str) -> dict[str, list[np.ndarray]]:
    """By parameter: the weights, what the swap brings, what checkpoints have of the average, and what a second swap brings."""
    progress = ProgressEngine(rank=comm.rank, deadline_seconds=60, abort=comm.abort)
    options = {"density": 1.0} if averager == "sparse" else {}
    replica = replica_of(TASK, comm, progress, partial(make_strategy, averager, options))
    for batch in batches(TASK, comm.rank, comm.size, replica.tiles):
        replica.step(batch, TASK.lr)
    replica.drain()
    (owner,) = replica.averagers.values()
    parameters = owner.group.parameters
    found = {name: [parameter.data.copy()] for name, parameter in parameters.items()}
    averages = {name: owner.full_state(parameter)[EMA].copy() for name, parameter in parameters.items()}
    for _ in range(2):
        swap_parameters(owner, EMA)
        for name, parameter in parameters.items():
            found[name].append(parameter.data.copy())
    copy_parameters(owner, EMA)
    for parameter in parameters.values():
        assert owner.full_state(parameter)[EMA].tobytes() == parameter.data.tobytes()
    return {name: [*arrays, averages[name].reshape(arrays[0].shape)] for name, arrays in found.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("averager", ["sharded", "blocking", "overlap", "priority", "lazy", "sparse"])
def test_a_swap_brings_the_average_a_second_one_the_weights_and_a_copy_ends_the_difference(averager: str, ranks: int) -> None:
    by_rank = run_virtual(ranks, partial(_swapped, averager=averager), ranks_per_node=1)
    for found in by_rank:
        for name, (before, average, after, kept) in found.items():
            assert average.tobytes() == kept.tobytes(), name
            assert after.tobytes() == before.tobytes(), name
            assert not kept.size or not np.array_equal(before, average), name
            assert average.tobytes() == by_rank[0][name][1].tobytes()
