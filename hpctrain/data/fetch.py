"""Public data sets (Fashion-MNIST, MNIST, CIFAR-10): locate, download, check and convert them.

Files are identified by the sha256 of their *content*, because compressed files differ between distributions.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import logging
import os
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.files import open_regular
from hpctrain.data.convert import cifar, idx
from hpctrain.data.convert.common import Advance, no_progress
from hpctrain.data.files import system_errors_as
from hpctrain.data.image_file import ImageFile, class_difference
from hpctrain.storage.atomic_write import write_bytes

_TIMEOUT_SECONDS = 60
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSet:
    """Data set that can be fetched.

    Attributes:
        url: address of the directory of the gzipped IDX files, or of the archive.
        splits: sha256 of the content of each file, by name and split. IDX files are images, then labels; CIFAR's are batches in
            order.
        archive: file name of the archive that contains all files; None: IDX files that are downloaded one by one.
        package: Debian package of the data set, if any.
    """

    title: str
    class_names: Sequence[str]
    url: str
    splits: Mapping[str, Mapping[str, str]]
    archive: str | None = None
    archive_sha256: str = ""  # of the archive itself
    package: str | None = None
    package_directory: Path = Path()  # directory of the package's files


FASHION_MNIST = DataSet(
    title="Fashion-MNIST",
    class_names=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    splits={
        "train": {
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        },
        "test": {
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    },
    package="dataset-fashion-mnist",
    package_directory=Path("/usr/share/datasets/fashion-mnist"),
)
MNIST = DataSet(
    title="MNIST",
    class_names=tuple("0123456789"),
    url="https://storage.googleapis.com/cvdf-datasets/mnist",
    splits={
        "train": {
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        },
        "test": {
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    },
)
CIFAR10 = DataSet(
    title="CIFAR-10",
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    splits={
        "train": {
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        },
        "test": {"test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"},
    },
    archive="cifar-10-binary.tar.gz",
    archive_sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
DATA_SETS = {"fashion-mnist": FASHION_MNIST, "mnist": MNIST, "cifar10": CIFAR10}

#: function (output directory, wanted splits of a data set) -> directory with all files of these splits, or None
Source = Callable[[Path, DataSet], Path | None]
#: function (description, total, noun) -> context manager that yields a function to call with the number of items just done
Bar = Callable[[str, int, str], AbstractContextManager[Advance]]
_BYTES_AT_ONCE = 1 << 18
_MOST_BYTES = 1 << 28


@contextmanager
def no_bar(description: str, total: int, noun: str) -> Iterator[Advance]:
    """Ignore the progress (a no-op `Bar`)."""
    yield no_progress


def fetch(
    out: Path,
    data_set: DataSet = FASHION_MNIST,
    sources: Sequence[Source] | None = None,
    *,
    overwrite: bool = False,
    bar: Bar = no_bar,
) -> dict[str, Path]:
    """Create out/train.h5 and out/test.h5 unless they exist, and return their paths by split.

    Args:
        sources: sources of the files, tried in order; default: the output directory, Debian's package if installed, the data
            set's public address.

    Raises:
        DataError: no source has the files (the message explains how to obtain them), a file has another checksum, or existing
            files of these names have other classes.
    """
    with system_errors_as(f"{data_set.title} cannot be fetched to {out}"):
        if sources is None:
            sources = (already_there, debian_package, partial(download, bar=bar))
        paths = {split: out / f"{split}.h5" for split in data_set.splits}
        missing = [split for split, path in paths.items() if overwrite or not _is_there(path, data_set)]
        if not missing:
            return paths
        out.mkdir(parents=True, exist_ok=True)
        wanted = replace(data_set, splits={split: data_set.splits[split] for split in missing})
        for source in sources:
            directory = source(out, wanted)
            if directory is not None:
                for split in missing:
                    _convert(directory, wanted, split, paths[split], bar)
                return paths
    package = f"install Debian's package with `apt-get install {data_set.package}`, or " if data_set.package else ""
    files = data_set.archive or "its IDX files"
    raise DataError(f"{data_set.title} was not found; {package}put {files} (from {data_set.url}) into {out}.")


def already_there(out: Path, wanted: DataSet) -> Path | None:
    """Return the output directory if it contains the files, or the archive; otherwise None."""
    return out if _has_all(out, wanted) else None


def debian_package(out: Path, wanted: DataSet) -> Path | None:
    """Return the directory of Debian's package if it is installed; otherwise None."""
    return wanted.package_directory if wanted.package is not None and _has_all(wanted.package_directory, wanted) else None


