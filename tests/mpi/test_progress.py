"""Progress modes over MPI yield the same bits, and traces of several ranks share one clock."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.link import measure_offset
from hpctrain.comm.progress import ProgressEngine, ProgressMode
from hpctrain.optim.optimizers import Lars, Sgd
from hpctrain.run.trace_report import TraceReport
from hpctrain.runs.directory import TABLE_FILE, TRACE_FILE
from hpctrain.trace.tracer import Tracer
from hpctrain.training.accounts import StepTrace
from hpctrain.training.snapshot import Position
from tests.support import nets
from tests.support.training import Task, batches, replica_of, train


@pytest.mark.mpi_differs
@pytest.mark.parametrize("mode", [ProgressMode.NONE, ProgressMode.THREAD])
@pytest.mark.parallel([1, 2, 3])
def test_training_does_not_depend_on_the_mode(world: Communicator, progress: ProgressEngine, mode: ProgressMode) -> None:
    task = Task(partial(nets.residual), NumpyKernelSet(), Sgd, steps=8)
    usual = train(task, world, progress, Blocking)
    progress.set_mode(mode)
    other = train(task, world, progress, Blocking)
    progress.set_mode(ProgressMode.TEST)
    for name, values in usual.parameters.items():
        assert np.array_equal(values, other.parameters[name]), name


@pytest.mark.mpi_differs
@pytest.mark.parallel([2, 3])
def test_many_messages_under_the_thread_arrive_whole(world: Communicator, progress: ProgressEngine) -> None:
    progress.set_mode(ProgressMode.THREAD)
    queue = progress.queue(world)
    left = np.ones((200, 200))
    for repeat in range(30):
        buffers = [np.full(1000 + 37 * k, world.rank + k + repeat, np.float32) for k in range(10)]
        with progress.computing():
            tickets = [queue.post(partial(world.iallreduce, buffer), f"buffer {k}") for k, buffer in enumerate(buffers)]
            for _ in range(5):
                left @ left
                progress.operator_done()
        progress.wait(tickets)
        for k, buffer in enumerate(buffers):
            assert np.all(buffer == sum(range(world.size)) + world.size * (k + repeat))
    progress.stop_thread()


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
    "bucketed, in 16 bits": (Bucketed, Sgd, {"bucket_bytes": 400, "wire": "bfloat16"}),
    "sparse": (Sparse, Sgd, {"density": 0.2, "compress": "always", "least_elements": 40, "two_level": False}),
}


@pytest.mark.mpi_differs
@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parallel([2, 3, 4])
def test_the_bits_are_those_without_a_thread(world: Communicator, progress: ProgressEngine, case: str) -> None:
    strategy, optimizer, options = CASES[case]
    task = Task(partial(nets.residual), OnednnKernelSet(), optimizer, dtype="float32", steps=8)
    usual = train(task, world, progress, strategy, nominal_batch=task.batch, **options)
    switches = sys.getswitchinterval()
    progress.set_mode(ProgressMode.THREAD)
    sys.setswitchinterval(1e-5)
    try:
        other = train(task, world, progress, strategy, nominal_batch=task.batch, **options)
    finally:
        sys.setswitchinterval(switches)
        progress.set_mode(ProgressMode.TEST)
    for name, values in usual.parameters.items():
        assert np.array_equal(values, other.parameters[name]), name
    assert [total.loss for total in usual.totals] == [total.loss for total in other.totals]


LATE_SECONDS = 0.05
STEPS = 5


@pytest.mark.mpi_differs
@pytest.mark.parallel([1, 2, 3])
def test_clocks_of_one_machine_are_the_same_clock(world: Communicator, progress: ProgressEngine) -> None:
    found = measure_offset(world, progress.wait_handle)  # perf_counter is the machine's: its true offset is 0
    assert abs(found.offset_ns) <= found.error_ns


def _run(world: Communicator, tracer: Tracer, directory: Path) -> list[str]:
    """A few steps, to each of which the last rank comes late."""
    task = Task(partial(nets.plain), NumpyKernelSet(), Sgd, steps=STEPS, synchronised=False)
    progress = ProgressEngine(rank=world.rank, deadline_seconds=30, abort=world.abort, trace=tracer)
    replica = replica_of(task, world, progress, Blocking)
    report = TraceReport(world, progress, tracer)

    steps = StepTrace(tracer)
    for batch in batches(task, world.rank, world.size):
        steps.before_batch()
        if world.rank == world.size - 1:
            time.sleep(LATE_SECONDS)
        steps.before_step(batch, whole=True)
        replica.step(batch, task.lr)
        replica.settle()
        steps.after_step(Position(), usual=True)
    return report.finish(directory, {"kernels": "numpy"}, width=80)


@pytest.mark.parallel([1, 2, 3])
def test_one_file_and_one_table_of_all_ranks(world: Communicator, tmp_path: Path) -> None:
    said = _run(world, Tracer(20_000), tmp_path)
    if world.rank != 0:
        assert said == []
        assert list(tmp_path.iterdir()) == []
        return
    trace = json.loads((tmp_path / TRACE_FILE).read_text())
    events = trace["traceEvents"]
    assert {event["pid"] for event in events} == set(range(world.size))
    assert trace["otherData"]["ranks"] == world.size
    assert trace["otherData"]["kernels"] == "numpy"
    error_seconds = trace["otherData"]["clock_error_seconds"]
    assert (error_seconds > 0) == (world.size > 1)
    steps = [event for event in events if event["cat" if "cat" in event else "ph"] == "step"]
    assert len(steps) == STEPS * world.size

    content = json.loads((tmp_path / TABLE_FILE).read_text())
    for table in (content["table"], *content["per_rank"]):
        spent = sum(row["compute_seconds"] + row["messages_seconds"] + row["exposed_seconds"] for row in table["rows"])
        assert spent + table["left_over_seconds"] == pytest.approx(table["step_seconds"], rel=1e-6)
    assert len(content["per_rank"]) == world.size
    rows = {row["name"]: row for row in content["table"]["rows"]}
    assert {"optimizer update", "data loading", "loss", "input copy", "all gradients", "step message"} <= rows.keys()
    late = rows["all gradients"]["late"]
    if world.size == 1:
        assert late is None
        return
    assert late["rank"] == world.size - 1
    assert late["share"] == 1.0
    assert late["after_first_seconds"] > LATE_SECONDS / 2
    # the others wait for it, and that is exposed
    assert rows["all gradients"]["exposed_seconds"] > LATE_SECONDS / 2 * (world.size - 1) / world.size
    assert any(f" {world.size - 1} by " in line for line in said)


@pytest.mark.mpi_differs
@pytest.mark.parallel([1, 2, 3])
def test_a_receive_never_completes_before_the_send_was_posted(world: Communicator, tmp_path: Path) -> None:
    """On one clock, no rank knows of the sum before the last one has posted its part, to within the clocks' error."""
    _run(world, Tracer(20_000), tmp_path)
    if world.rank != 0:
        return
    trace = json.loads((tmp_path / TRACE_FILE).read_text())
    error_us = trace["otherData"]["clock_error_seconds"] * 1e6
    begins: dict[int, list[float]] = {}
    ends: dict[int, list[float]] = {}
    for event in trace["traceEvents"]:
        if event["name"] == "all gradients" and event["cat"] == "communication" and event["ph"] in "be":
            sequence = int(event["id"].split(".")[-1])
            (begins if event["ph"] == "b" else ends).setdefault(sequence, []).append(event["ts"])
    assert len(begins) == STEPS
    for sequence, posted in begins.items():
        assert len(posted) == len(ends[sequence]) == world.size
        assert np.min(ends[sequence]) >= np.max(posted) - 2 * error_us - 1e-3


@pytest.mark.parallel([2, 3])
def test_a_rank_without_room_is_reported(world: Communicator, tmp_path: Path) -> None:
    said = _run(world, Tracer(3 if world.rank == 1 else 20_000), tmp_path)
    if world.rank == 0:
        assert any("events were dropped" in line for line in said)
        assert any("no whole step" in line for line in said)
