"""Checkpoints that ranks verify together: all find the same one, are told one reason, and read no more than they need."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.boxes import Box, even_interval, size_of
from hpctrain.errors import CheckpointError
from hpctrain.experiment.checkpoint_search import find_checkpoint, read_together
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, remove, restore, write
from hpctrain.storage.run_directory import RunDirectory
from hpctrain.storage.run_owner import owned
from hpctrain.storage.shard_file import Part, write_shard
from hpctrain.storage.sharded_checkpoint import publish, unfinished
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support.jobs import Outcome

SHAPES = {"parameters/w": (60, 100), "parameters/v": (3, 3, 64, 9), "parameters/b": (100,)}


def content(step: int) -> CheckpointContent:
    random = np.random.default_rng(step)
    return CheckpointContent({key: random.standard_normal(shape, "f4") for key, shape in SHAPES.items()}, {"global_step": step})


def box_of(shape: tuple[int, ...], rank: int, ranks: int, dim: int) -> Box:
    return tuple(even_interval(size, ranks, rank) if at == dim % len(shape) else (0, size) for at, size in enumerate(shape))


def write_sharded(directory: Path, step: int, shards: int) -> Path:
    """Each shard has an even part of every tensor, along its first dim of several elements."""
    path, whole = checkpoint_path(directory, step, sharded=True), content(step)

    def parts(rank: int) -> dict[str, Part]:
        boxes = {key: box_of(shape, rank, shards, 0) for key, shape in SHAPES.items()}
        return {
            key: Part(SHAPES[key], box, np.ascontiguousarray(whole.tensors[key][tuple(slice(*each) for each in box)]))
            for key, box in boxes.items()
            if size_of(box)
        }

    growing = unfinished(path, "t")
    publish(growing, path, [write_shard(growing, rank, parts(rank)) for rank in range(shards)], whole.meta)
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path, "net", config="name: net\n", versions={}, git={})
    write(checkpoint_path(directory.checkpoints, 3), content(3))
    write_sharded(directory.checkpoints, 5, 4)
    write_sharded(directory.checkpoints, 7, 4)
    return directory


def found_on(ranks: int, run: RunDirectory, source: str) -> list[tuple[str, int, bytes]]:
    """On each rank: name and step of what is found, and the elements of one of its tensors."""

    def search(comm: ThreadCommunicator) -> tuple[str, int, bytes]:
        there = find_checkpoint(comm, str(run.path.parent), "net", source)
        assert there is not None
        step = int(str(there[1].meta["global_step"]))
        return there[0].name, step, there[1].tensors["parameters/w"].tobytes()

    return run_virtual(ranks, search)


def expected(step: int, suffix: str) -> tuple[str, int, bytes]:
    return f"checkpoint-{step:08d}{suffix}", step, content(step).tensors["parameters/w"].tobytes()


def flip(path: Path, tensor: np.ndarray) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(np.ascontiguousarray(tensor).tobytes()) + 5] ^= 8
    path.write_bytes(data)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Of the search's log, in which only rank 0 writes."""
    handler, logger = Lines(), logging.getLogger("hpctrain.experiment.checkpoint_search")
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("source", ["auto", "run"])
def test_all_ranks_pass_over_a_damaged_one_and_are_told_one_reason(
    run: RunDirectory, lines: list[str], ranks: int, source: str
) -> None:
    source = str(run.path) if source == "run" else source
    newest, older = (checkpoint_path(run.checkpoints, step, sharded=True) for step in (7, 5))
    assert found_on(ranks, run, source) == [expected(7, ".shards")] * ranks
    assert lines == []
    for number in range(4):  # more than one reason, of which each rank knows some
        flip(newest / f"shard-{number:05d}.h5", content(7).tensors["parameters/w"][15 * number : 15 * number + 15])
    assert found_on(ranks, run, source) == [expected(5, ".shards")] * ranks
    [line] = lines
    assert "Tensor parameters/w in the shard" in line
    assert line.count("use an older checkpoint") == 1
    (older / "shard-00002.h5").unlink()
    assert found_on(ranks, run, source) == [expected(3, ".h5")] * ranks
    assert len(lines) == 3
    assert "shard-00002.h5 is missing" in lines[2]


def raised_on(ranks: int, run: RunDirectory, source: str) -> set[str]:
    def search(comm: ThreadCommunicator) -> str:
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(comm, str(run.path.parent), "net", source)
        return str(caught.value)

    return set(run_virtual(ranks, search))


def test_where_nothing_is_whole_all_ranks_raise_the_same(run: RunDirectory) -> None:
    paths = [checkpoint_path(run.checkpoints, 7, sharded=True), checkpoint_path(run.checkpoints, 3)]
    (paths[0] / "shard-00003.h5").write_bytes(b"")
    [sentence] = raised_on(3, run, str(paths[0]))
    assert "shard-00003.h5 has 0 bytes instead of" in sentence
    paths[1].write_bytes(b"")
    (checkpoint_path(run.checkpoints, 5, sharded=True) / "manifest.json").write_text("{}")
    [sentence] = raised_on(3, run, "auto")
    assert f"Every checkpoint of the runs of 'net' in {run.path.parent} is damaged, {run.path} is the newest" in sentence
    [sentence] = raised_on(3, run, str(run.path))
    assert sentence == f"The run {run.path} holds no valid checkpoint; train one without --resume first."
    [sentence] = raised_on(3, run, "nowhere")
    assert sentence.startswith("nowhere is no run directory")


