"""Runs: on virtual ranks, small ones on pictures, and their directories as a training leaves them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from hpctrain.assembly.options import filled
from hpctrain.assembly.recipe import Recipe, columns
from hpctrain.comm.groups import ProcessGrid
from hpctrain.config.load import load
from hpctrain.data.convert import folder
from hpctrain.job.automatic_choice import Resolved
from hpctrain.job.session import Session
from hpctrain.launch.launcher import detect
from hpctrain.launch.signals import SignalWatch
from hpctrain.launch.threads import ThreadPlan
from hpctrain.parallel.groups import GridGroups
from hpctrain.run.training import TrainingRequest, run_training
from hpctrain.runs.directory import TABLE_FILE, TRACE_FILE, RunDirectory, latest
from hpctrain.runs.owner import RunMarker, mark
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path
from hpctrain.trace.time_table import Row, TimeTable
from hpctrain.training.evaluation import ConfusionMatrix
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine


def make_run(path: Path, config: str) -> Path:
    """Make the directory of a run without records and checkpoints, ordered by the time in its name, and return it."""
    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(config)
    (path / "versions.json").write_text(json.dumps({"python": "3.11.7", "hpctrain": "0.1.0"}))
    (path / "git.json").write_text("{}")
    date, second, number = re.fullmatch(r".*?(?:-(\d{8})-(\d{6})(?:-(\d+))?)?", path.name).groups()
    order = int(f"{date or 0}{second or 0}{int(number or 1):03}")
    mark(path, RunMarker(hashlib.sha256(path.name.encode()).hexdigest()[:16], order))
    return path


_ORIENTATION = 0x0112

_TURNED = 6  # by a quarter


def write_pictures(directory: Path, classes: tuple[str, ...] = ("ant", "bee"), *, seed: int = 0) -> list[Path]:
    """Write some pictures of each class to a directory of its name; return their paths, sorted.

    The brightness of a picture follows from its class, so that a network can learn the classes.
    """
    random = np.random.default_rng(seed)
    for number, name in enumerate(classes):
        (directory / name).mkdir(parents=True, exist_ok=True)
        for kind in ("RGB", "L", "P", "RGBA", "CMYK", "I;16", "turned"):
            height, width = random.integers(8, 40, 2)
            pixels = (random.integers(0, 90, (height, width, 3)) + 150 * number // max(1, len(classes) - 1)).astype(np.uint8)
            _write(directory / name / kind.replace(";", ""), kind, Image.fromarray(pixels))
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _write(path: Path, kind: str, image: Image.Image) -> None:
    if kind == "turned":
        exif = Image.Exif()
        exif[_ORIENTATION] = _TURNED
        image.save(path.with_suffix(".jpg"), exif=exif)
    elif kind == "I;16":
        Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8).save(path.with_suffix(".png"))
    else:
        image.convert(kind).save(path.with_suffix(".jpg" if kind == "CMYK" else ".png"))


Result = TypeVar("Result")


def train_virtual(ranks: int, file: Path, *overrides: str, resume: str | None = None, steps: int = 0) -> None:
    """Run `hpctrain train file overrides --resume resume --steps steps` on virtual ranks. Signals are not watched."""
    program = partial(_rank, file=file, overrides=overrides, resume=resume, steps=steps)
    try:
        run_virtual(ranks, program, deadline_seconds=120)
    finally:
        for thread in threading.enumerate():
            if thread.name == "hpctrain-checkpoint":
                thread.join()


def work_virtual(
    ranks: int, file: Path, overrides: Sequence[str], work: Callable[[Session], Result], ranks_per_node: int | None = None
) -> list[Result]:
    """Return the results of `work` on each virtual rank of a job. ranks_per_node: None if all are on one node."""
    return run_virtual(
        ranks, lambda comm: work(_session(comm, file, overrides)), deadline_seconds=120, ranks_per_node=ranks_per_node
    )


def _rank(comm: ThreadCommunicator, file: Path, overrides: tuple[str, ...], resume: str | None, steps: int) -> None:
    session = _session(comm, file, overrides)
    run_training(session, SignalWatch(), TrainingRequest(resume, steps, "lines"))


def _session(comm: ThreadCommunicator, file: Path, overrides: Sequence[str]) -> Session:
    config = filled(load(file, overrides)[0])
    grid = ProcessGrid(comm, config.grid.rows, columns(config, comm.size))
    threads, engine = ThreadPlan(1, 1, "a test"), virtual_engine(comm)
    return Session(detect({}), threads, comm, grid, GridGroups(grid), engine, Resolved(Recipe.of(config)), {})


CLASSES = ("ant", "bee", "cow")

#: number of ranks, and overrides of the grid
GRIDS = {
    "1": (1, ()),
    "1x2": (2, ()),
    "1x3": (3, ()),
    "1x4": (4, ()),
    "domain 3x1": (3, ("grid.rows=3", "plan.default=domain")),
    "tiles 4x1": (4, ("grid={rows: 4, tiles: [2, 2]}", "plan.default=domain")),
    "model 2x1": (2, ("grid.rows=2", "plan.default=model")),
    "mixed 2x2": (4, ("grid.rows=2", "plan.stage1.*=domain", "plan.classifier.*=model")),
}

CONFIG = """
{{name: tiny, seed: 7, backend: numpy, dtype: {dtype}, progress: test, model: {{name: small, channels: [4, 6], hidden: 9}},
 data: {{train: {folder}/train.h5, test: {folder}/test.h5, augment: [{{name: pad_crop, padding: 1}}],
        evaluate_augment: [{{name: center_crop, size: 9}}]}},
 batch: 8, epochs: 1, optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}, schedule: constant,
 checkpoint: {{layout: {layout}}}, deadline_seconds: 60, output: {folder}/runs}}
