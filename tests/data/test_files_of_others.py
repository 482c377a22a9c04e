"""Files that other users may have made are not overwritten, read as valid or waited for. Values that HDF5 lacks are an error."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from hpctrain.cli import run_command
from hpctrain.comm.base import SingleCommunicator
from hpctrain.core import files
from hpctrain.core.errors import CheckpointError, DataError
from hpctrain.core.files import open_own, open_regular, read_text
from hpctrain.data.convert import arrays, hdf5
from hpctrain.data.image_file import ImageFile
from hpctrain.data.writer import ImageFileWriter, write_data_file
from hpctrain.doctor import files as doctor
from hpctrain.storage import atomic_write, checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from tests.support.data_files import make_node

_RANDOM = np.random.default_rng(0)
IMAGES, LABELS = _RANDOM.integers(1, 256, (6, 7, 5, 3), np.uint8), np.arange(6) % 3
_OTHER_USER = 65534
_opened: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _audit() -> None:
    def hook(event: str, values: tuple[object, ...]) -> None:
        if event == "open" and isinstance(values[0], str | os.PathLike):
            _opened.append(os.fspath(values[0]))  # type: ignore[arg-type]

    sys.addaudithook(hook)


def _conversion(directory: Path) -> object:
    out = directory / "out.h5"
    with ImageFileWriter(out, 6, (7, 5, 3), "abc", source="s") as writer:
        writer.append(IMAGES, LABELS)
    return ImageFile.open(out).images.tolist()


def _text(directory: Path) -> object:
    atomic_write.write_text(directory / "text", "new")
    return read_text(directory / "text")


def _checkpoint(directory: Path) -> object:
    checkpoint.write(directory / "checkpoint-00000001.h5", CheckpointContent({"parameters/w": np.ones(2)}, {}))
    return checkpoint.read(directory / "checkpoint-00000001.h5").tensors["parameters/w"].tolist()


def _doctor(directory: Path) -> object:
    alone = SingleCommunicator()
    doctor.gather_shared(SimpleNamespace(world=alone, node=alone, own=SimpleNamespace(directory=directory)))  # type: ignore[arg-type]
    facts = doctor.gather_directory(SimpleNamespace(leads_job=True, directory=directory))  # type: ignore[arg-type]
    if facts is not None and facts.error:
        raise OSError(facts.error, "not written")
    return doctor.look(directory, "").error in (0, 17)


def _attempts(directory: Path) -> object:
    run_command._keep(directory, "name", SimpleNamespace(as_json=dict))  # type: ignore[arg-type]
    return None


def _own(directory: Path) -> object:
    os.close(open_own(directory / "own", os.O_RDWR | os.O_CREAT))
    return None


PROGRAMS: dict[str, Callable[[Path], object]] = {
    "conversion": _conversion,
    "text": _text,
    "checkpoint": _checkpoint,
    "doctor": _doctor,
    "attempts": _attempts,
    "own": _own,
}
KINDS = ["link", "dangling", "hard link", "pipe", "zero", "other user's", "directory"]


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _plant(path: Path, kind: str, victim: Path, legitimate: bytes) -> None:
    if kind in ("link", "dangling"):
        path.symlink_to(victim if kind == "link" else victim.with_name("new"))
    elif kind == "hard link":
        os.link(victim, path)
        return
    elif kind == "other user's":
        path.write_bytes(legitimate)
        path.chmod(0o666)
    else:
        make_node(path, kind)
    os.lchown(path, _OTHER_USER, _OTHER_USER)


@pytest.fixture
def _in_time() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError("the program waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.usefixtures("_in_time")
def test_no_file_that_another_user_may_have_made_is_overwritten_read_or_waited_for(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test replaces every file that a program opens in a directory to which all may write by a file of each kind."""
    shared, victim, contents = tmp_path / "shared", tmp_path / "victim", dict[str, bytes]()

    def run() -> object:
        monkeypatch.setattr(atomic_write, "_NUMBERS", itertools.count(1))
        return PROGRAMS[program](shared)

    def fresh() -> None:
        shutil.rmtree(shared, ignore_errors=True)
        shared.mkdir()
        shared.chmod(0o1777)

    fresh()
    _opened.clear()
    expected = run()
    names = sorted({Path(name).name for name in _opened if Path(name).parent == shared and not Path(name).is_dir()})
    names = [name for name in names if not (name.endswith(".samples") and "-" in name and len(name.split("-")[2]) < 20)]
    contents = {path.name: path.read_bytes() for path in shared.iterdir() if path.is_file()}
    assert names, "the program opens no file by its name"
    for name, kind in itertools.product(names, KINDS):
        fresh()
        victim.write_bytes(b"precious")
        _plant(shared / name, kind, victim, contents.get(name, bytes(5000)))
        try:
            result = run()
        except (OSError, DataError, CheckpointError):
            result = expected
        assert (name, kind, result) == (name, kind, expected)
        assert victim.read_bytes() == b"precious", (name, kind)
        assert not victim.with_name("new").exists(), (name, kind)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("mount", ["umask 0", "one owner"])
