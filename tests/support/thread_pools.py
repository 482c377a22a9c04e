"""Processor time of thread pools other than OpenMP's during trainings: `python -m tests.support.thread_pools`, on Linux.

Prints JSON: seconds by training, and for comparison those of NumPy's products. Threads that Python has started are not counted.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.choice import make_backend
from hpctrain.backend.onednn.arithmetic import Team
from hpctrain.backend.onednn.binding import Engine
from hpctrain.models import catalogue
from hpctrain.optim.ema import EmaRule
from hpctrain.optim.optimizers import Adamw, Lamb, Lars, Sgd
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support.training import Task, train

#: name -> (model, options, pixels, optimiser). A small network of each family, with few pixels, so that products have few rows.
TASKS = {
    "small": ("small", {}, 28, Sgd),
    "vgg11": ("vgg11", {"width": 0.25}, 32, partial(Adamw, weight_decay=0.01)),
    "resnet20": ("resnet20", {}, 32, Lars),
    "resnet34": ("resnet34", {}, 48, partial(Sgd, momentum=0.9, nesterov=True, clip_norm=1.0)),
    "resnet50": ("resnet50", {"width": 0.5}, 64, Lamb),
}


def pool_seconds(known: Collection[int] = ()) -> dict[int, float]:
    """Return the processor seconds so far of each thread that is neither Python's nor `known`, by native identifier."""
    excluded = {thread.native_id for thread in threading.enumerate()}.union(known)
    seconds = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended in the meantime
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return {thread: value for thread, value in seconds.items() if thread not in excluded}


def seconds_between(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the processor seconds of the threads in `after` since `before`, in which new threads are missing."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())


def main() -> None:
    """Train each network, and print the processor times."""
    seconds: dict[str, float] = {}
    kernels = make_backend("onednn").kernels

    def program(comm: ThreadCommunicator) -> None:
        team: set[int] = set()
        Team(Engine().library).share(2, lambda start, stop: team.add(threading.get_native_id()))
        for name, (model, options, pixels, optimizer) in TASKS.items():
            shape, build = (pixels, pixels, catalogue.image_shape(model)[2]), partial(catalogue.build, model, options)
            task = Task(build, kernels, optimizer, shape, batch=4, samples=4, steps=3, dtype="float32", ema=EmaRule(0.9))
            before = pool_seconds(team)
            train(task, comm, virtual_engine(comm), Sharded)
            seconds[name] = seconds_between(before, pool_seconds(team))

    run_virtual(1, program, deadline_seconds=100)
    before, matrix = pool_seconds(), np.ones((700, 700), np.float32)
    with threadpool_limits(limits=2, user_api="blas"):
        for _ in range(20):
            np.matmul(matrix, matrix)
    seconds["products of NumPy"] = seconds_between(before, pool_seconds())
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
