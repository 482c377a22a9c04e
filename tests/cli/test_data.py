"""`hpctrain data`: what its commands print and write, and how they fail."""

import gzip
import json
import re
import struct
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from hpctrain.cli.data import data
from hpctrain.core.text import size_text
from hpctrain.data import decoding
from hpctrain.data import fetch as fetching
from hpctrain.data.image_file import ImageFile
from hpctrain.data.writer import write_data_file
from tests.support.data_files import stored
from tests.support.runs import write_pictures


def run(*arguments, fails_with=None, code=0):
    """The output of a command; `fails_with`: a pattern of the sentence that it must end with, and exit code 2."""
    result = CliRunner().invoke(data, [str(a) for a in arguments], catch_exceptions=False)
    if fails_with is not None:
        assert result.exit_code == 2, result.output
        assert re.search(fails_with, result.stderr)
        return ""
    assert result.exit_code == code, result.output
    return result.output


def write_idx(path, array):
    header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def path(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 7, 9, 3), np.uint8)
    images[4] = images[1]
    labels = np.array([0, 0, 0, 2, 2, 2])
    write_data_file(tmp_path / "a.h5", 6, (7, 9, 3), ["ant", "bee", "cow"], [(images, labels)])
    return tmp_path / "a.h5"


def test_info_shows_sizes_statistics_and_classes(path):
    output = run("info", path)
    assert "6 of 7x9x3" in output
    assert f"{ImageFile.open(path).mean[0]:.4f}" in output
    assert "2  cow: 3" in output


def test_fetch_prints_the_files(tmp_path, monkeypatch):
    paths = {"train": tmp_path / "train.h5", "test": tmp_path / "test.h5"}
    asked = []

    def fetch(out, data_set, overwrite, bar):
        asked.append((out, data_set, overwrite))
        return paths

    monkeypatch.setattr(fetching, "fetch", fetch)
    assert run("fetch", "mnist", "--out", tmp_path).split() == [str(path) for path in paths.values()]
    assert asked == [(tmp_path, fetching.MNIST, False)]
    paths["train"].touch()
    again = CliRunner().invoke(data, ["fetch", "mnist", "--out", str(tmp_path)])
    assert again.stdout.split() == [str(path) for path in paths.values()], "a script reads the paths"
    assert again.stderr == f"{paths['train']} exists already and is unchanged\n"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("fit", ["crop", "squash"])
def test_kept_picture_files_are_the_images_that_pixels_would_be(tmp_path, fit, channels):
    """Every kind of picture that users have: turned by EXIF, grey, with a palette, transparent, CMYK, 16 bits."""
    write_pictures(tmp_path / "tree")
    inputs = ("convert", "folder", tmp_path / "tree", "--size", 12, "--fit", fit, "--channels", channels)
    run(*inputs, tmp_path / "pixels.h5")
    run(*inputs, tmp_path / "files.h5", "--keep-jpeg")
    pixels, files = ImageFile.open(tmp_path / "pixels.h5"), ImageFile.open(tmp_path / "files.h5")
    assert np.array_equal(files.pixels[:], pixels.images)
    assert (files.mean.tobytes(), files.std.tobytes()) == (pixels.mean.tobytes(), pixels.std.tobytes())
    assert (files.class_names, files.labels.tolist()) == (pixels.class_names, pixels.labels.tolist())
    sources = sorted((tmp_path / "tree").rglob("*.*"))
    assert [stored(files, number) for number in range(len(files))] == [path.read_bytes() for path in sources]
    assert f"stored   as picture files, {size_text(files.stored_bytes)}" in run("info", tmp_path / "files.h5")
    run("check", tmp_path / "files.h5")


def test_kept_picture_files_of_an_npz(tmp_path, inputs):
    (path,), _ = inputs["npz"]
    run("convert", "npz", path, tmp_path / "files.h5", "--keep-jpeg")
    file = ImageFile.open(tmp_path / "files.h5")
    assert stored(file, 0) == (tmp_path / "tree" / "ant" / "a.png").read_bytes()
    assert (file.shape, file.fit) == ((4, 4, 3), None)
    assert not file.pixels[:].any()


