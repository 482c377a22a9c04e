"""Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv 1708.07747): locates, installs or downloads, checks and converts it.

The four IDX files are identified by the sha256 of their *content*, because compressed files differ between distributions.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpctrain.core.errors import DataError
from hpctrain.core.log import get_logger
from hpctrain.data.convert import idx
from hpctrain.data.convert.common import Advance, no_progress
from hpctrain.data.files import system_errors_as
from hpctrain.data.image_file import ImageFile, class_difference
from hpctrain.storage.atomic_write import write_bytes

CLASS_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
PACKAGE = "dataset-fashion-mnist"
PACKAGE_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_TIMEOUT_SECONDS = 60
_INSTALL_TIMEOUT_SECONDS = 900
_log = get_logger(__name__)


@dataclass(frozen=True)
class Split:
    """IDX files of one split, without .gz, and the sha256 of their decompressed content."""

    images: str
    labels: str
    images_sha256: str
    labels_sha256: str


SPLITS: Mapping[str, Split] = {
    "train": Split(
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    "test": Split(
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}

#: function (output directory, splits) -> directory with all files of the splits, or None; may write into the output directory
Source = Callable[[Path, Mapping[str, Split]], Path | None]


#: function (description, total, noun) -> context manager that yields a function to call with the number of items just done
Bar = Callable[[str, int, str], AbstractContextManager[Advance]]
_BYTES_AT_ONCE = 1 << 18
_MOST_BYTES = 1 << 28


@contextmanager
def no_bar(description: str, total: int, noun: str) -> Iterator[Advance]:
    """Show no progress (a `Bar`)."""
    yield no_progress


def fetch(
    out: Path,
    sources: Sequence[Source] | None = None,
    splits: Mapping[str, Split] = SPLITS,
    names: Sequence[str] = CLASS_NAMES,
    *,
    overwrite: bool = False,
    bar: Bar = no_bar,
) -> dict[str, Path]:
    """Create out/train.h5 and out/test.h5 unless they exist, and return their paths by split.

    Args:
        out: output directory.
        sources: sources of the IDX files, tried in order; default: the output directory, Debian's package if installed, the
            package manager, the data set's own site.
        overwrite: whether to replace existing files.
        bar: progress display of downloads and conversions.

    Raises:
        DataError: no source has the files (the message explains how to get them), a file has another checksum, or existing files
            of these names are not Fashion-MNIST.
    """
    with system_errors_as(f"Fashion-MNIST cannot be written to {out}"):
        if sources is None:
            sources = (*LOCAL_SOURCES, partial(download, bar=bar))
        return _fetch(out, sources, splits, names, overwrite, bar)


def _fetch(
    out: Path, sources: Sequence[Source], splits: Mapping[str, Split], names: Sequence[str], overwrite: bool, bar: Bar
) -> dict[str, Path]:
    paths = {split: out / f"{split}.h5" for split in splits}
    missing = {split: splits[split] for split, path in paths.items() if overwrite or not _is_there(path, names)}
    if not missing:
        return paths
    out.mkdir(parents=True, exist_ok=True)
    for source in sources:
        directory = source(out, missing)
        if directory is not None:
            for split, files in missing.items():
                _convert(directory, files, paths[split], names, bar)
            return paths
    raise DataError(
        f"Fashion-MNIST was not found; install Debian's package with `apt-get install {PACKAGE}`, or put the four IDX files "
        f"(from {URL}/) into {out}."
    )


def already_there(out: Path, splits: Mapping[str, Split]) -> Path | None:
    """Return the output directory if it contains the IDX files."""
    return out if _has_all(out, splits) else None


def debian_package(out: Path, splits: Mapping[str, Split]) -> Path | None:
    """Return the directory of Debian's package if it is installed."""
    return PACKAGE_DIRECTORY if _has_all(PACKAGE_DIRECTORY, splits) else None


