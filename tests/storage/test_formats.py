"""Formats of files: tensors in HDF5, weights, hashes and metrics are read as they were written, and no damage goes unnoticed."""

import json
import logging
import os
import resource
import struct
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hpctrain.core.errors import CheckpointError, DataError
from hpctrain.runs.records import HashFile, HashRecord, cut_back, read_hashes, unreadable_path
from hpctrain.storage import weights_file
from hpctrain.storage.checkpoint import read as read_store
from hpctrain.storage.hdf5_store import write_store
from hpctrain.storage.weights_file import WeightsFile
from tests.support.sampling import amount

DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool", ">f4")


def small_store(path):
    rng = np.random.default_rng(0)
    tensors = {
        "parameters/conv.weight": rng.standard_normal((7, 3, 3, 5), np.float32),
        "parameters/fc.bias": rng.standard_normal(9),
        "statistics/norm.running_mean": rng.standard_normal(225, np.float32),
        "optimizer/momentum/fc.bias": np.zeros(9),
    }
    meta = {"global_step": 7, "config": "model: quickstart\n", "plan": {"buckets": [1, 2, 3]}}
    write_store(path, tensors, meta)
    return tensors, meta


def same(left, right):
    return set(left) == set(right) and all(
        left[n].dtype == right[n].dtype and left[n].shape == right[n].shape and left[n].tobytes() == right[n].tobytes()
        for n in left
    )


@settings(max_examples=amount(30, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.dictionaries(
        st.from_regex(r"[a-z]{1,3}/[a-z0-9]{1,4}(\.[a-z]{1,5}){0,2}", fullmatch=True),
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
        ),
        max_size=5,
    )
)
def test_round_trip_keeps_every_bit_shape_and_dtype(tmp_path, tensors):
    path = tmp_path / "store.h5"
    write_store(path, tensors, {})
    content = read_store(path)
    native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in tensors.items()}
    assert content.meta == {}
    assert same(content.tensors, native)


def test_arrays_that_are_not_contiguous(tmp_path):
    base = np.arange(7 * 9 * 5, dtype=np.float64).reshape(7, 9, 5)
    tensors = {"a/transposed": base.T, "a/strided": base[::2, 1::3], "a/reversed": base[::-1]}
    write_store(tmp_path / "s.h5", tensors, {})
    read = read_store(tmp_path / "s.h5").tensors
    assert all(np.array_equal(read[name], tensors[name]) for name in tensors)


def test_metadata_round_trip_exactly(tmp_path):
    meta = {
        "loss_sum": 0.1 + 0.2,
        "tiny": 5e-324,
        "count": np.int64(225),
        "mean": np.float64(1 / 3),
        "text": "Größe: 7×9\nlr: 1e-3\n",
        "plan": {"buckets": list(range(40_000))},  # more than the 64 KiB that an attribute could hold
        "none": None,
    }
    write_store(tmp_path / "m.h5", {"a/b": np.ones(3)}, meta)
    assert read_store(tmp_path / "m.h5").meta == meta
    with pytest.raises(TypeError, match="set"):
        write_store(tmp_path / "n.h5", {}, {"names": {1, 2}})


def test_layout_is_plain_hdf5(tmp_path):
    tensors, meta = small_store(tmp_path / "s.h5")
    with h5py.File(tmp_path / "s.h5") as file:
        dataset = file["parameters/conv.weight"]
        assert dataset.chunks is None
        assert dataset.compression is None
        assert np.array_equal(dataset[...], tensors["parameters/conv.weight"])
        assert (json.loads(file["meta"][()]), file.attrs["format"]) == (meta, b"hpctrain-checkpoint")


def test_a_name_without_a_group_and_a_strange_dtype_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="group"):
        write_store(tmp_path / "s.h5", {"meta": np.ones(3)}, {})
    with pytest.raises(AssertionError, match="dtype"):
        write_store(tmp_path / "s.h5", {"a/b": np.array(["x"])}, {})


def change(path, edit):
    with h5py.File(path, "r+") as file:
        edit(file)


