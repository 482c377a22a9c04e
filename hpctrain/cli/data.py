"""`hpctrain data`: fetch, convert, describe and check data files.

`progress` shows the progress of a command on a terminal.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.arguments import Commands, FilePath, OutputFile, options
from hpctrain.core.text import counted, echo, echo_block, size_text
from hpctrain.process.ends import USER_ERROR

if TYPE_CHECKING:
    from hpctrain.data.convert.arrays import ForeignImages
    from hpctrain.data.convert.common import LeftOut
    from hpctrain.data.convert.folder import Tree


@contextmanager
def progress(description: str, total: int, noun: str = "images") -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error, if it is a terminal, during the block; yield a callback that counts further items."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console  # loads slowly
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    done = DownloadColumn() if noun == "bytes" else MofNCompleteColumn()
    columns = TextColumn("{task.description}", markup=False), BarColumn(), done, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


_DAMAGED = 2
_DATA_FILES = (".h5", ".hdf5")


@click.command()
@click.argument("file", type=FilePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
@click.option("--strict", is_flag=True, help="Also exit with code 2 for duplicates and empty classes.")
@click.option("--threads", type=click.IntRange(1), help="Number of threads that decode images; default: one per core.")
def check(file: Path, as_json: bool, strict: bool, threads: int | None) -> None:
    """Search a data file for damage, duplicates and empty classes.

    Every sample is read and compared with its checksum, and picture files are decoded. Damage is a sample that changed or cannot
    be read or decoded, a label outside the classes, or any other difference from the file as it was written; the exit code is
    then 2. Duplicates, within a class and across classes, and classes without samples are reported; they change the exit code
    only with --strict.
    """
    from hpctrain.data.check import check_file
    from hpctrain.data.convert.common import default_threads
    from hpctrain.data.image_file import read_contents

    with progress(f"checking {file.name}", len(read_contents(file).labels)) as advance:
        checked = check_file(file, default_threads() if threads is None else threads, advance)
    if as_json:
        content = {"file": str(file), "images": checked.images, "classes": checked.classes, "damaged": checked.damaged}
        echo_block(json.dumps({**content, "findings": [vars(finding) for finding in checked.findings]}, indent=1))
    else:
        for finding in checked.findings:
            echo(f"{'damage' if finding.damage else 'note'}: {finding.sentence}.")
        outcome = "damaged" if checked.damaged else "undamaged"
        echo(f"{file}: {counted(checked.images, 'image')} of {counted(checked.classes, 'class')}, {outcome}")
    if checked.damaged or (strict and checked.findings):
        raise SystemExit(_DAMAGED)


# NumPy and HDF5 are imported inside the commands: `hpctrain --help` must start fast, and threads are set before NumPy is loaded.

_INPUT = FilePath(path_type=Path)
_OUTPUT = OutputFile(makes_directory=True)
_FITS = click.Choice(["crop", "squash"])
_SIDE = click.IntRange(1, 32768)  # pixels


@click.group(cls=Commands)
def data() -> None:
    """Fetch, convert and check data files."""


@data.command()
@click.argument("name", type=click.Choice(["fashion-mnist", "mnist", "cifar10"]))
@click.option(
    "--out",
    type=FilePath(path_type=Path, file_okay=False),
    required=True,
    help="Directory in which train.h5 and test.h5 are written.",
)
@click.option("--overwrite", is_flag=True, help="Write both files again, even if they exist.")
def fetch(name: str, out: Path, overwrite: bool) -> None:
    """Download a data set and convert it.

    The gzipped IDX files of Fashion-MNIST or MNIST, or the archive cifar-10-binary.tar.gz, are taken from the first place that
    has them: the directory of --out, an installed Debian package (Fashion-MNIST only), or the public address. Files train.h5 and
    test.h5 that exist are kept, unless --overwrite is set.
    """
    from hpctrain.data import fetch as sources

    unchanged = set() if overwrite else set(out.glob("*.h5"))
    for path in sources.fetch(out, sources.DATA_SETS[name], overwrite=overwrite, bar=progress).values():
        echo(path)
        if path in unchanged:
            echo(f"{path} exists already and is unchanged", err=True)


@data.command()
@click.argument("file", type=_INPUT)
def info(file: Path) -> None:
    """Print the size, statistics and classes of a data file."""
    import numpy as np

    from hpctrain.data.image_file import ImageFile

    opened = ImageFile.open(file)
    height, width, channels = opened.shape
    per_class = np.bincount(opened.labels, minlength=len(opened.class_names))
    size = size_text(len(opened) * height * width * channels)
    echo(f"images   {len(opened)} of {height}x{width}x{channels} (H x W x C), {size}")
    if "blob" in opened.manifest:
        echo(f"stored   as picture files, {size_text(opened.stored_bytes)}")
    if opened.value_range is not None:
        echo("range    {:g} to {:g}, which became 0 to 255".format(*opened.value_range))
    echo(f"mean     {_numbers(opened.mean)}")
    echo(f"std      {_numbers(opened.std)}")
    echo(f"classes  {len(opened.class_names)}")
    for label, (class_name, count) in enumerate(zip(opened.class_names, per_class.tolist(), strict=True)):
        echo(f"  {label:4d}  {class_name}: {count}")


data.add_command(check)


@data.group()
def convert() -> None:
    """Convert images into one data file, OUT.

    Each command prints a description of OUT, and the parts of the source that were left out.
    """


_KEEP = click.option(
    "--keep-jpeg",
    "keep_files",
    is_flag=True,
    help="Store the original picture files instead of pixels; a training decodes them to the same pixels.",
)
_CLASS_NAMES = click.option(
    "--class-names",
    "names_file",
    type=_INPUT,
    help="Text file with one class name per line, in UTF-8, or a data file whose class names are used.",
)
_MAX_PIXELS = click.option(
    "--max-pixels", type=click.IntRange(1), help="Maximum number of pixels of an image to decode; default: 178,956,970."
)
_OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace OUT if it exists; otherwise an existing OUT is an error.")
_THREADS = click.option("--threads", type=click.IntRange(1), help="Number of threads that decode images; default: one per core.")
_RANGE = click.option(
    "--range",
    "value_range",
    type=float,
    nargs=2,
    metavar="LOW HIGH",
    callback=lambda context, parameter, value: _checked_range(value),
    help="Values of more than 8 bits that become black and white; values beyond them are clipped. Default: the range of a data "
    "file in --class-names, or else the range of the images, up to a power of two: 0 to 4095 for values of 12 bits.",
)
_LAYOUT = click.option(
    "--layout",
    type=click.Choice(["nhwc", "nchw"]),
    help="Order of the dimensions; default: the channels are the only dimension of size 1, 3 or 4.",
)
_SKIP = click.option(
    "--skip-unreadable", is_flag=True, help="Leave out and list images that cannot be read or decoded; the exit code is then 2."
)
_FIT = click.option(
    "--fit",
    type=_FITS,
    default="crop",
    show_default=True,
    help="Make images square by cropping the centre (crop) or by changing the aspect ratio (squash).",
)
_CHANNELS = click.option(
    "--channels",
    type=click.Choice(["1", "3"]),
    default="3",
    show_default=True,
    callback=lambda context, parameter, value: int(value),
    help="Number of channels: grey (1) or RGB (3).",
)
_DEEP = options(_RANGE, _CLASS_NAMES, _OVERWRITE)
_PICTURES = options(_FIT, _CHANNELS, _KEEP, _MAX_PIXELS, _RANGE)
_TREE = options(_PICTURES, _SKIP, _CLASS_NAMES, _THREADS, _OVERWRITE)


@convert.command("idx")
@click.argument("images", type=_INPUT)
@click.argument("labels", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@_CLASS_NAMES
@_OVERWRITE
def convert_idx(images: Path, labels: Path, out: Path, names_file: Path | None, overwrite: bool) -> None:
    """Convert IDX files (such as MNIST).

    IMAGES and LABELS may be plain or gzipped.
    """
    from hpctrain.data.convert import idx

    idx.convert(images, labels, out, _class_names(names_file), overwrite=overwrite)
    _report(out)


@convert.command("cifar")
@click.argument("directory", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@click.option("--split", type=click.Choice(["train", "test"]), required=True, help="Split to convert.")
@click.option("--coarse", is_flag=True, help="Use the 20 superclasses of CIFAR-100 as classes.")
@_OVERWRITE
def convert_cifar(directory: Path, out: Path, split: Any, coarse: bool, overwrite: bool) -> None:
    """Convert CIFAR-10 or CIFAR-100.

    DIRECTORY contains the files of the binary version of the data set.
    """
    from hpctrain.data.convert import cifar

    cifar.convert(directory, split, out, coarse=coarse, overwrite=overwrite)
    _report(out)


@convert.command("hdf5")
@click.argument("file", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@click.option("--images", default="images", show_default=True, metavar="KEY", help="Name of the HDF5 dataset of images.")
@click.option("--labels", default="labels", show_default=True, metavar="KEY", help="Name of the HDF5 dataset of labels.")
@_LAYOUT
@_DEEP
def convert_hdf5(file: Path, out: Path, images: str, labels: str, layout: Any, overwrite: bool, **deep: Any) -> None:
    """Convert an HDF5 file of another program.

    FILE has images of shape (N, H, W), (N, H, W, C) or (N, C, H, W), and labels: integers (N,) or (N, 1), or one-hot rows (N, K).
    """
    from hpctrain.data.convert import hdf5
    from hpctrain.data.files import require_new

    require_new(out, overwrite)
    with hdf5.opened(file, images, labels, layout) as source:
        _convert_arrays(source, out, overwrite, **deep)


@convert.command("arrays")
@click.argument("file", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@click.option("--images", metavar="KEY", help="Name of the array of images in an .npz; default: x, images or data.")
@click.option(
    "--labels",
    metavar="KEY|FILE",
    help="Name of the array of labels in an .npz, default: y, labels or targets; or the .npy file of the labels.",
)
@_LAYOUT
@_DEEP
def convert_arrays(
    file: Path, out: Path, images: str | None, labels: str | None, layout: Any, overwrite: bool, **deep: Any
) -> None:
    """Convert NumPy arrays (.npz or .npy).

    FILE has images of shape (N, H, W), (N, H, W, C) or (N, C, H, W), and labels: integers (N,) or (N, 1), or one-hot rows (N, K).
    Images are integers of 8 or more bits, floating-point numbers in 0..1, or whole ones in 0..255; for others, set --range.
    """
    from hpctrain.data.convert import arrays
    from hpctrain.data.files import require_new

    require_new(out, overwrite)
    _convert_arrays(arrays.opened(file, images, labels, layout), out, overwrite, **deep)


@convert.command("npz")
@click.argument("file", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@click.option("--size", type=_SIDE, help="Side of the square images, in pixels; default: images keep their size.")
@_TREE
def convert_npz(file: Path, out: Path, names_file: Path | None, overwrite: bool, **pictures: Any) -> None:
    """Convert JPEG files packed in an .npz.

    FILE is an .npz or .npz.xz with `blob`, `offsets` and `labels`; for arrays of images use `data convert arrays`. Running the
    same command again continues an interrupted conversion.
    """
    from hpctrain.data.convert import npz
    from hpctrain.data.files import require_new

    require_new(out, overwrite)  # before a large file is read
    tree = npz.scan(file, _class_names(names_file))
    _convert_tree(tree, file.name, out, names_file, overwrite=overwrite, **pictures)


@convert.command("folder")
@click.argument("directory", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@click.option("--size", type=_SIDE, required=True, help="Side of the square images, in pixels.")
@_TREE
def convert_folder(
    directory: Path, out: Path, names_file: Path | None, skip_unreadable: bool, overwrite: bool, **pictures: Any
) -> None:
    """Convert a tree of picture files.

    The tree is DIRECTORY/<class>/.../<name>.jpg, .png, .webp, .tif, .bmp, .gif or another format that Pillow decodes. Links are
    followed. Running the same command again continues an interrupted conversion.
    """
    from hpctrain.data.convert import folder
    from hpctrain.data.files import require_new

    require_new(out, overwrite)  # before many directories are listed
    tree = folder.scan(directory, _class_names(names_file), skip_unreadable=skip_unreadable)
    _convert_tree(tree, directory.name, out, names_file, skip_unreadable=skip_unreadable, overwrite=overwrite, **pictures)


@convert.command("csv")
@click.argument("file", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@click.option("--size", type=_SIDE, required=True, help="Side of the square images, in pixels.")
@click.option("--directory", type=_INPUT, help="Directory of the picture files; default: that of FILE.")
@click.option(
    "--columns",
    nargs=2,
    default=("file", "label"),
    show_default=True,
    metavar="FILE LABEL",
    help="Headers of the columns of picture files and of labels.",
)
@click.option("--suffix", default="", help="Suffix of the picture files that their column lacks, such as .jpg.")
@_TREE
def convert_csv(
    file: Path,
    out: Path,
    directory: Path | None,
    columns: tuple[str, str],
    suffix: str,
    names_file: Path | None,
    overwrite: bool,
    **pictures: Any,
) -> None:
    """Convert picture files whose labels are in a CSV file.

    FILE has a header, and a line for each picture with its file, relative to the directory, and its label: a class name, or an
    integer from 0. Running the same command again continues an interrupted conversion.
    """
    from hpctrain.data.convert import table
    from hpctrain.data.files import require_new

    require_new(out, overwrite)
    tree = table.scan(file, directory, _class_names(names_file), table.TableColumns(*columns, suffix))
    _convert_tree(tree, file.name, out, names_file, overwrite=overwrite, **pictures)


def _convert_tree(
    tree: Tree,
    name: str,
    out: Path,
    names_file: Path | None,
    size: int | None,
    value_range: tuple[float, float] | None,
    **pictures: Any,
) -> None:
    """Convert the picture files below `name`, and report what was left out."""
    from hpctrain.data.convert import folder

    scaling = _range(value_range, names_file)
    with progress(f"converting {name}", len(tree.files)) as advance:
        sides = None if size is None else (size, size)
        skipped = folder.convert(tree, out, size=sides, advance=advance, **scaling, **pictures)
    _report(out, folder.left_out(tree, skipped))


def _convert_arrays(
    source: ForeignImages,
    out: Path,
    overwrite: bool,
    value_range: tuple[float, float] | None,
    names_file: Path | None,
) -> None:
    from hpctrain.data.convert import arrays

    is_deep = source.images.dtype.kind in "iu" and source.images.dtype.itemsize > 1
    scaling = _range(value_range, names_file if is_deep else None)
    names = _class_names(names_file)
    with progress(f"converting {source.path.name}", len(source.labels)) as advance:
        arrays.convert(source, out, names, **scaling, overwrite=overwrite, advance=advance)
    _report(out)


def _checked_range(value: tuple[float, float] | None) -> tuple[float, float] | None:
    if value is not None and not (value[0] < value[1] and all(map(math.isfinite, value))):
        raise click.BadParameter(f"{value[0]:g} {value[1]:g} must be two finite numbers, the smaller one first, such as 0 4095.")
    return value


def _range(value_range: tuple[float, float] | None, names_file: Path | None) -> dict[str, Any]:
    """Return the keywords of a converter for the range of values: that of the option, or of the data file of class names."""
    if value_range is None and names_file is not None and names_file.suffix in _DATA_FILES:
        from hpctrain.data.image_file import ImageFile

        inherited = ImageFile.open(names_file).value_range
        is_deep = inherited is not None and inherited[1] >= 255  # other ranges are those of bytes or floating-point numbers
        return {"value_range": inherited if is_deep else None, "measures": False}
    return {"value_range": value_range, "measures": value_range is None}


def _report(out: Path, left_out: Sequence[LeftOut] = ()) -> None:
    """Print what was converted and left out; exit with code 2 if a part of the source could not be read."""
    from hpctrain.data.convert.common import ConvertedFile

    echo_block(str(ConvertedFile.of(out, left_out)))
    if any(one.unreadable for one in left_out):
        raise SystemExit(USER_ERROR)


def _class_names(names_file: Path | None) -> Sequence[str] | None:
    if names_file is None:
        return None
    from hpctrain.data.convert.common import read_names
    from hpctrain.data.image_file import ImageFile

    return ImageFile.open(names_file).class_names if names_file.suffix in _DATA_FILES else read_names(names_file)


def _numbers(values: Any) -> str:
    return " ".join(f"{value:.4f}" for value in values.tolist())
