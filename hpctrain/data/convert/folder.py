"""Tree of image files, DIRECTORY/<class>/.../<name>.jpg, decoded and resized in parallel threads.

A search follows links, and accounts for every entry: as a searched directory, as a picture, or as left out with a reason. An
unreadable entry is an error, unless the user requests to skip it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.text import escaped
from hpctrain.data import decoding
from hpctrain.data.convert.common import (
    Advance,
    DecodedPicture,
    LeftOut,
    PictureForm,
    default_threads,
    in_order,
    listed,
    measured_range,
    no_progress,
    pack,
)
from hpctrain.data.decoding import FOREIGN_SUFFIXES, SUFFIXES, Fit
from hpctrain.data.files import require_directory, require_new
from hpctrain.data.image_file import digest_of, normal_name
from hpctrain.data.readers import ValueRange

_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"})
#: directories that systems and programs create in any directory, in lower case
_OF_SYSTEMS = frozenset(
    {"__macosx", "__pycache__", "@eadir", "lost+found", "$recycle.bin", "system volume information", "#recycle", "#snapshot"}
)
_HIDDEN = "hidden or created by an operating system"
_NO_PICTURE = "not the name of a picture"
_SPECIAL = "not a regular file"
_LOOSE = "a picture outside the class directories"
_AGAIN = "a link to a directory above, or to one already searched"
_UNDECODABLE = "cannot be read or decoded"
_FOREIGN = "this format is not supported, save the picture as PNG or JPEG"
_log = logging.getLogger(__name__)

_Identity = tuple[int, int]  # device and inode


@dataclass(frozen=True, slots=True)
class PackedPicture:
    """Picture file in an array: its name for messages, and its bytes (n,) uint8."""

    name: str
    content: np.ndarray

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Tree:
    """Classes and picture files of a source of images.

    Attributes:
        class_names: names of the labels.
        files: (file, label), sorted by class and path if the source is a directory.
        named: whether classes may be empty, because the user has named them.
        left_out: all other entries.
    """

    class_names: tuple[str, ...]
    files: tuple[tuple[Path | PackedPicture, int], ...]
    named: bool = False
    left_out: tuple[LeftOut, ...] = ()


def scan(directory: Path, class_names: Sequence[str] | None = None, *, skip_unreadable: bool = False) -> Tree:
    """Find the classes in a directory and their files.

    Args:
        class_names: names of the labels, which permit empty classes and equal labels in several splits. None: the names of the
            directories, sorted. Names are compared in Unicode's composed form.
        skip_unreadable: whether to leave out unreadable entries.

    Raises:
        DataError: the directory is missing or has no class directory; a directory is not among `class_names`; a class, or the
            whole directory, has no image; the directories are splits (train, test, ...) and not among `class_names`; or an entry
            is unreadable.
    """
    require_directory(directory, "it must contain one directory of images per class")
    search = Search(directory)
    found = _class_directories(search, directory, () if class_names is None else class_names)
    if class_names is None:
        _refuse_splits(directory, [path.name for path in found.values()])
    names = tuple(sorted(found) if class_names is None else class_names)
    twice = [name for name, count in Counter(map(normal_name, names)).items() if count > 1]
    if twice:
        raise DataError(f"Several classes have the name {twice[0]}, so their directory is ambiguous; give distinct names.")
    strange = sorted(set(found).difference(map(normal_name, names)))
    if strange:
        raise DataError(
            f"In {directory} the directories {', '.join(strange)} are not among the class names {', '.join(names)}; "
            "rename or remove them, or add the names."
        )
    of_classes = [search.pictures(found[name], name) if name in found else [] for name in map(normal_name, names)]
    if search.unreadable and not skip_unreadable:
        places = [f"{path}: {reason}" for path, reason in sorted(search.unreadable)]
        raise DataError(
            f"In {directory} {listed('place', places)} cannot be read, so nothing was converted; repair or remove them, or give "
            "--skip-unreadable."
        )
    files = tuple((path, label) for label, paths in enumerate(of_classes) for path in paths)
    if not files:
        notes = "".join(f"; {note}" for note in search.left_out())
        raise DataError(f"{directory} contains no images in class directories, such as <class>/<name>.jpg{notes}.")
    empty = [name for name, paths in zip(names, of_classes, strict=True) if not paths]
    if empty and class_names is None:
        raise DataError(
            f"In {directory} these directories would be classes, but contain no readable image: {', '.join(empty)}; remove "
            "them, or name all classes in --class-names."
        )
    return Tree(names, files, class_names is not None, search.left_out())


def _class_directories(search: Search, directory: Path, class_names: Sequence[str]) -> dict[str, Path]:
    """Return the directories in `directory`, by name in Unicode's composed form. Other entries are recorded as left out."""
    found: dict[str, Path] = {}
    for path, is_directory in search.entries(directory, {*map(normal_name, class_names)}):
        name = normal_name(path.name)
        if not is_directory:
            search.leave_out(_LOOSE if path.suffix.lower() in SUFFIXES | FOREIGN_SUFFIXES else _NO_PICTURE, path)
        elif name in found:
            raise DataError(f"The directories {found[name]} and {path} have the same name in Unicode; rename one or merge them.")
        else:
            found[name] = path
    return found


