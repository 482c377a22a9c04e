"""`hpctrain data check`: what it prints, its JSON, its exit codes."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from hpctrain.cli.data import data
from hpctrain.data import format as data_format
from hpctrain.data.format import ImageFile


def check(path, *options):
    """(exit code, standard output) of the command."""
    result = CliRunner().invoke(data, ["check", str(path), *options])
    return result.exit_code, result.stdout


@pytest.fixture
def path(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 7, 9, 3), np.uint8)
    images[4] = images[1]
    labels = np.array([0, 0, 0, 2, 2, 2])
    data_format.write(tmp_path / "a.h5", 6, (7, 9, 3), ["ant", "bee", "cow"], [(images, labels)])
    return tmp_path / "a.h5"


def flip(path, sample):
    place = ImageFile.open(path).pixels.extents.first + sample * 7 * 9 * 3
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_notes_are_told_and_count_when_asked_to(path):
    code, output = check(path)
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == "note: 2 samples in different classes have the same image as others: 1, 4."
    assert lines[1] == "note: class 1 (bee) has no sample."
    assert lines[2].endswith("a.h5: 6 images of 3 classes, as it was written")
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


def test_a_missing_file_is_a_sentence(tmp_path):
    result = CliRunner().invoke(data, ["check", str(tmp_path / "none.h5")])
    assert result.exit_code == 2
    assert "There is no data file" in result.stderr
