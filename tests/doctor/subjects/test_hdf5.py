"""Locks of HDF5 and data files, really locked and really missing."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from hpctrain.config.load import load
from hpctrain.data.format import ImageFile
from hpctrain.doctor.check import OwnPlace
from hpctrain.doctor.subjects import hdf5
from hpctrain.doctor.subjects.hdf5 import Hdf5Facts
from hpctrain.errors import DataError
from hpctrain.launch.launcher import Launcher
from tests.cli.test_starting import folder as folder
from tests.support.doctored import keys, view

ALONE = Launcher("none")


def looked(folder: Path, *overrides: str) -> Hdf5Facts:
    facts = hdf5.gather(OwnPlace(ALONE, load(folder / "tiny.yaml", overrides)[0], folder / "runs"))
    assert facts is not None
    return facts


def test_files_in_order_are_counted(folder: Path) -> None:
    facts = looked(folder)
    assert (facts.data, facts.failure, facts.files) == ((), "", 2)
    assert hdf5.judge(view(1), [facts])[0].sentence == "Locks work in the run directory; 2 data files can be opened."
    assert not list(folder.glob(".hpctrain*"))


def test_a_lock_that_cannot_be_had_is_told_from_other_faults(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 reads the environment when it is loaded: tests/cli/test_doctor.py has a lock that another process holds."""

    def refuse(path: Path) -> None:
        raise DataError(f"The data file {path} cannot be read.") from OSError(11, "unable to lock file, errno = 11")

    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "open", refuse)
        found = hdf5.judge(view(1), [looked(folder)])
    assert keys(found) == ["hdf5-lock"]
    assert found[0].mend == "export HDF5_USE_FILE_LOCKING=FALSE"
    with (folder / "train.h5").open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert looked(folder).data == (), "hpctrain asks for no locks"


def test_missing_and_damaged_files_have_their_own_sentence(folder: Path) -> None:
    (folder / "train.h5").write_bytes(b"no HDF5")
    found = hdf5.judge(view(1), [looked(folder, "data.test=nowhere.h5")])
    assert keys(found) == ["data-file", "data-file"]
    assert "damaged" in found[0].sentence
    assert found[1].sentence == "There is no data file nowhere.h5."
    assert "hpctrain data convert" in found[1].mend


def test_made_up_images_need_no_file(folder: Path) -> None:
    assert looked(folder, "data.train=synthetic", "data.test=").files == 0


def test_a_file_system_without_locks_is_a_warning_with_its_node() -> None:
    facts = Hdf5Facts("/scratch/runs", "unable to lock file, errno = 38")
    [found] = hdf5.judge(view(1, 1), [Hdf5Facts("/scratch/runs"), facts])
    assert (found.key, found.mend) == ("no-hdf5-locks", "export HDF5_USE_FILE_LOCKING=FALSE")
    assert "in /scratch/runs on nid1: unable to lock file, errno = 38." in found.sentence


def test_a_directory_that_cannot_be_written_is_not_taken_for_one_without_locks(tmp_path: Path) -> None:
    assert hdf5._probe(tmp_path / "nowhere") == ""