def _refuse_splits(directory: Path, directories: Sequence[str]) -> None:
    """Raise a DataError if the directories are the splits of a data set, such as train and test.

    A single directory named like a split is accepted if there are other directories, because it may be a class.
    """
    splits = [name for name in directories if name.lower() in _SPLITS]
    if len(splits) < min(2, len(directories)) or not splits:
        return
    right = next((name for name in splits if name.lower().startswith("train")), splits[0])
    raise DataError(
        f"The directories {', '.join(splits)} in {directory} are the splits of a data set, not its classes; convert each "
        f"split separately, such as {directory / right}, or name them in --class-names if they are classes."
    )


def convert(
    tree: Tree,
    out: Path,
    *,
    size: tuple[int, int] | None,
    fit: Fit = "crop",
    channels: int = 3,
    keep_files: bool = False,
    skip_unreadable: bool = False,
    max_pixels: int | None = None,
    value_range: ValueRange | None = None,
    measures: bool = True,
    threads: int | None = None,
    overwrite: bool = False,
    advance: Advance = no_progress,
) -> list[str]:
    """Write the tree as one data file, and return the files that were skipped.

    An interrupted conversion of the same files is continued.

    Args:
        size: (H, W) to which images are resized; None: all must have the size of the first.
        fit, channels, keep_files, max_pixels, value_range: see `PictureForm`.
        measures: whether `value_range` is measured if it is None; see `common.measured_range`.

    Raises:
        DataError: files cannot be decoded (the message lists all of them) and may not be skipped; no file can be decoded; a class
            loses all its files, unless the user has named the classes; or `out` exists.
    """
    require_new(out, overwrite)
    threads = default_threads() if threads is None else threads
    if value_range is None and measures:
        value_range = measured_range(lambda item: _source(item[0]), tree.files, threads, max_pixels)
    form = PictureForm(size, fit, channels, keep_files, max_pixels, value_range)
    shape = None if size is None else (*size, channels)

    def one(item: tuple[Path | PackedPicture, int]) -> DecodedPicture | str:
        file, label = item
        try:
            picture = form.picture(_source(file), label)
            if shape not in (None, picture.pixels.shape):
                raise DataError(f"The image is {picture.pixels.shape}, but the first one is {shape}; give --size to resize them.")
            return picture
        except DataError as error:
            _log.warning("%s: %s", escaped(str(file)), error)
            return str(file)

    if shape is None:
        first = one(tree.files[0])
        if isinstance(first, str):
            raise DataError(f"{first} cannot be decoded, so the size of the images is unknown; give --size, or remove it.")
        height, width, _ = first.pixels.shape
        shape = height, width, channels
    source = _identifier(tree, form, skip_unreadable)
    with form.writer(out, len(tree.files), shape, tree.class_names, source) as writer:
        advance(writer.done)
        unreadable = pack(writer, in_order(one, tree.files[writer.done :], threads), advance, skip=skip_unreadable)
        if len(unreadable) == len(tree.files):
            raise DataError(
                f"None of {listed('image', unreadable)} can be decoded, so nothing was written; save them in another format."
            )
        if unreadable and not skip_unreadable:
            raise DataError(
                f"{listed('image', unreadable)} cannot be decoded, so {out} was not written; repair or remove them, or give "
                "--skip-unreadable."
            )
        _require_all_classes(tree, unreadable)
    return unreadable


def _source(file: Path | PackedPicture) -> Path | bytes:
    return file if isinstance(file, Path) else file.content.tobytes()


def _identifier(tree: Tree, form: PictureForm, skips: bool) -> str:
    """Return a digest of the inputs and settings of a conversion."""
    digest = hashlib.sha256(repr([form, skips, tree.class_names, decoding.versions()]).encode())
    for file, label in tree.files:
        version: object = None
        if isinstance(file, PackedPicture):
            version = digest_of(file.content)
        else:
            with contextlib.suppress(OSError):  # decoding reports the reason
                status = file.stat()
                version = status.st_size, status.st_mtime_ns
        digest.update(repr([str(file), label, version]).encode())
    return digest.hexdigest()


def _require_all_classes(tree: Tree, unreadable: Sequence[str]) -> None:
    """Raise a DataError if leaving out the `unreadable` files empties a class, unless the user has named the classes."""
    if tree.named or not unreadable:
        return
    left = Counter(label for _, label in tree.files)
    label_of = {str(path): label for path, label in tree.files}
    left.subtract(label_of[path] for path in unreadable)
    empty = [tree.class_names[label] for label, count in sorted(left.items()) if not count]
    if empty:
        raise DataError(
            f"No image of these classes can be decoded: {', '.join(empty)}; remove their directories, or name all classes in "
            "--class-names."
        )


