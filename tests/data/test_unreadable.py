"""Pauses that fit into a deadline, and the system's words in errors of HDF5."""

import errno

import h5py
import pytest

from hpctrain.data.unreadable import PAUSES_SECONDS, pauses_within, reason


@pytest.mark.parametrize(("deadline", "count"), [(300, 3), (8.5, 3), (8, 2), (3, 2), (1, 1), (0.2, 0)])
def test_pauses_leave_a_deadline_most_of_its_time(deadline, count):
    assert pauses_within(deadline) == PAUSES_SECONDS[:count]
    assert sum(pauses_within(deadline)) <= deadline / 4


def test_hdf5_errors_are_the_systems_words():
    text = "Can't synchronously read data (file read failed: time = Thu, filename = 'a.h5', file descriptor = 5, errno = 5, "
    text += "error message = 'Input/output error', buf = 0x7f, total read size = 8, offset = 800)"
    assert reason(OSError(text)) == "Input/output error"
    assert reason(OSError(errno.EIO, "Input/output error")) == "Input/output error"


def test_other_errors_have_no_words_of_the_system(tmp_path):
    assert reason(KeyError("images")) is None
    (tmp_path / "a.h5").write_bytes(b"no HDF5 file")
    with pytest.raises(OSError, match="signature") as caught:
        h5py.File(tmp_path / "a.h5", "r")
    assert reason(caught.value) is None
