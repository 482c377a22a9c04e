"""Files that users name: only regular files are read, and only up to a size."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hpctrain.core.files import read_bytes, read_text, require_regular
from tests.support.data_files import NODES, make_node


@pytest.mark.parametrize("kind", [*NODES, "directory", "loop"])
def test_what_has_no_end_is_not_opened(kind: str, tmp_path: Path) -> None:
    path = make_node(tmp_path / "node", kind)
    with pytest.raises(OSError, match=r"not a regular file|Is a directory|Too many levels"):
        read_bytes(path, 100)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match=r"not a regular file|Is a directory|Too many levels"):
        require_regular(tmp_path / "link", pipes=True)


@pytest.mark.parametrize("size", [0, 7, 8, 9, 10_000])
def test_a_file_has_its_bytes_or_too_many(size: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * size)
    if size <= 8:
        assert read_bytes(path, 8) == b"x" * size
    else:
        with pytest.raises(OSError, match="more than 8 bytes") as error:
            read_bytes(path, 8)
        assert error.value.filename == str(path)


def test_a_hole_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than 262,144 bytes"):
        read_bytes(tmp_path / "hole", 1 << 18)


def test_a_pipe_without_a_name_is_read_where_it_is_allowed() -> None:
    reading, writing = os.pipe()
    os.write(writing, "é\r\nb".encode())
    os.close(writing)
    with pytest.raises(OSError, match="it is a pipe, not a regular file"):
        read_text(f"/dev/fd/{reading}", 100)
    assert read_text(f"/dev/fd/{reading}", 100, pipes=True) == "é\nb"
    os.close(reading)


def test_a_socket_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="it is a socket, not a regular file"):
            read_bytes(tmp_path / "socket")
