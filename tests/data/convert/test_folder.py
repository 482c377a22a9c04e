"""Image folders: labels by directory, deterministic order, unreadable files listed or skipped."""

import json
import os
import shutil
import tempfile
import unicodedata
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from hpctrain.cli.data import data
from hpctrain.data.convert import folder
from hpctrain.data.convert.common import ConvertedFile
from hpctrain.data.format import ImageFile
from hpctrain.errors import DataError
from tests.support.folder_trees import Folder, as_another_user
from tests.support.sampling import amount


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


@pytest.fixture
def open_place():
    """Return a directory that every user may search, unlike the directories of pytest."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    (place / "out").mkdir()
    (place / "out").chmod(0o777)
    yield place
    for path in place.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(place)


def convert_as_another_user(*words):
    with as_another_user():
        return CliRunner().invoke(data, ["convert", "folder", *map(str, words)], catch_exceptions=False)


def real_place(path):
    return str(Path(path).parent.resolve() / Path(path).name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(amount(6, 60)))
def test_all_that_is_in_a_folder_is_converted_or_said_to_be_left_out(open_place, seed):
    """Every entry of a random folder is converted or reported, also for a user who cannot read all of it."""
    made = Folder(open_place, seed)
    pictures, others = made.entries()
    words = (made.path, open_place / "out" / "a.h5", "--size", 8, "--json", "--threads", 2)
    named = seed % 2 == 0
    if named:
        (open_place / "names").write_text("\n".join([*sorted(pictures), "none"]), "utf-8")
        words = (*words, "--class-names", open_place / "names")
    bad = {place for place in others if Path(place).name.startswith("bad-")}
    empty = "empty" in pictures and not named
    whole = convert_as_another_user(*words)
    if bad or empty:
        assert whole.exit_code == 2
        assert any(name in whole.stderr for name in [Path(place).name for place in bad] + ["empty"] * empty)
        assert not (open_place / "out" / "a.h5").exists()
    else:
        assert whole.exit_code == 0, whole.output
    rest = convert_as_another_user(*words, "--skip-unreadable", "--overwrite")
    if empty:
        assert (rest.exit_code, "would be classes: empty;" in rest.stderr) == (2, True)
        return
    assert rest.exit_code == (2 if bad else 0), rest.output
    said = json.loads(rest.stdout)
    assert {one["name"]: one["images"] for one in said["classes"]} == pictures | ({"none": 0} if named else {})
    assert said["images"] == sum(pictures.values()) == len(ImageFile.open(said["file"]))
    links = "a link to a directory above, or to one that was searched already"
    places = [real_place(place) for one in said["left_out"] for place in one["places"] if one["reason"] != links]
    assert set(places) == others
    assert all(one["count"] == len(one["places"]) for one in said["left_out"])


def test_directories_of_one_name_in_unicode_are_one_class(tmp_path):
    """macOS decomposes file names, and lists of class names are composed; both name the same class."""
    composed, decomposed = (unicodedata.normalize(form, "größe") for form in ("NFC", "NFD"))
    root = make_tree(tmp_path / "tree", classes=(decomposed, "ant"), count=1)
    assert folder.scan(root).class_names == ("ant", composed)
    for names in ([composed, "ant"], [decomposed, "ant"]):
        assert [label for _, label in folder.scan(root, names).files] == [0, 1]
    make_tree(root, classes=(composed,), count=1)
    with pytest.raises(DataError, match="have the same name in Unicode"):
        folder.scan(root)


def test_a_class_without_an_image_must_be_named(tmp_path):
    root = make_tree(tmp_path / "tree", count=1)
    (root / "stray").mkdir()
    (root / "stray" / "notes.txt").write_text("")
    with pytest.raises(DataError, match="hold no image that can be read, and would be classes: stray; remove them"):
        folder.scan(root)
    tree = folder.scan(root, ["ant", "bee", "cow", "stray"])
    folder.convert(tree, tmp_path / "out.h5", size=(5, 5))
    said = str(ConvertedFile.of(tmp_path / "out.h5", folder.left_out(tree, [])))
    assert said.splitlines()[0].endswith("3 images of 4 classes, 0 (stray) to 1 (ant) per class")
    assert "classes without an image: 1 (stray)" in said
    assert f"left out, not a picture by the name: 1 ({root / 'stray' / 'notes.txt'})" in said
    (root / "ant" / "0.JPG").write_bytes(b"")
    shutil.rmtree(root / "stray")
    with pytest.raises(DataError, match="No image can be decoded of these classes: ant"):
        folder.convert(folder.scan(root), tmp_path / "b.h5", size=(5, 5), skip_unreadable=True)
    assert not (tmp_path / "b.h5").exists()


def test_a_directory_in_two_classes_is_told(tmp_path, caplog):
    root = make_tree(tmp_path / "tree", classes=("ant", "bee"), count=1)
    (root / "dog").symlink_to(root / "ant")
    assert [label for _, label in folder.scan(root).files] == [0, 1, 2]
    assert "dog is in the classes ant and dog" in caplog.text


def test_two_links_to_a_directory_do_not_multiply_its_pictures(tmp_path):
    """Thirty directories, each with two links to the next, have a billion paths."""
    root = make_tree(tmp_path / "tree", classes=("ant",), count=1)
    store = [tmp_path / f"{number}" for number in range(30)]
    for here in store:
        here.mkdir()
    for here, beyond in pairwise([root / "ant", *store]):
        (here / "a").symlink_to(beyond)
        (here / "b").symlink_to(beyond)
    Image.new("L", (4, 4)).save(store[-1] / "x.png")
    tree = folder.scan(root)
    assert len(tree.files) == 2
    assert sum(len(one.places) for one in tree.left_out) == 30
