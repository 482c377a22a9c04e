"""Image blobs in .npz: round trip, damage, and CIFAR-10 where it is at hand."""

import io
import lzma

import numpy as np
import pytest
from PIL import Image

from hpctrain.data.convert import common, npz
from hpctrain.data.format import ImageFile
from hpctrain.errors import DataError


def pack(path, images, labels, changes=None):
    blobs = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        blobs.append(buffer.getvalue())
    arrays = {
        "blob": np.frombuffer(b"".join(blobs), np.uint8),
        "offsets": np.concatenate([[0], np.cumsum([len(blob) for blob in blobs])]).astype(np.int64),
        "labels": np.asarray(labels, np.uint8),
    }
    arrays.update(changes or {})
    content = io.BytesIO()
    np.savez(content, **{name: array for name, array in arrays.items() if array is not None})
    path.write_bytes(lzma.compress(content.getvalue()) if path.suffix == ".xz" else content.getvalue())
    return path


def random_images(count, height=7, width=9):
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


@pytest.mark.parametrize("name", ["a.npz", "a.npz.xz"])
@pytest.mark.parametrize("threads", [1, 3])
def test_round_trip(tmp_path, name, threads):
    images, labels = random_images(50), np.arange(50) % 3
    done = []
    npz.convert(pack(tmp_path / name, images, labels), tmp_path / "out.h5", threads=threads, advance=done.append)
    file = ImageFile.open(tmp_path / "out.h5")
    assert np.array_equal(file.images, images)
    assert np.array_equal(file.labels, labels)
    assert file.class_names == ("0", "1", "2")
    assert sum(done) == 50


def test_limit_size_and_channels(tmp_path):
    path = pack(tmp_path / "a.npz", random_images(5), [4, 3, 2, 1, 0])
    npz.convert(path, tmp_path / "out.h5", list("abcde"), size=(4, 6), channels=1, limit=2)
    file = ImageFile.open(tmp_path / "out.h5")
    assert file.images.shape == (2, 4, 6, 1)
    assert file.labels.tolist() == [4, 3]


def test_images_of_several_sizes_need_a_size(tmp_path):
    images = [*random_images(2), *random_images(1, 8, 8)]
    path = pack(tmp_path / "a.npz", images, [0, 1, 0])
    with pytest.raises(DataError, match=r"Image 2 .* is \(8, 8, 3\), the first one \(7, 9, 3\); give --size"):
        npz.convert(path, tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()
    npz.convert(path, tmp_path / "out.h5", size=(5, 5))
    assert ImageFile.open(tmp_path / "out.h5").images.shape == (3, 5, 5, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "lacks an array"),
        ({"offsets": np.array([0, 1, 2])}, "offsets do not fit"),
        ({"offsets": np.array([], np.int64)}, "offsets do not fit"),
        ({"labels": np.zeros(4, np.uint8)}, "offsets do not fit"),
        ({"blob": np.zeros(3, np.uint8), "offsets": np.array([0, 1, 2, 3])}, "image 0: The image cannot be decoded"),
        ({"labels": np.zeros(0, np.uint8), "blob": np.zeros(0, np.uint8), "offsets": np.array([0])}, "holds no image"),
        ({"labels": np.array([{}] * 3, object)}, r"no \.npz file"),
    ],
)
def test_wrong_content_is_refused(tmp_path, changes, message):
    path = pack(tmp_path / "a.npz", random_images(3), [0, 1, 2], changes)
    with pytest.raises(DataError, match=message):
        npz.convert(path, tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.parametrize("name", ["a.npz", "a.npz.xz"])
def test_truncated_missing_or_strange_files_are_refused(tmp_path, name):
    with pytest.raises(DataError, match="no file"):
        npz.convert(tmp_path / name, tmp_path / "out.h5")
    path = pack(tmp_path / name, random_images(3), [0, 1, 2])
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"text", np.lib.format.magic(1, 0)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"truncated or no \.npz file"):
            npz.convert(path, tmp_path / "out.h5")


def test_an_archive_is_not_unpacked_where_memory_has_no_room(tmp_path, monkeypatch):
    path = pack(tmp_path / "a.npz", random_images(3), [0, 1, 2], {"blob": np.zeros(1 << 20, np.uint8)})
    monkeypatch.setattr(common, "available_bytes", lambda: 1 << 20)
    with pytest.raises(
        DataError, match=r"a.npz holds 1,\d{3},\d{3} bytes when it is unpacked, and memory has room for 1,048,576"
    ):
        npz.load(path)
    monkeypatch.setattr(npz, "_CHECKED_BYTES", 1 << 19)
    packed = tmp_path / "b.npz.xz"
    packed.write_bytes(lzma.compress(bytes(1 << 24), preset=0))
    with pytest.raises(DataError, match=r"b\.npz\.xz holds .* bytes when it is unpacked"):
        npz.load(packed)


def test_the_classes_of_a_beginning_are_those_of_the_whole(tmp_path):
    path = pack(tmp_path / "a.npz", random_images(4), [0, 2, 1, 3])
    npz.convert(path, tmp_path / "out.h5", limit=2)
    assert ImageFile.open(tmp_path / "out.h5").class_names == ("0", "1", "2", "3")


def test_a_single_array_is_no_npz(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"no \.npz file"):
        npz.convert(tmp_path / "a.npy", tmp_path / "out.h5")


def test_cifar10_looks_like_cifar10(tmp_path, shared_data):
    path = shared_data("cifar10-jpeg-test.npz.xz")
    npz.convert(path, tmp_path / "out.h5", limit=500)
    file = ImageFile.open(tmp_path / "out.h5")
    assert file.images.shape == (500, 32, 32, 3)
    assert len(file.class_names) == 10
    np.testing.assert_allclose(file.mean, [0.494, 0.485, 0.450], atol=0.02)
    np.testing.assert_allclose(file.std, [0.245, 0.242, 0.261], atol=0.02)
