"""Training with a posting thread, over MPI: the bits are those of mode `test`, whatever thread posts and updates."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet
from hpctrain.comm import progress_mode
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from tests.support import nets
from tests.support.training import Task, train

CASES = {
    "sharded": (Sharded, Sgd, {}),
    "sharded, inputs and errors": (Sharded, Sgd, {"fc_exchange": "always"}),
    "sharded, lars": (Sharded, Lars, {}),
    "sharded, clipped": (Sharded, partial(Sgd, clip_norm=0.1), {}),
    "priority": (Priority, Sgd, {"slice_parameters": 200, "window": 2, "replan": False}),
    "overlap": (Overlap, Sgd, {}),
    "bucketed": (Bucketed, Sgd, {"bucket_bytes": 400}),
    "lazy": (Lazy, Sgd, {}),
    "sharded, in 16 bits": (Sharded, Sgd, {"wire": "bfloat16", "wire_parameters": "bfloat16"}),
    "bucketed, in 16 bits": (Bucketed, Sgd, {"bucket_bytes": 400, "wire": "float16"}),
    "sparse": (Sparse, Sgd, {"density": 0.2, "compress": "always", "least_elements": 40, "two_level": False}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parallel([2, 3, 4])
def test_the_bits_are_those_of_posting_by_the_program(world: Communicator, progress: ProgressEngine, case: str) -> None:
    strategy, optimizer, options = CASES[case]
    task = Task(partial(nets.residual), OnednnKernelSet(), optimizer, dtype="float32", steps=12)
    usual = train(task, world, progress, strategy, nominal_batch=task.batch, **options)
    switches = sys.getswitchinterval()
    progress_mode.apply(progress, ProgressMode.POSTING)
    sys.setswitchinterval(1e-5)
    try:
        other = train(task, world, progress, strategy, nominal_batch=task.batch, **options)
    finally:
        sys.setswitchinterval(switches)
        progress_mode.apply(progress, ProgressMode.TEST)
    for name, values in usual.parameters.items():
        assert np.array_equal(values, other.parameters[name]), name
    assert [total.loss for total in usual.totals] == [total.loss for total in other.totals]
