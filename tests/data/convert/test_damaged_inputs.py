"""Converters' inputs with damaged bytes: converted, or refused with a sentence; never another error."""

import gzip
import io
import lzma
import os
import random
import struct

import h5py
import numpy as np
import pytest
from PIL import Image

from hpctrain.data.convert import cifar, folder, hdf5, idx, npz
from hpctrain.errors import DataError
from tests.support.sampling import amount


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def photo(kind):
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)).save(content, kind)
    return content.getvalue()


def packed(**changes):
    content, image = io.BytesIO(), photo("PNG")
    arrays = {
        "blob": np.frombuffer(image * 2, np.uint8),
        "offsets": np.array([0, len(image), 2 * len(image)]),
        "labels": np.array([0, 1]),
    }
    np.savez_compressed(content, **{**arrays, **changes})
    return content.getvalue()


def convert_idx(path, out):
    path.with_name("labels").write_bytes(idx_bytes(np.zeros(3, np.uint8)))
    idx.convert(path, path.with_name("labels"), out)


def convert_labels(path, out):
    path.with_name("images").write_bytes(idx_bytes(np.zeros((3, 2, 2), np.uint8)))
    idx.convert(path.with_name("images"), path, out)


def convert_cifar(path, out):
    path.rename(path.with_name("test_batch.bin"))
    cifar.convert(path.parent, "test", out)


def convert_names(path, out):
    path.rename(path.with_name("batches.meta.txt"))
    path.with_name("test_batch.bin").write_bytes(bytes(2 * 3073))
    cifar.convert(path.parent, "test", out)


def convert_npz(path, out):
    npz.convert(path, out, threads=1)


def convert_xz(path, out):
    path.rename(path.with_name("a.npz.xz"))
    npz.convert(path.with_name("a.npz.xz"), out, threads=1)


def convert_folder(path, out):
    path.with_name("ant").mkdir(exist_ok=True)
    path.rename(path.with_name("ant") / "a.jpg")
    folder.convert(folder.scan(path.parent), out, size=(5, 5), threads=1)


def foreign():
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file["images"], file["labels"] = np.zeros((2, 4, 4, 3), np.uint8), np.array([0, 1])
    return content.getvalue()


def convert_hdf5(path, out):
    with hdf5.opened(path) as source:
        hdf5.convert(source, out)


KINDS = {
    "hdf5": (convert_hdf5, foreign()),
    "idx": (convert_idx, idx_bytes(np.zeros((3, 2, 2), np.uint8))),
    "idx.gz": (convert_idx, gzip.compress(idx_bytes(np.zeros((3, 2, 2), np.uint8)))),
    "labels": (convert_labels, idx_bytes(np.arange(3, dtype=np.uint8))),
    "cifar": (convert_cifar, bytes(2 * 3073)),
    "cifar names": (convert_names, b"".join(b"name %d\n" % i for i in range(10))),
    "npz": (convert_npz, packed()),
    "npz.xz": (convert_xz, lzma.compress(packed())),
    "png": (convert_folder, photo("PNG")),
    "jpeg": (convert_folder, photo("JPEG")),
}


def damaged(content, generator):
    result = bytearray(content)
    for _ in range(generator.choice((1, 1, 3))):
        place = generator.randrange(min(len(result), generator.choice((64, len(content)))) + 1)  # often in a header
        action = generator.choice(("change", "zero", "ones", "cut", "insert", "lose"))
        if action in ("change", "zero", "ones"):
            stop = min(len(result), place + generator.choice((1, 2, 8)))
            result[place:stop] = bytes({"zero": 0, "ones": 255}.get(action, generator.randrange(256)) for _ in range(place, stop))
        elif action == "cut":
            del result[place:]
        elif action == "insert":
            result[place:place] = generator.randbytes(generator.choice((1, 4, 100)))
        else:
            del result[place : place + generator.choice((1, 4, 100))]
    return bytes(result)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_inputs_are_converted_or_refused_with_a_sentence(tmp_path, kind, monkeypatch):
    convert, content = KINDS[kind]
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    generator = random.Random(kind)
    refused = 0
    cases = amount(40, 500)
    for case in range(cases):
        directory = tmp_path / str(case)
        directory.mkdir()
        (directory / "input").write_bytes(damaged(content, generator))
        sentence = outcome(convert, directory / "input")
        assert not sentence or (sentence.endswith(".") and str(directory) in sentence)
        refused += bool(sentence)
    assert refused > cases // 10


def outcome(convert, path):
    """The sentence of a refusal; empty where it was converted."""
    try:
        convert(path, path.parent.with_suffix(".h5"))
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array([0.5, 1.0])}, "labels float64 of"),
        ({"labels": np.array([[0], [1]])}, r"labels int64 of \(2, 1\)"),
        ({"offsets": np.array([0.0, np.nan, 1.0])}, "offsets are float64"),
        ({"blob": np.zeros(4)}, "blob is float64"),
        ({"labels": np.array([0, 10**12])}, "largest label is 1000000000000"),
        ({"labels": np.array([-1, -1])}, "label -1"),
    ],
)
def test_arrays_of_other_types_are_refused(tmp_path, changes, message):
    (tmp_path / "a.npz").write_bytes(packed(**changes))
    with pytest.raises(DataError, match=message):
        npz.convert(tmp_path / "a.npz", tmp_path / "out.h5")


def test_an_idx_file_of_very_many_dims_is_refused(tmp_path):
    (tmp_path / "images").write_bytes(struct.pack(">BBBB100i", 0, 0, 8, 100, *[1] * 100) + b"x")
    with pytest.raises(DataError, match="array of 100 dims"):
        idx.convert(tmp_path / "images", tmp_path / "images", tmp_path / "out.h5")
