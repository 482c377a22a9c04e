"""Fetching Fashion-MNIST: the order of sources, checks of their content, and no work done twice. The network is never used."""

import functools
import gzip
import hashlib
import http.server
import io
import os
import struct
import threading

import numpy as np
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data import fetch as fetching
from hpctrain.data.fetch import Split, fetch
from hpctrain.data.image_file import ImageFile


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def make_source(directory, *, packed=True, sizes=(("train", 9), ("test", 4))):
    """IDX files of a tiny data set in `directory`, and their splits."""
    directory.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split, count in sizes:
        rng = np.random.default_rng(count)
        contents = {
            "images": idx_bytes(rng.integers(0, 256, (count, 7, 9), np.uint8)),
            "labels": idx_bytes(np.arange(count, dtype=np.uint8) % 3),
        }
        for name, content in contents.items():
            path = directory / f"{split}-{name}"
            if packed:
                path.with_suffix(".gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)
        digests = [hashlib.sha256(contents[name]).hexdigest() for name in ("images", "labels")]
        splits[split] = Split(f"{split}-images", f"{split}-labels", *digests)
    return splits


def absent(out, splits):
    return None


def forbidden(out, splits):
    raise AssertionError("a source was asked in vain")


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_in_the_directory_are_converted(tmp_path, packed):
    splits = make_source(tmp_path, packed=packed)
    paths = fetch(tmp_path, [fetching.already_there, forbidden], splits, "abc")
    assert paths == {"train": tmp_path / "train.h5", "test": tmp_path / "test.h5"}
    train, test = (ImageFile.open(paths[name]) for name in ("train", "test"))
    assert (train.images.shape, test.images.shape) == ((9, 7, 9, 1), (4, 7, 9, 1))
    assert train.class_names == ("a", "b", "c")
    train.verify()


def test_what_is_there_is_left_alone(tmp_path):
    splits = make_source(tmp_path)
    first = fetch(tmp_path, [fetching.already_there], splits, "abc")
    times = [path.stat().st_mtime_ns for path in first.values()]
    assert fetch(tmp_path, [forbidden], splits, "abc") == first
    assert [path.stat().st_mtime_ns for path in first.values()] == times


def test_only_what_is_missing_is_made(tmp_path):
    splits = make_source(tmp_path / "source")
    paths = fetch(tmp_path, [lambda out, wanted: tmp_path / "source"], splits, "abc")
    kept = paths["train"].stat().st_mtime_ns
    paths["test"].unlink()

    def source(out, wanted):
        assert list(wanted) == ["test"]
        return tmp_path / "source"

    fetch(tmp_path, [absent, source, forbidden], splits, "abc")
    assert len(ImageFile.open(paths["test"])) == 4
    assert paths["train"].stat().st_mtime_ns == kept


def test_files_that_are_something_else_are_kept_unless_they_may_be_overwritten(tmp_path):
    splits = make_source(tmp_path / "source")
    sources = [lambda out, wanted: tmp_path / "source"]
    (tmp_path / "train.h5").write_text("another program's")
    with pytest.raises(DataError, match=r"train\.h5 is damaged, or not an HDF5 file.*; --overwrite replaces it\."):
        fetch(tmp_path, sources, splits, "abc")
    assert (tmp_path / "train.h5").read_text() == "another program's"
    (tmp_path / "train.h5").unlink()
    fetch(tmp_path, sources, splits, "xyz")
    with pytest.raises(DataError, match=r"train\.h5 exists already, with 3 classes other than those of Fashion-MNIST"):
        fetch(tmp_path, [forbidden], splits, "abc")
    fetch(tmp_path, sources, splits, "abc", overwrite=True)
    for split in ("train", "test"):
        assert ImageFile.open(tmp_path / f"{split}.h5").class_names == ("a", "b", "c")


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path):
    splits = make_source(tmp_path / "source")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"Fashion-MNIST cannot be written to .*: (Not a directory|File exists)"):
        fetch(tmp_path / "file" / "out", [forbidden], splits, "abc")


def test_without_any_source_the_error_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"apt-get install dataset-fashion-mnist.*http://fashion-mnist\."):
        fetch(tmp_path / "out", [absent, absent], make_source(tmp_path / "source"), "abc")


