"""Files that users name: each thing that is wrong with one is a sentence of its own, and nothing is left open."""

import os

import pytest

from hpctrain.data.files import require_directory, require_file, require_new, system_errors_as
from hpctrain.errors import DataError


def test_a_file_that_can_be_read_passes_and_is_closed(tmp_path):
    path = tmp_path / "a.h5"
    path.write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    require_file(path, "data file", "convert one")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "There is no data file .*; convert one."),
        (lambda path: path.mkdir(), "is a directory, not a data file; convert one."),
        (os.mkfifo, "is no regular file, not a data file; convert one."),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links."),
    ],
)
def test_what_is_no_file_is_refused(tmp_path, make, sentence):
    make(tmp_path / "a.h5")
    with pytest.raises(DataError, match=sentence):
        require_file(tmp_path / "a.h5", "data file", "convert one")


def test_a_file_below_a_file_is_missing(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(DataError, match="There is no archive"):
        require_file(tmp_path / "a" / "b", "archive", "fetch it")


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b""), lambda path: path.symlink_to("nowhere")])
def test_a_name_that_is_taken_is_refused_unless_it_may_be_replaced(tmp_path, make):
    path = tmp_path / "a.h5"
    require_new(path, overwrite=False)
    make(path)
    with pytest.raises(DataError, match="exists already; give another name, or --overwrite"):
        require_new(path, overwrite=False)
    require_new(path, overwrite=True)


def test_directories_are_told_from_files_and_from_nothing(tmp_path):
    require_directory(tmp_path, "name one")
    with pytest.raises(DataError, match=r"There is no directory .*; name one."):
        require_directory(tmp_path / "nowhere", "name one")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"is a file, not a directory; name one."):
        require_directory(tmp_path / "file", "name one")


def test_the_system_s_words_end_the_sentence(tmp_path):
    with (
        pytest.raises(DataError, match=r"^The list cannot be written: No such file or directory.$"),
        system_errors_as("The list cannot be written"),
    ):
        (tmp_path / "nowhere" / "list").write_text("")
