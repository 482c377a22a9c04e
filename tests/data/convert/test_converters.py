"""Converters of CIFAR, HDF5, IDX and NPZ files: round trips, and a sentence for each input that is damaged or ambiguous."""

import gzip
import io
import lzma
import os
import random
import struct

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from hpctrain.cli.data import data
from hpctrain.core.errors import DataError
from hpctrain.data.convert import arrays, cifar, common, folder, hdf5, idx, npz, table
from hpctrain.data.image_file import ImageFile
from tests.support.sampling import amount


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
        (GOOD[:-1], r"33 bytes, but its header \(2, 3, 3\) declares 34"),
        (GOOD + b"x", "35 bytes"),
        (struct.pack(">BBBBi", 0, 0, 8, 1, -1), r"declares an array of shape \(-1,\)"),
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
    with pytest.raises(DataError, match=r"has 35 bytes or more, but its header \(2, 3, 3\) declares 34"):
        idx.convert(images, labels, tmp_path / "out.h5")
    assert sum(unpacked) < 100
    claim = struct.pack(">BBBB4i", 0, 0, 8, 4, *[(1 << 31) - 1] * 4)
    images.write_bytes(gzip.compress(claim) if packed else claim)
    with pytest.raises(DataError, match=r"images needs \d+(,\d{3})+ bytes of memory, but "):
        idx.convert(images, labels, tmp_path / "out.h5")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ((2, 3, 3), (3,), "2 images and 3 labels"),
        ((2, 3), (2,), "3 or 4 dims"),
        ((2, 3, 3), (2, 1), "labels 1"),
        ((0, 3, 3), (0,), "hold 0 images of shape"),
        ((2, 0, 3), (2,), "at least 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, images, labels, message):
    with pytest.raises(DataError, match=message):
        idx.convert(*files(tmp_path, random_images(*images), np.zeros(labels)), tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


def write_batch(path, count, label_bytes, classes, seed):
    """A batch file as the data set defines it: labels, then 1024 red, 1024 green, 1024 blue bytes, row by row."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, (count, label_bytes), np.uint8)
    images = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
    with path.open("wb") as out:
        for image, label in zip(images, labels, strict=True):
            out.write(label.tobytes() + b"".join(image[..., channel].tobytes() for channel in range(3)))
    return images, labels


def test_cifar10_reads_its_batches_in_order(tmp_path):
    parts = [write_batch(tmp_path / f"data_batch_{i}.bin", 3 + i, 1, 10, i) for i in (1, 2, 3)]
    test = write_batch(tmp_path / "test_batch.bin", 4, 1, 10, 9)
    names = [f"name {i}" for i in range(10)]
    (tmp_path / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    done = []
    cifar.convert(tmp_path, "train", tmp_path / "train.h5", advance=done.append)
    cifar.convert(tmp_path, "test", tmp_path / "test.h5")
    train_file, test_file = ImageFile.open(tmp_path / "train.h5"), ImageFile.open(tmp_path / "test.h5")
    assert np.array_equal(train_file.images, np.concatenate([images for images, _ in parts]))
    assert np.array_equal(train_file.labels, np.concatenate([labels[:, 0] for _, labels in parts]))
    assert np.array_equal(test_file.images, test[0])
    assert train_file.class_names == test_file.class_names == tuple(names)
    assert done == [4, 5, 6]


@pytest.mark.parametrize(("coarse", "column", "classes"), [(False, 1, 100), (True, 0, 20)])
def test_cifar100_has_fine_and_coarse_labels(tmp_path, coarse, column, classes):
    images, labels = write_batch(tmp_path / "train.bin", 7, 2, 20, 0)
    cifar.convert(tmp_path, "train", tmp_path / "out.h5", coarse=coarse)
    file = ImageFile.open(tmp_path / "out.h5")
    assert np.array_equal(file.images, images)
    assert np.array_equal(file.labels, labels[:, column])
    assert len(file.class_names) == classes


def test_a_batch_between_others_and_a_name_are_missed(tmp_path):
    for number in (1, 3):
        write_batch(tmp_path / f"data_batch_{number}.bin", 3, 1, 10, 0)
    with pytest.raises(DataError, match=r"holds .*data_batch_3\.bin, but not data_batch_2\.bin"):
        cifar.convert(tmp_path, "train", tmp_path / "out.h5")
    (tmp_path / "data_batch_3.bin").rename(tmp_path / "data_batch_2.bin")
    for count in (9, 27):
        (tmp_path / "batches.meta.txt").write_text("\n".join(f"name {i}" for i in range(count)))
        with pytest.raises(DataError, match=rf"names {count} classes, but the data set has 10"):
            cifar.convert(tmp_path, "train", tmp_path / "out.h5")
    (tmp_path / "batches.meta.txt").unlink()
    (tmp_path / "batches.meta.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"no file of class names .*batches\.meta\.txt"):
        cifar.convert(tmp_path, "train", tmp_path / "out.h5")


def test_batches_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "_RECORDS_AT_ONCE", 2)
    images, _ = write_batch(tmp_path / "test_batch.bin", 5, 1, 10, 0)
    done = []
    cifar.convert(tmp_path, "test", tmp_path / "out.h5", advance=done.append)
    assert np.array_equal(ImageFile.open(tmp_path / "out.h5").images, images)
    assert done == [2, 2, 1]


def test_damaged_or_missing_batches_are_refused(tmp_path):
    with pytest.raises(DataError, match="no CIFAR batches of the test split"):
        cifar.convert(tmp_path, "test", tmp_path / "out.h5")
    write_batch(tmp_path / "test_batch.bin", 2, 1, 10, 0)
    with pytest.raises(DataError, match="no CIFAR batches of the train split"):
        cifar.convert(tmp_path, "train", tmp_path / "out.h5")
    with pytest.raises(DataError, match="no coarse labels"):
        cifar.convert(tmp_path, "test", tmp_path / "out.h5", coarse=True)
    content = (tmp_path / "test_batch.bin").read_bytes()
    for damaged in (content[:-1], b""):
        (tmp_path / "test_batch.bin").write_bytes(damaged)
        with pytest.raises(DataError, match="not a multiple of a record's 3073"):
            cifar.convert(tmp_path, "test", tmp_path / "out.h5")
    (tmp_path / "test_batch.bin").write_bytes(b"\x0a" + content[1:])
    with pytest.raises(DataError, match=r"sample 0 has label 10, which is outside 0\.\.9"):
        cifar.convert(tmp_path, "test", tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


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
        arrays.convert(source, out, class_names, overwrite=True)
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
    monkeypatch.setattr(arrays, "_BYTES_AT_ONCE", 500)
    assert np.array_equal(converted(written(tmp_path / "a.h5", images, **options), layout=layout).images, IMAGES)


def test_grey_images_and_names_in_groups(tmp_path):
    path = written(tmp_path / "a.h5", IMAGES[..., 0], names=("train/x", "train/y"))
    assert converted(path, list("abc"), names=("train/x", "/train/y")).images.shape == (6, 8, 9, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": IMAGES / 255 * 300}, r"values from 0 to 300 \(float64\), whose range is unknown; .* --range 0 300\."),
        ({"images": IMAGES.astype(np.int16) - 1}, r"values from -1 to 254 \(int16\), whose range is unknown"),
        ({"images": np.full_like(IMAGES, 9, np.int32) << 14}, r"such as --range 0 147456\."),
        ({"images": np.where(IMAGES > 9, IMAGES / 255, np.nan)}, r"a value that is not finite in image 0"),
        ({"images": IMAGES > 9}, r"holds values of type bool, but images must be numbers"),
        ({"images": IMAGES[0, 0]}, r"holds an array of \(9, 3\); images must be"),
        ({"images": np.zeros((6, 3, 5, 3), np.uint8)}, "channels may be first or last; give --layout nchw or nhwc"),
        ({"images": np.zeros((6, 5, 5, 7), np.uint8)}, "channels may be first or last; give --layout"),
        ({"labels": LABELS[:5]}, r"y in .* holds int64 of shape \(5,\); labels of 6 images must be"),
        ({"labels": LABELS + 0.5}, "label 0.5 for image 0; labels must be whole numbers"),
        ({"labels": np.where(LABELS == 1, np.nan, LABELS)}, "label nan for image 2"),
        ({"labels": [b"a"] * 6}, "labels of 6 images must be whole numbers"),
        ({"labels": np.tile([[1, 1]], (6, 1))}, r"not one-hot: row 0 of \(6, 2\)"),
        ({"labels": ONE_HOT * 0.5}, "not one-hot: row 0"),
        ({"labels": LABELS - 1}, r"label -1, which is outside 0\.\.1"),
        ({"labels": np.eye(4)[LABELS + 1]}, "have 3 values from 1 to 3, but none is 0; name all 4 classes in --class-names"),
        ({"names": ("images", "y")}, r"has no dataset 'x' \(it has images, y\); select one with --images"),
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
    with pytest.raises(DataError, match=f"all values of x: 0 of its {1 << 40} chunks were written"):
        converted(tmp_path / "a.h5")
    written(tmp_path / "a.h5", chunks=True)
    monkeypatch.setattr(common, "available_bytes", lambda: 100)
    with pytest.raises(DataError, match=r"A chunk of x in .*a.h5 needs .* bytes"):
        converted(tmp_path / "a.h5")


def test_a_file_of_another_program_is_reported(tmp_path):
    for libver in ("earliest", "latest"):
        with pytest.raises(DataError, match=r"is an HDF5 file, but not a data file of hpctrain.*; make one with .* convert hdf5"):
            ImageFile.open(written(tmp_path / "a.h5", libver=libver))


def test_a_data_file_that_was_rewritten_in_the_old_format_says_so_and_can_be_converted(make_file, tmp_path):
    new, images, labels = make_file()
    with h5py.File(new.path) as source, h5py.File(tmp_path / "old.h5", "w", libver="earliest") as old:
        for name in source:
            source.copy(name, old)
        old.attrs.update(source.attrs)
    with pytest.raises(DataError, match="not a data file of hpctrain, because its structures have no checksums"):
        ImageFile.open(tmp_path / "old.h5")
    file = converted(tmp_path / "old.h5", new.class_names, names=("images", "labels"))
    assert np.array_equal(file.images, images)
    assert np.array_equal(file.labels, labels)


DEEP = IMAGES.astype(np.uint16) * 16  # up to 4,080, as in 12 bits


@pytest.mark.parametrize(
    ("images", "value_range", "wanted", "stored"),
    [
        (IMAGES, None, IMAGES, None),
        (IMAGES[..., 0], None, IMAGES[..., :1], None),
        (IMAGES.transpose(0, 3, 1, 2), None, IMAGES, None),
        (IMAGES.astype(np.int64), None, IMAGES, None),
        ((IMAGES / 255).astype(np.float32), None, IMAGES, None),
        (IMAGES.astype(np.float64), None, IMAGES, None),
        (DEEP, None, np.rint(DEEP * (255 / 4095)), (0.0, 4095.0)),
        (DEEP.astype(np.int16), (0.0, 4080.0), IMAGES, (0.0, 4080.0)),
        (IMAGES / 255 * 2 - 1, (-1.0, 1.0), IMAGES, (-1.0, 1.0)),
        (IMAGES / 100.0, (0.0, 1.0), np.rint(np.clip(IMAGES / 100, 0, 1) * 255), None),
    ],
)
def test_arrays_of_every_form_and_range(tmp_path, images, value_range, wanted, stored):
    """Values of 12 bits do not become nearly black. Dims in another order are found. A test set can inherit the range."""
    np.savez(tmp_path / "a.npz", x=images, y=LABELS)
    np.save(tmp_path / "x.npy", images)
    np.save(tmp_path / "y.npy", ONE_HOT)
    sources = arrays.opened(tmp_path / "a.npz"), arrays.opened(tmp_path / "x.npy", labels=str(tmp_path / "y.npy"))
    for number, source in enumerate(sources):
        arrays.convert(source, tmp_path / f"{number}.h5", value_range=value_range)
        file = ImageFile.open(tmp_path / f"{number}.h5")
        assert np.array_equal(file.images, wanted)
        assert file.labels.tolist() == LABELS.tolist()
        assert file.value_range == stored


def test_the_range_of_bytes_is_not_inherited(tmp_path):
    """Bytes do not become nearly black as test set of 12-bit data. Pictures do not inherit the range of bytes."""
    np.savez(tmp_path / "deep.npz", x=DEEP, y=LABELS)
    np.savez(tmp_path / "bytes.npz", x=IMAGES, y=LABELS)
    for name, words in (("deep", []), ("bytes", ["--class-names", str(tmp_path / "deep.h5")])):
        files = str(tmp_path / f"{name}.npz"), str(tmp_path / f"{name}.h5")
        result = CliRunner().invoke(data, ["convert", "arrays", *files, *words])
        assert result.exit_code == 0, result.output
    assert np.array_equal(ImageFile.open(tmp_path / "bytes.h5").images, IMAGES)
    arrays.convert(arrays.opened(tmp_path / "bytes.npz"), tmp_path / "half.h5", value_range=(0.0, 127.5))
    assert ImageFile.open(tmp_path / "half.h5").value_range == (0.0, 127.5)
    files = str(tmp_path / "deep.npz"), str(tmp_path / "new.h5")
    result = CliRunner().invoke(data, ["convert", "arrays", *files, "--class-names", str(tmp_path / "half.h5")])
    assert "has no range for them" in result.output


def test_arrays_that_are_missing_are_named(tmp_path):
    """The error names the arrays and is no traceback of NumPy."""
    np.savez(tmp_path / "a.npz", train_x=IMAGES, train_y=LABELS)
    assert len(arrays.opened(tmp_path / "a.npz", "train_x", "train_y").labels) == 6
    with pytest.raises(DataError, match=r"has no array x or images or data \(it has train_x, train_y\); give --images\."):
        arrays.opened(tmp_path / "a.npz")
    with pytest.raises(DataError, match=r"has no array y or labels or targets .* give --labels"):
        arrays.opened(tmp_path / "a.npz", "train_x")
    np.save(tmp_path / "x.npy", IMAGES)
    with pytest.raises(DataError, match=r"holds images only; give the \.npy file of their labels in --labels"):
        arrays.opened(tmp_path / "x.npy")
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        arrays.opened(tmp_path / "objects.npy", labels=str(tmp_path / "x.npy"))


def write_table(directory, lines, header="file,label", name="labels.csv"):
    """Write a table and the pictures a.png to d.png next to it."""
    for number, letter in enumerate("abcd"):
        Image.fromarray(IMAGES[number]).save(directory / f"{letter}.png")
    path = directory / name
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


@pytest.mark.parametrize(
    ("lines", "options", "names", "labels"),
    [
        (["b.png,dog", "a.png,cat", "c.png,dog"], {}, ("cat", "dog"), [1, 0, 1]),
        (["a.png,1", "b.png,0", "c.png,2"], {}, ("0", "1", "2"), [1, 0, 2]),
        (["a.png,1", "b.png,0"], {"class_names": ["cat", "dog", "emu"]}, ("cat", "dog", "emu"), [1, 0]),
        (["a.png,emu", "b.png,cat"], {"class_names": ["cat", "dog", "emu"]}, ("cat", "dog", "emu"), [2, 0]),
        (["a.png,7", "b.png,3"], {"class_names": ["3", "7"]}, ("3", "7"), [1, 0]),
        (['"a.png", cat', "", 'b.png,"big, dog"'], {}, ("big, dog", "cat"), [1, 0]),
    ],
)
def test_a_table_has_files_and_labels_in_order(tmp_path, lines, options, names, labels):
    """Labels do not follow the sorted files. Integers are not taken for names, nor names for integers."""
    tree = table.scan(write_table(tmp_path, lines), **options)
    assert (tree.class_names, [label for _, label in tree.files]) == (names, labels)
    folder.convert(tree, tmp_path / "out.h5", size=(8, 9), threads=1)
    file = ImageFile.open(tmp_path / "out.h5")
    assert file.labels.tolist() == labels
    order = ["abcd".index(path.stem) for path, _ in tree.files]
    assert np.array_equal(file.images, IMAGES[order])


def test_a_table_with_other_columns_in_another_directory(tmp_path):
    """The name of a column decides, not its place. A suffix and a directory are not ignored."""
    path = write_table(tmp_path, ["5\tcat\ta", "6\tdog\tb"], header="age\tbreed\tid", name="t.tsv")
    (tmp_path / "elsewhere").mkdir()
    path = path.rename(tmp_path / "elsewhere" / "t.tsv")
    tree = table.scan(path, tmp_path, columns=table.TableColumns("id", "breed", ".png"))
    assert tree.files == ((tmp_path / "a.png", 0), (tmp_path / "b.png", 1))


WRONG = ["a.png,cat", "x.png,dog", "b.png", ",dog", "a.png,dog"]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (WRONG, {}, r"has 4 wrong lines \(line 3: there is no file .*x\.png, line 4: 1 value instead of 2, line 5: no file, "),
        (WRONG, {}, r"line 6: a\.png is also in line 2\)"),
        (["a.png,cat", "b.png,"], {}, r"has 1 wrong line \(line 3: no label\)"),
        (["a" * 300 + ",cat"], {}, r"a{300} cannot be read \(File name too long\)\)"),
        (["a.png,cat", "b.png,cow"], {"class_names": ["cat", "dog"]}, r"line 3: there is no class 'cow'"),
        (["a.png,0", "b.png,2"], {"class_names": ["cat", "dog"]}, r"line 3: there is no class '2'"),
        (["a.png,0", "b.png,2"], {}, "have 2 values from 0 to 2, but none is 1"),
        (["a.png,0"], {"columns": table.TableColumns("path", "label")}, r"has no column 'path'; .* in --columns"),
        ([], {}, "has a header, but no line with a picture"),
        (['"a.png,0'], {}, "is damaged in line 2"),
    ],
)
def test_faults_of_a_table_are_named_by_line(tmp_path, lines, options, message):
    """No table is converted without some of its lines, and its faults are not reported one at a time."""
    with pytest.raises(DataError, match=message):
        table.scan(write_table(tmp_path, lines), **options)


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


def convert_npz(path, out, size=None, threads=1, **options):
    folder.convert(npz.scan(path), out, size=size, threads=threads, **options)


@pytest.mark.parametrize("name", ["a.npz", "a.npz.xz"])
@pytest.mark.parametrize("threads", [1, 3])
def test_npz_round_trip(tmp_path, name, threads):
    images, labels = random_images(50, 7, 9, 3), np.arange(50) % 3
    done = []
    convert_npz(pack(tmp_path / name, images, labels), tmp_path / "out.h5", threads=threads, advance=done.append)
    file = ImageFile.open(tmp_path / "out.h5")
    assert np.array_equal(file.images, images)
    assert np.array_equal(file.labels, labels)
    assert file.class_names == ("0", "1", "2")
    assert sum(done) == 50


def test_images_of_several_sizes_need_a_size(tmp_path, caplog):
    images = [*random_images(2, 7, 9, 3), *random_images(1, 8, 8, 3)]
    path = pack(tmp_path / "a.npz", images, [0, 1, 0])
    with pytest.raises(DataError, match=r"1 image \(image 2 of .*a\.npz\) cannot be decoded"):
        convert_npz(path, tmp_path / "out.h5")
    assert "The image is (8, 8, 3), but the first one is (7, 9, 3); give --size to resize them." in caplog.text
    assert not (tmp_path / "out.h5").exists()
    convert_npz(path, tmp_path / "out.h5", size=(5, 4), channels=1)
    assert ImageFile.open(tmp_path / "out.h5").images.shape == (3, 5, 4, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "lacks an array"),
        ({"offsets": np.array([0, 1, 2])}, "offsets do not match"),
        ({"offsets": np.array([], np.int64)}, "offsets do not match"),
        ({"labels": np.zeros(4, np.uint8)}, "offsets do not match"),
        ({"blob": np.zeros(3, np.uint8), "offsets": np.array([0, 1, 2, 3])}, "image 0 of .* cannot be decoded"),
        ({"labels": np.zeros(0, np.uint8), "blob": np.zeros(0, np.uint8), "offsets": np.array([0])}, "holds no image"),
        ({"labels": np.array([{}] * 3, object)}, r"not an \.npz file"),
        ({"labels": np.array([0.5, 1.0, 0.0])}, "labels float64 of"),
        ({"labels": np.array([[0], [1], [1]])}, r"labels int64 of \(3, 1\)"),
        ({"offsets": np.array([0.0, np.nan, 1.0, 2.0])}, "offsets are float64"),
        ({"blob": np.zeros(4)}, "blob is float64"),
        ({"labels": np.array([0, 10**12, 0])}, "has label 1000000000000 for image 1"),
        ({"labels": np.array([-1, -1, -1])}, "label -1"),
    ],
)
def test_wrong_content_is_refused(tmp_path, changes, message):
    path = pack(tmp_path / "a.npz", random_images(3, 7, 9, 3), [0, 1, 2], changes)
    with pytest.raises(DataError, match=message):
        convert_npz(path, tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.parametrize("name", ["a.npz", "a.npz.xz"])
def test_truncated_missing_or_strange_files_are_refused(tmp_path, name):
    with pytest.raises(DataError, match="no file"):
        convert_npz(tmp_path / name, tmp_path / "out.h5")
    path = pack(tmp_path / name, random_images(3, 7, 9, 3), [0, 1, 2])
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"text", np.lib.format.magic(1, 0)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"truncated or not an \.npz file"):
            convert_npz(path, tmp_path / "out.h5")


def test_an_archive_is_not_unpacked_where_memory_has_no_room(tmp_path, monkeypatch):
    path = pack(tmp_path / "a.npz", random_images(3, 7, 9, 3), [0, 1, 2], {"blob": np.zeros(1 << 20, np.uint8)})
    monkeypatch.setattr(common, "available_bytes", lambda: 1 << 20)
    with pytest.raises(DataError, match=r"a.npz needs 1,\d{3},\d{3} bytes of memory, but 1,048,576 are available"):
        npz.scan(path)
    monkeypatch.setattr(npz, "_CHECKED_BYTES", 1 << 19)
    packed = tmp_path / "b.npz.xz"
    packed.write_bytes(lzma.compress(bytes(1 << 24), preset=0))
    with pytest.raises(DataError, match=r"b\.npz\.xz needs .* bytes of memory"):
        npz.scan(packed)


def test_cifar10_looks_like_cifar10(tmp_path, shared_data):
    path = shared_data("cifar10-jpeg-test.npz.xz")
    convert_npz(path, tmp_path / "out.h5")
    file = ImageFile.open(tmp_path / "out.h5")
    assert file.images.shape[1:] == (32, 32, 3)
    assert len(file.class_names) == 10
    np.testing.assert_allclose(file.mean, [0.494, 0.485, 0.450], atol=0.02)
    np.testing.assert_allclose(file.std, [0.245, 0.242, 0.261], atol=0.02)


def photo(kind):
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)).save(content, kind)
    return content.getvalue()


def packed():
    content, image = io.BytesIO(), photo("PNG")
    offsets = np.array([0, len(image), 2 * len(image)])
    np.savez_compressed(content, blob=np.frombuffer(image * 2, np.uint8), offsets=offsets, labels=np.array([0, 1]))
    return content.getvalue()


def foreign():
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file["images"], file["labels"] = np.zeros((2, 4, 4, 3), np.uint8), np.array([0, 1])
    return content.getvalue()


def array_file():
    content = io.BytesIO()
    np.savez_compressed(content, x=np.zeros((2, 4, 4, 3), np.uint8), y=np.array([0, 1]))
    return content.getvalue()


def convert_hdf5(path, out):
    with hdf5.opened(path) as source:
        arrays.convert(source, out)


def convert_idx(path, out):
    idx.convert(path.with_name("images"), path.with_name("labels"), out)


def convert_cifar(path, out):
    cifar.convert(path.parent, "test", out)


def convert_folder(path, out):
    folder.convert(folder.scan(path.parents[1]), out, size=(5, 5), threads=1)


BATCH, GREY = bytes(2 * 3073), idx_bytes(np.zeros((3, 2, 2), np.uint8))
#: by name, the converter, its input's name and content, and the other files of the directory
KINDS = {
    "hdf5": (convert_hdf5, "input", foreign(), {}),
    "arrays": (lambda path, out: arrays.convert(arrays.opened(path), out), "a.npz", array_file(), {}),
    "idx": (convert_idx, "images", GREY, {"labels": idx_bytes(np.zeros(3, np.uint8))}),
    "idx.gz": (convert_idx, "images", gzip.compress(GREY), {"labels": idx_bytes(np.zeros(3, np.uint8))}),
    "labels": (convert_idx, "labels", idx_bytes(np.arange(3, dtype=np.uint8)), {"images": GREY}),
    "cifar": (convert_cifar, "test_batch.bin", BATCH, {}),
    "cifar names": (convert_cifar, "batches.meta.txt", b"".join(b"name %d\n" % i for i in range(10)), {"test_batch.bin": BATCH}),
    "npz": (convert_npz, "input", packed(), {}),
    "npz.xz": (convert_npz, "a.npz.xz", lzma.compress(packed()), {}),
    "png": (convert_folder, "ant/a.jpg", photo("PNG"), {}),
    "jpeg": (convert_folder, "ant/a.jpg", photo("JPEG"), {}),
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
    convert, name, content, others = KINDS[kind]
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    generator = random.Random(kind)
    refused = 0
    cases = amount(40, 500)
    for case in range(cases):
        directory = tmp_path / str(case)
        (directory / name).parent.mkdir(parents=True)
        for other, whole in {**others, name: damaged(content, generator)}.items():
            (directory / other).write_bytes(whole)
        sentence = outcome(convert, directory / name, tmp_path / f"{case}.h5")
        assert not sentence or (sentence.endswith(".") and str(directory) in sentence)
        refused += bool(sentence)
    assert refused > cases // 10


def outcome(convert, path, out):
    """The sentence of a refusal; empty where it was converted."""
    try:
        convert(path, out)
    except DataError as error:
        return str(error)
    return ""


def test_an_idx_file_of_very_many_dims_is_refused(tmp_path):
    (tmp_path / "images").write_bytes(struct.pack(">BBBB100i", 0, 0, 8, 100, *[1] * 100) + b"x")
    with pytest.raises(DataError, match="array of 100 dims"):
        idx.convert(tmp_path / "images", tmp_path / "images", tmp_path / "out.h5")
