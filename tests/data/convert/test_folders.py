"""Image folders and what converters share: order, class names, files that are left out, and what an interruption leaves."""

import os
import shutil
import tempfile
import threading
import unicodedata
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from hpctrain.cli.data import data
from hpctrain.core.errors import DataError
from hpctrain.data import writer as writing
from hpctrain.data.convert import common, folder
from hpctrain.data.convert.common import ConvertedFile, DecodedPicture, LeftOut, PictureForm, pack
from hpctrain.data.convert.folder import PackedPicture
from hpctrain.data.image_file import ImageFile
from tests.support.data_files import stored
from tests.support.folder_trees import Folder
from tests.support.sampling import amount
from tests.support.users import as_nobody


@pytest.mark.parametrize("threads", [1, 3])
def test_parallel_results_keep_their_order_and_a_bounded_window(threads):
    lock, state = threading.Lock(), {"ahead": 0, "taken": 0, "started": 0}

    def work(item):
        with lock:
            state["started"] += 1
            state["ahead"] = max(state["ahead"], state["started"] - state["taken"])
        return item * item

    results = []
    for result in common.in_order(work, range(100), threads):
        results.append(result)
        with lock:
            state["taken"] += 1
    assert results == [i * i for i in range(100)]
    assert state["ahead"] <= 4 * threads + 1


def test_an_error_in_a_worker_ends_the_whole():
    started = []

    def work(item):
        started.append(item)
        if item == 3:
            raise DataError("bad item")
        return item

    with pytest.raises(DataError, match="bad item"):
        list(common.in_order(work, range(1000), 2))
    assert len(started) < 30


def test_class_names_are_one_a_line(tmp_path):
    (tmp_path / "names").write_text("first\n\n second one \n")
    assert common.read_names(tmp_path / "names") == ["first", "second one"]
    for content, message in (("a\nb\na\n", "contains a twice"), ("\n", "is empty")):
        (tmp_path / "names").write_text(content)
        with pytest.raises(DataError, match=message):
            common.read_names(tmp_path / "names")
    with pytest.raises(DataError, match="no file of class names"):
        common.read_names(tmp_path / "none")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_names_are_read_as_editors_of_any_system_write_them(tmp_path, encoding, end):
    names = ["größe", "猫", "кот"]
    for form in ("NFC", "NFD"):
        (tmp_path / "names").write_bytes(unicodedata.normalize(form, end.join(names)).encode(encoding))
        assert common.read_names(tmp_path / "names") == names
    (tmp_path / "names").write_text(end.join([names[0], unicodedata.normalize("NFD", names[0])]))
    with pytest.raises(DataError, match="twice"):
        common.read_names(tmp_path / "names")


def test_names_are_read_from_regular_files_of_a_bounded_size(tmp_path):
    with (tmp_path / "names").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match=r"names cannot be read: it has more than 67,108,864 bytes"):
        common.read_names(tmp_path / "names")
    with pytest.raises(DataError, match="is a device, not a file of class names"):
        common.read_names(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (
            range(1, 27),
            "have 26 values from 1 to 26, but none is 0; name all 27 classes in --class-names, or "
            "renumber the labels from 0 to 25",
        ),
        ([0, 1, 3], "have 3 values from 0 to 3, but none is 2; name all 4"),
        ([0, 1, 2, 255], "have 4 values from 0 to 255, but none is 3; name all 256"),
        ([1 << 40], "largest label is 1099511627776"),
    ],
)
def test_labels_that_do_not_say_how_many_classes_there_are_need_names(labels, sentence):
    with pytest.raises(DataError, match=sentence):
        common.named_labels(np.array(labels), None, "a file")


def test_labels_without_a_gap_are_named_by_number():
    assert common.named_labels(np.array([2, 0, 1, 0]), None, "a file")[1] == ["0", "1", "2"]
    assert common.named_labels(np.array([1, 0]), None, "a file", 2)[1] == ["0", "1"]
    with pytest.raises(DataError, match="none is 2"):
        common.named_labels(np.array([1, 0]), None, "a file", 3)


def test_a_terminal_receives_no_advice():
    said = str(LeftOut("hidden", tuple(f"{number}\x1b[31m\n\u202e\udcff" for number in range(8))))
    assert said == "left out, hidden: 8 (" + ", ".join(rf"{n}\x1b[31m\n\u202e\udcff" for n in range(5)) + ", and 3 more)"
    assert said.isprintable()


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
    with pytest.raises(DataError, match="contains no images"):
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
    with as_nobody():
        return CliRunner().invoke(data, ["convert", "folder", *map(str, words)], catch_exceptions=False)


