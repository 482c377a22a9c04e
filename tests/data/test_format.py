"""The data format: round trip, exact statistics, and one sentence for every damaged file."""

import errno
import fcntl
import hashlib
import os

import h5py
import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.data.format import ImageFile, ImageFileWriter
from hpctrain.errors import DataError


def random_images(count, shape=(7, 9, 3)):
    return np.random.default_rng(1).integers(0, 256, (count, *shape), np.uint8)


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 9, 3), (28, 28, 1), (5, 3, 4)])
@pytest.mark.parametrize("sizes", [[11], [1, 7, 3], [4, 0, 7]])
def test_round_trip_does_not_depend_on_chunks(tmp_path, shape, sizes):
    images, labels = random_images(11, shape), np.arange(11) % 4
    with ImageFileWriter(tmp_path / "new" / "a.h5", 11, shape, ["a", "b", "c", "d"]) as writer:
        start = 0
        for size in sizes:
            writer.append(images[start : start + size], labels[start : start + size])
            start += size
    file = ImageFile.open(tmp_path / "new" / "a.h5")
    assert np.array_equal(file.images, images)
    assert np.array_equal(file.labels, labels)
    assert file.labels.dtype == np.int64
    assert file.class_names == ("a", "b", "c", "d")
    assert (file.shape, len(file)) == (shape, 11)
    np.testing.assert_allclose(file.mean, (images / 255).mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(file.std, (images / 255).std(axis=(0, 1, 2)), rtol=1e-9, atol=1e-12)
    file.verify()
    assert os.listdir(tmp_path / "new") == ["a.h5"]


def test_images_that_are_no_contiguous_array_are_written_as_they_look(tmp_path):
    images = random_images(6)[:, :, ::-1]
    data_format.write(tmp_path / "a.h5", 6, (7, 9, 3), ["x"], [(images, np.zeros(6, np.int64))])
    file = ImageFile.open(tmp_path / "a.h5")
    assert np.array_equal(file.images, images)
    file.verify()


@pytest.mark.parametrize("written", [1, 7])
def test_fewer_samples_than_announced_make_a_shorter_file(tmp_path, written):
    images, labels = random_images(written), np.arange(written)
    data_format.write(tmp_path / "a.h5", 20, (7, 9, 3), [str(i) for i in range(7)], [(images, labels)])
    file = ImageFile.open(tmp_path / "a.h5")
    assert np.array_equal(file.images, images)
    assert np.array_equal(file.labels, labels)
    file.verify()
    assert os.listdir(tmp_path) == ["a.h5"]


def test_constant_images_have_no_spread(tmp_path):
    images = np.full((3, 4, 5, 1), 255, np.uint8)
    data_format.write(tmp_path / "a.h5", 3, (4, 5, 1), ["x"], [(images, np.zeros(3, np.int64))])
    file = ImageFile.open(tmp_path / "a.h5")
    assert (file.mean.tolist(), file.std.tolist()) == ([1.0], [0.0])


def test_images_are_mapped_read_only(make_file):
    file, _, _ = make_file()
    with pytest.raises(ValueError, match="read-only"):
        file.images[0] = 0


def test_opens_while_another_holds_the_file_locked(make_file):
    file, images, _ = make_file()
    with file.path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="lock"):
            h5py.File(file.path, "r", locking=True)
        assert np.array_equal(ImageFile.open(file.path).images, images)


@pytest.mark.parametrize("label", [-1, 5])
def test_a_wrong_label_stops_the_writer_and_leaves_nothing(tmp_path, label):
    labels = np.array([0, 1, label, 4])
    with pytest.raises(DataError, match=rf"sample 2 has label {label}, which is outside 0\.\.4"):
        data_format.write(tmp_path / "a.h5", 4, (7, 9, 3), list("abcde"), [(random_images(4), labels)])
    assert os.listdir(tmp_path) == []


def test_an_error_leaves_the_old_file_as_it_was(make_file):
    file, images, _ = make_file()

    def chunks():
        yield random_images(2), np.zeros(2, np.int64)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        data_format.write(file.path, 4, (7, 9, 3), ["x"], chunks())
    assert np.array_equal(ImageFile.open(file.path).images, images)
    assert os.listdir(file.path.parent) == [file.path.name]


