"""The file of a local copy: shared by a node's ranks, of one job alone, gone at its end or found again by a later run."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm.single import SingleCommunicator
from hpctrain.data import local_file
from hpctrain.data.format import ImageFile
from hpctrain.data.local_file import LocalFile, LocalRequest, open_local
from hpctrain.virtual.run import run_virtual

Make = Callable[..., tuple[ImageFile, np.ndarray, np.ndarray]]
ALONE = SingleCommunicator()


def request(directory: Path | str, limit: int | None = None, first: int = 0, *, kept: bool = False) -> LocalRequest:
    return LocalRequest(str(directory), limit, first, kept)


def fill(local: LocalFile, images: np.ndarray) -> None:
    assert local.copy is not None
    for sample, image in enumerate(images):
        local.copy.write(sample, image.reshape(-1).data)


def read(local: LocalFile, images: np.ndarray) -> list[bool]:
    """Whether each sample is there; what is there is right."""
    assert local.copy is not None
    there = []
    for sample, image in enumerate(images):
        out = bytearray(image.nbytes)
        there.append(local.copy.read(sample, memoryview(out)))
        assert not there[-1] or bytes(out) == image.tobytes()
    return there


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_of_a_node_share_one_file(make_file: Make, tmp_path: Path, ranks: int, kept: bool) -> None:
    file, images, _ = make_file()

    def program(comm: object) -> list[bool]:
        local = open_local(comm, file, request(tmp_path / "disk", kept=kept))  # type: ignore[arg-type]
        assert (local.denied, local.found, local.n_bytes) == ("", 0, images.nbytes)
        if comm.rank == 0:  # type: ignore[attr-defined]
            fill(local, images)
        comm.allgather_object(None)  # type: ignore[attr-defined]
        return read(local, images)

    assert run_virtual(ranks, program) == [[True] * len(images)] * ranks
    assert len(list((tmp_path / "disk").iterdir())) == kept


def test_a_copy_that_is_not_kept_has_no_name(make_file: Make, tmp_path: Path) -> None:
    file, images, _ = make_file()
    first, second = (open_local(ALONE, file, request(tmp_path / "disk")) for _ in range(2))
    assert list((tmp_path / "disk").iterdir()) == []
    fill(first, images)
    assert read(second, images) == [False] * len(images)
    first.keep()
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_kept_copy_is_found_again_and_a_second_job_takes_its_own(make_file: Make, tmp_path: Path) -> None:
    file, images, _ = make_file()
    wanted = request(tmp_path / "disk", kept=True)
    first = open_local(ALONE, file, wanted)
    fill(first, images[:7])
    second = open_local(ALONE, file, wanted)  # while the first has it
    assert (second.found, second.index) == (0, None)
    first.keep()
    del first
    third = open_local(ALONE, file, wanted)
    assert third.found == 7
    assert read(third, images) == [True] * 7 + [False] * 6
    fill(third, images)
    third.keep()
    del third
    assert open_local(ALONE, file, request(tmp_path / "disk", 3 * images[0].nbytes, kept=True)).found == 3
    assert sorted(path.suffix for path in (tmp_path / "disk").iterdir()) == [".index", ".samples"]


@pytest.mark.parametrize("change", ["touched", "index cut", "index flipped", "no index", "another file's index"])
def test_a_copy_of_another_file_or_with_a_damaged_index_holds_nothing(make_file: Make, tmp_path: Path, change: str) -> None:
    file, images, _ = make_file()
    wanted = request(tmp_path / "disk", kept=True)
    local = open_local(ALONE, file, wanted)
    fill(local, images)
    local.keep()
    index = local.index
    assert index is not None
    del local
    content = index.read_bytes()
    if change == "touched":
        os.utime(file.path, ns=(0, 0))
    elif change == "index cut":
        index.write_bytes(content[:-1])
    elif change == "index flipped":
        index.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    elif change == "no index":
        index.unlink()
    else:
        index.write_bytes(content.replace(b'"bytes": ', b'"bytes": 1'))
    local = open_local(ALONE, file, wanted)
    assert local.found == 0
    assert not any(read(local, images))


def test_what_somebody_has_changed_in_a_kept_copy_is_not_given(make_file: Make, tmp_path: Path) -> None:
    file, images, _ = make_file()
    wanted = request(tmp_path / "disk", kept=True)
    local = open_local(ALONE, file, wanted)
    fill(local, images)
    local.keep()
    del local
    (path,) = (tmp_path / "disk").glob("*.samples")
    content = bytearray(path.read_bytes())
    content[5 * images[0].nbytes] ^= 1
    path.write_bytes(content[:-1])
    local = open_local(ALONE, file, wanted)
    assert [number for number, there in enumerate(read(local, images)) if not there] == [5, 12]


def test_a_link_or_another_mode_in_its_place_is_left_alone(make_file: Make, tmp_path: Path) -> None:
    file, images, _ = make_file()
    wanted = request(tmp_path / "disk", kept=True)
    del_me = open_local(ALONE, file, wanted)
    del del_me
    (path,) = (tmp_path / "disk").iterdir()
    path.chmod(0o666)
    assert open_local(ALONE, file, wanted).index is None
    path.unlink()
    (tmp_path / "victim").write_bytes(b"kept")
    path.symlink_to(tmp_path / "victim")
    assert "cannot be used" in open_local(ALONE, file, wanted).denied
    assert (tmp_path / "victim").read_bytes() == b"kept"
    assert images.any()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        (
            "$NOT_SET_HERE/x",
            "$NOT_SET_HERE/x cannot be used: the variable NOT_SET_HERE in it is not set here; set it, or write the path out",
        ),
        ("/proc/nothing", "/proc/nothing cannot be used: No such file or directory"),
        ("{}/train.h5", "cannot be used: File exists"),
    ],
)
def test_no_directory_is_no_error(make_file: Make, tmp_path: Path, ranks: int, directory: str, reason: str) -> None:
    file, _, _ = make_file(name="train.h5")
    found = run_virtual(ranks, lambda comm: open_local(comm, file, request(directory.format(tmp_path))))
    for local in found:
        assert local.copy is None
        assert reason in local.denied


def test_a_small_disk_gets_a_part_and_a_full_one_nothing(
    make_file: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, images, _ = make_file()
    status = namedtuple("status", ["f_bavail", "f_frsize"])
    size = images[0].nbytes
    monkeypatch.setattr(local_file.os, "fstatvfs", lambda descriptor: status(10 * size, 1))
    local = open_local(ALONE, file, request(tmp_path))
    assert local.copy is not None
    assert (local.copy.count, local.denied) == (9, f"{tmp_path} has room for {9 * size / 1e9:.3g} GB")
    asked = open_local(ALONE, file, request(tmp_path, limit=4 * size + 1))
    assert asked.copy is not None
    assert (asked.copy.count, asked.denied) == (4, "")
    monkeypatch.setattr(local_file.os, "fstatvfs", lambda descriptor: status(0, 4096))
    assert open_local(ALONE, file, request(tmp_path)) == LocalFile(denied=f"{tmp_path} has room for 0 GB")


def test_the_environment_of_the_node_names_the_directory(
    make_file: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR_OF_JOB", str(tmp_path / "of job"))
    file, _, _ = make_file()
    open_local(ALONE, file, request("$TMPDIR_OF_JOB/cache", kept=True))
    assert len(list((tmp_path / "of job" / "cache").iterdir())) == 1