def test_the_sentence_names_what_is_damaged(tmp_path):
    def flip(file):
        file["parameters/fc.bias"][4] += 1.0

    def rewrite_meta(file):
        text = bytearray(file["meta"][()])
        text[-3] ^= 1
        file["meta"][()] = np.bytes_(bytes(text))

    def rename(file):
        file.move("parameters/fc.bias", "parameters/fc.bios")

    def drop(file):
        del file["optimizer/momentum/fc.bias"]

    def swap(file):  # a whole valid tensor in another's place
        file.move("parameters/fc.bias", "parameters/x")
        file.move("optimizer/momentum/fc.bias", "parameters/fc.bias")
        file.move("parameters/x", "optimizer/momentum/fc.bias")

    def reshape(file):
        data, digest = file["parameters/fc.bias"][...], file["parameters/fc.bias"].attrs["sha256"]
        del file["parameters/fc.bias"]
        file["parameters/fc.bias"] = data.reshape(3, 3)
        file["parameters/fc.bias"].attrs["sha256"] = digest

    def unfinish(file):
        del file.attrs["sha256"]

    def other_version(file):
        file.attrs["format_version"] = 99
        file.attrs["hpctrain"] = np.bytes_("9.7.5")

    cases = {
        flip: "Tensor parameters/fc.bias",
        rewrite_meta: "The metadata",
        rename: "list of tensors",
        drop: "list of tensors",
        swap: "list of tensors",
        reshape: "Tensor parameters/fc.bias",
        unfinish: "list of tensors",
        other_version: "has format version 99, but hpctrain .* reads version 1; use hpctrain 9.7.5, which wrote it",
    }
    for edit, words in cases.items():
        path = tmp_path / f"{edit.__name__}.h5"
        small_store(path)
        read_store(path)
        change(path, edit)
        with pytest.raises(CheckpointError, match=words):
            read_store(path)


def test_files_of_others(tmp_path):
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        read_store(tmp_path / "absent.h5")
    (tmp_path / "text.h5").write_text("not HDF5 at all\n" * 100)
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        read_store(tmp_path / "text.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = np.zeros(3)
    limits, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"other.h5 cannot be read \(Too many open files\); remove the cause"):
            read_store(tmp_path / "other.h5")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with pytest.raises(CheckpointError, match="not a checkpoint of hpctrain"):
        read_store(tmp_path / "other.h5")


