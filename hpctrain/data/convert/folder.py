"""A tree of image files, DIRECTORY/<class>/.../<name>.jpg, decoded and resized in parallel threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.data.convert.common import Advance, default_threads, in_order, listed, no_progress
from hpctrain.data.convert.packing import DecodedPicture, PictureForm, pack
from hpctrain.data.decoder import Fit
from hpctrain.data.files import require_directory, require_new, system_errors_as
from hpctrain.errors import DataError
from hpctrain.log import get_logger

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"})
_log = get_logger(__name__)


@dataclass(frozen=True)
class Tree:
    """The content of a directory: class names, and (file, label) sorted by class and path."""

    class_names: tuple[str, ...]
    files: tuple[tuple[Path, int], ...]


def scan(directory: Path, class_names: Sequence[str] | None = None) -> Tree:
    """Find the classes and their files; hidden ones are ignored.

    Args:
        class_names: gives the labels, so that several splits agree; None: the directories' names, sorted.

    Raises:
        DataError: no such directory, no class directory, one that is not among `class_names`, or no image; directories that
            are splits (train, test, ...), unless `class_names` says that they are classes.
    """
    require_directory(directory, "it must hold one directory of images for each class")
    with system_errors_as(f"The directory {directory} cannot be read"):
        return _scan(directory, class_names)


def _scan(directory: Path, class_names: Sequence[str] | None) -> Tree:
    directories = sorted(path.name for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    if class_names is None:
        _refuse_splits(directory, directories)
    names = tuple(directories if class_names is None else class_names)
    strange = sorted(set(directories) - set(names))
    if strange:
        raise DataError(f"In {directory} the directories {', '.join(strange)} are not among the class names {', '.join(names)}.")
    files = tuple((path, label) for label, name in enumerate(names) for path in images_below(directory / name))
    if not files:
        loose = " in a directory of its class" if any(map(_is_image, directory.iterdir())) else ""
        raise DataError(f"{directory} holds no image{loose}; it must hold <class>/<name>.jpg, .jpeg or .png.")
    return Tree(names, files)


def _refuse_splits(directory: Path, directories: Sequence[str]) -> None:
    """Make sure that the directories are not the splits of a data set; one among others may be a class, such as a train."""
    splits = [name for name in directories if name.lower() in _SPLITS]
    if len(splits) < min(2, len(directories)) or not splits:
        return
    right = next((name for name in splits if name.lower().startswith("train")), splits[0])
    raise DataError(
        f"The directories {', '.join(splits)} in {directory} are the splits of a data set, not its classes; convert each of "
        f"them by itself, such as {directory / right}, or name them in --class-names if they are classes."
    )


def convert(
    tree: Tree,
    out: Path,
    *,
    size: tuple[int, int],
    fit: Fit = "crop",
    channels: int = 3,
    keep_files: bool = False,
    skip_unreadable: bool = False,
    threads: int | None = None,
    overwrite: bool = False,
    advance: Advance = no_progress,
) -> list[str]:
    """Write the tree as one data file with images of `size` (H, W); give the files that were skipped.

    Goes on where an interrupted conversion of the same files ended.

    Args:
        keep_files: store the picture files as they are, to be decoded when they are read, in place of pixels.

    Raises:
        DataError: files that cannot be decoded (all of them listed), unless they may be skipped; no file left; `out` exists.
    """
    require_new(out, overwrite)
    form = PictureForm(size, fit, channels, keep_files)

    def one(item: tuple[Path, int]) -> DecodedPicture | str:
        path, label = item
        try:
            return form.picture(path, label)
        except DataError as error:
            _log.warning("%s: %s", path, error)
            return str(path)

    source = form.source([_item(*file) for file in tree.files], tree.class_names, skip_unreadable)
    with form.writer(out, len(tree.files), (*size, channels), tree.class_names, source) as writer:
        advance(writer.done)
        results = in_order(one, tree.files[writer.done :], default_threads() if threads is None else threads)
        found = pack(writer, results, advance, skip=skip_unreadable)
        unreadable = writer.skipped if skip_unreadable else found
        if len(unreadable) == len(tree.files):
            raise DataError(f"None of {listed('image', unreadable)} can be decoded; nothing was written.")
        if unreadable and not skip_unreadable:
            raise DataError(
                f"{listed('image', unreadable)} cannot be decoded, so {out} was not written; mend or remove them, or give "
                "--skip-unreadable."
            )
    return unreadable


def _item(path: Path, label: int) -> list[object]:
    """Facts that tell a file from another, or from one of its name that was changed."""
    with system_errors_as(f"The image {path} cannot be read"):
        status = path.stat()
    return [str(path), label, status.st_size, status.st_mtime_ns]


def images_below(directory: Path) -> list[Path]:
    """The image files below a directory, sorted; hidden ones are ignored. None where there is no such directory."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.rglob("*") if _is_image(path))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES and path.is_file() and not path.name.startswith(".")
