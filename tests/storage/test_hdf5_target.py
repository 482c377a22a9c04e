"""Where HDF5 is in a file that it writes through."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.storage.hdf5_target import Hdf5Target
from hpctrain.storage.store_file import StoreFile

KINDS: tuple[type[Hdf5Target], ...] = (StoreFile,)
MOVES = st.lists(
    st.tuples(st.sampled_from([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END]), st.integers(0, 40), st.binary(min_size=1, max_size=20)),
    max_size=8,
)


@pytest.mark.parametrize("kind", KINDS)
@given(moves=MOVES)
def test_places_and_contents_are_those_of_a_plain_file(
    tmp_path_factory: pytest.TempPathFactory, kind: type[Hdf5Target], moves: list[tuple[int, int, bytes]]
) -> None:
    directory = tmp_path_factory.mktemp("target")
    (directory / "a").write_bytes(b"what was there")
    with kind(directory / "a") as target, open(directory / "b", "wb+") as plain:
        for whence, offset, data in moves:
            assert target.seek(offset, whence) == plain.seek(offset, whence)
            assert target.write(data) == plain.write(data)
            assert target.tell() == plain.tell()
        if isinstance(target, StoreFile):
            target.finish()
    assert target.closed
    target.close()
    assert (directory / "a").read_bytes() == (directory / "b").read_bytes()