class Lazy(Mapping[str, np.ndarray]):
    """Tensors that exist only while they are looked at."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.asked: list[str] = []

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        return iter(f"parameters/{i}" for i in range(self.count))

    def __getitem__(self, name: str) -> np.ndarray:
        self.asked.append(name)
        return np.full(self.size, float(name.split("/")[1]))


def test_a_lazy_mapping_is_never_in_memory_as_a_whole(tmp_path):
    lazy = Lazy(20, 125_000)  # 20 tensors of 1 MB
    tracemalloc.start()
    write_store(tmp_path / "s.h5", lazy, {})
    _, writing = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lazy.asked == list(lazy)
    assert writing < 5_000_000
    tensors = read_store(tmp_path / "s.h5").tensors
    assert all(np.array_equal(array, np.full(125_000, float(name.split("/")[1]))) for name, array in tensors.items())


def test_a_tensor_larger_than_its_file_is_not_read(tmp_path):
    """A dataset without stored elements may claim any number of bytes. No checkpoint has such a dataset."""
    path = tmp_path / "s.h5"
    write_store(path, {"a/b": np.zeros(3, np.float32)}, {})
    with h5py.File(path, "r+") as file:
        digest = file["a/b"].attrs["sha256"]
        del file["a/b"]
        file.create_dataset("a/b", (1 << 44,), "<f4", chunks=(1 << 20,)).attrs["sha256"] = digest
    with pytest.raises(CheckpointError, match="a/b has more bytes than the file"):
        read_store(path)


_DTYPES = st.sampled_from(["<f4", "<f8", "<i8"]).map(np.dtype)
_SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@settings(max_examples=20, deadline=None)
@given(
    tensors=st.dictionaries(st.text("ab.0_é", min_size=1), hnp.arrays(_DTYPES, _SHAPES), min_size=1, max_size=3),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3),
)
def test_what_was_written_is_read_to_the_last_bit(
    tensors: dict[str, np.ndarray], metadata: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    weights_file.write(path, WeightsFile(tensors, metadata))
    content = weights_file.read(path)
    assert (content.metadata, content.tensors.keys()) == (metadata, tensors.keys())
    for name, array in tensors.items():
        assert (content.tensors[name].dtype, content.tensors[name].shape) == (array.dtype, array.shape)
        assert content.tensors[name].tobytes() == array.tobytes()


def test_a_file_is_readable_by_who_may_read_others(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    weights_file.write(tmp_path / "w.safetensors", WeightsFile({"a": np.zeros(2)}))
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "w.safetensors"]


def test_sixteen_bits_become_the_same_numbers_in_32(tmp_path: Path) -> None:
    halves = np.array([1.5, -0.1, 6e-8, 65504], np.float16)
    weights_file.write(tmp_path / "half.safetensors", WeightsFile({"a": halves}))
    content = weights_file.read(tmp_path / "half.safetensors").tensors["a"]
    assert content.dtype == np.float32
    np.testing.assert_array_equal(content, halves)
    header = json.dumps({"b": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [0, 4]}}).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "brain.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\x80\x3f\xc0\xc0")
    np.testing.assert_array_equal(weights_file.read(tmp_path / "brain.safetensors").tensors["b"], [[1.0], [-6.0]])


@pytest.mark.parametrize("content", [b"", b"neither", b"\xff" * 64, 1, 8, 40])
def test_a_damaged_file_is_a_sentence(tmp_path: Path, content: bytes | int) -> None:
    path = tmp_path / "w.safetensors"
    weights_file.write(path, WeightsFile({"a": np.arange(10.0)}))
    path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:-content])
    with pytest.raises(CheckpointError, match=r"as a safetensors file \(.*\); write or download it again\.$"):
        weights_file.read(path)


def test_missing_files_and_other_kinds_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no weight file"):
        weights_file.read(tmp_path / "w.safetensors")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match=r"pipe.pt cannot be read \(it is a pipe, not a regular file\); make it readable"):
        weights_file.read(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match=r"it must end in \.safetensors, \.pt or \.pth\.$"):
        weights_file.read(tmp_path / "w.h5")
    with pytest.raises(CheckpointError, match=r"it must end in \.safetensors\.$"):
        weights_file.check_suffix(tmp_path / "w.pt", (weights_file.SAFETENSORS,))


@pytest.mark.parametrize(("module", "name"), [("torch", "w.pt"), ("safetensors", "w.safetensors")])
def test_a_missing_package_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"pip install {module}"):
        weights_file.read(tmp_path / name)


@pytest.mark.parametrize(
    "wrap",
    [
        "module.{}",
        "_orig_mod.{}",
        "module._orig_mod.{}",
        "_orig_mod.module.{}",
        "module.module.{}",
        "_fsdp_wrapped_module.{}",
        "module._orig_mod._checkpoint_wrapped_module.{}",
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_names_lose_what_wrappers_put_before_them(wrap: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".pth":
        pytest.importorskip("torch")
    tensors = {name: np.full(2, float(number)) for number, name in enumerate(("conv.weight", "fc.bias", "n_module.weight"))}
    path = tmp_path / f"w{suffix}"
    weights_file.write(path, WeightsFile({wrap.format(name): array for name, array in tensors.items()}))
    read = weights_file.read(path).tensors
    assert list(read) == list(tensors) or sorted(read) == sorted(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(read[name], array)


def test_names_lose_what_wrappers_put_inside_of_them(tmp_path: Path) -> None:
    names = {"features._orig_mod.0.weight": "features.0.weight", "fc.bias": "fc.bias", "module.x": "module.x"}
    weights_file.write(tmp_path / "w.safetensors", WeightsFile({name: np.zeros(1) for name in names}))
    assert sorted(weights_file.read(tmp_path / "w.safetensors").tensors) == sorted(names.values())


def test_names_of_a_file_of_ours_stay(tmp_path: Path) -> None:
    tensors = {"module.weight": np.zeros(1), "module.bias": np.zeros(1)}
    weights_file.write(tmp_path / "w.safetensors", WeightsFile(tensors, {"model": "package:Model"}))
    assert sorted(weights_file.read(tmp_path / "w.safetensors").tensors) == sorted(tensors)


def test_two_tensors_never_become_one(tmp_path: Path) -> None:
    tensors = {"a._orig_mod.weight": np.zeros(1), "a.weight": np.ones(1)}
    weights_file.write(tmp_path / "w.safetensors", WeightsFile(tensors))
    with pytest.raises(CheckpointError, match=r"has both a\S+ and a\S+, which are equal without the names of PyTorch"):
        weights_file.read(tmp_path / "w.safetensors")


A, B, C = "a" * 16, "b" * 16, "c" * 16


def record(step: int, **hashes: str) -> dict[str, object]:
    return {"step": step, "epoch": 1, "all": f"{step:016x}", "hashes": hashes}


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    file = HashFile(tmp_path / "hashes.jsonl")
    file.append(record(10, x=A, y=B))
    file.append(record(20, x=A, y=C))
    found = read_hashes(tmp_path / "hashes.jsonl")
    assert found == {10: HashRecord(10, ("x", "y"), A + B, f"{10:016x}"), 20: HashRecord(20, ("x", "y"), A + C, f"{20:016x}")}
    assert found[20].by_key() == {"x": A, "y": C}
    assert len((tmp_path / "hashes.jsonl").read_text().splitlines()) == 3  # names are there once


def test_a_run_without_a_hash_file_has_no_hashes(tmp_path: Path) -> None:
    assert read_hashes(tmp_path / "hashes.jsonl") == {}


def test_records_go_on_with_other_tensors(tmp_path: Path) -> None:
    """After a resume with other keys, and after another one that has cut these back: their names stay in the file."""
    path = tmp_path / "hashes.jsonl"
    HashFile(path).append(record(10, x=A))
    HashFile(path).append(record(20, x=A, y=B))
    cut_back(path, 0, 10)
    HashFile(path).append(record(20, x=C))
    assert {step: found.by_key() for step, found in read_hashes(path).items()} == {10: {"x": A}, 20: {"x": C}}
    HashFile(path).append(record(30, x=A))
    assert [list(json.loads(line)) for line in path.read_text().splitlines()].count(["tensors"]) == 3


def test_a_torn_line_is_left_out_and_then_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "hashes.jsonl"
    HashFile(path).append(record(10, x=A))
    with open(path, "ab") as torn:
        torn.write(b'{"step": 20, "ep')
    assert list(read_hashes(path)) == [10]
    HashFile(path).append(record(20, x=B))
    assert list(read_hashes(path)) == [10, 20]


@pytest.mark.parametrize(
    "line", ["nothing", "[1]", '{"step": 20, "hashes": "ab"}', '{"hashes": ""}', '{"step": "20", "hashes": "' + A + '"}']
)
def test_another_line_is_reported_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hashes.jsonl"
    HashFile(path).append(record(10, x=A))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"Line 3 of .*hashes\.jsonl does not contain hashes of 1 tensors; delete the line\."):
        read_hashes(path)
    HashFile(path).append(record(20, x=B))  # a run goes on, with its tensors' names once more
    assert json.loads(path.read_text().splitlines()[-2]) == {"tensors": ["x"]}


def test_tensors_that_differ_come_in_order(tmp_path: Path) -> None:
    one = HashRecord(1, ("x", "y", "z"), A + B + C, "")
    assert one.different(HashRecord(1, ("x", "y", "z"), A + B + C, "")) == ()
    assert one.different(HashRecord(1, ("x", "y", "z"), A + A + A, "")) == ("y", "z")
    assert one.different(HashRecord(1, ("z", "y", "more"), C + A + A, "")) == ("x", "y", "more")
    assert one.different(HashRecord(1, ("z", "x", "y"), C + A + B, "")) == ()


Record = dict[str, Any]
STEPS_PER_EPOCH = 5


def written(epochs: int) -> list[Record]:
    """Return the records of a run of 5 steps per epoch: its start, each step, each epoch's end and its evaluation."""
    found: list[Record] = [{"kind": "progress", "mode": "test"}]
    for epoch in range(epochs):
        found.append({"kind": "image_size", "epoch": epoch + 1, "step": epoch * STEPS_PER_EPOCH, "size": 24})
        for step in range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1):
            found.append({"kind": "interval", "epoch": epoch + 1, "step": step, "images": 7})
        found.append({"kind": "epoch", "epoch": epoch + 1, "step": step, "images": 7})
        found.append({"kind": "evaluation", "epoch": epoch + 1, "step": step})
    return found


