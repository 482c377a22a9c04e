"""Checks of data files: damaged samples, duplicates and classes, in files of pixels and of picture files."""

import json
from dataclasses import asdict

import h5py
import numpy as np
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.check import check_file
from hpctrain.data.image_file import ImageFile, digest_of
from hpctrain.data.writer import write_data_file


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
    from hpctrain.data.convert.common import PictureForm, pack
    from tests.data.conftest import picture_contents

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