def install_package(out: Path, splits: Mapping[str, Split]) -> Path | None:
    """Install Debian's package and return its directory; None without root permission or apt-get, or on failure."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return None
    _log.info("installing %s", PACKAGE)
    install = ("apt-get", "install", "-y", "--no-install-recommends", PACKAGE)
    # The package lists may be missing (in fresh containers) or outdated.
    if _run(install) or (_run(("apt-get", "update")) and _run(install)):
        return debian_package(out, splits)
    return None


def download(out: Path, splits: Mapping[str, Split], url: str = URL, bar: Bar = no_bar) -> Path | None:
    """Download the gzipped files from the data set's own site into the output directory; None if it is unreachable.

    Raises:
        DataError: a downloaded file has another checksum.
    """
    for split in splits.values():
        for name, digest in ((split.images, split.images_sha256), (split.labels, split.labels_sha256)):
            _log.info("downloading %s/%s.gz", url, name)
            try:
                with urllib.request.urlopen(f"{url}/{name}.gz", timeout=_TIMEOUT_SECONDS) as response:
                    packed = _read(response, name, bar)
            except (OSError, http.client.HTTPException) as error:
                _log.warning("cannot download %s/%s.gz: %s", url, name, error)
                return None
            _check(idx.unpack(io.BytesIO(packed), f"{url}/{name}.gz"), digest, f"{url}/{name}.gz")
            write_bytes(out / f"{name}.gz", packed)
    return out


LOCAL_SOURCES: tuple[Source, ...] = (already_there, debian_package, install_package)


def _read(response: http.client.HTTPResponse, name: str, bar: Bar) -> bytes:
    """Read the whole response of a site.

    Raises:
        http.client.HTTPException: the response ends too early.
        DataError: the response is larger than any of the files.
    """
    parts: list[bytes] = []
    received = 0
    total = int(response.headers.get("Content-Length") or 0)
    with bar(f"downloading {name}.gz", total, "bytes") as advance:
        while part := response.read(_BYTES_AT_ONCE):
            parts.append(part)
            advance(len(part))
            received += len(part)
            if received > _MOST_BYTES:
                raise DataError(
                    f"{name}.gz has more than {_MOST_BYTES:,} bytes, so it is not the file of Fashion-MNIST; use another source."
                )
    content = b"".join(parts)
    if len(content) < total:
        raise http.client.IncompleteRead(content, total - len(content))
    return content


def _is_there(path: Path, names: Sequence[str]) -> bool:
    """Return whether the data file exists.

    Raises:
        DataError: another file of this name exists, which must not be overwritten.
    """
    if not os.path.lexists(path):
        return False
    try:
        classes = ImageFile.open(path).class_names
    except DataError as error:
        raise DataError(f"{str(error).rstrip('.')}; --overwrite replaces it.") from error
    if class_difference(classes, names) is not None:
        raise DataError(
            f"{path} exists already, with {len(classes)} classes other than those of Fashion-MNIST; give another --out, or "
            "--overwrite to replace it."
        )
    return True


def _has_all(directory: Path, splits: Mapping[str, Split]) -> bool:
    return all(_find(directory, name) is not None for split in splits.values() for name in (split.images, split.labels))


def _find(directory: Path, name: str) -> Path | None:
    return next((path for path in (directory / name, directory / f"{name}.gz") if path.is_file()), None)


def _convert(directory: Path, files: Split, out: Path, names: Sequence[str], bar: Bar) -> None:
    arrays = []
    for name, digest in ((files.images, files.images_sha256), (files.labels, files.labels_sha256)):
        path = _find(directory, name)
        assert path is not None, f"a source without {name}"
        content = idx.read_bytes(path)
        _check(content, digest, str(path))
        arrays.append(idx.parse(content, str(path)))
    with bar(f"converting {files.images}", len(arrays[1]), "images") as advance:
        idx.write(arrays[0], arrays[1], out, names, advance, str(directory))
    _log.info("wrote %s: %d images", out, len(arrays[1]))


def _check(content: bytes, digest: str, origin: str) -> None:
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise DataError(
            f"{origin} is not the file of Fashion-MNIST: the sha256 of its content is {actual[:12]}... and must be "
            f"{digest[:12]}...; remove it and fetch again."
        )


def _run(command: Sequence[str]) -> bool:
    """Run a command of the package manager without prompts, and return whether it succeeded."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("%s failed: %s", " ".join(command), error)
        return False
    if done.returncode:
        _log.info("%s ended with %d: %s", " ".join(command), done.returncode, done.stderr.strip().splitlines()[-1:])
    return done.returncode == 0