def lines(*records: Record) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def warnings() -> Iterator[list[logging.LogRecord]]:
    """What the module logs in this thread, wherever the package's log goes: threads of earlier tests may log as well."""
    found: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("hpctrain.runs.records"), logging.Handler()
    handler.emit = lambda record: found.append(record) if record.thread == threading.get_ident() else None
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize("step", range(16))
def test_a_cut_and_the_same_steps_again_give_the_whole_file(path: Path, step: int) -> None:
    """The position is where a checkpoint is taken: at an epoch's end it is after its evaluation."""
    records = written(3)
    epoch, boundary = step // STEPS_PER_EPOCH, step > 0 and step % STEPS_PER_EPOCH == 0
    here = [index for index, record in enumerate(records) if record.get("step") == step and record["kind"] != "image_size"]
    kept = here[-1 if boundary else 0] + 1 if here else 1
    for end in range(kept, len(records) + 1):
        path.write_bytes(lines(*records[:end]))
        cut_back(path, epoch, step)
        assert path.read_bytes() == lines(*records[:kept])
        with open(path, "ab") as file:
            file.write(lines(*records[kept:]))
        assert path.read_bytes() == lines(*records)


def test_a_checkpoint_inside_the_epochs_last_step_is_before_its_end(path: Path) -> None:
    """The epoch's end and its evaluation come again."""
    path.write_bytes(lines(*written(2)))
    cut_back(path, 0, 5)
    assert path.read_bytes() == lines(*written(1)[:-2])


