"""Checkpoints of one file: complete or absent, the same in the other layout, and written by earlier programs."""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.core.errors import CheckpointError
from hpctrain.data.image_file import DataFacts, ImageFile
from hpctrain.run.resume import stored_data
from hpctrain.storage import checkpoint
from hpctrain.storage import shards as write_shares
from hpctrain.storage.checkpoint import (
    SEQUENCE,
    CheckpointContent,
    by_age,
    checkpoint_path,
    checkpoints,
    next_sequence,
    open_checkpoint,
    optimizer_key,
    parameter_key,
    prune,
    read,
    restore,
    set_aside,
    statistic_key,
    write,
)
from hpctrain.training.snapshot import Position
from tests.support.newest_checkpoint import read_newest, write_shards
from tests.support.runs import train_virtual
from tests.support.write_fixtures import CASES, CLASSES, SAMPLES, SHAPE, STEPS, arithmetic


def content(step=0):
    rng = np.random.default_rng(step)
    tensors = {
        parameter_key("fc.weight"): rng.standard_normal((9, 25), np.float32),
        statistic_key("norm.running_var"): rng.standard_normal(7, np.float32),
        optimizer_key("momentum", "fc.weight"): rng.standard_normal((9, 25), np.float32),
    }
    return CheckpointContent(tensors, {"global_step": step, "epoch": step // 7, "seed": 225})


def assert_same(left: CheckpointContent, right: CheckpointContent) -> None:
    assert (left.meta, set(left.tensors)) == (right.meta, set(right.tensors))
    for key, values in right.tensors.items():
        other = left.tensors[key]
        assert (other.shape, other.dtype.str, other.tobytes()) == (values.shape, values.dtype.str, values.tobytes()), key


def listing(directory):
    return sorted(path.name for path in directory.iterdir())


def newest(directory):
    found = read_newest(directory)
    return None if found is None else found[0]


def damage(path):
    data = bytearray(path.read_bytes())
    at = data.index(content(int(path.stem.split("-")[1])).tensors["parameters/fc.weight"].tobytes())
    data[at + 40] ^= 4
    path.write_bytes(data)


def test_round_trip_and_names(tmp_path):
    directory = tmp_path / "runs" / "checkpoints"  # made on demand
    path = checkpoint_path(directory, 225)
    assert path.name == "checkpoint-00000225.h5"
    write(path, content(225))
    assert_same(read(path), content(225))
    assert list(content().tensors) == ["parameters/fc.weight", "statistics/norm.running_var", "optimizer/momentum/fc.weight"]
    write(path, content(3))  # over an older one
    assert_same(read(path), content(3))
    assert listing(directory) == [path.name]


def test_steps_beyond_eight_digits_still_sort(tmp_path):
    for step in (7, 99_999_999, 100_000_000, 225):
        write(checkpoint_path(tmp_path, step), content(step))
    assert [step for step, _ in checkpoints(tmp_path)] == [7, 225, 99_999_999, 100_000_000]
    assert newest(tmp_path) == checkpoint_path(tmp_path, 100_000_000)


def test_the_newest_valid_checkpoint_is_found_despite_damage(tmp_path):
    for step in (7, 9, 25, 225):
        write(checkpoint_path(tmp_path, step), content(step))
    damage(checkpoint_path(tmp_path, 225))
    with open(checkpoint_path(tmp_path, 25), "r+b") as file:
        file.truncate(1000)
    (tmp_path / "checkpoint-00000300.h5.partial").write_bytes(b"half")
    (tmp_path / "checkpoint-latest.h5").write_bytes(b"not ours")
    assert newest(tmp_path) == checkpoint_path(tmp_path, 9)


def written(directory, step, sequence=None):
    """Write a checkpoint as a run does; without `sequence`, as a program with its own loop does."""
    held = content(step)
    meta = held.meta if sequence is None else {**held.meta, SEQUENCE: sequence}
    write(checkpoint_path(directory, step), CheckpointContent(held.tensors, meta))


@pytest.mark.parametrize("numbered", [True, False])
def test_prune_keeps_what_was_written_last(tmp_path, numbered):
    for sequence, step in enumerate((5, 7, 9, 25), 1):
        written(tmp_path, step, sequence if numbered else None)
    assert (prune(tmp_path, 4), prune(tmp_path, 2)) == ([], [checkpoint_path(tmp_path, 5), checkpoint_path(tmp_path, 7)])
    damage(checkpoint_path(tmp_path, 25))
    set_aside(tmp_path, 9)
    assert next_sequence(tmp_path) == (5 if numbered else 1)
    written(tmp_path, 11, 5)  # resumed from step 9, because 25 is damaged
    prune(tmp_path, 1)
    assert newest(tmp_path) == checkpoint_path(tmp_path, 11)
    assert listing(tmp_path) == ["checkpoint-00000011.h5", "checkpoint-00000025-set-aside.h5"]
    with pytest.raises(AssertionError):
        prune(tmp_path, 0)


def test_prune_spares_a_step_however_old_it_is(tmp_path):
    for step in (5, 7, 9, 25):
        written(tmp_path, step, 100 - step)
    assert ([step for step, _ in by_age(tmp_path)], newest(tmp_path)) == ([25, 9, 7, 5], checkpoint_path(tmp_path, 5))
    set_aside(tmp_path, 9)
    written(tmp_path, 25, 1)
    assert prune(tmp_path, 1, {25, 4}) == [checkpoint_path(tmp_path, 9), checkpoint_path(tmp_path, 7)]
    assert [step for step, _ in by_age(tmp_path)] == [25, 5]


def test_a_link_to_what_is_not_there_is_left_out(tmp_path, caplog):
    for sequence, step in enumerate((7, 9, 11), 1):
        written(tmp_path, step, sequence)
    for step in (5, 13):
        checkpoint_path(tmp_path, step).symlink_to(tmp_path / "unmounted" / "checkpoint.h5")
    logger = logging.getLogger("hpctrain.storage.checkpoint")
    logger.addHandler(caplog.handler)
    try:
        assert (newest(tmp_path), prune(tmp_path, 2)) == (checkpoint_path(tmp_path, 11), [checkpoint_path(tmp_path, 7)])
        set_aside(tmp_path, 9)
    finally:
        logger.removeHandler(caplog.handler)
    warnings = {record.getMessage() for record in caplog.records if "is a broken link" in record.getMessage()}
    assert len(warnings) == 2
    assert len(listing(tmp_path)) == 4, "links stay, as their targets may come back"


def test_where_no_run_is_proven_only_checkpoints_of_runs_are_pruned(tmp_path):
    for step in (5, 7, 9):
        written(tmp_path, step)
    with h5py.File(checkpoint_path(tmp_path, 1), "w") as file:  # other programs name their files alike
        file["weights"] = np.ones(3)
    checkpoint_path(tmp_path, 3).write_bytes(b"somebody's")
    assert prune(tmp_path, 1, is_run=False) == [checkpoint_path(tmp_path, 5), checkpoint_path(tmp_path, 7)]
    assert len(listing(tmp_path)) == 3


def test_a_write_removes_no_file_of_others(tmp_path):
    names = ("download.h5.partial", "checkpoint-00000003.h5.partial", "net.h5.partial.backup", "other.shards.ab12.partial")
    for name in names:
        (tmp_path / name).write_bytes(b"somebody's")
    write(tmp_path / "net.h5", content(1))
    assert listing(tmp_path) == sorted((*names, "net.h5"))


def test_prune_keeps_as_many_of_those_that_are_set_aside(tmp_path):
    for step in (5, 7, 9, 11):
        path = checkpoint_path(tmp_path, step)
        write(path, content(step))
        os.utime(path, (step, step))
    aside = set_aside(tmp_path, 5)
    write(checkpoint_path(tmp_path, 6), content(6))
    assert prune(tmp_path, 2) == aside[:1]
    assert listing(tmp_path) == sorted(
        [checkpoint_path(tmp_path, 5).name, checkpoint_path(tmp_path, 6).name, *(path.name for path in aside[1:])]
    )


class Stop(Exception):
    """Not an error that the writer knows."""


def raising(error, calls=1, of=lambda *arguments: None):
    """A function that raises at its `calls`-th call and does `of` before."""
    made = []

    def function(*arguments):
        made.append(arguments)
        if len(made) == calls:
            raise error
        return of(*arguments)

    return function


#: where a write may fail: module, function, and the number of the call
STAGES = {
    "begin": (checkpoint, "write_store", 1),
    "tensor": (os, "pwrite", 2),
    "file sync": (os, "fsync", 1),
    "rename": (os, "replace", 1),
    "directory sync": (os, "fsync", 2),
}
ERRORS = [OSError(28, "No space left on device"), Stop(), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_at_any_stage_leaves_the_previous_one_and_nothing_else(tmp_path, monkeypatch, stage, error):
    old, new = checkpoint_path(tmp_path, 7), checkpoint_path(tmp_path, 9)
    write(old, content(7))
    with monkeypatch.context() as patch:
        owner, name, call = STAGES[stage]
        patch.setattr(owner, name, raising(error, call, getattr(owner, name)))
        with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)) as caught:
            write(new, content(9))
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
        assert str(new) in str(caught.value)
    assert_same(read(old), content(7))
    renamed = stage == "directory sync"
    assert (listing(tmp_path), newest(tmp_path)) == ([old.name] + [new.name] * renamed, new if renamed else old)
    write(new, content(9))
    assert_same(read(newest(tmp_path)), content(9))


CHILD = """
import sys
import numpy as np
from pathlib import Path
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, write

directory, stage = Path(sys.argv[1]), sys.argv[2]

def content(step):
    return {f"parameters/{i}": np.full((25, 225), float(step * 100 + i)) for i in range(9)}

write(checkpoint_path(directory, 1), CheckpointContent(content(1), {"global_step": 1}))
print("ready", flush=True)
tensors = content(2)
if stage == "any":
    for step in range(2, 100000):
        write(checkpoint_path(directory, step), CheckpointContent(content(step), {"global_step": step}))
        print(step, flush=True)
elif stage == "full":
    import resource
    from hpctrain.core.errors import CheckpointError
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for limit in range(0, 400_000, 9999):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            write(checkpoint_path(directory, 2), CheckpointContent(tensors, {"global_step": 2}))
        except CheckpointError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            print(error, [path.name for path in directory.iterdir()], flush=True)
write(checkpoint_path(directory, 2), CheckpointContent(tensors, {"global_step": 2}))
print("done", flush=True)
"""


def assert_valid_step(path):
    step = int(path.stem.split("-")[1])
    got = read(path)
    assert got.meta == {"global_step": step}
    for i in range(9):
        assert np.array_equal(got.tensors[f"parameters/{i}"], np.full((25, 225), float(step * 100 + i)))


@pytest.mark.job
@pytest.mark.parametrize("delay", [0.0, 0.0137, 0.0291])
def test_sigkill_at_any_moment(tmp_path, delay):
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), "any"], stdout=subprocess.PIPE, text=True) as writer:
        for _ in range(4):
            last = writer.stdout.readline()
        time.sleep(delay)
        writer.kill()
        last = (writer.stdout.read().rpartition("\n")[0].rpartition("\n")[2] or last).strip()
    found = newest(tmp_path)
    # every write that was reported is there, and at most one more
    assert checkpoints(tmp_path)[-1][1] == found
    assert int(found.stem.split("-")[1]) - int(last) in (0, 1)
    for _, path in checkpoints(tmp_path):
        assert_valid_step(path)
    assert len(list(tmp_path.glob("*.partial"))) <= 1
    write(checkpoint_path(tmp_path, 10**6), content(10**6))
    assert not list(tmp_path.glob("*.partial"))
    assert newest(tmp_path) == checkpoint_path(tmp_path, 10**6)