def test_a_directory_in_which_users_cannot_be_distinguished_can_be_used(
    program: str, mount: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Programs write with any umask, and where all files belong to another user, as on many mounts of network shares."""
    expected = PROGRAMS[program](_made(tmp_path / "private"))
    if mount == "one owner":
        monkeypatch.setattr(files, "_is_of_user", lambda status: False)
    before = os.umask(0 if mount == "umask 0" else 0o022)
    try:
        shared = _made(tmp_path / "shared")
        shared.chmod(0o777)
        assert [PROGRAMS[program](shared) for _ in range(1 if program in ("own", "conversion") else 2)][-1] == expected
        assert "cannot be written" not in capfd.readouterr().err
    finally:
        os.umask(before)


def test_a_file_of_a_colleague_is_read_and_a_link_of_another_user_is_not_written_through(tmp_path: Path) -> None:
    """`open_regular` reads regular files of any owner; `link_target` rejects links of other users where others may write."""
    (tmp_path / "a").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.close(open_regular(tmp_path / "link", os.O_WRONLY))
    if os.geteuid() == 0:
        os.chown(tmp_path / "a", _OTHER_USER, _OTHER_USER)
        os.lchown(tmp_path / "link", _OTHER_USER, _OTHER_USER)
    os.close(open_regular(tmp_path / "link"))
    tmp_path.chmod(0o1777)
    if os.geteuid() == 0:
        with pytest.raises(OSError, match=r"it is a link of another user|Permission denied"):
            open_regular(tmp_path / "link", os.O_WRONLY)
        with pytest.raises(OSError, match=r"it is a link of another user|Permission denied"):
            atomic_write.write_text(tmp_path / "link", "y")


# -- values that are not stored ------------------------------------------------------------------------------------------------


def _converted(path: Path) -> ImageFile:
    with hdf5.opened(path) as source:
        arrays.convert(source, path.with_name("out.h5"), overwrite=True)
    return ImageFile.open(path.with_name("out.h5"))


def _link(file: h5py.File, target: str, name: str = "images") -> None:
    file[name] = h5py.ExternalLink(target, "x")


def _external(file: h5py.File, target: str, name: str = "images") -> None:
    file.create_dataset(name, IMAGES.shape, "u1", external=[(target, 0, IMAGES.nbytes)])


def _virtual(file: h5py.File, target: str, name: str = "images") -> None:
    layout = h5py.VirtualLayout(IMAGES.shape, np.uint8)
    layout[...] = h5py.VirtualSource(target, "x", shape=IMAGES.shape)
    file.create_virtual_dataset(name, layout)


@pytest.mark.parametrize("refer", [_link, _external, _virtual])
@pytest.mark.parametrize("target", ["values", "pipe"])
@pytest.mark.usefixtures("_in_time")
def test_a_foreign_file_that_refers_to_other_files_is_refused(refer: Callable[..., None], target: str, tmp_path: Path) -> None:
    """No matter whether HDF5 could read the values, would make them up or would wait for them."""
    with h5py.File(tmp_path / "values", "w") as file:
        file["x"] = IMAGES
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        refer(file, target)
        file["labels"] = LABELS
    with pytest.raises(DataError, match=r"does not have all values of images: (it is a link|its values are in other files)\.$"):
        _converted(tmp_path / "a.h5")


@pytest.mark.parametrize("name", ["images", "labels", "mean", "sums", "class_names"])
@pytest.mark.parametrize("refer", [_link, _external, _virtual])
@pytest.mark.usefixtures("_in_time")
def test_a_data_file_that_refers_to_other_files_is_refused(name: str, refer: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_data_file(path, 6, (7, 5, 3), "abc", [(IMAGES, LABELS)])
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(path, "r+") as file:
        attributes = dict(file[name].attrs)
        del file[name]
        refer(file, "pipe", name)
        if refer is not _link:
            file[name].attrs.update(attributes)
    with pytest.raises(DataError, match="damaged"):
        ImageFile.open(path)


def test_matlabs_arrays_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        for name, values in (("images", IMAGES.T), ("labels", LABELS[None])):
            file.create_dataset(name, data=values).attrs["MATLAB_class"] = np.bytes_("double")
    with pytest.raises(DataError, match=r"images in .*a\.mat is an array of MATLAB"):
        _converted(tmp_path / "a.mat")
