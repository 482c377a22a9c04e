"""Whole runs of a tiny configuration in a folder: what tests of commands prepare, start and look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from hpctrain.data import format as data_format
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.run_directory import RunDirectory, latest
from tests.support.here import run_here
from tests.support.jobs import Outcome

#: `run_here`, or `run_job` where processes and a real MPI are wanted
Start = Callable[..., Outcome]
_SHAPE = (9, 8, 1)


def write_images(
    path: Path, count: int, *, seed: int = 0, shape: tuple[int, int, int] = _SHAPE, names: tuple[str, ...] = ("a", "b", "c")
) -> None:
    """A data file of random images, the same for the same seed."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, *shape), dtype=np.uint8)
    data_format.write(path, count, shape, list(names), [(images, random.integers(0, len(names), count))])


def prepare(folder: Path, config: str, train: int = 75, test: int = 21, shape: tuple[int, int, int] = _SHAPE) -> Path:
    """`tiny.yaml` with FOLDER in its text replaced, `train.h5` and `test.h5` with so many images; returns the folder."""
    write_images(folder / "train.h5", train, shape=shape)
    if test:
        write_images(folder / "test.h5", test, seed=1, shape=shape)
    (folder / "tiny.yaml").write_text(config.replace("FOLDER", str(folder)))
    return folder


def hpctrain(
    ranks: int,
    folder: Path,
    command: str,
    *words: str,
    code: int = 0,
    start: Start = run_here,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """`hpctrain command tiny.yaml words` in the folder, which must end with `code` and without a traceback."""
    outcome = start(ranks, ["-m", "hpctrain", *command.split(), "tiny.yaml", *words], cwd=folder, env=env)
    assert outcome.code == code, outcome.output
    assert "Traceback" not in outcome.output
    return outcome


def run_in(folder: Path, output: str = "runs", name: str = "tiny") -> RunDirectory:
    """The newest run of an output directory."""
    run = latest(folder / output, name)
    assert run is not None
    return run


def last(folder: Path, output: str = "runs", name: str = "tiny") -> CheckpointContent:
    """The newest checkpoint of that run."""
    newest = checkpoint.read_newest(run_in(folder, output, name).checkpoints)
    assert newest is not None
    return newest[1]


def assert_same(ours: CheckpointContent, theirs: CheckpointContent) -> None:
    """Every bit of all tensors, and the position."""
    assert ours.meta["position"] == theirs.meta["position"]
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in ours.tensors.items():
        assert np.array_equal(tensor, theirs.tensors[key]), key


def assert_close(ours: CheckpointContent, theirs: CheckpointContent, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """All tensors to rounding, and the step."""
    assert ours.meta["position"]["global_step"] == theirs.meta["position"]["global_step"]  # type: ignore[index]
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in ours.tensors.items():
        np.testing.assert_allclose(tensor, theirs.tensors[key], rtol=rtol, atol=atol, err_msg=key)


def accuracy(outcome: Outcome) -> str:
    """The percentage that a training has ended with."""
    return outcome.stdout.split("test accuracy ")[1].split("%")[0]


def sentence(outcome: Outcome) -> str:
    """The one sentence of a refusal."""
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("hpctrain: ")]
    return line
