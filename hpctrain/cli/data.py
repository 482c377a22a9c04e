"""`hpctrain data`: fetch, convert, look at and check data files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.arguments import FilePath, OutputFile
from hpctrain.cli.data_check import check
from hpctrain.cli.failure import USER_ERROR, Commands
from hpctrain.cli.progress import progress
from hpctrain.core.text import echo, echo_block

if TYPE_CHECKING:
    from hpctrain.data.convert.common import LeftOut

# NumPy and HDF5 are imported inside the commands: the command line itself must start fast, and set threads before NumPy is there.

_INPUT = FilePath(path_type=Path)
_OUTPUT = OutputFile(makes_directory=True)
_FITS = click.Choice(["crop", "squash"])
_SIDE = click.IntRange(1, 32768)  # pixels


@click.group(cls=Commands)
def data() -> None:
    """Fetch, convert and check data files."""


@data.command()
@click.argument("name", type=click.Choice(["fashion-mnist"]))
@click.option(
    "--out",
    type=FilePath(path_type=Path, file_okay=False),
    required=True,
    help="Directory to which train.h5 and test.h5 are written.",
)
@click.option("--overwrite", is_flag=True, help="Make both files again, even where they exist.")
def fetch(name: str, out: Path, overwrite: bool) -> None:
    """Download a data set and convert it.

    Looks for it on this machine and in Debian's packages first. Nothing is done where the files exist.
    """
    from hpctrain.data import fetch as sources

    for path in sources.fetch(out, overwrite=overwrite, bar=progress).values():
        echo(path)


@data.command()
@click.argument("file", type=_INPUT)
def info(file: Path) -> None:
    """Print what a data file holds."""
    import numpy as np

    from hpctrain.data.image_file import ImageFile

    opened = ImageFile.open(file)
    height, width, channels = opened.shape
    per_class = np.bincount(opened.labels, minlength=len(opened.class_names))
    megabytes = len(opened) * height * width * channels / 1e6
    echo(f"images   {len(opened)} of {height}x{width}x{channels} (H x W x C), {megabytes:.1f} MB")
    if "blob" in opened.manifest:
        echo(f"stored   as picture files, {opened.stored_bytes / 1e6:.1f} MB")
    echo(f"mean     {_numbers(opened.mean)}")
    echo(f"std      {_numbers(opened.std)}")
    echo(f"classes  {len(opened.class_names)}")
    for label, (class_name, count) in enumerate(zip(opened.class_names, per_class.tolist(), strict=True)):
        echo(f"  {label:4d}  {class_name}: {count}")


@data.command()
@click.argument("file", type=_INPUT)
def verify(file: Path) -> None:
    """Compare a data file with its checksums.

    It says whether the file is as it was written; `check` says which samples are not, and more.
    """
    from hpctrain.data.image_file import ImageFile

    opened = ImageFile.open(file)
    opened.verify()
    echo(f"{file}: {len(opened)} images, all checksums agree")


data.add_command(check)


@data.group()
def convert() -> None:
    """Convert images into one data file, OUT.

    Each command ends with what the file holds, and what of the source it does not.
    """


def _keep_option(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "Store the picture files as they are, in place of pixels; they are decoded when they are read, to the same pixels."
    return click.option("--keep-jpeg", "keep_files", is_flag=True, help=text)(command)


def _names_option(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "Text file of class names in UTF-8, one per line, or another data file whose classes are taken."
    return click.option("--class-names", "names_file", type=_INPUT, help=text)(command)


def _pixels_option(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "Number of pixels of the largest image that is decoded; by default 178,956,970."
    return click.option("--max-pixels", type=click.IntRange(1), help=text)(command)


def _json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "Print what was made and left out as one JSON object, with all names."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def _overwrite_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--overwrite", is_flag=True, help="Replace OUT if it exists; without it that is an error.")(command)


def _threads_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--threads", type=click.IntRange(1), help="Number of threads that decode images; by default one per core."
    )(command)


@convert.command("idx")
@click.argument("images", type=_INPUT)
@click.argument("labels", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@_names_option
@_overwrite_option
@_json_option
def convert_idx(images: Path, labels: Path, out: Path, names_file: Path | None, overwrite: bool, as_json: bool) -> None:
    """Convert IDX files (MNIST and its like).

    They may be plain or gzipped.
    """
    from hpctrain.data.convert import idx

    idx.convert(images, labels, out, _class_names(names_file), overwrite=overwrite)
    _report(out, as_json)


@convert.command("cifar")
@click.argument("directory", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@click.option("--split", type=click.Choice(["train", "test"]), required=True, help="Split whose images are converted.")
@click.option("--coarse", is_flag=True, help="Take the 20 superclasses of CIFAR-100 as classes.")
@_overwrite_option
@_json_option
def convert_cifar(directory: Path, out: Path, split: Any, coarse: bool, overwrite: bool, as_json: bool) -> None:
    """Convert CIFAR-10 or CIFAR-100.

    DIRECTORY holds the files of the binary version.
    """
    from hpctrain.data.convert import cifar

    cifar.convert(directory, split, out, coarse=coarse, overwrite=overwrite)
    _report(out, as_json)


@convert.command("hdf5")
@click.argument("file", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@click.option("--images", default="images", show_default=True, metavar="KEY", help="Name of the dataset of images, such as x.")
@click.option("--labels", default="labels", show_default=True, metavar="KEY", help="Name of the dataset of labels.")
@click.option(
    "--layout",
    type=click.Choice(["nhwc", "nchw"]),
    help="Where the channels of images stand; by default the only dim of 1, 3 or 4 at either place.",
)
@_names_option
@_overwrite_option
@_json_option
def convert_hdf5(
    file: Path, out: Path, images: str, labels: str, layout: Any, names_file: Path | None, overwrite: bool, as_json: bool
) -> None:
    """Convert an HDF5 file of another program.

    FILE has images of whole numbers 0..255, (N, H, W), (N, H, W, C) or (N, C, H, W), and labels: whole numbers (N,) or (N, 1), or
    one-hot rows (N, K).
    """
    from hpctrain.data.convert import hdf5
    from hpctrain.data.files import require_new

    require_new(out, overwrite)
    names = _class_names(names_file)
    with (
        hdf5.opened(file, images, labels, layout) as source,
        progress(f"converting {file.name}", len(source.labels)) as advance,
    ):
        hdf5.convert(source, out, names, overwrite=overwrite, advance=advance)
    _report(out, as_json)


@convert.command("npz")
@click.argument("file", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@click.option("--size", type=_SIDE, help="Side of the square images, in pixels; without it images keep their size.")
@click.option(
    "--fit", type=_FITS, default="crop", show_default=True, help="Cut out the centre (crop), or change the aspect (squash)."
)
@click.option(
    "--channels", type=click.Choice(["1", "3"]), default="3", show_default=True, help="Number of channels: grey (1) or RGB (3)."
)
@_keep_option
@_pixels_option
@click.option("--limit", type=click.IntRange(1), help="Number of images to convert, counted from the first; by default all.")
@_names_option
@_threads_option
@_overwrite_option
@_json_option
def convert_npz(
    file: Path,
    out: Path,
    size: int | None,
    fit: Any,
    channels: str,
    keep_files: bool,
    max_pixels: int | None,
    limit: int | None,
    names_file: Path | None,
    threads: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Convert JPEG files packed in an .npz.

    FILE is an .npz or .npz.xz with `blob`, `offsets` and `labels`. The same command goes on where it was interrupted.
    """
    from hpctrain.data.convert import npz
    from hpctrain.data.convert.common import LeftOut
    from hpctrain.data.files import require_new

    require_new(out, overwrite)  # before a large file is read
    packed = npz.load(file)
    with progress(f"converting {file.name}", len(packed.labels[:limit])) as advance:
        npz.convert(
            packed,
            out,
            _class_names(names_file),
            size=None if size is None else (size, size),
            fit=fit,
            channels=int(channels),
            keep_files=keep_files,
            max_pixels=max_pixels,
            threads=threads,
            limit=limit,
            overwrite=overwrite,
            advance=advance,
        )
    beyond = tuple(f"image {number}" for number in range(len(packed.labels))[limit:]) if limit else ()
    _report(out, as_json, [LeftOut("beyond --limit", beyond)] if beyond else [])


