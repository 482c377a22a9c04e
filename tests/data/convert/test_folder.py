"""Image folders: labels by directory, deterministic order, unreadable files listed or skipped."""

import os
import tarfile

import numpy as np
import pytest
from PIL import Image

from hpctrain.data.convert import folder
from hpctrain.data.format import ImageFile
from hpctrain.errors import DataError


def make_tree(root, classes=("ant", "bee", "cow"), count=4, size=(7, 9)):
    rng = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(count):
            image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), np.uint8))
            image.save(root / name / f"{i}.{'png' if i % 2 else 'JPG'}", "PNG" if i % 2 else "JPEG")
    return root


@pytest.mark.parametrize("threads", [1, 4])
def test_the_tree_is_read_in_order_of_class_and_name(tmp_path, threads):
    root = make_tree(tmp_path / "tree")
    done = []
    tree = folder.scan(root)
    assert folder.convert(tree, tmp_path / "out.h5", size=(9, 7), threads=threads, advance=done.append) == []
    file = ImageFile.open(tmp_path / "out.h5")
    assert file.class_names == ("ant", "bee", "cow")
    assert file.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    expected = [np.asarray(Image.open(path)) for path in sorted(root.rglob("*.*"))]
    assert np.array_equal(file.images, expected)
    assert sum(done) == 12


def test_threads_and_runs_give_the_same_file(tmp_path):
    tree = folder.scan(make_tree(tmp_path / "tree"))
    for name, threads in (("a.h5", 1), ("b.h5", 3)):
        folder.convert(tree, tmp_path / name, size=(5, 5), threads=threads)
    assert ImageFile.open(tmp_path / "a.h5").manifest == ImageFile.open(tmp_path / "b.h5").manifest


def test_deeper_and_hidden_and_other_files(tmp_path):
    root = make_tree(tmp_path / "tree", classes=("ant",), count=1)
    (root / "ant" / "deep").mkdir()
    Image.new("L", (4, 4)).save(root / "ant" / "deep" / "x.jpeg")
    Image.new("L", (4, 4)).save(root / "ant" / "._hidden.png")
    (root / "ant" / "notes.txt").write_text("no image")
    (root / ".cache").mkdir()
    (root / "LICENSE").write_text("no class")
    tree = folder.scan(root)
    assert tree.class_names == ("ant",)
    assert [path.name for path, _ in tree.files] == ["0.JPG", "x.jpeg"]


def test_class_names_make_splits_agree(tmp_path):
    root = make_tree(tmp_path / "tree", classes=("bee",), count=2)
    tree = folder.scan(root, ["ant", "bee", "cow"])
    assert tree.class_names == ("ant", "bee", "cow")
    assert [label for _, label in tree.files] == [1, 1]
    with pytest.raises(DataError, match="directories bee are not among the class names ant, cow"):
        folder.scan(root, ["ant", "cow"])


def broken_tree(root, broken=2):
    make_tree(root)
    for i in range(broken):
        path = root / "bee" / f"{i}.{'png' if i % 2 else 'JPG'}"
        path.write_bytes(path.read_bytes()[: 60 * i])
    return folder.scan(root)


def test_unreadable_files_are_all_listed_and_nothing_is_written(tmp_path):
    with pytest.raises(DataError, match=r"2 images \(.*bee/0\.JPG, .*bee/1\.png\) cannot be decoded.*--skip-unreadable"):
        folder.convert(broken_tree(tmp_path / "tree"), tmp_path / "out.h5", size=(5, 5))
    assert os.listdir(tmp_path) == ["tree"]


def test_unreadable_files_are_skipped_on_request(tmp_path):
    skipped = folder.convert(broken_tree(tmp_path / "tree"), tmp_path / "out.h5", size=(5, 5), skip_unreadable=True)
    assert [os.path.basename(path) for path in skipped] == ["0.JPG", "1.png"]
    file = ImageFile.open(tmp_path / "out.h5")
    assert file.labels.tolist() == [0] * 4 + [1] * 2 + [2] * 4
    file.verify()
    assert sorted(os.listdir(tmp_path)) == ["out.h5", "tree"]


def test_a_tree_of_nothing_but_unreadable_files_is_refused(tmp_path):
    (tmp_path / "tree" / "ant").mkdir(parents=True)
    (tmp_path / "tree" / "ant" / "a.png").write_bytes(b"nothing")
    for skip in (False, True):
        with pytest.raises(DataError, match=r"None of 1 image .* can be decoded"):
            folder.convert(folder.scan(tmp_path / "tree"), tmp_path / "out.h5", size=(5, 5), skip_unreadable=skip)
    assert os.listdir(tmp_path) == ["tree"]


def test_missing_and_empty_directories_are_refused(tmp_path):
    with pytest.raises(DataError, match="no directory"):
        folder.scan(tmp_path / "none")
    (tmp_path / "empty" / "ant").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no image"):
        folder.scan(tmp_path / "empty")


def test_photos_become_images_of_one_size(tmp_path, shared_data):
    with tarfile.open(shared_data("clothing-232.tar")) as archive:
        chosen = [m for m in archive.getmembers() if "/validation/" in m.name and m.name.endswith(("1.jpg", "2.jpg"))][:40]
        for member in chosen:  # Python before 3.11.4 has no filter that makes extractall() safe
            path, content = tmp_path / member.name, archive.extractfile(member)
            assert content is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
    tree = folder.scan(tmp_path / "clothing-232" / "validation")
    assert folder.convert(tree, tmp_path / "out.h5", size=(96, 96)) == []
    file = ImageFile.open(tmp_path / "out.h5")
    assert file.images.shape == (40, 96, 96, 3)
    assert ((file.mean > 0.3) & (file.mean < 0.8)).all()
    assert (file.std > 0.15).all()