def test_the_name_is_given_after_the_bytes_are_on_disk(tmp_path, monkeypatch):
    events = []
    sync, replace_file = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(os.readlink(f"/proc/self/fd/{handle}")), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("rename"), replace_file(old, new)))
    data_format.write(tmp_path / "a.h5", 2, (7, 9, 3), ["x"], [(random_images(2), np.zeros(2, np.int64))])
    assert len(events) == 3
    assert events[0].endswith(".tmp")
    assert events[1:] == ["rename", str(tmp_path)]


def test_a_replaced_file_does_not_change_an_open_one(make_file):
    file, images, _ = make_file()
    data_format.write(file.path, 2, (7, 9, 3), ["x"], [(random_images(2), np.zeros(2, np.int64))])
    assert np.array_equal(file.images, images)
    assert len(ImageFile.open(file.path)) == 2


@pytest.mark.parametrize(
    ("count", "shape", "names", "message"),
    [
        (0, (7, 9, 3), ["x"], "no image"),
        (3, (7, 9, 3), ["x"], "no image"),
        (3, (0, 9, 3), ["x"], "at least 1"),
        (3, (7, 9, 3), [], "no class"),
    ],
)
def test_empty_files_are_refused(tmp_path, count, shape, names, message):
    with pytest.raises(DataError, match=message):
        data_format.write(tmp_path / "a.h5", count, shape, names, [])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("images", [np.zeros((1, 7, 9, 1), np.uint8), np.zeros((1, 7, 9, 3), np.float32)])
def test_images_of_another_shape_or_type_are_refused(tmp_path, images):
    with pytest.raises(DataError, match=r"uint8 images of shape \(7, 9, 3\)"):
        data_format.write(tmp_path / "a.h5", 1, (7, 9, 3), ["x"], [(images, np.zeros(1, np.int64))])


def test_a_missing_file_is_named_with_the_way_to_make_it(tmp_path):
    with pytest.raises(DataError, match=r"no data file .*none\.h5; make it with `hpctrain data convert`"):
        ImageFile.open(tmp_path / "none.h5")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(make_file, share):
    file, _, _ = make_file(count=200)
    size = file.path.stat().st_size
    os.truncate(file.path, int(size * share))
    with pytest.raises(DataError, match=r"truncated|damaged"):
        ImageFile.open(file.path)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text.h5").write_text("not HDF5\n" * 100)
    with pytest.raises(DataError, match="not an HDF5 file"):
        ImageFile.open(tmp_path / "text.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = np.zeros((3, 2, 2, 1), np.uint8)
    with pytest.raises(DataError, match="not a data file of hpctrain"):
        ImageFile.open(tmp_path / "other.h5")


@pytest.mark.parametrize("name", ["labels", "mean", "class_names", "sums"])
def test_values_that_were_never_written_are_not_read(make_file, name, monkeypatch):
    """A file of kilobytes may declare a dataset of gigabytes without stored values; reading it would fill memory with zeros."""
    file, _, _ = make_file()
    with h5py.File(file.path, "r+") as opened:
        dtype, digest = opened[name].dtype, opened[name].attrs["sha256"]
        del opened[name]
        opened.create_dataset(name, (1 << 40,), dtype, chunks=(1 << 10,)).attrs["sha256"] = digest
    read, values = [], h5py.Dataset.__getitem__
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda self, key: read.append(self.nbytes) or values(self, key))
    with pytest.raises(DataError, match="damaged"):
        ImageFile.open(file.path)
    assert max(read, default=0) < 1 << 20


def changed(file, change):
    with h5py.File(file.path, "r+") as opened:
        change(opened)
    return file.path


def replace(opened, name, values, **options):
    digest = opened[name].attrs["sha256"]
    del opened[name]
    opened.create_dataset(name, data=values, **options).attrs["sha256"] = digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.attrs.modify("version", 99), "version 99"),
        (lambda f: f["labels"].write_direct(np.full(13, 7)), r"label 7, which is outside 0\.\.4"),
        (lambda f: f["labels"].write_direct(np.full(13, -2)), r"label -2, which is outside 0\.\.4"),
        (lambda f: replace(f, "labels", np.zeros(0, np.int64)), "holds no image"),
        (lambda f: replace(f, "labels", np.zeros(12, np.int64)), "12 labels"),
        (lambda f: replace(f, "mean", np.zeros(1)), "1 channels"),
        (lambda f: replace(f, "images", np.zeros((13, 7, 9, 3), np.uint8), chunks=(1, 7, 9, 3)), "contiguous"),
        (lambda f: replace(f, "images", np.zeros((13, 7, 9, 3), np.float32)), "uint8"),
        (lambda f: replace(f, "images", np.zeros((13, 0, 9, 3), np.uint8)), "contiguous uint8 images"),
        (lambda f: replace(f, "class_names", np.zeros(0, "S3")), "no class"),
        (lambda f: replace(f, "class_names", np.array([b"\xff"] * 5)), "damaged"),
        (lambda f: replace(f, "labels", np.zeros((13, 1), np.int64)), r"labels \(N,\) int64"),
        (lambda f: replace(f, "std", np.ones(2)), r"deviations of \(2,\)"),
        (lambda f: f.pop("std"), "damaged"),
    ],
)
def test_files_with_wrong_content_are_refused(make_file, change, message):
    file, _, _ = make_file()
    with pytest.raises(DataError, match=message):
        ImageFile.open(changed(file, change))