@convert.command("folder")
@click.argument("directory", type=_INPUT)
@click.argument("out", type=_OUTPUT)
@click.option("--size", type=_SIDE, required=True, help="Side of the square images, in pixels.")
@click.option(
    "--fit", type=_FITS, default="crop", show_default=True, help="Cut out the centre (crop), or change the aspect (squash)."
)
@click.option(
    "--channels", type=click.Choice(["1", "3"]), default="3", show_default=True, help="Number of channels: grey (1) or RGB (3)."
)
@_keep_option
@_pixels_option
@click.option(
    "--skip-unreadable", is_flag=True, help="Leave out what cannot be read or decoded, and list it; the exit code is 2 then."
)
@_names_option
@_threads_option
@_overwrite_option
@_json_option
def convert_folder(
    directory: Path,
    out: Path,
    size: int,
    fit: Any,
    channels: str,
    keep_files: bool,
    max_pixels: int | None,
    skip_unreadable: bool,
    names_file: Path | None,
    threads: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Convert a tree of picture files.

    The tree is DIRECTORY/<class>/.../<name>.jpg, .png, .webp, .tif, .bmp, .gif or another format that Pillow decodes. Links are
    followed. The same command goes on where it was interrupted.
    """
    from hpctrain.data.convert import folder
    from hpctrain.data.files import require_new

    require_new(out, overwrite)  # before many directories are listed
    tree = folder.scan(directory, _class_names(names_file), skip_unreadable=skip_unreadable)
    with progress(f"converting {directory.name}", len(tree.files)) as advance:
        skipped = folder.convert(
            tree,
            out,
            size=(size, size),
            fit=fit,
            channels=int(channels),
            keep_files=keep_files,
            max_pixels=max_pixels,
            skip_unreadable=skip_unreadable,
            threads=threads,
            overwrite=overwrite,
            advance=advance,
        )
    _report(out, as_json, folder.left_out(tree, skipped))


def _report(out: Path, as_json: bool, left_out: Sequence[LeftOut] = ()) -> None:
    """Print what was converted and what was left out, and exit with an error if a part of the source could not be read."""
    from hpctrain.data.convert.common import ConvertedFile

    made = ConvertedFile.of(out, left_out)
    echo_block(json.dumps(made.to_json(), indent=1) if as_json else str(made))
    if any(one.unreadable for one in left_out):
        raise SystemExit(USER_ERROR)


def _class_names(names_file: Path | None) -> Sequence[str] | None:
    if names_file is None:
        return None
    from hpctrain.data.convert.common import read_names
    from hpctrain.data.image_file import ImageFile

    return ImageFile.open(names_file).class_names if names_file.suffix in (".h5", ".hdf5") else read_names(names_file)


def _numbers(values: Any) -> str:
    return " ".join(f"{value:.4f}" for value in values.tolist())
