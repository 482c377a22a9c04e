"""A file for HDF5 to write through: bytes as in any file, and the first refused write kept until the end."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.storage.guarded_file import GuardedFile

_ACTIONS = st.one_of(
    st.tuples(st.just("write"), st.binary(max_size=40)),
    st.tuples(st.just("read"), st.integers(0, 40)),
    st.tuples(st.just("seek"), st.integers(0, 60)),
    st.tuples(st.just("back"), st.integers(0, 30)),
    st.tuples(st.just("truncate"), st.integers(0, 60)),
)


def _act(file: Any, action: str, value: Any) -> Any:
    if action == "seek":
        return file.seek(value)
    if action == "back":
        return file.seek(-min(value, file.tell()), os.SEEK_CUR)
    return getattr(file, action)(value)


@given(st.lists(_ACTIONS, max_size=12))
def test_it_holds_what_any_file_would_hold(tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, Any]]) -> None:
    path, other = (tmp_path_factory.mktemp("guarded") / name for name in ("ours", "theirs"))
    ours = GuardedFile(path)
    with open(other, "w+b", buffering=0) as theirs:
        for action, value in actions:
            assert _act(ours, action, value) == _act(theirs, action, value)
            assert ours.tell() == theirs.tell()
        assert ours.seek(0, os.SEEK_END) == theirs.seek(0, os.SEEK_END)
    ours.close()
    assert path.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("refused", [0, 1, 5])
def test_hdf5_never_learns_of_a_full_disk_and_the_end_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    writes: list[int] = []
    pwrite = os.pwrite

    def limited(descriptor: int, data: Any, offset: int) -> int:
        writes.append(offset)
        if len(writes) > refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", limited)
    guarded = GuardedFile(tmp_path / "file.h5")
    with h5py.File(guarded, "w") as file:
        file["numbers"] = np.arange(10_000)
        file.flush()
    assert guarded.error is not None
    with pytest.raises(OSError, match="No space left"):
        guarded.close()
    assert len(writes) == refused + 1, "nothing is tried after the first refusal"


def test_a_closed_file_can_be_closed_and_abandoned_again(tmp_path: Path) -> None:
    file = GuardedFile(tmp_path / "file")
    file.write(b"abc")
    file.close()
    file.close()
    file.abandon()
    other = GuardedFile(tmp_path / "other")
    other.abandon()
    other.close()