def left_out(tree: Tree, unreadable: Sequence[str]) -> tuple[LeftOut, ...]:
    """Return everything that a conversion left out of a tree, including pictures that it could not read or decode."""
    return (*tree.left_out, *([LeftOut(_UNDECODABLE, tuple(unreadable), unreadable=True)] if unreadable else []))


class Search:
    """Search for pictures in directories, which follows links.

    Each directory is searched once per class, so links cannot cause endless loops or duplicate pictures.

    Args:
        directory: top of the data set. Links to it, or to a directory above it, are left out. None: only links to directories
            above the top of each search are left out.

    Attributes:
        unreadable: (place, reason) of unreadable directories, links and pictures.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.unreadable: list[tuple[Path, str]] = []
        self._left_out: defaultdict[str, list[Path]] = defaultdict(list)
        self._above = set() if directory is None else {*_identities(Path(os.path.realpath(directory)))}
        self._class_of: dict[_Identity, str] = {}

    def entries(self, directory: Path, shown: Collection[str] = ()) -> Iterator[tuple[Path, bool]]:
        """Yield (path, whether it is a directory) of the directories and regular files in a directory, sorted.

        All other entries are recorded as left out or unreadable.

        Args:
            shown: names that are yielded even if they are hidden or created by an operating system.
        """
        try:
            with os.scandir(directory) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            self._note_unreadable(directory, error)
            return
        for entry in entries:
            path = directory / entry.name
            if (entry.name.startswith(".") or entry.name.lower() in _OF_SYSTEMS) and normal_name(entry.name) not in shown:
                self.leave_out(_HIDDEN, path)
                continue
            try:
                is_directory = entry.is_dir()
                if not is_directory and not entry.is_file():
                    entry.stat()  # raises for a broken link
                    raise OSError(errno.EINVAL, _SPECIAL)
            except OSError as error:
                self._note_unreadable(path, error)
            else:
                yield path, is_directory

    def pictures(self, top: Path, of_class: str = "") -> list[Path]:
        """Return the pictures below the directory of a class, sorted.

        A directory that belongs to two classes through links is searched for both, with a warning in the log.
        """
        found: list[Path] = []
        above = self._above | {*_identities(Path(os.path.realpath(top)).parent)}
        searched: set[_Identity] = set()
        directories, links = deque([top]), deque[Path]()
        while directories or links:  # links last, so that a picture has the path of its real directory
            directory = directories.popleft() if directories else links.popleft()
            try:
                identity = _identity(directory)
            except OSError as error:
                self._note_unreadable(directory, error)
                continue
            if identity in searched or identity in above:
                self.leave_out(_AGAIN, directory)
                continue
            searched.add(identity)
            if self._class_of.setdefault(identity, of_class) != of_class:
                _log.warning("%s is in the classes %s and %s", escaped(str(directory)), self._class_of[identity], of_class)
            for path, is_directory in self.entries(directory):
                if is_directory:
                    (links if path.is_symlink() else directories).append(path)
                elif path.suffix.lower() in SUFFIXES:
                    found.append(path)
                elif path.suffix.lower() in FOREIGN_SUFFIXES:
                    self.unreadable.append((path, _FOREIGN))
                else:
                    self.leave_out(_NO_PICTURE, path)
        return sorted(found)

    def leave_out(self, reason: str, path: Path) -> None:
        """Record a path as left out for a reason."""
        self._left_out[reason].append(path)

    def left_out(self) -> tuple[LeftOut, ...]:
        """Return everything that was left out, by reason."""
        unreadable: defaultdict[str, list[Path]] = defaultdict(list)
        for path, reason in self.unreadable:
            unreadable[reason].append(path)
        return tuple(
            LeftOut(reason, tuple(map(str, sorted(paths))), of is unreadable)
            for of in (self._left_out, unreadable)
            for reason, paths in sorted(of.items())
        )

    def _note_unreadable(self, path: Path, error: OSError) -> None:
        """Record an unreadable path. A pipe, socket or device without a picture's suffix is recorded as left out."""
        if error.strerror == _SPECIAL and path.suffix.lower() not in SUFFIXES | FOREIGN_SUFFIXES:
            self.leave_out(_SPECIAL, path)
        else:
            self.unreadable.append((path, error.strerror or str(error)))


def _identity(directory: Path) -> _Identity:
    status = directory.stat()
    return status.st_dev, status.st_ino


def _identities(directory: Path) -> Iterator[_Identity]:
    """Yield device and inode of a directory and of all directories above it."""
    for place in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            yield _identity(place)
