"""Counters of one training step, which do not depend on the load of the machine: `python -m tests.support.step_counters`.

| counter | meaning |
|---|---|
| kernels | calls of oneDNN's primitives, reorders included |
| copied_bytes | bytes that reorders write |
| products | matrix products of oneDNN (`dnnl_sgemm`) |
| numpy_products | matrix products of NumPy, whose thread pool competes with that of oneDNN for the cores |
| python_calls | calls of Python functions |
| allocated_bytes | peak memory of Python and NumPy during a step minus their memory before it |
| messages, message_bytes | collective operations that one of two ranks posts per step, with strategy `overlap` |
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakSet

import numpy as np

from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.backend.choice import make_backend
from hpctrain.backend.onednn.binding import Call, Engine, Primitive
from hpctrain.bench.engine_step import EngineStep, Workload, workload
from hpctrain.models import catalogue
from hpctrain.optim.optimizers import Sgd
from hpctrain.training.replica import Replica
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support.training import Task, train

#: In this order: deep and narrow; few pixels and many weights; large linear layers; bottlenecks; groups of few channels.
NETS = {
    "resnet20": workload("resnet20", 8, 32),
    "resnet34": workload("resnet34", 4, 48),
    "vgg13": workload("vgg13", 2, 32, {"width": 0.25}),
    "resnet50": workload("resnet50", 2, 64, {"width": 0.5}),
    "resnext50_32x4d": workload("resnext50_32x4d", 2, 32, {"width": 0.25}),
}
WARM_UP_STEPS = 3


def step_counters() -> dict[str, dict[str, int]]:
    """Return the counters of one step of each network, on the oneDNN kernel set with the threads of this process."""
    return {name: _of_engine(net) | _of_messages(net) for name, net in NETS.items()}


def step_counters_with(threads: int) -> Mapping[str, Mapping[str, int]]:
    """Return `step_counters()` of a process with this number of threads, whose oneDNN uses at most AVX2 instructions."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "tests.support.step_counters"]
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
    counters: Mapping[str, Mapping[str, int]] = json.loads(ended.stdout)
    return counters


def _of_engine(net: Workload) -> dict[str, int]:
    counts: Counter[str] = Counter()
    with _counting_kernels(counts):
        step = EngineStep(net, "onednn")
        for _ in range(WARM_UP_STEPS):
            step.run()
        counts.clear()
        step.run()
    calls = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(called)
    step.run()
    sys.setprofile(None)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    step.run()
    allocated = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    named = {name: counts[name] for name in ("kernels", "copied_bytes", "products", "numpy_products")}
    return {**named, "python_calls": calls, "allocated_bytes": allocated}


@contextmanager
def _counting_kernels(counts: Counter[str]) -> Iterator[None]:
    execute, multiply, make, matmul, dot = Call.__call__, Engine.multiply, Primitive.__init__, np.matmul, np.dot
    copies: WeakSet[Primitive] = WeakSet()
    target: Any = None  # array that the last call wrote, if it was a reorder

    def initialised(primitive: Primitive, engine: Engine, kind: str, *arguments: Any) -> None:
        make(primitive, engine, kind, *arguments)
        if kind == "reorder":
            copies.add(primitive)

    def counted(call: Call) -> None:
        nonlocal target
        counts["kernels"] += 1
        written = call._memories[-1].array if call._primitive in copies else None
        if written is not None and written is not target:  # the same target: one copy in several calls
            counts["copied_bytes"] += written.nbytes
        target = written
        execute(call)

    def counted_numpy_product(function: Any, *arguments: Any, **options: Any) -> Any:
        counts["numpy_products"] += 1
        return function(*arguments, **options)

    def counted_product(*arguments: Any) -> None:
        counts["products"] += 1
        multiply(*arguments)

    with (
        mock.patch.object(Call, "__call__", counted),
        mock.patch.object(Engine, "multiply", counted_product),
        mock.patch.object(Primitive, "__init__", initialised),
        mock.patch.object(np, "matmul", partial(counted_numpy_product, matmul)),
        mock.patch.object(np, "dot", partial(counted_numpy_product, dot)),
    ):
        yield


def _of_messages(net: Workload) -> dict[str, int]:
    posted: list[int] = []  # bytes, of rank 0
    begun: list[int] = []  # how many were posted before each step
    collect, take_step = ThreadCommunicator._collect, Replica.step

    def counted(comm: ThreadCommunicator, posting: Any, *arguments: Any) -> Any:
        if comm.rank == 0:
            posted.append(posting.contribution.nbytes if posting.contribution is not None else 0)
        return collect(comm, posting, *arguments)

    def step(replica: Replica, *arguments: Any) -> Any:
        if replica.groups.position == 0:
            begun.append(len(posted))
        return take_step(replica, *arguments)

    def program(comm: ThreadCommunicator) -> None:
        kernels = make_backend("onednn").kernels
        model, shape = partial(catalogue.build, net.model, net.options), (net.pixels, net.pixels, net.channels)
        task = Task(model, kernels, Sgd, shape, batch=net.batch, samples=net.batch, steps=3, dtype="float32")
        train(task, comm, virtual_engine(comm), Overlap)

    with mock.patch.object(ThreadCommunicator, "_collect", counted), mock.patch.object(Replica, "step", step):
        run_virtual(2, program, deadline_seconds=120)
    _, second, third = begun
    return {"messages": third - second, "message_bytes": sum(posted[second:third])}


if __name__ == "__main__":
    print(json.dumps(step_counters()))