"""


@dataclass(frozen=True)
class TrainedRun:
    """A folder with pictures in `train` and `test`, data files made of them, a configuration, and a run.

    The test images are larger than the training images, and fitted in another way.
    """

    folder: Path

    @property
    def file(self) -> Path:
        """The configuration."""
        return self.folder / "tiny.yaml"

    @property
    def run(self) -> RunDirectory:
        """The run."""
        run = latest(self.folder / "runs", "tiny")
        assert run is not None
        return run


def train(directory: Path, *overrides: str, layout: str = "single", dtype: str = "float64") -> TrainedRun:
    """Make a `TrainedRun` in a directory, by two virtual ranks. overrides: of the run; the configuration file lacks them."""
    for split, size, fit, seed in (("train", 9, "crop", 0), ("test", 11, "squash", 1)):
        write_pictures(directory / split, CLASSES, seed=seed)
        tree = folder.scan(directory / split)
        folder.convert(tree, directory / f"{split}.h5", size=(size, size), fit=fit, threads=1)  # type: ignore[arg-type]
    trained = TrainedRun(directory)
    trained.file.write_text(CONFIG.format(folder=directory, layout=layout, dtype=dtype))
    train_virtual(2, trained.file, *overrides)
    return trained


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
    """Write a run of `epochs` epochs of `STEPS` steps, with `intervals` records in each, whose loss is 2 / place in epochs."""
    run = RunDirectory.create(output, "quick", config=config, versions={"numpy": "2.4", "mpi": "MPICH"}, git={"revision": "abc"})
    lines = [*records(epochs, intervals), *events]
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return run


def records(epochs: int, intervals: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of its metrics. The mean loss of each interval alone is 2 / its end, in epochs."""
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
    """Write a checkpoint with these parameters."""
    path = checkpoint_path(run.checkpoints, step)
    tensors = {f"parameters/{name}": np.array(values) for name, values in parameters.items()}
    checkpoint.write(path, CheckpointContent(tensors, {"epoch": 1}))
    return path


def write_trace(run: RunDirectory, *, ranks: int = 2, operators: int = 3) -> None:
    """Write the files of a trace: two steps of 10 ms, in which a rank computes half and waits a tenth."""
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
    """Yield the events of one rank, in microseconds: steps of 10,000 that begin `rank` * 100 late."""
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
    """Return the counts of labels (first dim) by predicted class; `undecided` samples of the first class have none."""
    cells = [(label, rival, count) for label, counts in enumerate(matrix) for rival, count in enumerate(counts) if count]
    cells += [(0, len(matrix), undecided)] if undecided else []
    labels, rivals, counts = np.array(sorted(cells), np.int64).reshape(-1, 3).T
    return ConfusionMatrix(len(matrix), labels, rivals, counts)
