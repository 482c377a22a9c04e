"""From any number of ranks to any other through checkpoints in the background: as through such as all ranks wait for, to the bit.

Whole runs, from the configuration to the last checkpoint; tests/train/test_owned_parts.py has the tensors of more grids.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.storage.background_writer import BackgroundWriter
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, read
from hpctrain.storage.run_directory import latest
from hpctrain.train.step import TrainingStep
from tests.experiment.test_checkpoints import CONFIG, PROGRAM
from tests.support.jobs import Outcome
from tests.support.virtual_runs import train_virtual

pytestmark = pytest.mark.slow

RANKS = (1, 2, 3, 6)
#: a single file that all ranks wait for is what the others are compared with
WAITED, BACKGROUND = ("single", "false"), (("single", "true"), ("sharded", "true"))
SPLIT = ("plan.stage*=domain", "plan.classifier.*=model", "plan.classifier.dropout2=batch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration that writes a checkpoint after every step, and 75 small images."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (75, 7, 6, 1), dtype=np.uint8)
    data_format.write(tmp_path / "train.h5", 75, (7, 6, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 75))])
    config = CONFIG.replace("train.h5", f"{tmp_path}/train.h5").replace("every_steps: 2", "every_steps: 1, keep: 9")
    (tmp_path / "tiny.yaml").write_text(config.replace("hidden: 5", "hidden: 5, dropout: 0.2"))
    return tmp_path


@dataclass
class Overlap:
    """Counts steps, and background writes during which steps began."""

    steps: int = 0
    writes: list[int] = field(default_factory=list)


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Overlap:
    """Every write in the background takes as long as some steps."""
    seen, run, write = Overlap(), TrainingStep.run, BackgroundWriter._run

    def counted(self: TrainingStep, *arguments: Any) -> None:
        seen.steps += 1
        run(self, *arguments)

    def slow(self: BackgroundWriter, work: Callable[[], Any]) -> None:
        before = seen.steps
        time.sleep(0.03)
        write(self, work)
        seen.writes.append(seen.steps - before)

    monkeypatch.setattr(TrainingStep, "run", counted)
    monkeypatch.setattr(BackgroundWriter, "_run", slow)
    return seen


@dataclass(frozen=True)
class Way:
    """The runs of one layout and one manner of writing, in a directory of their own."""

    folder: Path
    layout: str
    asynchronous: str
    name: str

    def train(self, ranks: int, *overrides: str, resume: str | None = None, steps: int) -> None:
        keys = (f"checkpoint.layout={self.layout}", f"checkpoint.asynchronous={self.asynchronous}")
        train_virtual(ranks, self.folder / "tiny.yaml", f"output={self.output}", *keys, *overrides, resume=resume, steps=steps)

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name}-{self.layout}-{self.asynchronous}"

    def path(self, step: int) -> Path:
        run = latest(self.output, "tiny")
        assert run is not None
        return checkpoint_path(run.checkpoints, step, sharded=self.layout == "sharded")


def assert_same(here: CheckpointContent, expected: CheckpointContent, place: str) -> None:
    assert here.meta["position"] == expected.meta["position"], place
    assert set(here.tensors) == set(expected.tensors), place
    for key, values in expected.tensors.items():
        assert here.tensors[key].tobytes() == values.tobytes(), f"{key}, {place}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("readers", RANKS)
@pytest.mark.parametrize("writers", RANKS)
def test_any_ranks_go_on_from_what_any_others_wrote_in_the_background(
    folder: Path, overlap: Overlap, writers: int, readers: int
) -> None:
    """Each goes on from the checkpoint before the newest, which was written while its run trained."""
    ways = [Way(folder, *how, "saved") for how in (WAITED, *BACKGROUND)]
    for way in ways:
        way.train(writers, steps=3)
        assert_same(read(way.path(2)), read(ways[0].path(2)), f"step 2 of {way}")
    assert any(overlap.writes), "steps began while a checkpoint was written"
    for way in ways:
        way.train(readers, resume=str(way.path(2)), steps=2)
        assert_same(read(way.path(4)), read(ways[0].path(4)), f"{writers} to {readers} ranks, {way.layout}")


def test_from_grid_to_grid_to_a_line_of_ranks(folder: Path, overlap: Overlap) -> None:
    """2 x 2, then 4 x 1, then 1 x 3; layers are split on the first two."""
    ways = [Way(folder, *how, "chain") for how in (WAITED, *BACKGROUND)]
    grids = ((4, ("grid.rows=2", *SPLIT)), (4, ("grid.rows=4", *SPLIT)), (3, ()))
    for number, (ranks, overrides) in enumerate(grids):
        for way in ways:
            way.train(ranks, *overrides, resume="auto" if number else None, steps=2)
            assert_same(read(way.path(2 * number + 2)), read(ways[0].path(2 * number + 2)), f"{overrides} of {way}")
    assert any(overlap.writes)


@pytest.mark.job
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("writers", "readers", "overrides"), [(2, 3, ()), (4, 3, ("grid.rows=2", *SPLIT))], ids=["2-3", "2x2-1x3"]
)
def test_real_ranks_go_on_with_the_same_bits(
    job: Callable[..., Outcome], folder: Path, writers: int, readers: int, overrides: tuple[str, ...]
) -> None:
    (folder / "program.py").write_text(PROGRAM.replace("@FAULT@", "time.sleep(0.002)"))
    ends = []
    for layout, asynchronous in (WAITED, BACKGROUND[1]):
        way = Way(folder, layout, asynchronous, "real")
        keys = (f"output={way.output}", f"checkpoint.layout={layout}", f"checkpoint.asynchronous={asynchronous}")
        outcome = job(writers, ["program.py", "train", "tiny.yaml", *keys, *overrides, "--steps", "3"], cwd=folder)
        assert outcome.code == 0, outcome.output
        resumed = ("--resume", str(way.path(2)), "--steps", "2")
        outcome = job(readers, ["program.py", "train", "tiny.yaml", *keys, *resumed], cwd=folder)
        assert outcome.code == 0, outcome.output
        ends.append(read(way.path(4)))
    assert_same(*ends, "real ranks")