def test_a_name_without_checkpoints_has_none(tmp_path: Path) -> None:
    def search(comm: ThreadCommunicator) -> Any:
        return find_checkpoint(comm, str(tmp_path), "net", "auto")

    assert run_virtual(3, search) == [None] * 3


def test_a_run_is_looked_through_again_once_it_is_owned(run: RunDirectory) -> None:
    """The previous owner may have written another checkpoint, or deleted the one that the first search found."""

    def search(comm: ThreadCommunicator) -> Any:
        taken = []

        def take(path: Path) -> bool:
            assert path == run.path
            taken.append(path)
            if comm.rank == 0 and len(taken) == 1:
                remove(checkpoint_path(run.checkpoints, 7, sharded=True))
                write(checkpoint_path(run.checkpoints, 8), content(8))
            return len(taken) == 1

        found = find_checkpoint(comm, str(run.path.parent), "net", "auto", take)
        return None if found is None else found[0].name

    assert run_virtual(2, search) == ["checkpoint-00000008.h5"] * 2


def test_a_job_that_is_queued_again_goes_on_with_its_own_run(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer run of the same name, from another job, is not chosen."""
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    with owned(run.path, "hpctrain train"):
        pass
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    other = RunDirectory.create(run.path.parent, "net", config="name: net\n", versions={}, git={})
    write(checkpoint_path(other.checkpoints, 2), content(2))
    with owned(other.path, "hpctrain train"):
        pass

    def search(comm: ThreadCommunicator) -> Any:
        found = find_checkpoint(comm, str(run.path.parent), "net", "auto")
        return None if found is None else found[0].parent.parent

    chosen = {}
    for job in ("41", "42", "43"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        [chosen[job]] = run_virtual(1, search)
    assert chosen == {"41": run.path, "42": other.path, "43": other.path}


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Of each thread, by `os.preadv`."""
    read: Counter[int] = Counter()
    original = os.preadv

    def counted(*arguments: Any) -> int:
        count = original(*arguments)
        read[threading.get_ident()] += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    return read


@pytest.mark.parametrize("shards", [1, 4, 6])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("dim", [0, -1])
def test_a_rank_reads_its_share_of_the_verification_and_the_elements_that_it_needs(
    tmp_path: Path, bytes_read: Counter[int], shards: int, ranks: int, dim: int
) -> None:
    path, whole = write_sharded(tmp_path, 5, shards), content(5)
    sizes = [(path / f"shard-{number:05d}.h5").stat().st_size for number in range(shards)]
    share = -(-shards // ranks) * max(sizes)

    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        there = read_together(comm, path)
        verified = bytes_read[threading.get_ident()]
        for key, shape in SHAPES.items():
            box = box_of(shape, comm.rank, ranks, dim)
            part = restore(there, key, shape, "float32", box)
            assert np.array_equal(part, whole.tensors[key][tuple(slice(*each) for each in box)])
        needed = sum(4 * size_of(box_of(shape, comm.rank, ranks, dim)) for shape in SHAPES.values())
        assert bytes_read[threading.get_ident()] - verified == needed
        return verified, needed

    outcomes = run_virtual(ranks, program)
    all_bytes = sum(values.nbytes for values in whole.tensors.values())
    assert sum(verified for verified, _ in outcomes) == all_bytes, "each element is compared once"
    assert sum(needed for _, needed in outcomes) == all_bytes
    assert max(verified for verified, _ in outcomes) <= share


COUNTING = """
import sys
from pathlib import Path
import numpy as np
from hpctrain.boxes import even_interval
from hpctrain.comm import mpi
from hpctrain.experiment.checkpoint_search import read_together

def read_so_far():
    return int(Path("/proc/self/io").read_text().split()[1])

world = mpi.world(60)
path = Path("checkpoint-00000005.shards")
import h5py  # modules are loaded before bytes are counted
if "warm" in sys.argv:
    read_together(world, Path("warm") / path)
world.allgather_object(None)
before = read_so_far()
there = read_together(world, path)
verified = read_so_far()
tensors = there.tensors
box = (even_interval(60, world.size, world.rank), (0, 100))
values = tensors.part("parameters/w", box)
# one write: the lines of two ranks come through one pipe
sys.stdout.write(f"counted {world.rank} {verified - before} {read_so_far() - verified} {values.nbytes}\\n")
"""


@pytest.mark.job
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system counts no bytes for a process")
def test_the_system_counts_no_more_bytes_on_real_ranks(tmp_path: Path, job: Callable[..., Outcome]) -> None:
    """All of what a process reads, HDF5's structures and the manifest among it."""
    path = write_sharded(tmp_path, 5, 4)
    (tmp_path / "warm").mkdir()
    write_sharded(tmp_path / "warm", 5, 4)
    (tmp_path / "program.py").write_text(COUNTING)
    outcome = job(2, ["program.py", "warm"], cwd=tmp_path)
    assert outcome.code == 0, outcome.output
    lines = sorted(line.split()[1:] for line in outcome.stdout.splitlines() if line.startswith("counted"))
    sizes = [(path / f"shard-{number:05d}.h5").stat().st_size for number in range(4)]
    manifest = sum((path / name).stat().st_size for name in ("manifest.json", "manifest.sha256"))
    assert [int(rank) for rank, *_ in lines] == [0, 1], outcome.output
    slack = 4096  # the count itself is read, and messages between processes may be
    for rank, verified, read, needed in (map(int, line) for line in lines):
        assert verified <= 1.25 * sum(sizes) / 2 + (rank == 0) * manifest + slack
        assert needed <= read <= needed + slack
        assert needed == 30 * 100 * 4