@pytest.mark.parametrize("name", ["train-images", "test-labels"])
def test_other_content_is_refused(tmp_path, name):
    splits = make_source(tmp_path, packed=False)
    content = bytearray((tmp_path / name).read_bytes())
    content[-1] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} is not the file of Fashion-MNIST.*remove it and fetch again"):
        fetch(tmp_path, [fetching.already_there], splits, "abc")
    assert not (tmp_path / f"{name.split('-')[0]}.h5").exists()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without writing to stderr."""

    def log_message(self, format, *args):
        pass


@pytest.fixture
def site(tmp_path):
    """(splits, URL) of a local web site with the files."""
    splits = make_source(tmp_path / "site")
    handler = functools.partial(QuietHandler, directory=str(tmp_path / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield splits, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_download_keeps_the_files_and_converts_them(tmp_path, site):
    splits, url = site
    out = tmp_path / "out"
    paths = fetch(out, [fetching.already_there, functools.partial(fetching.download, url=url)], splits, "abc")
    assert len(ImageFile.open(paths["train"])) == 9
    names = [f"{split}-{kind}.gz" for split in ("test", "train") for kind in ("images", "labels")]
    assert sorted(os.listdir(out)) == sorted([*names, "test.h5", "train.h5"])


def test_a_download_that_ends_early_is_no_source(tmp_path, site, monkeypatch):
    splits, url = site
    send = http.server.SimpleHTTPRequestHandler.copyfile
    monkeypatch.setattr(
        QuietHandler, "copyfile", lambda self, source, out: send(self, io.BytesIO(source.read()[:-5]), out), False
    )
    assert fetching.download(tmp_path, splits, url) is None


def test_a_wrong_download_is_refused_and_not_kept(tmp_path, site):
    splits, url = site
    for content in (b"<html>moved</html>", gzip.compress(b"other")):
        (tmp_path / "site" / "train-images.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"not an IDX file|not the file of Fashion-MNIST"):
            fetch(tmp_path / "out", [functools.partial(fetching.download, url=url)], splits, "abc")
        assert os.listdir(tmp_path / "out") == []


def test_a_site_that_is_away_is_no_source(tmp_path, site):
    splits, url = site
    (tmp_path / "site" / "train-images.gz").unlink()
    assert fetching.download(tmp_path, splits, url) is None
    assert fetching.download(tmp_path, splits, "http://127.0.0.1:9") is None


@pytest.fixture
def fake_apt(tmp_path, monkeypatch):
    """fake_apt(script): an apt-get that notes its arguments and runs `script`; PATH has nothing else."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    log = tmp_path / "apt.log"

    def make(script):
        program = tmp_path / "bin" / "apt-get"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho "$1" >> {log}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        return log

    return make


@pytest.mark.job
def test_the_package_is_installed_after_an_update_where_needed(tmp_path, fake_apt, monkeypatch):
    splits = make_source(tmp_path / "package")
    monkeypatch.setattr(fetching, "PACKAGE_DIRECTORY", tmp_path / "package")
    marker = tmp_path / "updated"
    log = fake_apt(f"if [ $1 = update ]; then touch {marker}; fi; [ -e {marker} ]")
    assert fetching.install_package(tmp_path, splits) == tmp_path / "package"
    assert log.read_text().split() == ["install", "update", "install"]
    assert fetching.debian_package(tmp_path, splits) == tmp_path / "package"


@pytest.mark.job
def test_a_failing_package_manager_is_no_source(tmp_path, fake_apt):
    log = fake_apt("echo no network >&2; exit 100")
    assert fetching.install_package(tmp_path, make_source(tmp_path / "package")) is None
    assert log.read_text().split() == ["install", "update"]


def test_without_a_package_manager_nothing_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetching.install_package(tmp_path, make_source(tmp_path / "package")) is None


def test_the_package_holds_fashion_mnist(tmp_path):
    if fetching.debian_package(tmp_path, fetching.SPLITS) is None:
        pytest.skip(f"{fetching.PACKAGE} is not installed in {fetching.PACKAGE_DIRECTORY}")
    test_only = {"test": fetching.SPLITS["test"]}
    file = ImageFile.open(fetch(tmp_path, [fetching.debian_package], test_only)["test"])
    assert file.images.shape == (10000, 28, 28, 1)
    assert np.bincount(file.labels).tolist() == [1000] * 10
    assert file.class_names[9] == "Ankle boot"
    # The published statistics of the training set are 0.2860 and 0.3530; the test set's are close to them.
    np.testing.assert_allclose([file.mean[0], file.std[0]], [0.2860, 0.3530], atol=0.003)
