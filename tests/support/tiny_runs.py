"""Whole runs of a tiny configuration in a folder, for tests of commands: prepare, start and inspect them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import yaml

from hpctrain.data.writer import write_data_file
from hpctrain.runs.directory import RunDirectory, latest
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain_testing.run import Outcome
from tests.support.here import run_here
from tests.support.newest_checkpoint import read_newest

#: `run_here`, or `run_job` for processes and a real MPI
Start = Callable[..., Outcome]
_SHAPE = (9, 8, 1)
_CONFIG = """
{name: tiny, seed: 7, backend: numpy, progress: test, model: {name: small, channels: [4, 6], hidden: 9},
 data: {train: FOLDER/train.h5, test: FOLDER/test.h5}, batch: 16, epochs: 2, optimizer: {name: sgd, lr: 0.05, momentum: 0.9},
 schedule: constant, deadline_seconds: 60}
"""


def tiny(sections: str) -> str:
    """Return the text of a configuration of a tiny run, with `sections` (YAML without braces) in place of its own."""
    return yaml.safe_dump(yaml.safe_load(_CONFIG) | yaml.safe_load(f"{{{sections}}}"), sort_keys=False)


def write_images(
    path: Path, count: int, *, seed: int = 0, shape: tuple[int, int, int] = _SHAPE, names: tuple[str, ...] = ("a", "b", "c")
) -> None:
    """Write a data file of random images, which the seed determines."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, *shape), dtype=np.uint8)
    write_data_file(path, count, shape, list(names), [(images, random.integers(0, len(names), count))])


def prepare(
    folder: Path, config: str, train: int = 75, test: int = 21, shape: tuple[int, int, int] = _SHAPE, file: str = "tiny.yaml"
) -> Path:
    """Write the configuration, with FOLDER in its text replaced, `train.h5` and `test.h5`, and return the folder.

    Args:
        train, test: the number of images; 0: no test file.
    """
    write_images(folder / "train.h5", train, shape=shape)
    if test:
        write_images(folder / "test.h5", test, seed=1, shape=shape)
    (folder / file).write_text(config.replace("FOLDER", str(folder)))
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
    """Run `hpctrain command tiny.yaml words` in the folder, and require the exit code and no traceback."""
    outcome = start(ranks, ["-m", "hpctrain", *command.split(), "tiny.yaml", *words], cwd=folder, env=env)
    assert outcome.code == code, outcome.output
    assert "Traceback" not in outcome.output
    return outcome


def newest_run(folder: Path, output: str = "runs", name: str = "tiny") -> RunDirectory:
    """Return the newest run of an output directory."""
    run = latest(folder / output, name)
    assert run is not None
    return run


def newest_checkpoint(folder: Path, output: str = "runs", name: str = "tiny") -> CheckpointContent:
    """Return the newest checkpoint of the newest run."""
    newest = read_newest(newest_run(folder, output, name).checkpoints)
    assert newest is not None
    return newest[1]


def assert_same(ours: CheckpointContent, theirs: CheckpointContent) -> None:
    """Require equal positions, and tensors that are equal bit by bit."""
    assert ours.meta["position"] == theirs.meta["position"]
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in ours.tensors.items():
        other = theirs.tensors[key]
        assert (tensor.dtype, tensor.shape, tensor.tobytes()) == (other.dtype, other.shape, other.tobytes()), key


def assert_close(ours: CheckpointContent, theirs: CheckpointContent, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Require the same step, and tensors that are equal up to rounding."""
    assert ours.meta["position"]["global_step"] == theirs.meta["position"]["global_step"]  # type: ignore[index]
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in ours.tensors.items():
        np.testing.assert_allclose(tensor, theirs.tensors[key], rtol=rtol, atol=atol, err_msg=key)


def accuracy(outcome: Outcome) -> str:
    """Return the test accuracy that a training printed, in percent."""
    return outcome.stdout.split("test accuracy: ")[1].split("%")[0]


def whole_lines(printed: str) -> str:
    """Return the output of a training with each indented line appended to the line before it, which joins wrapped lines."""
    return printed.replace("\n  ", " ")


def sentence(outcome: Outcome) -> str:
    """Return the only line of an error."""
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("hpctrain: ")]
    return line
