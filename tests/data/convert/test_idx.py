"""IDX files: round trip, plain and gzipped, and one sentence for every damaged one."""

import gzip
import os
import struct

import numpy as np
import pytest

from hpctrain.data.convert import idx
from hpctrain.data.format import ImageFile
from hpctrain.errors import DataError


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def files(tmp_path, images, labels, *, packed=False):
    paths = []
    for name, array in (("images", images), ("labels", labels)):
        path = tmp_path / f"{name}{'.gz' if packed else ''}"
        content = idx_bytes(np.asarray(array, np.uint8))
        path.write_bytes(gzip.compress(content) if packed else content)
        paths.append(path)
    return paths


def random_images(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(5, 7, 9), (5, 7, 9, 3), (1, 1, 1)])
def test_round_trip(tmp_path, shape, packed):
    images, labels = random_images(*shape), np.arange(shape[0])
    done = []
    idx.convert(*files(tmp_path, images, labels, packed=packed), tmp_path / "out.h5", advance=done.append)
    file = ImageFile.open(tmp_path / "out.h5")
    assert np.array_equal(file.images, images.reshape(*shape[:3], -1))
    assert np.array_equal(file.labels, labels)
    assert file.class_names == tuple(str(i) for i in range(shape[0]))
    assert sum(done) == shape[0]


def test_class_names_may_be_more_than_the_labels_seen(tmp_path):
    idx.convert(*files(tmp_path, random_images(2, 3, 3), [0, 1]), tmp_path / "out.h5", ["a", "b", "c"])
    assert ImageFile.open(tmp_path / "out.h5").class_names == ("a", "b", "c")


GOOD = idx_bytes(np.zeros((2, 3, 3), np.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (b"\x89PNG" + GOOD, "not an IDX file"),
        (b"\0\0\x0d\x01" + GOOD[4:], "IDX type 0x0d"),
        (b"\0\0\x08\0", "not an IDX file"),
        (GOOD[:10], "truncated within its header of 16 bytes"),
        (GOOD[:-1], r"33 bytes, but its header \(2, 3, 3\) asks for 34"),
        (GOOD + b"x", "35 bytes"),
        (struct.pack(">BBBBi", 0, 0, 8, 1, -1), r"asks for an array of \(-1,\)"),
        (gzip.compress(GOOD, mtime=0)[:-6], "truncated or damaged gzip"),
        (gzip.compress(GOOD, mtime=0)[:-8] + bytes(8), "truncated or damaged gzip"),
        (gzip.compress(GOOD, mtime=0)[:12] + b"\xff" * 20, "truncated or damaged gzip"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    images, labels = files(tmp_path, random_images(2, 3, 3), [0, 1])
    images.write_bytes(content)
    with pytest.raises(DataError, match=message):
        idx.convert(images, labels, tmp_path / "out.h5")
    assert sorted(os.listdir(tmp_path)) == ["images", "labels"]


@pytest.mark.parametrize("packed", [False, True])
def test_no_more_is_unpacked_than_the_header_asks_for(tmp_path, packed, monkeypatch):
    """The inputs are a gzip bomb, and a header that claims more than memory holds."""
    images, labels = files(tmp_path, random_images(2, 3, 3), [0, 1])
    unpacked = []
    read = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size: unpacked.append(size) or read(self, size))
    bomb = GOOD + bytes(1 << 26)
    images.write_bytes(gzip.compress(bomb, 1) if packed else bomb)
    with pytest.raises(DataError, match=r"has 35 bytes or more, but its header \(2, 3, 3\) asks for 34"):
        idx.convert(images, labels, tmp_path / "out.h5")
    assert sum(unpacked) < 100
    claim = struct.pack(">BBBB4i", 0, 0, 8, 4, *[(1 << 31) - 1] * 4)
    images.write_bytes(gzip.compress(claim) if packed else claim)
    with pytest.raises(DataError, match=r"images holds \d+(,\d{3})+ bytes when it is unpacked, and memory has room for"):
        idx.convert(images, labels, tmp_path / "out.h5")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ((2, 3, 3), (3,), "2 images and 3 labels"),
        ((2, 3), (2,), "3 or 4 dims"),
        ((2, 3, 3), (2, 1), "labels 1"),
        ((0, 3, 3), (0,), "no image"),
        ((2, 0, 3), (2,), "at least 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, images, labels, message):
    with pytest.raises(DataError, match=message):
        idx.convert(*files(tmp_path, random_images(*images), np.zeros(labels)), tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no IDX file .*nowhere"):
        idx.convert(tmp_path / "nowhere", tmp_path / "nowhere", tmp_path / "out.h5")