def download(out: Path, wanted: DataSet, bar: Bar = no_bar) -> Path | None:
    """Download the files, or the archive, from the public address into the output directory; None if it is unreachable.

    Raises:
        DataError: a downloaded file has another checksum.
    """
    if wanted.archive is not None:
        content = _get(wanted.url, wanted, bar)
        if content is None:
            return None
        _check(content, wanted.archive_sha256, wanted.url, wanted)
        write_bytes(out / wanted.archive, content)
        return out
    for files in wanted.splits.values():
        for name, digest in files.items():
            url = f"{wanted.url}/{name}.gz"
            packed = _get(url, wanted, bar)
            if packed is None:
                return None
            _check(idx.unpack(io.BytesIO(packed), url), digest, url, wanted)
            write_bytes(out / f"{name}.gz", packed)
    return out


def _get(url: str, wanted: DataSet, bar: Bar) -> bytes | None:
    """Return the whole response of a site; None if it cannot be read.

    Raises:
        DataError: the response is larger than any of the files.
    """
    _log.info("downloading %s", url)
    parts: list[bytes] = []
    received = 0
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            total = int(response.headers.get("Content-Length") or 0)
            with bar(f"downloading {url.rpartition('/')[2]}", total, "bytes") as advance:
                while part := response.read(_BYTES_AT_ONCE):
                    parts.append(part)
                    advance(len(part))
                    received += len(part)
                    if received > _MOST_BYTES:
                        raise DataError(
                            f"{url} has more than {_MOST_BYTES:,} bytes, so it is not the file of {wanted.title}; "
                            "use another source."
                        )
        if received < total:
            raise http.client.IncompleteRead(b"".join(parts), total - received)
    except (OSError, http.client.HTTPException) as error:
        _log.warning("cannot download %s: %s", url, error)
        return None
    return b"".join(parts)


def _is_there(path: Path, data_set: DataSet) -> bool:
    """Return whether a data file with the classes of the data set exists.

    Raises:
        DataError: the existing file is not a valid data file, or has other classes.
    """
    if not os.path.lexists(path):
        return False
    try:
        classes = ImageFile.open(path).class_names
    except DataError as error:
        raise DataError(f"{str(error).rstrip('.')}; --overwrite replaces it.") from error
    if class_difference(classes, data_set.class_names) is not None:
        raise DataError(
            f"{path} already exists, with {len(classes)} classes other than those of {data_set.title}; give another --out, or "
            "--overwrite to replace it."
        )
    return True


def _has_all(directory: Path, wanted: DataSet) -> bool:
    if wanted.archive is not None and (directory / wanted.archive).is_file():
        return True
    return all(_find(directory, name) is not None for files in wanted.splits.values() for name in files)


def _find(directory: Path, name: str) -> Path | None:
    return next((path for path in (directory / name, directory / f"{name}.gz") if path.is_file()), None)


def _convert(directory: Path, data_set: DataSet, split: str, out: Path, bar: Bar) -> None:
    contents = []
    for name, digest in data_set.splits[split].items():
        path = _find(directory, name)
        origin = str(path)
        if path is not None and data_set.archive is None:
            content = idx.read_bytes(path)
        elif path is not None:
            with open(open_regular(path), "rb") as file:
                content = file.read()
        else:
            assert data_set.archive is not None, f"a source without {name}"
            content = _member(directory / data_set.archive, name)
            origin = f"{name} of {directory / data_set.archive}"
        _check(content, digest, origin, data_set)
        contents.append(content)
    if data_set.archive is None:
        images, labels = (idx.parse(content, name) for content, name in zip(contents, data_set.splits[split], strict=True))
    else:
        images, labels = cifar.parse(np.concatenate([np.frombuffer(content, np.uint8) for content in contents]))
    with bar(f"converting {data_set.title} ({split})", len(labels), "images") as advance:
        idx.write(images, labels, out, data_set.class_names, advance, str(directory))
    _log.info("wrote %s: %d images", out, len(labels))


def _member(path: Path, name: str) -> bytes:
    """Return the content of the file with this name from an archive, in any of its directories.

    Raises:
        DataError: the archive is damaged, or has no such file.
    """
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and Path(member.name).name == name:
                    file = archive.extractfile(member)
                    assert file is not None, "a file has content"
                    return file.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"The archive {path} is damaged ({error}); remove it and fetch again.") from error
    raise DataError(f"The archive {path} has no file {name}; remove it and fetch again.")


def _check(content: bytes, digest: str, origin: str, data_set: DataSet) -> None:
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise DataError(
            f"{origin} is not the file of {data_set.title}: the sha256 of its content is {actual[:12]}... and must be "
            f"{digest[:12]}...; remove it and fetch again."
        )