def one_value_changed(name):
    def change(opened):
        values = opened[name][()]
        if name == "class_names":
            values[0] = b"other"
        else:
            values.reshape(-1)[0] = 1 if values.reshape(-1)[0] != 1 else 2
        opened[name][...] = values

    return change


@pytest.mark.parametrize("name", ["labels", "mean", "std", "class_names"])
def test_all_but_the_images_is_compared_with_its_checksum_when_the_file_is_opened(make_file, name):
    file, _, _ = make_file()
    with pytest.raises(DataError, match=rf"In .*images\.h5 {name} changed since the file was written"):
        ImageFile.open(changed(file, one_value_changed(name)))


def test_verify_compares_the_images(make_file):
    file, _, _ = make_file()
    opened = ImageFile.open(changed(file, one_value_changed("images")))
    with pytest.raises(DataError, match=r"In .*images\.h5 images changed"):
        opened.verify()


@pytest.mark.parametrize("name", ["mean", "std"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_statistics_that_are_not_finite_are_refused_though_their_checksum_is_right(make_file, name, value):
    file, _, _ = make_file()

    def change(opened):
        values = opened[name][()]
        values[1] = value
        opened[name][...] = values
        opened[name].attrs["sha256"] = np.bytes_(hashlib.sha256(values.tobytes()).hexdigest())

    with pytest.raises(DataError, match=rf"images\.h5 channel 1 has mean .*{value}.*both must be finite"):
        ImageFile.open(changed(file, change))


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    images = random_images(500, (32, 32, 3))
    for written in (0, 300_000):  # at once, and after some writes went well
        pwrite, left = os.pwrite, [written]

        def limited(handle, content, place, pwrite=pwrite, left=left):
            left[0] -= len(content)
            return pwrite(handle, content, place) if left[0] >= 0 else full()

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", limited)
            with pytest.raises(DataError, match=r"The data file .*a\.h5 cannot be written: No space left on device\."):
                data_format.write(tmp_path / "a.h5", 500, (32, 32, 3), ["x"], [(images, np.zeros(500, np.int64))])
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (".", "is a directory; give a file to write"),
        ("file/a.h5", "cannot be written: (Not a directory|File exists)"),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, place, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=message):
        data_format.write(tmp_path / place, 1, (1, 1, 1), ["x"], [(random_images(1, (1, 1, 1)), np.zeros(1, np.int64))])
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["a\0b", "\udcff"])
def test_class_names_that_cannot_be_stored_are_refused(tmp_path, name):
    with pytest.raises(DataError, match="valid Unicode without zero bytes"):
        data_format.write(tmp_path / "a.h5", 1, (1, 1, 1), ["x", name], [])
    assert os.listdir(tmp_path) == []


def test_class_names_of_any_script_and_length(tmp_path):
    names = ["", "ant", "Käfer", "甲虫", "x" * 1000, " spaces "]
    data_format.write(tmp_path / "a.h5", 1, (1, 1, 1), names, [(random_images(1, (1, 1, 1)), np.zeros(1, np.int64))])
    assert ImageFile.open(tmp_path / "a.h5").class_names == tuple(names)


def test_large_images_start_on_a_page(tmp_path):
    data_format.write(tmp_path / "a.h5", 30, (32, 32, 3), ["x"], [(random_images(30, (32, 32, 3)), np.zeros(30, np.int64))])
    with h5py.File(tmp_path / "a.h5", "r") as file:
        assert file["images"].id.get_offset() % 4096 == 0
        assert file.attrs["version"] == 2
