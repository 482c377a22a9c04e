"""Version 1 of the data format: what older files hold is read as HDF5 reads it."""

import h5py
import numpy as np
import pytest

from hpctrain.data.format import ImageFile
from hpctrain.errors import DataError


@pytest.mark.parametrize(
    ("count", "shape", "classes"), [(1, (1, 1, 1), 1), (13, (7, 9, 3), 5), (70, (32, 32, 3), 1000), (500, (5, 3, 4), 20)]
)
def test_version_1_has_the_contents_of_version_2(make_file, as_version_1, count, shape, classes):
    new, images, labels = make_file(count, shape, classes)
    old = ImageFile.open(as_version_1(new.path))
    assert np.array_equal(old.images, images)
    assert np.array_equal(old.labels, labels)
    assert old.labels.dtype == np.int64
    assert old.class_names == new.class_names
    assert (old.mean.tobytes(), old.std.tobytes()) == (new.mean.tobytes(), new.std.tobytes())
    assert old.manifest == {name: digest for name, digest in new.manifest.items() if name != "sums"}
    assert old.sums is None
    old.verify()


def changed(path, change):
    with h5py.File(path, "r+") as file:
        change(file)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.attrs.modify("version", 3), "has version 3 of the data format, but was rewritten in HDF5's old"),
        (lambda f: f.attrs.modify("version", 4), "has version 4 of the data format, this hpctrain reads versions 1 to 3"),
        (lambda f: f.attrs.modify("format", "other"), "not a data file of hpctrain"),
        (lambda f: f["labels"].write_direct(np.full(13, 7)), r"label 7, which is outside 0\.\.4"),
        (lambda f: f["labels"].write_direct(np.zeros(13, np.int64)), "labels changed"),
        (lambda f: f.pop("std"), "damaged"),
    ],
)
def test_wrong_contents_are_refused(make_file, as_version_1, change, message):
    with pytest.raises(DataError, match=message):
        ImageFile.open(changed(as_version_1(make_file()[0].path), change))