def real_place(path):
    return str(Path(path).parent.resolve() / Path(path).name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(amount(6, 60)))
def test_all_that_is_in_a_folder_is_converted_or_said_to_be_left_out(open_place, monkeypatch, seed):
    """Every entry of a random folder is converted or reported, also for a user who cannot read all of it."""
    made = Folder(open_place, seed)
    pictures, others = made.entries()
    summary, summaries = ConvertedFile.of, []
    monkeypatch.setattr(ConvertedFile, "of", lambda *of: summaries.append(summary(*of)) or summaries[-1])
    out = open_place / "out" / "a.h5"
    words = (made.path, out, "--size", 8, "--threads", 2)
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
        assert not out.exists()
    else:
        assert whole.exit_code == 0, whole.output
    rest = convert_as_another_user(*words, "--skip-unreadable", "--overwrite")
    if empty:
        assert (rest.exit_code, "contain no readable image: empty;" in rest.stderr) == (2, True)
        return
    assert rest.exit_code == (2 if bad else 0), rest.output
    said = summaries[-1]
    assert dict(said.images) == pictures | ({"none": 0} if named else {})
    assert sum(pictures.values()) == len(ImageFile.open(out))
    links = "a link to a directory above, or to one already searched"
    assert {real_place(place) for one in said.left_out for place in one.places if one.reason != links} == others


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
    with pytest.raises(DataError, match="would be classes, but contain no readable image: stray; remove them"):
        folder.scan(root)
    tree = folder.scan(root, ["ant", "bee", "cow", "stray"])
    folder.convert(tree, tmp_path / "out.h5", size=(5, 5))
    said = str(ConvertedFile.of(tmp_path / "out.h5", folder.left_out(tree, [])))
    assert said.splitlines()[0].endswith("3 images of 4 classes, 0 (stray) to 1 (ant) per class")
    assert "classes without an image: 1 (stray)" in said
    assert f"left out, not the name of a picture: 1 ({root / 'stray' / 'notes.txt'})" in said
    (root / "ant" / "0.JPG").write_bytes(b"")
    shutil.rmtree(root / "stray")
    with pytest.raises(DataError, match="No image of these classes can be decoded: ant"):
        folder.convert(folder.scan(root), tmp_path / "b.h5", size=(5, 5), skip_unreadable=True)
    assert not (tmp_path / "b.h5").exists()


def test_a_directory_in_two_classes_is_reported(tmp_path, caplog):
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


SHAPE = (3, 4, 3)


def pictures(count=10, broken=()):
    random = np.random.default_rng(0)
    made = [
        DecodedPicture(random.integers(0, 256, SHAPE, np.uint8), number % 3, random.bytes(number + 1)) for number in range(count)
    ]
    return [f"file {number}" if number in broken else picture for number, picture in enumerate(made)]


@pytest.fixture(params=[False, True], ids=["pixels", "files"])
def form(request):
    return PictureForm(SHAPE[:2], "crop", 3, request.param)


def write(form, path, given, skip=False):
    """Convert, or continue a conversion. Return the number of pictures that were done before, and the names of those left out."""
    counts = []
    with form.writer(path, len(given), SHAPE, list("abc"), "x") as writer:
        begin = writer.done
        found = pack(writer, given[begin:], counts.append, skip=skip)
        if not skip and found:
            raise DataError("unreadable")
    assert sum(counts) == len(given) - begin
    return begin, found


def interrupt(form, path, given, source="x"):
    """Interrupt a conversion of ten pictures after the given ones."""

    def pictures():
        yield from given
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), form.writer(path, 10, SHAPE, list("abc"), source) as writer:
        pack(writer, pictures(), lambda count: None, skip=True)


def contents(path):
    file = ImageFile.open(path)
    return [stored(file, number) for number in range(len(file))], file.labels.tolist()


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_everything_is_stored_in_order(form, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(common, "_CHUNK_BYTES", chunk)
    write(form, tmp_path / "a.h5", pictures())
    blocks, labels = contents(tmp_path / "a.h5")
    assert blocks == [picture.content if form.keep_files else picture.pixels.tobytes() for picture in pictures()]
    assert labels == [number % 3 for number in range(10)]


@pytest.mark.parametrize("broken", [(0,), (3, 4), (9,), tuple(range(9))])
@pytest.mark.parametrize("items", [1, 4, 100])
def test_pictures_that_cannot_be_decoded_are_left_out(form, tmp_path, monkeypatch, broken, items):
    monkeypatch.setattr(common, "_CHUNK_ITEMS", items)
    _, found = write(form, tmp_path / "a.h5", pictures(broken=broken), skip=True)
    assert found == [f"file {number}" for number in broken]
    kept = [number for number in range(10) if number not in broken]
    assert contents(tmp_path / "a.h5")[1] == [number % 3 for number in kept]
    with pytest.raises(DataError, match="unreadable"):
        write(form, tmp_path / "b.h5", pictures(broken=broken))
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]