@pytest.mark.parametrize("keep", [(), ("--keep-jpeg",)])
def test_broken_pictures_are_named_or_left_out(tmp_path, keep):
    write_pictures(tmp_path / "tree")
    broken = tmp_path / "tree" / "bee" / "turned.jpg"
    broken.write_bytes(broken.read_bytes()[:-30])
    convert = ("convert", "folder", tmp_path / "tree", tmp_path / "out.h5", "--size", 12, *keep)
    run(*convert, fails_with=r"1 image \(.*bee/turned\.jpg\) cannot be decoded")
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]
    assert f"left out, cannot be read or decoded: 1 ({broken})" in run(*convert, "--skip-unreadable", code=2)
    file = ImageFile.open(tmp_path / "out.h5")
    assert (len(file), file.class_names) == (13, ("ant", "bee"))


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("keep", [(), ("--keep-jpeg",)])
def test_a_conversion_that_is_killed_goes_on(tmp_path, keep):
    """kill -9 once a part of it is in the journal; then a changed picture, which is noticed."""
    random = np.random.default_rng(0)
    (tmp_path / "tree" / "ant").mkdir(parents=True)
    for number in range(24):
        Image.fromarray(random.integers(0, 256, (60, 60, 3), np.uint8)).save(tmp_path / "tree" / "ant" / f"{number:02}.jpg")
    code = "import hpctrain.data.convert.common as packing; packing._CHUNK_ITEMS = 4; "
    code += "from hpctrain.cli.data import data; data()"
    slow = "import time, hpctrain.data.convert.common as packing; decode = packing.decode; "
    slow += "packing.decode = lambda *arguments: (time.sleep(0.05), decode(*arguments))[1]; "

    def command(out, before=""):
        arguments = ["convert", "folder", tmp_path / "tree", tmp_path / out, "--size", 50, "--threads", 1, *keep]
        return [sys.executable, "-c", before + code, *map(str, arguments)]

    def finish(out):
        return subprocess.run(command(out), check=True, capture_output=True, text=True, timeout=120).stderr

    def kill_in_the_middle():
        running, journal = subprocess.Popen(command("a.h5", slow)), tmp_path / "a.h5.partial.journal"
        end = time.monotonic() + 60
        while not (journal.exists() and journal.read_bytes().count(b"\n") > 2):
            assert running.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        running.kill()
        running.wait()

    finish("whole.h5")
    kill_in_the_middle()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5.partial", "a.h5.partial.journal", "tree", "whole.h5"]
    finish("a.h5")
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "tree", "whole.h5"]

    (tmp_path / "a.h5").unlink()
    kill_in_the_middle()
    Image.new("RGB", (60, 60)).save(tmp_path / "tree" / "ant" / "00.jpg")
    assert "belongs to a conversion of other images or with other options; starting from scratch" in finish("a.h5")
    assert not ImageFile.open(tmp_path / "a.h5").pixels[0].any()


@pytest.fixture
def inputs(tmp_path):
    """Good input of every converter: command -> arguments before OUT, arguments after it."""
    write_idx(tmp_path / "images.gz", np.zeros((2, 3, 3), np.uint8))
    write_idx(tmp_path / "labels.gz", np.zeros(2, np.uint8))
    np.zeros(3073, np.uint8).tofile(tmp_path / "test_batch.bin")
    (tmp_path / "tree" / "ant").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "tree" / "ant" / "a.png")
    blob = np.fromfile(tmp_path / "tree" / "ant" / "a.png", np.uint8)
    np.savez(tmp_path / "a.npz", blob=blob, offsets=np.array([0, blob.size]), labels=np.array([0]))
    with h5py.File(tmp_path / "foreign.h5", "w") as foreign:
        foreign["x"], foreign["y"] = np.zeros((2, 3, 5, 5), np.uint8), np.array([[1, 0], [0, 1]])
    return {
        "hdf5": ((tmp_path / "foreign.h5",), ("--images", "x", "--labels", "y")),
        "idx": ((tmp_path / "images.gz", tmp_path / "labels.gz"), ()),
        "cifar": ((tmp_path,), ("--split", "test")),
        "npz": ((tmp_path / "a.npz",), ()),
        "folder": ((tmp_path / "tree",), ("--size", 4)),
    }


@pytest.mark.parametrize("command", ["idx", "cifar", "npz", "hdf5", "folder"])
def test_a_file_is_replaced_only_on_request_and_described(tmp_path, inputs, command):
    before, after = inputs[command]
    out = tmp_path / "out.h5"
    out.write_text("precious")
    run("convert", command, *before, out, *after, fails_with=r"out\.h5 already exists; give another name, or --overwrite")
    assert out.read_text() == "precious"
    text = run("convert", command, *before, out, *after, "--overwrite")
    (file := ImageFile.open(out)).verify()
    counts = np.bincount(file.labels, minlength=len(file.class_names)).tolist()
    assert text.startswith(f"{out}: {len(file)} image{'' if len(file) == 1 else 's'} of {len(counts)} class")
    assert f" {max(counts)} " in text
    assert "left out" not in text


@pytest.mark.parametrize("keep", [(), ("--keep-jpeg",)])
def test_a_limit_of_pixels_holds_for_a_data_file_too(tmp_path, keep, monkeypatch):
    """A conversion with --max-pixels stores the limit, so that training decodes the kept picture files without the option."""
    (tmp_path / "tree" / "ant").mkdir(parents=True)
    Image.new("RGB", (10, 8), (7, 7, 7)).save(tmp_path / "tree" / "ant" / "a.jpg")
    monkeypatch.setattr(decoding, "MAX_PIXELS", 79)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 79)
    convert = ("convert", "folder", tmp_path / "tree", tmp_path / "out.h5", "--size", 4, *keep)
    run(*convert, fails_with="None of 1 image")
    run(*convert, "--max-pixels", 80)
    assert (ImageFile.open(tmp_path / "out.h5").pixels[0] == 7).all()
    run("check", tmp_path / "out.h5")


