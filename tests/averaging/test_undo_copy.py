"""A step that is undone has never been: the next one makes the bits that it would have made without it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.averaging.strategy import Strategy
from hpctrain.averaging.undo_copy import UndoCopy
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.train.snapshot import Position
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.averaging import STRATEGIES
from tests.support.training import Task, batches, replica_of

TASK = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.9), steps=6)
_SPARSE = {**STRATEGIES["sparse, all of it"][1], "density": 0.1}
_CORRECTED = {"momentum_correction": 0.9, "warmup_density": 1.0, "warmup_steps": 4}
CASES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "overlap": STRATEGIES["overlap"],
    "sharded": STRATEGIES["sharded, exchange"],
    "lazy": (Lazy, {"layers": 3, "max_interval": 4, "check_every": 1, "bucket_bytes": 100}),
    "sparse": (Sparse, {**_SPARSE, **_CORRECTED}),
    "sparse, whole": (Sparse, {**_SPARSE, **_CORRECTED, "compress": "auto", "least_elements": 10**9}),
    "rounded": (STRATEGIES["sharded"][0], {**STRATEGIES["sharded"][1], "wire_parameters": "bfloat16"}),
}


def _train(
    comm: ThreadCommunicator, case: str, *, undone: int | None, content: CheckpointContent | None = None
) -> CheckpointContent:
    """Some steps, of which one is made and undone, and then made again; or not."""
    kind, options = CASES[case]
    task = replace(TASK, optimizer=partial(Sgd, momentum=0.0)) if "sparse" in case else TASK
    replica = replica_of(task, comm, virtual_engine(comm), kind, **options)
    if content is not None:
        replica.load(content)
    (averager,) = replica.averagers.values()
    copy = UndoCopy(averager)
    for number, batch in enumerate(islice(batches(task, comm.rank, comm.size), task.steps)):
        if number == undone:
            replica.drain()
            copy.keep()
            other = replace(batch, x=np.full_like(batch.x, np.nan))
            with np.errstate(all="ignore"):
                replica._step.run(other, 99, 1.0)
                averager.drain()
            assert not all(np.isfinite(array).all() for array in averager.changed())
            copy.restore()
        replica.update(batch, task.lr)
    replica.drain()
    return replica.state(Position(), {})


def _assert_same(a: CheckpointContent, b: CheckpointContent) -> None:
    assert a.meta == b.meta
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in b.tensors.items():
        assert a.tensors[name].tobytes() == tensor.tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_undone_is_as_if_it_had_not_been(case: str, ranks: int) -> None:
    plain = run_virtual(ranks, lambda comm: _train(comm, case, undone=None))
    for undone in (1, 4):
        found = run_virtual(ranks, partial(_train, case=case, undone=undone))
        for one, other in zip(found, plain, strict=True):
            _assert_same(one, other)


@pytest.mark.slow
def test_what_another_run_kept_back_is_still_there() -> None:
    """Where slices are sent whole now the first step adds it, and adds it once more if that step is undone."""
    before = run_virtual(2, lambda comm: _train(comm, "sparse", undone=None))
    plain, undone = (
        run_virtual(2, lambda comm, at=step: _train(comm, "sparse, whole", undone=at, content=before[comm.rank]))
        for step in (None, 0)
    )
    for one, other in zip(undone, plain, strict=True):
        _assert_same(one, other)
