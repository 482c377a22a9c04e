"""Checkpoints in the other layout: the same to the last bit, whatever is in them, and nothing that was there is touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import CheckpointError
from hpctrain.storage import convert as module
from hpctrain.storage import write_shares
from hpctrain.storage.checkpoint import CheckpointContent, open_checkpoint, read, write
from hpctrain.storage.convert import convert
from tests.support.jobs import Outcome
from tests.support.write_fixtures import CASES

FIXTURES = Path(__file__).parents[1] / "fixtures"
DTYPES = st.sampled_from(["<f4", "<f8", "<f2", "<i8", "<u1", "|b1"])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
META = {"global_step": 7, "ranks": 3, "position": {"sums": {"loss": 0.1 + 0.2}}, "config": "name: é\n" * 5000, "data": None}


def content_of(kinds: list[tuple[tuple[int, ...], str]]) -> CheckpointContent:
    """Random bits, not-a-numbers among them."""
    random = np.random.default_rng(len(kinds))
    tensors = {}
    for number, (shape, dtype) in enumerate(kinds):
        most = 2 if dtype == "|b1" else 256
        data = random.integers(0, most, int(np.prod(shape)) * np.dtype(dtype).itemsize, dtype=np.uint8)
        tensors[f"parameters/{number}"] = data.view(dtype).reshape(shape)
    return CheckpointContent(tensors, META)


def assert_same(left: CheckpointContent, right: CheckpointContent) -> None:
    assert left.meta == right.meta
    assert set(left.tensors) == set(right.tensors)
    for key, values in right.tensors.items():
        other = left.tensors[key]
        assert (other.shape, other.dtype.str, other.tobytes()) == (values.shape, values.dtype.str, values.tobytes()), key


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=6), st.integers(1, 5), st.integers(9, 300))
def test_there_and_back_is_the_same_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[tuple[int, ...], str]], shards: int, least_bytes: int
) -> None:
    directory = tmp_path_factory.mktemp("there")
    source, there, back = directory / "a.h5", directory / "b.shards", directory / "c.h5"
    content = content_of(kinds)
    write(source, content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_shares, "_SMALLEST_SHARED_BYTES", least_bytes)
        assert_same(convert(source, there, sharded=True, shards=shards), content)
    assert_same(convert(there, back, sharded=False), content)
    assert_same(convert(there, directory / "d.shards", sharded=True, shards=2), content)
    digests = []
    for path in (source, back):
        with h5py.File(path, "r") as file:
            digests.append(bytes(file.attrs["sha256"]))
    assert digests[0] == digests[1]
    shutil.rmtree(directory)


def test_there_are_as_many_shards_as_ranks_wrote_it_or_as_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", content_of([((9,), "<f4")] * 6))
    convert(tmp_path / "a.h5", tmp_path / "b.shards", sharded=True)
    convert(tmp_path / "a.h5", tmp_path / "c.shards", sharded=True, shards=9)
    counts = [len(list((tmp_path / name).glob("shard-*.h5"))) for name in ("b.shards", "c.shards")]
    assert counts == [3, 6], "none is made without parts"


def test_what_is_there_is_kept_and_names_say_the_layout(tmp_path: Path) -> None:
    source, out = tmp_path / "a.h5", tmp_path / "b.shards"
    write(source, content_of([((3,), "<f4")]))
    growing = tmp_path / "checkpoint-00000009.h5.partial"
    growing.write_text("a run's")
    with pytest.raises(CheckpointError, match="is there already, and nothing is overwritten"):
        convert(source, source, sharded=False)
    with pytest.raises(CheckpointError, match=r"b.shards would be taken for a directory of shards: .* give .*b.h5"):
        convert(source, out, sharded=False)
    with pytest.raises(CheckpointError, match=r"b.h5 would be taken for a file: .* give .*b.shards"):
        convert(source, tmp_path / "b.h5", sharded=True)
    out.mkdir()
    with pytest.raises(CheckpointError, match="is there already"):
        convert(source, out, sharded=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "b.shards", growing.name]
    (tmp_path / "d.h5").write_bytes(source.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"d.h5 is truncated"):
        convert(tmp_path / "d.h5", tmp_path / "e.shards", sharded=True)


@pytest.mark.parametrize("name", ["b.h5", "b.shards"])
def test_a_disk_that_refuses_or_keeps_other_bits_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source, out = tmp_path / "a.h5", tmp_path / name
    content = content_of([((30,), "<f4"), ((), "<f8")])
    write(source, content)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"cannot be written .*No space left on device"):
            convert(source, out, sharded=name == "b.shards")
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]
    other = CheckpointContent({**content.tensors, "parameters/0": np.zeros(30, "<f4")}, content.meta)
    for again, what in ((other, "tensor parameters/0"), (CheckpointContent(content.tensors, {}), "its metadata")):
        with monkeypatch.context() as patch:
            patch.setattr(module, "read", lambda path, again=again: again if path == out else read(path))
            with pytest.raises(CheckpointError, match=f"differs from its source in {what}"):
                convert(source, out, sharded=name == "b.shards")
        assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_of_earlier_versions_are_converted(tmp_path: Path, case: str) -> None:
    source = FIXTURES / case / "end.h5"
    convert(source, tmp_path / "a.shards", sharded=True, shards=3)
    assert_same(read(tmp_path / "a.shards"), read(source))


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.parametrize("case", ["lazy", "sharded"])
def test_a_run_goes_on_from_either_layout_with_the_same_bits(job: Callable[..., Outcome], tmp_path: Path, case: str) -> None:
    """With what averagers keep back, and the state of the optimiser; the commands are the user's."""
    shutil.copy(FIXTURES / "train.h5", tmp_path)
    for name in ("single", "shards", "back"):
        shutil.copytree(FIXTURES / case / "run", tmp_path / name)
    [name] = [path.name for path in (tmp_path / "single" / "checkpoints").iterdir()]
    sharded = f"shards/checkpoints/{Path(name).stem}.shards"
    for directory, source, out in (
        ("shards", f"single/checkpoints/{name}", sharded),
        ("back", sharded, f"back/checkpoints/{name}"),
    ):
        (tmp_path / directory / "checkpoints" / name).unlink()
        command = ["-m", "hpctrain", "checkpoint", "convert", source, "--out", out]
        outcome = job(0, command, cwd=tmp_path, through_mpi4py=False)
        assert outcome.code == 0, outcome.output
    ends = []
    for directory in ("single", "shards", "back"):
        command = ["-m", "hpctrain", "train", f"{directory}/config.yaml", "--resume", directory, "--steps", "2"]
        outcome = job(CASES[case].ranks, command, cwd=tmp_path)
        assert outcome.code == 0, outcome.output
        newest = max((tmp_path / directory / "checkpoints").iterdir())
        ends.append(open_checkpoint(newest))
    for end in ends[1:]:
        assert end.meta["position"] == ends[0].meta["position"]
        assert_same(CheckpointContent(end.tensors, {}), CheckpointContent(ends[0].tensors, {}))