def test_an_evaluation_that_comes_again_goes(path: Path) -> None:
    path.write_bytes(lines(*written(2)))
    cut_back(path, 2, 10)
    assert path.read_bytes() == lines(*written(2))
    cut_back(path, 2, 10, evaluates=True)
    assert path.read_bytes() == lines(*written(2)[:-1])


def test_starts_stay(path: Path) -> None:
    start = {"kind": "progress", "mode": "none"}
    path.write_bytes(lines(*written(1), start, {"kind": "interval", "epoch": 1, "step": 6}, start))
    cut_back(path, 1, 5)
    assert path.read_bytes() == lines(*written(1), start, start)


def test_no_file_and_nothing_to_cut(path: Path) -> None:
    cut_back(path, 1, 5)
    assert not path.exists()
    path.write_bytes(lines(*written(1)))
    before = path.stat()
    cut_back(path, 1, 5)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_torn_last_line_is_nothing_to_warn_of(path: Path, warnings: list[logging.LogRecord]) -> None:
    whole = lines(*written(1))
    for length in range(1, len(whole.splitlines(True)[-1])):
        path.write_bytes(whole[:-length])
        cut_back(path, 1, 5)
        assert path.read_bytes() == lines(*written(1)[:-1])
    assert warnings == []
    assert not unreadable_path(path).exists()


def test_unreadable_lines_move_out_of_the_way_with_a_warning(path: Path, warnings: list[logging.LogRecord]) -> None:
    bad = [b'{"kind": "interval", "st', b"[3]", b"\0\0\xff", b""]
    path.write_bytes(lines(*written(1)) + b"\n".join(bad) + b"\n" + lines({"kind": "interval", "epoch": 1, "step": 6}) + b"torn")
    cut_back(path, 1, 5)
    assert (path.read_bytes(), unreadable_path(path).read_bytes()) == (lines(*written(1)), b"\n".join(bad) + b"\n")
    (warning,) = warnings
    assert warning.levelno == logging.WARNING
    assert "4 lines" in warning.getMessage()
    assert str(unreadable_path(path)) in warning.getMessage()
    path.write_bytes(path.read_bytes() + b"more\n")
    cut_back(path, 1, 5)
    assert unreadable_path(path).read_bytes() == b"\n".join([*bad, b"more"]) + b"\n"


class Killed(BaseException):
    """Nothing runs after it."""


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "full"])
@pytest.mark.parametrize("call", range(4))
def test_an_interruption_leaves_the_old_file_or_the_new_one(path: Path, monkeypatch, call: int, error: BaseException) -> None:
    """At the synchronisation of what is unreadable, that of the new file, its renaming, and the directory's synchronisation."""
    old = lines(*written(1)) + b"bad\n" + lines({"kind": "interval", "epoch": 1, "step": 6})
    path.write_bytes(old)
    calls = []

    def interrupted(work: Any) -> Any:
        def run(*arguments: Any) -> None:
            calls.append(work)
            if len(calls) == call + 1:
                raise error
            work(*arguments)

        return run

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace"):
            patch.setattr(os, name, interrupted(getattr(os, name)))
        expected = CheckpointError if isinstance(error, OSError) else Killed
        with pytest.raises(expected) as caught:
            cut_back(path, 1, 5)
    if expected is CheckpointError:
        assert str(path) in str(caught.value)
        assert "No space left" in str(caught.value)
    assert (len(calls), path.read_bytes()) == (call + 1, lines(*written(1)) if call == 3 else old)
    cut_back(path, 1, 5)
    assert path.read_bytes() == lines(*written(1))
    assert b"bad\n" in unreadable_path(path).read_bytes()
    assert {each.name for each in path.parent.iterdir()} == {path.name, unreadable_path(path).name}


def test_a_rollback_to_here_is_reported_again_by_a_resume_and_stays_where_the_run_itself_goes_back(path: Path) -> None:
    back, skip = {"kind": "rollback", "epoch": 2, "step": 5, "from_step": 7}, {"kind": "skip", "epoch": 2, "step": 6}
    path.write_bytes(lines(*written(1), back, skip))
    cut_back(path, 1, 5, goes_back=True)
    assert path.read_bytes() == lines(*written(1), back)
    cut_back(path, 1, 5)
    assert path.read_bytes() == lines(*written(1))
    path.write_bytes(lines(*written(1), back, skip))
    cut_back(path, 1, 6)
    assert path.read_bytes() == lines(*written(1), back, skip)
