"""The data format: round trip, exact statistics, facts and classes of files, damaged files, and checks of files."""

import errno
import fcntl
import hashlib
import json
import os
import re
import unicodedata
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hpctrain.core import user_code
from hpctrain.core.errors import DataError
from hpctrain.data import image_file
from hpctrain.data.check import check_file
from hpctrain.data.convert.common import PictureForm, pack
from hpctrain.data.image_file import DataFacts, ImageFile, ImageForm, class_difference, digest_of, with_class_order
from hpctrain.data.writer import ImageFileWriter, _moments, write_data_file
from tests.data.conftest import picture_contents


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
    write_data_file(tmp_path / "a.h5", 6, (7, 9, 3), ["x"], [(images, np.zeros(6, np.int64))])
    file = ImageFile.open(tmp_path / "a.h5")
    assert np.array_equal(file.images, images)
    file.verify()


@pytest.mark.parametrize("written", [1, 7])
def test_fewer_samples_than_announced_make_a_shorter_file(tmp_path, written):
    images, labels = random_images(written), np.arange(written)
    write_data_file(tmp_path / "a.h5", 20, (7, 9, 3), [str(i) for i in range(7)], [(images, labels)])
    file = ImageFile.open(tmp_path / "a.h5")
    assert np.array_equal(file.images, images)
    assert np.array_equal(file.labels, labels)
    file.verify()
    assert os.listdir(tmp_path) == ["a.h5"]


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
        write_data_file(tmp_path / "a.h5", 4, (7, 9, 3), list("abcde"), [(random_images(4), labels)])
    assert os.listdir(tmp_path) == []


def test_an_error_leaves_the_old_file_as_it_was(make_file):
    file, images, _ = make_file()

    def chunks():
        yield random_images(2), np.zeros(2, np.int64)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_data_file(file.path, 4, (7, 9, 3), ["x"], chunks())
    assert np.array_equal(ImageFile.open(file.path).images, images)
    assert os.listdir(file.path.parent) == [file.path.name]


def test_the_name_is_given_after_the_bytes_are_on_disk(tmp_path, monkeypatch):
    events = []
    sync, replace_file = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(os.readlink(f"/proc/self/fd/{handle}")), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("rename"), replace_file(old, new)))
    write_data_file(tmp_path / "a.h5", 2, (7, 9, 3), ["x"], [(random_images(2), np.zeros(2, np.int64))])
    assert len(events) == 3
    assert events[0].endswith(".partial")
    assert events[1:] == ["rename", str(tmp_path)]


def test_a_replaced_file_does_not_change_an_open_one(make_file):
    file, images, _ = make_file()
    write_data_file(file.path, 2, (7, 9, 3), ["x"], [(random_images(2), np.zeros(2, np.int64))])
    assert np.array_equal(file.images, images)
    assert len(ImageFile.open(file.path)) == 2


@pytest.mark.parametrize(
    ("count", "shape", "names", "message"),
    [
        (0, (7, 9, 3), ["x"], "hold 0 images"),
        (3, (7, 9, 3), ["x"], "hold 0 images"),
        (3, (0, 9, 3), ["x"], "at least 1"),
        (3, (7, 9, 3), [], "no class"),
    ],
)
def test_empty_files_are_refused(tmp_path, count, shape, names, message):
    with pytest.raises(DataError, match=message):
        write_data_file(tmp_path / "a.h5", count, shape, names, [])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("images", [np.zeros((1, 7, 9, 1), np.uint8), np.zeros((1, 7, 9, 3), np.float32)])
def test_images_of_another_shape_or_type_are_refused(tmp_path, images):
    with pytest.raises(DataError, match=r"uint8 images of shape \(7, 9, 3\)"):
        write_data_file(tmp_path / "a.h5", 1, (7, 9, 3), ["x"], [(images, np.zeros(1, np.int64))])


def test_a_missing_file_is_named_with_the_way_to_make_it(tmp_path):
    with pytest.raises(DataError, match=r"no data file .*none\.h5; make it with `hpctrain data convert`"):
        ImageFile.open(tmp_path / "none.h5")


