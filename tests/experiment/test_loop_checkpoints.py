"""Checkpoints of a loop of the program's own: at once and in the background, one file and shards, and on after an error."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.errors import CheckpointError, DivergedError
from hpctrain.experiment.loop_checkpoints import LoopCheckpoints
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.storage import checkpoint
from hpctrain.train.own_loop import OwnLoop
from hpctrain.train.replica import Replica
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, batches, replica_of

TASK = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.9), steps=6)
RANKS = (1, 2, 3)
NAMES = ("net.h5", "net.shards")


def _made(comm: ThreadCommunicator) -> tuple[Replica, LoopCheckpoints]:
    progress = virtual_engine(comm)
    replica = replica_of(TASK, comm, progress, Sharded)
    checkpoints = LoopCheckpoints(comm, progress.notes, 60.0)
    replica.loop = OwnLoop(progress.notes, saver=checkpoints.saver)
    return replica, checkpoints


def _tensors(replica: Replica) -> dict[str, bytes]:
    replica.settle()
    replica.drain()
    return {name: parameter.data.tobytes() for name, parameter in replica.network.parameters.items()}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_saved_between_steps_goes_on_bit_by_bit(ranks: int, name: str, background: bool, tmp_path: Path) -> None:
    def whole(comm: ThreadCommunicator) -> dict[str, bytes]:
        replica, checkpoints = _made(comm)
        for batch in batches(TASK, comm.rank, comm.size):
            replica.step(batch, TASK.lr)
            if replica.global_step == 3:
                checkpoints.save(replica, tmp_path / name, {"seen": 3}, background=background)
        checkpoints.finish()
        return _tensors(replica)

    def resumed(comm: ThreadCommunicator) -> dict[str, bytes]:
        replica, checkpoints = _made(comm)
        assert checkpoints.load(replica, tmp_path / name) == {"seen": 3}
        assert replica.global_step == replica.kept_step == 3
        for batch in [*batches(TASK, comm.rank, comm.size)][3:]:
            replica.step(batch, TASK.lr)
        return _tensors(replica)

    assert run_virtual(ranks, whole, seed=1) == run_virtual(ranks, resumed, seed=2)


@pytest.mark.parametrize("name", NAMES)
def test_one_path_is_written_again_and_again(name: str, tmp_path: Path) -> None:
    def program(comm: ThreadCommunicator) -> None:
        replica, checkpoints = _made(comm)
        for batch in batches(TASK, comm.rank, comm.size):
            replica.step(batch, TASK.lr)
            checkpoints.save(replica, tmp_path / name, {"step": replica.global_step}, background=replica.global_step % 3 != 0)
        checkpoints.finish()

    run_virtual(2, program)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert checkpoint.read(tmp_path / name).meta["notes"] == {"step": TASK.steps}


@pytest.mark.parametrize("ranks", RANKS)
def test_a_loop_goes_back_after_it_has_diverged(ranks: int, tmp_path: Path) -> None:
    """And ends with the bits of one that never came to what was not finite."""

    def program(comm: ThreadCommunicator, poisoned: bool) -> dict[str, bytes]:
        replica, checkpoints = _made(comm)
        steps = [*batches(TASK, comm.rank, comm.size)]
        for batch in steps[:3]:
            replica.step(batch, TASK.lr)
        checkpoints.save(replica, tmp_path / "good.h5", {}, background=True)
        if poisoned:
            bad = steps[3].x.copy()
            with pytest.raises(DivergedError):  # noqa: PT012
                steps[3].x[...] = np.nan
                for batch in steps[3:]:
                    replica.step(batch, TASK.lr)
            steps[3].x[...] = bad
            checkpoints.load(replica, tmp_path / "good.h5")
        for batch in steps[3:]:
            replica.step(batch, TASK.lr)
        checkpoints.finish()
        return _tensors(replica)

    assert run_virtual(ranks, partial(program, poisoned=True)) == run_virtual(ranks, partial(program, poisoned=False))


def test_a_load_drops_the_sums_of_steps_that_it_undoes(tmp_path: Path) -> None:
    def program(comm: ThreadCommunicator) -> dict[str, bytes]:
        replica, checkpoints = _made(comm)
        first, second, *_ = batches(TASK, comm.rank, comm.size)
        replica.step(first, TASK.lr)
        checkpoints.save(replica, tmp_path / "net.h5", {}, background=False)
        before = {name: view.tobytes() for name, view in replica.network.statistics.views.items()}
        replica.step(second, TASK.lr)
        checkpoints.load(replica, tmp_path / "net.h5")
        assert replica.settle() is None
        assert {name: view.tobytes() for name, view in replica.network.statistics.views.items()} == before
        return before

    run_virtual(3, program)


@pytest.mark.parametrize("ranks", RANKS)
def test_one_that_cannot_be_written_is_an_error_at_once_or_at_the_end(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def program(comm: ThreadCommunicator) -> list[str]:
        replica, checkpoints = _made(comm)
        sentences = []
        for background in (False, True):
            with pytest.raises(CheckpointError) as caught:  # noqa: PT012
                checkpoints.save(replica, tmp_path / "file" / "net.h5", {}, background=background)
                checkpoints.finish()
            sentences.append(str(caught.value))
        return sentences

    for sentences in run_virtual(ranks, program):
        assert all("cannot be written" in sentence for sentence in sentences)


def test_steps_go_on_while_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, original = threading.Event(), os.pwrite

    def pwrite(*arguments: object) -> int:
        if threading.current_thread().name == "hpctrain-checkpoint":
            assert held.wait(50)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", pwrite)

    def program(comm: ThreadCommunicator) -> None:
        replica, checkpoints = _made(comm)
        for batch in batches(TASK, comm.rank, comm.size):
            replica.step(batch, TASK.lr)
            if replica.global_step == 2:
                checkpoints.save(replica, tmp_path / "net.h5", {}, background=True)
        assert not (tmp_path / "net.h5").exists()
        comm.allgather_object(None)
        held.set()
        checkpoints.finish()

    run_virtual(2, program)
    assert checkpoint.read(tmp_path / "net.h5").meta["position"]["global_step"] == 2  # type: ignore[index]