@pytest.mark.job
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    """Wherever in the file the room ends; and there is life after it."""
    command = [sys.executable, "-c", CHILD, str(tmp_path), "full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, *refused, last = done.stdout.splitlines()
    assert (first, last) == ("ready", "done")
    assert len(refused) == 41
    for line in refused:
        assert "cannot be written" in line
        assert "File too large" in line
        assert line.endswith("['checkpoint-00000001.h5']")
    assert newest(tmp_path) == checkpoint_path(tmp_path, 2)
    assert_valid_step(newest(tmp_path))


def test_restore_returns_the_tensor_or_raises_one_sentence():
    saved = content()
    tensor = restore(saved, "parameters/fc.weight", (9, 25), "float32")
    np.testing.assert_array_equal(restore(saved, "parameters/fc.weight", (9, 25), ">f4"), tensor)  # as on a big-endian host
    assert tensor is saved.tensors["parameters/fc.weight"]
    with pytest.raises(CheckpointError, match=r"parameters/fc.weight has shape \(9, 25\) in the checkpoint and \(9, 7\) here"):
        restore(saved, "parameters/fc.weight", (9, 7), "float32")
    with pytest.raises(CheckpointError, match="float32 in the checkpoint and float64 here"):
        restore(saved, "parameters/fc.weight", (9, 25), np.dtype("float64"))
    with pytest.raises(CheckpointError, match=r"no tensor parameters/fc.weigth; the nearest is .parameters/fc.weight."):
        restore(saved, "parameters/fc.weigth", (9, 25), "float32")
    with pytest.raises(CheckpointError, match="another model"):
        restore(CheckpointContent({}, {}), "parameters/fc.weight", (9, 25), "float32")


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
        write_shards(there, content, shards)
    assert_same(read(there), content)
    write(back, read(there))
    digests = []
    for path in (source, back):
        with h5py.File(path, "r") as file:
            digests.append(bytes(file.attrs["sha256"]))
    assert digests[0] == digests[1]
    shutil.rmtree(directory)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lazy", "sharded"])
def test_a_run_goes_on_from_either_layout_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """With what averagers keep back, and the state of the optimiser."""
    shutil.copy(FIXTURES / "train.h5", tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("single", "shards", "back"):
        shutil.copytree(FIXTURES / case / "run", name)
    [name] = os.listdir("single/checkpoints")
    sharded = f"shards/checkpoints/{Path(name).stem}.shards"
    for directory in ("shards", "back"):
        Path(directory, "checkpoints", name).unlink()
    write_shards(Path(sharded), read(Path(f"single/checkpoints/{name}")), CASES[case].ranks)
    write(Path(f"back/checkpoints/{name}"), read(Path(sharded)))
    ends = []
    for directory in ("single", "shards", "back"):
        train_virtual(CASES[case].ranks, Path(directory, "config.yaml"), resume=directory, steps=2)
        ends.append(open_checkpoint(max(Path(directory, "checkpoints").iterdir())))
    for end in ends[1:]:
        assert end.meta["position"] == ends[0].meta["position"]
        assert_same(CheckpointContent(end.tensors, {}), CheckpointContent(ends[0].tensors, {}))


def _newest(run: Path) -> CheckpointContent:
    return read_newest(run / "checkpoints")[1]


def _schedules(content: CheckpointContent) -> dict[str, str]:
    """Return the schedules of a checkpoint by name."""
    schedules: Any = content.meta["schedules"]
    return dict(schedules)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_of_an_earlier_version_goes_on_as_it_did(tmp_path: Path, monkeypatch, capsys, case: str) -> None:
    shutil.copy(FIXTURES / "train.h5", tmp_path)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / case / "run", run)
    train_virtual(CASES[case].ranks, Path("run/config.yaml"), resume="run", steps=STEPS)
    assert " -> " not in capsys.readouterr().out, "a resume with the run's own configuration changes no value"
    here, expected = _newest(run), checkpoint.read(FIXTURES / case / "end.h5")
    compared = [key for key in expected.meta if key not in ("position", "config", "schedules", "run", "sequence")]
    assert {key: here.meta[key] for key in compared} == {key: expected.meta[key] for key in compared}
    same_bits = arithmetic() == (FIXTURES / "arithmetic.txt").read_text().strip()
    assert set(here.tensors) == set(expected.tensors)
    for key, tensor in expected.tensors.items():
        values = here.tensors[key]
        assert values.dtype == tensor.dtype
        np.testing.assert_allclose(values, tensor, rtol=1e-12, atol=1e-13, err_msg=key)
        assert not same_bits or values.tobytes() == tensor.tobytes(), key
    _assert_same_position(here, expected)
    if case != "blocking":
        assert _schedules(here) == _schedules(_newest(FIXTURES / case / "run")), "the stored schedules were made for this request"


def _assert_same_position(here: CheckpointContent, expected: CheckpointContent) -> None:
    ours, theirs = Position.from_meta(here.meta), Position.from_meta(expected.meta)
    assert replace(ours, sums=theirs.sums) == theirs
    assert asdict(ours.sums) == pytest.approx(asdict(theirs.sums), rel=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if case != "blocking"])
