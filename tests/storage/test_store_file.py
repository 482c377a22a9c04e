"""A file in the eyes of HDF5: it reads what it wrote, and the disk sees nothing of it before the end."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from hpctrain.storage import store_file
from hpctrain.storage.store_file import StoreFile


def test_the_disk_sees_arrays_at_once_and_structures_at_the_end(tmp_path: Path) -> None:
    array, state = np.arange(9, dtype="<f4"), hashlib.sha256()
    with StoreFile(tmp_path / "f") as file:
        file.write(b"head")
        file.seek(100)
        file.write(b"tail")
        file.seek(2)
        file.write(b"AD")
        file.place(16, array, state.update)
        assert (tmp_path / "f").read_bytes() == bytes(16) + array.tobytes()
        assert file.seek(0, os.SEEK_END) == 104
        file.seek(0)
        buffer = bytearray(6)
        assert file.readinto(buffer) == 6
        assert bytes(buffer) == b"heAD\0\0"
        file.finish()
    assert (tmp_path / "f").read_bytes() == b"heAD" + bytes(12) + array.tobytes() + bytes(48) + b"tail"
    assert state.digest() == hashlib.sha256(array.tobytes()).digest()


def test_writes_that_the_system_cuts_short_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: write(descriptor, data[:3], at))
    monkeypatch.setattr(store_file, "_BLOCK", 7)
    with StoreFile(tmp_path / "f") as file:
        file.place(5, np.arange(11, dtype=np.uint8), lambda block: None)
        file.write(b"12345")
        file.finish()
    assert (tmp_path / "f").read_bytes() == b"12345" + bytes(range(11))


def test_an_error_of_the_disk_is_raised_and_the_file_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    with StoreFile(tmp_path / "f") as file:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            file.place(0, np.ones(3), lambda block: None)
        file.write(b"structures")  # HDF5 goes on to close its file, and is told nothing
    assert len(os.listdir("/proc/self/fd")) == before