@pytest.mark.parametrize("at", range(1, 10))
def test_an_interrupted_one_goes_on_and_ends_in_the_same_bytes(form, tmp_path, monkeypatch, at):
    monkeypatch.setattr(common, "_CHUNK_ITEMS", 2)
    given = pictures(broken=(1, 6))
    write(form, tmp_path / "whole.h5", given, skip=True)
    interrupt(form, tmp_path / "a.h5", given[:at])
    begin, found = write(form, tmp_path / "a.h5", given, skip=True)
    ends = [0, *(number + 1 for number in range(at) if number not in (1, 6))]
    assert begin == ends[(len(ends) - 1) // 2 * 2]
    assert found == ["file 1", "file 6"]
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "whole.h5"]


@pytest.mark.parametrize("which", ["a.h5.partial", "a.h5.partial.journal"])
def test_a_file_that_ends_anywhere_or_has_a_changed_byte_keeps_whole_chunks(form, tmp_path, monkeypatch, which):
    """A conversion continues after a whole number of chunks, and ends in the bytes of an uninterrupted one."""
    monkeypatch.setattr(common, "_CHUNK_ITEMS", 3)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    given, path = pictures(), tmp_path / "a.h5"
    write(form, path, given)
    whole = path.read_bytes()
    path.unlink()
    interrupt(form, path, given)
    left = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    content, begins = left[which], set()
    first, last = writing._BLOCK_OFFSET if which.endswith("partial") else 0, len(content) - 1
    for place in [*range(first, last, max(7, (last - first) // 60)), last]:
        for damaged in (content[:place], content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]):
            for name, before in left.items():
                (tmp_path / name).write_bytes(damaged if name == which else before)
            begins.add(write(form, path, given)[0])
            assert path.read_bytes() == whole
            path.unlink()
    assert begins == {0, 3, 6}


CHANGES = [
    {},
    {"size": (4, 3)},
    {"size": None},
    {"fit": "squash"},
    {"channels": 1},
    {"keep_files": True},
    {"skip_unreadable": True},
    {"max_pixels": 1000},
    {"value_range": (0.0, 99.0)},
    {"names": ("b", "a")},
    {"last": "red"},
]


@pytest.mark.parametrize("packed", [False, True], ids=["files", "packed"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "".join(change) or "none")
def test_a_conversion_goes_on_only_with_the_same_options_and_pictures(tmp_path, monkeypatch, caplog, packed, change):
    """Whatever has changed, the file is that of an uninterrupted conversion."""
    monkeypatch.setattr(common, "_CHUNK_ITEMS", 2)
    caplog.set_level("INFO")
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for path, image in zip(paths, np.random.default_rng(0).integers(0, 256, (4, 7, 9, 3), np.uint8), strict=True):
        Image.fromarray(image).save(path)

    def convert(out, advance=common.no_progress, names=("a", "b"), last=None, **options):
        if last is not None:
            Image.new("RGB", (9, 7), last).save(paths[3])
        sources = [PackedPicture(path.name, np.fromfile(path, np.uint8)) if packed else path for path in paths]
        tree = folder.Tree(names, tuple(zip(sources, (0, 0, 1, 1), strict=True)))
        folder.convert(tree, tmp_path / out, advance=advance, threads=1, **{"size": (3, 4), **options})

    def stop(count):
        if count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert("a.h5", stop)
    convert("a.h5", **change)
    assert ("starting from scratch" in caplog.text) == bool(change)
    assert ("after the first 2 of 4 images" in caplog.text) != bool(change)
    convert("whole.h5", **change)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_a_file_of_somebody_else_stays(tmp_path):
    partial = tmp_path / "a.h5.partial"
    partial.write_bytes(b"half a download")
    with pytest.raises(DataError, match="already exists without the journal of a conversion"):
        interrupt(PictureForm(SHAPE[:2], "crop", 3), tmp_path / "a.h5", [])
    assert partial.read_bytes() == b"half a download"
    partial.unlink()
    partial.mkdir()
    with pytest.raises(DataError, match=r"already exists, but cannot be opened \(.*directory.*\); move it away"):
        interrupt(PictureForm(SHAPE[:2], "crop", 3), tmp_path / "a.h5", [])


def test_one_process_at_a_time(form, tmp_path):
    path = tmp_path / "a.h5"
    with form.writer(path, 10, SHAPE, list("abc"), "x") as writer:
        with pytest.raises(DataError, match=r"Another process is writing .*a\.h5\.partial; wait for it"):
            write(form, path, pictures())
        pack(writer, pictures(), lambda count: None)
    assert len(ImageFile.open(path)) == 10


def test_a_file_system_without_locks_will_do(form, tmp_path, monkeypatch):
    def refused(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(writing.fcntl, "flock", refused)
    interrupt(form, tmp_path / "a.h5", pictures())
    assert write(form, tmp_path / "a.h5", pictures()) == (0, [])


def _deep_tree(directory: Path, images: np.ndarray, suffix: str) -> Path:
    """Write a class directory with 16-bit pictures, grey (N, H, W) or colour (N, H, W, 3)."""
    import cv2

    (directory / "ant").mkdir(parents=True)
    for number, image in enumerate(images):
        assert cv2.imwrite(str(directory / "ant" / f"{number}{suffix}"), image[..., ::-1] if image.ndim == 3 else image)
    return directory


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("keep_files", [False, True])
def test_twelve_bits_in_sixteen_are_scaled_by_their_range(tmp_path: Path, suffix: str, channels: int, keep_files: bool) -> None:
    """Pictures of 12 bits do not become nearly black on conversion, when they are read, or in a test set."""
    shape = (4, 6, 6) if channels == 1 else (4, 6, 6, 3)
    values = np.random.default_rng(0).integers(0, 4096, shape, np.uint16)
    values.flat[0] = 4095
    train = folder.scan(_deep_tree(tmp_path / "train", values, suffix))
    options = {"size": (6, 6), "channels": channels, "keep_files": keep_files, "threads": 1}
    folder.convert(train, tmp_path / "train.h5", **options)
    file = ImageFile.open(tmp_path / "train.h5")
    assert file.value_range == (0.0, 4095.0)
    assert np.array_equal(file.images[:].reshape(shape), np.rint(values * (255 / 4095)))
    assert "0 became black and 4095 white" in str(ConvertedFile.of(tmp_path / "train.h5"))
    dark = str(_deep_tree(tmp_path / "test", values // 8, suffix))
    words = ["--size", "6", "--channels", str(channels), "--class-names", str(tmp_path / "train.h5")]
    result = CliRunner().invoke(data, ["convert", "folder", dark, str(tmp_path / "test.h5"), *words])
    assert result.exit_code == 0, result.output
    assert np.array_equal(ImageFile.open(tmp_path / "test.h5").images[:].reshape(shape), np.rint(values // 8 * (255 / 4095)))
    words = ["--size", "6", "--channels", str(channels), "--range", "0", "65535", "--overwrite"]
    result = CliRunner().invoke(data, ["convert", "folder", dark, str(tmp_path / "test.h5"), *words])
    assert result.exit_code == 0, result.output
    assert ImageFile.open(tmp_path / "test.h5").images[:].max() <= 2


def test_a_measured_range_is_not_that_of_floating_point_numbers(tmp_path: Path) -> None:
    """Numbers from 0 to 1 do not become black because other pictures have 12 bits."""
    root = _deep_tree(tmp_path / "a", np.full((2, 3, 3), 4095, np.uint16), ".png")
    Image.fromarray(np.full((3, 3), 0.5, np.float32)).save(root / "ant" / "f.tif")
    options = {"size": (3, 3), "channels": 1, "threads": 1}
    with pytest.raises(DataError, match=r"floating-point numbers .* values up to 4095, .* --range 0 4095\."):
        folder.convert(folder.scan(root), tmp_path / "a.h5", **options)
    folder.convert(folder.scan(root), tmp_path / "a.h5", value_range=(0.0, 1.0), **options)
    assert sorted(ImageFile.open(tmp_path / "a.h5").images[:, 0, 0, 0].tolist()) == [128, 255, 255]


def test_sixteen_bits_that_are_used_keep_their_upper_bits(tmp_path: Path) -> None:
    """The range does not follow the brightest picture of each set."""
    values = np.array([[[0, 255, 256], [32768, 65280, 20000]]], np.uint16)
    folder.convert(folder.scan(_deep_tree(tmp_path / "a", values, ".png")), tmp_path / "a.h5", size=(2, 3), channels=1, threads=1)
    file = ImageFile.open(tmp_path / "a.h5")
    assert (file.value_range, file.images[0, :, :, 0].tolist()) == (None, (values[0] >> 8).tolist())