def test_a_stored_schedule_keeps_its_digest_and_its_request(case: str) -> None:
    texts = _newest(FIXTURES / case / "run").meta["schedules"]
    assert texts
    for text in texts.values():
        schedule = CollectiveSchedule.from_json(text)
        assert (schedule.to_json(), schedule.digest()) == (text, hashlib.sha256(text.encode()).hexdigest())
        assert schedule.request == json.loads(text)["request"]


def test_the_cases_hold_what_they_are_for() -> None:
    lazy, sharded = (_newest(FIXTURES / case / "run") for case in ("lazy", "sharded"))
    assert any(np.any(tensor) for key, tensor in lazy.tensors.items() if key.startswith("optimizer/lazy_gradient/"))
    assert CollectiveSchedule.from_json(_schedules(sharded)["all"]).timed


def test_a_data_file_of_an_earlier_program_is_read() -> None:
    file = ImageFile.open(FIXTURES / "train.h5")
    file.verify()
    random = np.random.default_rng(3)
    assert file.images.dtype == np.uint8
    assert np.array_equal(file.images, random.integers(0, 256, (SAMPLES, *SHAPE), dtype=np.uint8))
    assert np.array_equal(file.labels, random.integers(0, len(CLASSES), SAMPLES))
    run = FIXTURES / "sharded" / "run"
    assert (tuple(file.class_names), stored_data(_newest(run), run)) == (CLASSES, DataFacts.of(file))
