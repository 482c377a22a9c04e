"""Many more ranks than cores: they start, train as one rank does, and end; where one of them fails, all do, in one sentence."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.core.text import place
from hpctrain_testing.run import Outcome
from tests.support.here import run_here
from tests.support.newest_checkpoint import read_newest
from tests.support.sampling import amount
from tests.support.tiny_runs import tiny, write_images

Job = Callable[..., Outcome]

pytestmark = pytest.mark.slow

#: `make many-ranks` sets 64
RANKS = int(os.environ.get("HPCTRAIN_MANY_RANKS", str(amount(6, 16))))
STEPS = 3
_SECONDS_PER_RANK = 9  # on two cores that other tests use, too
_LEAST_SECONDS = 180

CONFIG = tiny(
    f"name: many, backend: auto, data: {{train: train.h5}}, batch: {2 * RANKS}, epochs: 1, deadline_seconds: 300, "
    f"batch_norm: {{statistics: synchronised}}, checkpoint: {{every_steps: {STEPS}}}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and as many small images as an epoch of `STEPS` steps has."""
    write_images(tmp_path / "train.h5", STEPS * 2 * RANKS)
    (tmp_path / "many.yaml").write_text(CONFIG)
    return tmp_path


def _job(job: Job, ranks: int, folder: Path, arguments: list[str]) -> Outcome:
    if job is run_here:
        return job(ranks, arguments, cwd=folder)
    return job(ranks, arguments, cwd=folder, timeout_seconds=max(_LEAST_SECONDS, _SECONDS_PER_RANK * ranks))


def _parameters(folder: Path, output: str) -> dict[str, np.ndarray]:
    [run] = (folder / output).iterdir()
    there = read_newest(run / "checkpoints")
    assert there is not None
    tensors = there[1].tensors
    assert there[1].meta["position"]["global_step"] == STEPS
    return {name: np.asarray(tensors[name]) for name in tensors if name.startswith("parameters")}


def test_they_train_as_one_rank_does_and_end(job: Job, folder: Path) -> None:
    for ranks, output in ((RANKS, "many"), (1, "one")):
        outcome = _job(
            job if ranks > 1 else run_here,
            ranks,
            folder,
            ["-m", "hpctrain", "train", "many.yaml", "--progress", "lines", f"output={output}"],
        )
        assert outcome.code == 0, outcome.output
        assert outcome.stdout.count("\n") == len(set(outcome.stdout.splitlines())), outcome.stdout
    many, one = _parameters(folder, "many"), _parameters(folder, "one")
    assert many.keys() == one.keys()
    assert many
    for name, tensor in one.items():
        np.testing.assert_allclose(many[name], tensor, rtol=1e-4, atol=1e-6, err_msg=name)


def _said(outcome: Outcome) -> list[str]:
    """The sentences of a job, without rank 0's answer to Open MPI's launcher, which asks all to stop where one fails."""
    lines = outcome.stderr.splitlines()
    return [line for line in lines if line.startswith("hpctrain: ") and "SIGTERM received" not in line]


_FAILS = """
import os
from hpctrain.__main__ import main
from hpctrain.core.errors import DataError

rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if rank == {rank}:
    from hpctrain.training.step import TrainingStep

    original = TrainingStep.run

    def fails(self, *arguments, **options):
        {fault}

    TrainingStep.run = fails
main()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raise DataError('This sample is mine alone.')", "hpctrain: {place}This sample is mine alone."),
        ("os.kill(os.getpid(), 9)", "hpctrain: {place}the process was ended by SIGKILL"),
    ],
    ids=["an error", "a kill"],
)
def test_one_that_fails_ends_all_in_one_sentence(job: Job, folder: Path, fault: str, sentence: str) -> None:
    rank = RANKS // 2
    (folder / "fails.py").write_text(textwrap.dedent(_FAILS).format(rank=rank, fault=fault))
    outcome = _job(job, RANKS, folder, ["fails.py", "train", "many.yaml"])
    assert outcome.code not in (0, 85, 124), outcome.output
    said = _said(outcome)
    assert len(said) == 1, outcome.stderr
    assert said[0].startswith(sentence.format(place=place(rank, RANKS)))
    assert "Traceback" not in outcome.stderr


def test_a_mistake_that_all_make_is_one_sentence(job: Job, folder: Path) -> None:
    outcome = _job(job, RANKS, folder, ["-m", "hpctrain", "train", "many.yaml", "data.train=nowhere.h5"])
    assert outcome.code == 2, outcome.output
    said = _said(outcome)
    assert len(said) == 1, outcome.stderr
    assert said[0].startswith("hpctrain: There is no data file nowhere.h5")