def test_arrays_have_the_range_of_the_data_file_of_their_class_names(tmp_path):
    """The range of the training set scales a test set, not the test set's own largest value."""
    bright, dark = np.full((4, 5, 5, 1), 200, np.uint16), np.full((4, 5, 5, 1), 3000, np.uint16)
    np.savez(tmp_path / "train.npz", images=bright, labels=[0, 1, 0, 1])
    np.savez(tmp_path / "test.npz", images=dark, labels=[0, 1, 0, 1])
    run("convert", "arrays", tmp_path / "train.npz", tmp_path / "train.h5")
    convert = ("convert", "arrays", tmp_path / "test.npz", tmp_path / "test.h5", "--class-names", tmp_path / "train.h5")
    run(*convert, fails_with="have values above 255, but the data file of the class names has no range .* such as --range 0 4095")
    run(*convert, "--range", 0, 4095)
    assert (ImageFile.open(tmp_path / "test.h5").pixels[0] == 187).all()


@pytest.mark.parametrize("label", [2**63 + 5, 2**64 - 1, 2**31])
def test_a_label_of_64_bits_is_named_as_it_is(tmp_path, label):
    labels = np.array([0, 1, label], np.uint64)
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 5, 5, 1), np.uint8), labels=labels)
    convert = ("convert", "arrays", tmp_path / "a.npz", tmp_path / "a.h5")
    run(*convert, fails_with=f"has label {label} for image 2; labels must be whole numbers between")


def test_splits_are_not_taken_for_classes(tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / "photos" / split / "ant").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "photos" / split / "ant" / "a.png")
    convert = ("convert", "folder", tmp_path / "photos", tmp_path / "out.h5", "--size", 4)
    run(*convert, fails_with=r"test, train, validation in .*photos are the splits .* such as .*photos/train, or name them in")
    assert not (tmp_path / "out.h5").exists()
    (tmp_path / "names.txt").write_text("train\nvalidation\ntest\n")
    run(*convert, "--class-names", tmp_path / "names.txt")
    assert ImageFile.open(tmp_path / "out.h5").class_names == ("train", "validation", "test")


@pytest.mark.parametrize("command", ["idx", "cifar", "npz", "hdf5", "folder"])
@pytest.mark.parametrize("kind", ["missing", "directory", "file", "in a file", "endless link", "long name"])
def test_inputs_that_cannot_be_read_are_reported_in_a_sentence(tmp_path, inputs, command, kind):
    _, after = inputs[command]
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("text")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    wrong = {
        "missing": tmp_path / "none",
        "directory": tmp_path / "empty",
        "file": tmp_path / "text",
        "in a file": tmp_path / "text" / "x",
        "endless link": tmp_path / "loop",
        "long name": tmp_path / ("x" * 300),
    }[kind]
    before = (wrong, wrong) if command == "idx" else (wrong,)
    sentence = rf"^hpctrain: .*{re.escape(str(wrong))}[^\n]*\.\n$"
    run("convert", command, *before, tmp_path / "out.h5", *after, fails_with=sentence)
    if command != "cifar" and kind != "file":
        good, _ = inputs[command]
        run("convert", command, *good, tmp_path / "out.h5", *after, "--class-names", wrong, fails_with=sentence)
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.job
def test_the_command_line_loads_neither_numpy_nor_hdf5():
    code = "import sys, hpctrain.cli.data; print(sorted({'numpy', 'h5py', 'PIL', 'rich'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def check(path, *options):
    """(exit code, standard output) of the command."""
    result = CliRunner().invoke(data, ["check", str(path), *options])
    return result.exit_code, result.stdout


def flip(path, sample):
    place = ImageFile.open(path).pixels.extents.first + sample * 7 * 9 * 3
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_notes_are_reported_and_count_when_asked_to(path):
    code, output = check(path)
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == "note: 2 samples in different classes have the same image as other samples: 1, 4."
    assert lines[1] == "note: class 1 (bee) has no sample."
    assert lines[2].endswith("a.h5: 6 images of 3 classes, undamaged")
    assert check(path, "--strict")[0] == 2


def test_damage_has_an_exit_code(path):
    flip(path, 3)
    code, output = check(path, "--threads", "1")
    assert code == 2
    assert output.splitlines()[0] == "damage: sample 3 has changed since the file was written."
    assert output.splitlines()[-1].endswith("3 classes, damaged")


def test_json_has_all_samples(path):
    flip(path, 3)
    code, output = check(path, "--json")
    content = json.loads(output)
    assert code == 2
    assert (content["images"], content["classes"], content["damaged"]) == (6, 3, True)
    assert [(finding["kind"], finding["samples"]) for finding in content["findings"]] == [
        ("changed", [3]),
        ("duplicate across classes", [1, 4]),
        ("empty class", []),
    ]
