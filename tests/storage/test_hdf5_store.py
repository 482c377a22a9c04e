"""The file format: round trip, layout, and that no damage goes unnoticed."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator, Mapping

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hpctrain.errors import CheckpointError
from hpctrain.storage.hdf5_store import read_store, write_store

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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    read, meta = read_store(path)
    native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in tensors.items()}
    assert meta == {}
    assert same(read, native)


def test_arrays_that_are_not_contiguous(tmp_path):
    base = np.arange(7 * 9 * 5, dtype=np.float64).reshape(7, 9, 5)
    tensors = {"a/transposed": base.T, "a/strided": base[::2, 1::3], "a/reversed": base[::-1]}
    write_store(tmp_path / "s.h5", tensors, {})
    read, _ = read_store(tmp_path / "s.h5")
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
    _, read = read_store(tmp_path / "m.h5")
    assert read == meta
    with pytest.raises(TypeError, match="set"):
        write_store(tmp_path / "n.h5", {}, {"names": {1, 2}})


def test_layout_is_plain_hdf5(tmp_path):
    tensors, meta = small_store(tmp_path / "s.h5")
    with h5py.File(tmp_path / "s.h5") as file:
        dataset = file["parameters/conv.weight"]
        assert dataset.chunks is None
        assert dataset.compression is None
        assert np.array_equal(dataset[...], tensors["parameters/conv.weight"])
        assert json.loads(file["meta"][()]) == meta
        assert file.attrs["format"] == b"hpctrain-checkpoint"


def test_a_name_without_a_group_and_a_strange_dtype_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="group"):
        write_store(tmp_path / "s.h5", {"meta": np.ones(3)}, {})
    with pytest.raises(AssertionError, match="dtype"):
        write_store(tmp_path / "s.h5", {"a/b": np.array(["x"])}, {})


def test_every_truncation_is_found(tmp_path):
    small_store(tmp_path / "s.h5")
    whole = (tmp_path / "s.h5").read_bytes()
    cut = tmp_path / "cut.h5"
    for length in [0, 1, 7, 8, 48, *range(97, len(whole), 225), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.h5"):
            read_store(cut)


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    """A flipped bit is found, or lies in a byte that nothing reads."""
    tensors, meta = small_store(tmp_path / "s.h5")
    whole = (tmp_path / "s.h5").read_bytes()
    rng = np.random.default_rng(0)
    found = 0
    for place in sorted(rng.choice(len(whole), 400, replace=False)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "d.h5").write_bytes(damaged)
        try:
            read, read_meta = read_store(tmp_path / "d.h5")
        except CheckpointError:
            found += 1
        else:
            assert same(read, tensors)
            assert read_meta == meta
    assert found > 100


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
        other_version: "format version 99, written by hpctrain 9.7.5",
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
    with pytest.raises(CheckpointError, match="no checkpoint of hpctrain"):
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
    tensors, _ = read_store(tmp_path / "s.h5")
    assert all(np.array_equal(array, np.full(125_000, float(name.split("/")[1]))) for name, array in tensors.items())


def test_the_first_version_can_be_read(tmp_path):
    small_store(tmp_path / "a.h5")
    expected = read_store(tmp_path / "a.h5")

    def first_version(file):
        file.attrs["format_version"] = 1

    change(tmp_path / "a.h5", first_version)
    tensors, meta = read_store(tmp_path / "a.h5")
    assert same(tensors, expected[0])
    assert meta == expected[1]


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
