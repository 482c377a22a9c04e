"""HDF5 files of other programs: every usual form of images and labels is converted, and each ambiguous form is refused."""

import h5py
import numpy as np
import pytest

from hpctrain.data.convert import common, hdf5
from hpctrain.data.format import ImageFile
from hpctrain.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 8, 9, 3), np.uint8)
LABELS = np.array([0, 2, 1, 1, 0, 2])


def written(path, images=IMAGES, labels=LABELS, names=("x", "y"), libver="earliest", **options):
    """Write a file with these datasets as h5py or other programs do, and return its path."""
    with h5py.File(path, "w", libver=libver) as file:
        for name, values in zip(names, (images, labels), strict=True):
            file.create_dataset(name, data=values, **options)
    return path


def converted(path, class_names=None, layout=None, names=("x", "y")):
    out = path.with_name("out.h5")
    with hdf5.opened(path, *names, layout) as source:
        hdf5.convert(source, out, class_names, overwrite=True)
    file = ImageFile.open(out)
    file.verify()
    return file


ONE_HOT = np.eye(3)[LABELS]


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize(
    "labels",
    [LABELS, LABELS[:, None], LABELS[None], LABELS.astype(np.float32), ONE_HOT, ONE_HOT.astype(bool), ONE_HOT.astype(np.int8)],
)
def test_labels_of_every_form(tmp_path, labels, libver):
    file = converted(written(tmp_path / "a.h5", labels=labels, libver=libver))
    assert file.labels.tolist() == LABELS.tolist()
    assert file.class_names == ("0", "1", "2")
    assert np.array_equal(file.images, IMAGES)


@pytest.mark.parametrize("options", [{}, {"chunks": True}, {"compression": "gzip"}, {"compression": "lzf", "shuffle": True}])
@pytest.mark.parametrize(
    ("images", "layout"),
    [
        (IMAGES, None),
        (IMAGES.transpose(0, 3, 1, 2), None),
        (IMAGES.transpose(0, 3, 1, 2), "nchw"),
        (IMAGES.astype(np.int64), None),
    ],
)
def test_images_of_every_form(tmp_path, images, layout, options, monkeypatch):
    monkeypatch.setattr(hdf5, "_BYTES_AT_ONCE", 500)
    assert np.array_equal(converted(written(tmp_path / "a.h5", images, **options), layout=layout).images, IMAGES)


def test_grey_images_and_names_in_groups(tmp_path):
    path = written(tmp_path / "a.h5", IMAGES[..., 0], names=("train/x", "train/y"))
    assert converted(path, list("abc"), names=("train/x", "/train/y")).images.shape == (6, 8, 9, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": IMAGES / 255}, r"x in .*a.h5 holds values of type float64; images are whole numbers 0..255, so scale"),
        ({"images": IMAGES.astype(np.int16) * 2}, r"pixels outside of 0..255 in image 0"),
        ({"images": IMAGES.astype(np.int16) - 1}, r"pixels outside of 0..255 in image"),
        ({"images": IMAGES[0, 0]}, r"holds an array of \(9, 3\); images are"),
        ({"images": np.zeros((6, 3, 5, 3), np.uint8)}, "channels may come first or last; give --layout nchw or nhwc"),
        ({"images": np.zeros((6, 5, 5, 7), np.uint8)}, "channels may come first or last; give --layout"),
        ({"labels": LABELS[:5]}, r"y in .* holds int64 of shape \(5,\); labels of 6 images are"),
        ({"labels": LABELS + 0.5}, "label 0.5 of image 0; labels are whole numbers"),
        ({"labels": np.where(LABELS == 1, np.nan, LABELS)}, "label nan of image 2"),
        ({"labels": [b"a"] * 6}, "labels of 6 images are whole numbers"),
        ({"labels": np.tile([[1, 1]], (6, 1))}, r"not one-hot: row 0 of \(6, 2\)"),
        ({"labels": ONE_HOT * 0.5}, "not one-hot: row 0"),
        ({"labels": LABELS - 1}, r"label -1, which is outside 0\.\.1"),
        ({"labels": np.eye(4)[LABELS + 1]}, "have 3 values from 1 to 3, but none is 0; name all 4 classes in --class-names"),
        ({"names": ("images", "y")}, "has no dataset 'x', but images, y; name one by --images"),
    ],
)
def test_what_could_mean_two_things_is_refused(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        converted(written(tmp_path / "a.h5", **changes))
    assert not (tmp_path / "out.h5").exists()


def test_claims_are_refused_before_anything_is_read(tmp_path, monkeypatch):
    """Datasets without written values claim shapes that fit no memory and no disk."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (1 << 40, 32, 32, 3), np.uint8, chunks=(1, 32, 32, 3))
        file.create_dataset("y", (1 << 40,), np.int64, chunks=(1000,))
    with pytest.raises(DataError, match="none of its values was ever written"):
        converted(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["x"][0] = 1
    with pytest.raises(DataError, match="memory has room for"):
        converted(tmp_path / "a.h5")
    written(tmp_path / "a.h5", chunks=True)
    monkeypatch.setattr(common, "available_bytes", lambda: 100)
    with pytest.raises(DataError, match=r"A chunk of x in .*a.h5 holds .* bytes"):
        converted(tmp_path / "a.h5")


def test_a_file_of_another_program_or_a_part_of_one_that_is_missing_is_told(tmp_path):
    for libver in ("earliest", "latest"):
        with pytest.raises(DataError, match=r"is an HDF5 file, but not a data file of hpctrain; make one with .* convert hdf5"):
            ImageFile.open(written(tmp_path / "a.h5", libver=libver))
    layout = h5py.VirtualLayout(IMAGES.shape, np.uint8)
    layout[:] = h5py.VirtualSource("elsewhere.h5", "x", IMAGES.shape)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
        file["y"] = LABELS
    with pytest.raises(DataError, match=r"is made of other files, of which elsewhere\.h5 is missing"):
        converted(tmp_path / "v.h5")


def test_a_data_file_that_was_rewritten_in_the_old_format_says_so_and_can_be_converted(make_file, tmp_path):
    new, images, labels = make_file()
    with h5py.File(new.path) as source, h5py.File(tmp_path / "old.h5", "w", libver="earliest") as old:
        for name in source:
            source.copy(name, old)
        old.attrs.update(source.attrs)
    with pytest.raises(DataError, match="has version 2 of the data format, but was rewritten in HDF5's old format"):
        ImageFile.open(tmp_path / "old.h5")
    file = converted(tmp_path / "old.h5", new.class_names, names=("images", "labels"))
    assert np.array_equal(file.images, images)
    assert np.array_equal(file.labels, labels)
