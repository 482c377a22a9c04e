"""CIFAR's binary version: planes to NHWC, both data sets, both splits."""

import numpy as np
import pytest

from hpctrain.data.convert import cifar
from hpctrain.data.format import ImageFile
from hpctrain.errors import DataError


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
        with pytest.raises(DataError, match="no whole number of records of 3073"):
            cifar.convert(tmp_path, "test", tmp_path / "out.h5")
    (tmp_path / "test_batch.bin").write_bytes(b"\x0a" + content[1:])
    with pytest.raises(DataError, match=r"sample 0 has label 10, which is outside 0\.\.9"):
        cifar.convert(tmp_path, "test", tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()