def test_a_missing_relative_path_is_answered_by_the_file_next_to_the_configuration(tmp_path, monkeypatch):
    """A program that starts in another directory is not only answered with the way to make the file."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.h5").write_bytes(b"")
    monkeypatch.chdir(tmp_path / "data")
    monkeypatch.setattr(user_code, "_config_folders", [Path("../configs")])
    there = re.escape(f"{tmp_path}/data/train.h5, so start from {tmp_path}.")
    with pytest.raises(DataError, match=rf"means {tmp_path}/data/data/train\.h5, but the file exists at {there}"):
        ImageFile.open(Path("data/train.h5"))
    with pytest.raises(DataError, match=rf"data file none\.h5; make {tmp_path}/data/none\.h5 \(the path is relative"):
        ImageFile.open(Path("none.h5"))


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


def replace_dataset(opened, name, values, **options):
    digest = opened[name].attrs["sha256"]
    del opened[name]
    opened.create_dataset(name, data=values, **options).attrs["sha256"] = digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.attrs.modify("version", 99), "has format version 99, but this hpctrain reads version 1; convert it again"),
        (lambda f: f["labels"].write_direct(np.full(13, 7)), r"label 7, which is outside 0\.\.4"),
        (lambda f: f["labels"].write_direct(np.full(13, -2)), r"label -2, which is outside 0\.\.4"),
        (lambda f: replace_dataset(f, "labels", np.zeros(0, np.int64)), "holds no image"),
        (lambda f: replace_dataset(f, "labels", np.zeros(12, np.int64)), r"labels of \(12,\) int64"),
        (lambda f: replace_dataset(f, "mean", np.zeros(1)), r"means of \(1,\) float64"),
        (lambda f: replace_dataset(f, "images", np.zeros((13, 7, 9, 3), np.uint8), chunks=(1, 7, 9, 3)), "contiguous"),
        (lambda f: replace_dataset(f, "images", np.zeros((13, 7, 9, 3), np.float32)), "uint8"),
        (lambda f: replace_dataset(f, "images", np.zeros((13, 0, 9, 3), np.uint8)), "contiguous images"),
        (lambda f: replace_dataset(f, "class_names", np.zeros(0, "S3")), "no class"),
        (lambda f: replace_dataset(f, "class_names", np.array([b"\xff"] * 5)), "damaged"),
        (lambda f: replace_dataset(f, "labels", np.zeros((13, 1), np.int64)), r"labels of \(13, 1\) int64"),
        (lambda f: replace_dataset(f, "labels", np.zeros(13)), r"labels of \(13,\) float64"),
        (lambda f: replace_dataset(f, "mean", np.zeros((1, 3))), r"means of \(1, 3\) float64"),
        (lambda f: replace_dataset(f, "mean", np.zeros(3, np.int64)), r"means of \(3,\) int64"),
        (lambda f: replace_dataset(f, "std", np.ones(2)), r"deviations of \(2,\)"),
        (lambda f: f.pop("std"), "damaged"),
        (lambda f: f.pop("sums"), "damaged"),
        (lambda f: f.attrs.modify("format", "other"), "not a data file of hpctrain"),
    ],
)
def test_files_with_wrong_content_are_refused(make_file, change, message):
    file, _, _ = make_file()
    with pytest.raises(DataError, match=message):
        ImageFile.open(changed(file, change))


@pytest.mark.parametrize(
    ("place", "message"), [({"stored_bytes": 1}, "is damaged: images of .* need"), ({"offset": 10**9}, "is truncated")]
)
def test_a_file_that_ends_before_its_images_do_is_refused(make_file, place, message):
    path = make_file()[0].path
    with h5py.File(path) as opened:
        contents = image_file.read_stored(opened)
    with pytest.raises(DataError, match=message):
        image_file.check(path, replace(contents, images=replace(contents.images, **place)))


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
                write_data_file(tmp_path / "a.h5", 500, (32, 32, 3), ["x"], [(images, np.zeros(500, np.int64))])
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (".", "cannot be written: Is a directory"),
        ("file/a.h5", "cannot be written: (Not a directory|File exists)"),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, place, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=message):
        write_data_file(tmp_path / place, 1, (1, 1, 1), ["x"], [(random_images(1, (1, 1, 1)), np.zeros(1, np.int64))])
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["a\0b", "\udcff"])
def test_class_names_that_cannot_be_stored_are_refused(tmp_path, name):
    with pytest.raises(DataError, match="valid Unicode without zero bytes"):
        write_data_file(tmp_path / "a.h5", 1, (1, 1, 1), ["x", name], [])
    assert os.listdir(tmp_path) == []


def test_class_names_of_any_script_and_length(tmp_path):
    names = ["", "ant", "Käfer", "甲虫", "x" * 1000, " spaces "]
    write_data_file(tmp_path / "a.h5", 1, (1, 1, 1), names, [(random_images(1, (1, 1, 1)), np.zeros(1, np.int64))])
    assert ImageFile.open(tmp_path / "a.h5").class_names == tuple(names)


def test_large_images_start_on_a_page(tmp_path):
    write_data_file(tmp_path / "a.h5", 30, (32, 32, 3), ["x"], [(random_images(30, (32, 32, 3)), np.zeros(30, np.int64))])
    with h5py.File(tmp_path / "a.h5", "r") as file:
        assert file["images"].id.get_offset() % 4096 == 0
        assert file.attrs["version"] == 1


SHAPE = (2, 3, 1)


def made_up(count):
    random = np.random.default_rng(count)
    return random.integers(0, 256, (count, *SHAPE), np.uint8), np.arange(count) % 2


def test_two_writers_of_one_path_do_not_meet(tmp_path, monkeypatch):
    """Two processes that write the same name have temporary files of their own; the last one to end wins."""
    path = tmp_path / "a.h5"
    (first_images, first_labels), (images, labels) = made_up(3), made_up(5)
    with ImageFileWriter(path, 3, SHAPE, ["a", "b"]) as first:
        first.append(first_images, first_labels)
        monkeypatch.setattr("os.getpid", lambda: 1)
        with ImageFileWriter(path, 5, SHAPE, ["a", "b"]) as second:
            second.append(images, labels)
        assert len(ImageFile.open(path)) == 5
    assert np.array_equal(ImageFile.open(path).images, first_images)


@given(arrays.arrays(np.int64, (2, 256), elements=st.integers(0, 10**9)))
def test_moments_are_those_of_exact_fractions(histogram):
    histogram[:, 7] += 1  # no channel without pixels
    mean, std = _moments(histogram)
    for channel, counts in enumerate(histogram.tolist()):
        n = sum(counts)
        expected = Fraction(sum(value * count for value, count in enumerate(counts)), n)
        variance = Fraction(sum(value * value * count for value, count in enumerate(counts)), n) - expected**2
        assert mean[channel] == pytest.approx(float(expected / 255), rel=1e-15)
        assert std[channel] ** 2 == pytest.approx(float(variance / 255**2), rel=1e-14)


@given(st.floats(allow_nan=True), st.floats(allow_nan=True))
def test_statistics_that_pass_give_finite_pixels_in_float32(mean, std):
    try:
        image_file.check_statistics("a file", np.array([mean]), np.array([std]))
    except DataError:
        return
    with np.errstate(over="raise", invalid="raise"):
        pixels = (np.array([0.0, 1.0]) - mean) / (std or 1.0)
    assert np.isfinite(pixels.astype(np.float32)).all()


def test_digests_depend_on_the_values_and_not_on_their_place():
    values = np.arange(24, dtype=np.int64).reshape(4, 6)
    assert digest_of(values[:, ::2]) == digest_of(values[:, ::2].copy())
    assert digest_of(values) != digest_of(values + 1)
    assert image_file.names_digest(["a,b"]) != image_file.names_digest(["a", "b"])


def test_json_keeps_every_bit(make_file):
    facts = DataFacts.of(make_file()[0])
    facts = replace(facts, mean=(0.1 + 0.2, 1 / 3, np.nextafter(0.5, 1).item()))
    assert DataFacts.from_meta(json.loads(json.dumps(facts.to_meta()))) == facts


def test_no_image_is_read(make_file):
    class Untouchable:
        def __init__(self, shape):
            self.shape = shape

        def __getattr__(self, name):
            raise AssertionError(f"{name} of the images was asked for")

    file, images, _ = make_file()
    file.images, kept = Untouchable(file.images.shape), file.images
    facts = DataFacts.of(file)
    file.images = kept
    assert (facts.samples, facts.shape) == (len(images), images.shape[1:])


def test_the_same_content_has_the_same_facts_in_any_file(make_file, tmp_path):
    file, images, labels = make_file()
    write_data_file(
        tmp_path / "again.h5",
        len(images),
        images.shape[1:],
        file.class_names,
        [(images[:5], labels[:5]), (images[5:], labels[5:])],
    )
    assert DataFacts.of(ImageFile.open(tmp_path / "again.h5")) == DataFacts.of(file)


@pytest.mark.parametrize("what", ["images", "labels", "class_names"])
def test_any_other_content_has_other_facts(make_file, tmp_path, what):
    file, images, labels = make_file()
    names = list(file.class_names)
    if what == "images":
        images = images.copy()
        images[3, 0, 0, 0] ^= 1
    elif what == "labels":
        labels = (labels + (np.arange(len(labels)) == 2)) % len(names)
    else:
        names[0] = "another"
    write_data_file(tmp_path / "other.h5", len(images), images.shape[1:], names, [(images, labels)])
    here, other = DataFacts.of(file), DataFacts.of(ImageFile.open(tmp_path / "other.h5"))
    assert getattr(here, what) != getattr(other, what)


@pytest.mark.parametrize("fit", [None, "crop", "squash"])
def test_the_fit_of_pictures_is_kept_and_by_default_that_of_the_converters(make_file, tmp_path, fit):
    _, images, labels = make_file()
    path, names = tmp_path / "fitted.h5", [f"class {number}" for number in range(5)]
    write_data_file(path, len(images), images.shape[1:], names, [(images, labels)], fit)
    file = ImageFile.open(path)
    facts = DataFacts.of(with_class_order(file, names[::-1], "another file"))
    assert (file.fit, facts.fit) == (fit, fit)
    assert ("fit" in facts.to_meta()) is (fit is not None)  # what says nothing is as before
    assert DataFacts.from_meta(json.loads(json.dumps(facts.to_meta()))) == facts
    form = ImageForm.of(facts)
    assert form == ImageForm.of(file) == ImageForm(images.shape[1:], fit or "crop")


names = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=6)


@given(names, st.randoms())
def test_any_order_of_different_names_is_the_same(given_names, random):
    different = list(dict.fromkeys(given_names))
    shuffled = random.sample(different, len(different))
    assert class_difference(different, shuffled) is None


@given(names, names)
def test_what_differs_is_said(first, second):
    words = class_difference(first, second)
    assert (words is None) == (first == second or (sorted(first) == sorted(second) and len(set(first)) == len(first)))
    if words is not None and len(first) == len(second):
        number = next(i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
        assert words.startswith(f"class {number} is '{first[number]}' and '{second[number]}'")


def test_names_are_compared_in_the_composed_form(make_file):
    composed = ["größe", "été", "猫"]
    decomposed = [unicodedata.normalize("NFD", name) for name in composed]
    assert decomposed != composed
    assert class_difference(composed, decomposed[::-1]) is None
    assert class_difference(composed, [*decomposed[:2], "dog"]) == "class 2 is '猫' and 'dog', '猫' is in only one of them"
    file, _, labels = make_file(classes=3)
    file.class_names = tuple(decomposed)
    mapped = with_class_order(file, composed[::-1], "the checkpoint")
    assert mapped.class_names == tuple(composed[::-1])
    assert np.array_equal(mapped.labels, 2 - labels)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(5)))
def test_labels_are_mapped_by_name(make_file, order):
    file, _, labels = make_file()
    mapped = with_class_order(file, [file.class_names[k] for k in order], "the checkpoint")
    assert [mapped.class_names[label] for label in mapped.labels] == [file.class_names[label] for label in labels]
    assert mapped.class_names == tuple(file.class_names[k] for k in order)
    assert mapped.images is file.images
    assert np.array_equal(file.labels, labels)
    mapped.verify()


def test_other_classes_are_refused_by_name(make_file):
    file, _, _ = make_file()
    with pytest.raises(DataError, match="other classes than the checkpoint: class 4 is 'class 4' and 'dog', 'class 4' is"):
        with_class_order(file, [*file.class_names[:4], "dog"], "the checkpoint")


def kinds(checked):
    return {(finding.kind, finding.damage): finding.samples for finding in checked.findings}


@pytest.fixture(params=["pixels", "picture files"])
def path(request, make_encoded):
    """A file of 13 samples of 5 classes, all different."""
    encoded, pixels = make_encoded()
    return (encoded if request.param == "picture files" else pixels).path


def change_dataset(path, name, change, keeps_digest=False):
    """Change the values of a dataset; keeps_digest: and its checksum with them."""
    with h5py.File(path, "r+") as file:
        values = file[name][()]
        change(values)
        file[name][...] = values
        if keeps_digest:
            file[name].attrs["sha256"] = np.bytes_(digest_of(values))


def flip_byte(path, sample, place=0):
    extents = ImageFile.open(path).pixels.extents
    content = bytearray(path.read_bytes())
    content[extents.first + int(extents.starts(np.array([sample]))[0]) + place] ^= 1
    path.write_bytes(content)


def test_a_sound_file_has_nothing_to_find(path):
    looked = []
    checked = check_file(path, advance=looked.append)
    assert (checked.images, checked.classes, checked.findings, checked.damaged) == (13, 5, (), False)
    assert sum(looked) == 13


@pytest.mark.parametrize("samples", [[0], [12], [3, 4, 9]])
def test_a_changed_byte_is_found_with_its_sample(path, samples):
    for sample in samples:
        flip_byte(path, sample, place=40)
    checked = check_file(path, threads=3)
    assert kinds(checked)["changed", True] == tuple(samples)
    assert checked.damaged
    assert ", ".join(map(str, samples)) in checked.findings[0].sentence


def test_every_label_outside_the_classes_is_named(path):
    change_dataset(path, "labels", lambda labels: np.put(labels, [2, 7], [5, -1]), keeps_digest=True)
    with pytest.raises(DataError, match="outside"):
        ImageFile.open(path)
    checked = check_file(path)
    assert kinds(checked) == {("label", True): (2, 7)}
    assert "samples 2, 7 have labels outside 0..4, the first of them 5" in checked.findings[0].sentence


@pytest.mark.parametrize("name", ["labels", "mean", "sums"])
def test_changed_values_are_named_and_the_rest_is_looked_at_all_the_same(path, name):
    change_dataset(path, name, lambda values: np.put(values, 2, values[2] + values.dtype.type(1)))
    with pytest.raises(DataError, match=f"{name} changed"):
        ImageFile.open(path)
    checked = check_file(path)
    assert any(finding.kind == "changed" and name in finding.sentence for finding in checked.findings)
    assert checked.damaged


def test_duplicates_are_named_and_those_across_classes_by_themselves(tmp_path):
    images = np.random.default_rng(2).integers(0, 256, (10, 4, 5, 3), np.uint8)
    images[[3, 8]] = images[1]
    images[6] = images[5]
    labels = np.array([0, 1, 2, 1, 0, 2, 2, 1, 0, 0])
    write_data_file(tmp_path / "a.h5", 10, (4, 5, 3), ["a", "b", "c", "d"], [(images, labels)])
    checked = check_file(tmp_path / "a.h5")
    assert kinds(checked) == {
        ("duplicate", False): (5, 6),
        ("duplicate across classes", False): (1, 3, 8),
        ("empty class", False): (),
    }
    assert not checked.damaged
    assert "1, 3, 8" in checked.findings[1].sentence
    assert "class 3 (d) has no sample" in checked.findings[2].sentence
    json.dumps([asdict(finding) for finding in checked.findings])


def test_samples_of_one_checksum_that_differ_are_no_duplicates(tmp_path, monkeypatch):
    images = np.random.default_rng(2).integers(0, 256, (6, 4, 5, 3), np.uint8)
    images[4] = images[2]
    write_data_file(tmp_path / "a.h5", 6, (4, 5, 3), ["a"], [(images, np.zeros(6, np.int64))])
    change_dataset(tmp_path / "a.h5", "sums", lambda sums: sums.fill(7), keeps_digest=True)
    monkeypatch.setattr("hpctrain.data.check.sum_of", lambda content: 7)
    assert kinds(check_file(tmp_path / "a.h5")) == {("duplicate", False): (2, 4)}


def test_picture_files_of_one_image_are_duplicates(tmp_path, make_encoded):
    contents = picture_contents(4)
    contents[3] = contents[0] + b"after"  # other bytes, the same pixels
    form = PictureForm((7, 9), "crop", 3, True)
    with form.writer(tmp_path / "a.h5", 4, (7, 9, 3), ["a", "b"]) as writer:
        pack(writer, [form.picture(content, number % 2) for number, content in enumerate(contents)], lambda count: None)
    assert kinds(check_file(tmp_path / "a.h5", threads=2)) == {("duplicate across classes", False): (0, 3)}


def test_pictures_that_decode_to_other_pixels_here_are_named(make_encoded):
    encoded, _ = make_encoded()
    change_dataset(encoded.path, "pixel_sums", lambda sums: np.put(sums, 5, sums[5] ^ 1), keeps_digest=True)
    assert kinds(check_file(encoded.path)) == {("decoder", True): (5,)}


def test_a_file_with_damaged_checksums_says_less(make_file):
    path = make_file()[0].path
    images = np.asarray(ImageFile.open(path).images[4]).tobytes()
    change_dataset(path, "sums", lambda sums: np.put(sums, 2, sums[2] ^ 1))
    content = bytearray(path.read_bytes())
    content[content.index(images)] ^= 1
    path.write_bytes(content)
    sentences = [finding.sentence for finding in check_file(path).findings if finding.damage]
    assert any("without checksums of samples, the affected ones are unknown" in sentence for sentence in sentences)
