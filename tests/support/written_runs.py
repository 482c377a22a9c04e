"""Run directories as a training leaves them, written without one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.experiment.trace_report import TABLE_FILE, TRACE_FILE
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path
from hpctrain.storage.run_directory import RunDirectory
from hpctrain.trace.time_table import Row, TimeTable
from hpctrain.train.confusion import ConfusionMatrix

SAMPLES = 1000
STEPS = 10


def write_run(
    output: Path,
    *,
    epochs: int = 3,
    intervals: int = 4,
    config: str = "batch: 100\noptimizer: {name: sgd, lr: 0.1}\n",
    events: Sequence[Mapping[str, Any]] = (),
    torn: str = "",
) -> RunDirectory:
    """A run of so many epochs of `STEPS` steps, with `intervals` records in each, whose loss is 2 / place in epochs."""
    run = RunDirectory.create(output, "quick", config=config, versions={"numpy": "2.4", "mpi": "MPICH"}, git={"revision": "abc"})
    lines = [*records(epochs, intervals), *events]
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return run


def records(epochs: int, intervals: int) -> Iterator[dict[str, Any]]:
    """The lines of its metrics. The mean of each stretch alone is 2 / its end, in epochs."""
    yield {"kind": "start", "time": 0.0, "epochs": epochs, "samples": SAMPLES, "done_samples": 0, "last_sample": epochs * SAMPLES}
    for epoch in range(1, epochs + 1):
        total = 0.0
        for number in range(1, intervals + 1):
            images = SAMPLES * number // intervals
            place = epoch - 1 + images / SAMPLES
            total += 2 / place * (images - SAMPLES * (number - 1) // intervals)
            step = STEPS * (epoch - 1) + STEPS * number // intervals
            common = {"time": 10.0 * place, "epoch": epoch, "step": step, "images": images, "loss": total / images}
            yield {"kind": "interval", **common, "top1": 0.5, "top5": 0.9, "lr": 0.1 / epoch, "images_per_second": 100.0 + epoch}
        common = {"epoch": epoch, "step": STEPS * epoch, "time": 10.0 * epoch}
        yield {"kind": "epoch", **common, "images": SAMPLES, "loss": total / SAMPLES, "top1": 0.5, "images_per_second": 100.0}
        yield {"kind": "evaluation", **common, "loss": 3.0 / epoch, "top1": 1 - 1 / (1 + epoch % 3), "top5": 0.95}


def write_checkpoint(run: RunDirectory, step: int, **parameters: Sequence[float]) -> Path:
    """A checkpoint with these parameters."""
    path = checkpoint_path(run.checkpoints, step)
    tensors = {f"parameters/{name}": np.array(values) for name, values in parameters.items()}
    checkpoint.write(path, CheckpointContent(tensors, {"epoch": 1}))
    return path


def write_trace(run: RunDirectory, *, ranks: int = 2, operators: int = 3) -> None:
    """The files of a trace: of two steps of 10 ms, of which a rank computes half and waits a tenth."""
    layers = tuple(
        Row(f"layer{number}.conv", "layer", 1e-3, 4e-4, 3e-4, 3e-4, 2e-3, 1e-3, 1e-3, 1.0) for number in range(operators)
    )
    total = Row("total", "work", operators * 1e-3, communication_seconds=2e-3, hidden_seconds=1e-3, exposed_seconds=1e-3)
    table = TimeTable(layers, total, 0.0, 1e-2, 1e-2, 2, 100.0)
    content = {"ranks": ranks, "clock_error_seconds": 1e-6, "table": asdict(table), "per_rank": [asdict(table)] * ranks}
    (run.path / TABLE_FILE).write_text(json.dumps(content))
    events = [event for rank in range(ranks) for event in trace_events(rank, operators)]
    (run.path / TRACE_FILE).write_text(json.dumps({"traceEvents": events}))


def trace_events(rank: int, operators: int) -> Iterator[dict[str, Any]]:
    """Events of one rank, in microseconds: steps of 10,000 that begin `rank` * 100 late."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for step in range(2):
        begin = 10_000.0 * step + 100 * rank
        yield {"ph": "X", "name": "step", "cat": "step", "pid": rank, "tid": 0, "ts": begin, "dur": 10_000.0}
        length = 5_000.0 / operators
        for number in range(operators):
            category = ("forward", "input", "parameters", "update")[number % 4]
            at = begin + 1.4 * number * length
            yield {"ph": "X", "name": f"layer{number}", "cat": category, "pid": rank, "tid": 0, "ts": at, "dur": length}
        yield {"ph": "X", "name": "wait", "cat": "wait", "pid": rank, "tid": 0, "ts": begin + 9_000, "dur": 1_000.0}
        common = {"name": "gradients", "cat": "communication", "pid": rank, "tid": 1, "id": f"{rank}.1.{step}"}
        yield {"ph": "b", **common, "ts": begin + 2_000, "args": {"sequence": step}}
        yield {"ph": "e", **common, "ts": begin + 12_000}


def confusion_of(matrix: Sequence[Sequence[int]], undecided: int = 0) -> ConfusionMatrix:
    """The counts of labels (first dim) that were taken for each class; so many samples of the first class for none."""
    cells = [(label, rival, count) for label, counts in enumerate(matrix) for rival, count in enumerate(counts) if count]
    cells += [(0, len(matrix), undecided)] if undecided else []
    labels, rivals, counts = np.array(sorted(cells), np.int64).reshape(-1, 3).T
    return ConfusionMatrix(len(matrix), labels, rivals, counts)
