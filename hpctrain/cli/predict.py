"""`hpctrain predict`: pictures of any kind to class names and probabilities, by a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.arguments import PASS_STYLE, FilePath
from hpctrain.cli.job_process import ConfiguredProcess
from hpctrain.cli.failure import job_ends_on_error
from hpctrain.launch.exit_codes import USER_ERROR
from hpctrain.launch.launcher import detect
from hpctrain.launch.threads import set_threads
from hpctrain.core.text import echo

if TYPE_CHECKING:
    from hpctrain.config.schema import Config
    from hpctrain.core.yaml_source import Source
    from hpctrain.train.progress_bar import PassStyle

_RUNS = Path("runs")
_MOST_LISTED = 20


@click.command()
@click.argument("places", metavar="IMAGE...", nargs=-1, required=True, type=FilePath(path_type=Path))
@click.option(
    "--checkpoint",
    type=FilePath(),
    default="auto",
    metavar="auto|best|PATH",
    help="Checkpoint file or run directory that predicts; auto takes the newest run that has a checkpoint, best the best "
    "checkpoint of the newest run that has one.",
)
@click.option(
    "--runs",
    type=FilePath(file_okay=False, path_type=Path),
    help="Directory in which auto and best look for runs, of any name; by default runs.",
)
@click.option(
    "--config",
    "file",
    type=FilePath(dir_okay=False, path_type=Path),
    help="Configuration file in place of the checkpoint's own one, needed for code of your own; auto and best take its runs.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Key of the configuration that has another value.")
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Number of classes shown of each image.")
@click.option("--flip", is_flag=True, help="Average the probabilities of each image and its mirror image.")
@click.option("--averaged", is_flag=True, help="Predict with the average of the weights, which a training with ema.decay keeps.")
@click.option(
    "--fit",
    type=click.Choice(["crop", "squash"]),
    help="Cut out the centre (crop), or change the aspect (squash); by default as the evaluated data file was made.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="Number of images that all ranks compute at once; by default as evaluation, at most 64 of each rank.",
)
@click.option("--max-pixels", type=click.IntRange(1), help="Number of pixels of the largest image; by default 178,956,970.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per image, each on a line of its own.")
@PASS_STYLE
def predict(
    places: tuple[Path, ...],
    checkpoint: str,
    runs: Path | None,
    file: Path | None,
    overrides: tuple[str, ...],
    top: int,
    flip: bool,
    averaged: bool,
    fit: str | None,
    batch: int | None,
    max_pixels: int | None,
    as_json: bool,
    style: PassStyle | None,
) -> None:
    """Predict the classes of images.

    IMAGE is a picture file (JPEG, PNG, WebP, TIFF and others), or a directory with some. A run directory says all that is needed
    of the model, so that no configuration is. Images that cannot be decoded are named, and the others go on; the exit code is 2
    then.
    """
    if file is not None and runs is not None:
        raise click.UsageError("--config says where its runs are; leave --runs out, or --config.")
    job = ConfiguredProcess(top=top, flip=flip, averaged=averaged, fit=fit, batch=batch)
    chosen = _Choice(checkpoint, runs or _RUNS, file, overrides)
    with job_ends_on_error(job.rank, job.abort, job.failed):
        session = job.start_from(chosen.read)
        from hpctrain.cli.prediction_tables import print_lines, print_table
        from hpctrain.run.prediction import PredictionRequest, run_prediction
        from hpctrain.train.progress_bar import pass_on_stderr

        source: str = session.world.broadcast_object(chosen.source)
        request = PredictionRequest(places, top, flip, averaged, fit, batch, max_pixels)
        predictions = run_prediction(session, source, request)
        show = print_lines if as_json else print_table
        with pass_on_stderr(style, len(predictions.files), visible=session.is_root, description="prediction") as advance:
            broken = show(predictions.counted(advance), visible=session.is_root)
        job.finish()
    if broken:
        if job.rank() == 0:
            echo(_sentence(broken, len(predictions.files)), err=True)
        job.leave(USER_ERROR)


def _sentence(broken: Sequence[Path], pictures: int) -> str:
    """The last words, where some pictures were not predicted."""
    shown = ", ".join(os.fsencode(path).decode(errors="replace") for path in broken[:_MOST_LISTED])
    more = f", and {len(broken) - _MOST_LISTED} more" if len(broken) > _MOST_LISTED else ""
    return f"hpctrain: {len(broken)} of {pictures} images could not be predicted: {shown}{more}."


class _Choice:
    """The run that the options choose.

    Attributes:
        source: what `find_checkpoint` takes, once the configuration was read.
    """

    def __init__(self, checkpoint: str, directory: Path, file: Path | None, overrides: tuple[str, ...]) -> None:
        self.source = checkpoint
        self._directory, self._file, self._overrides = directory, file, overrides

    def read(self) -> tuple[Config, Source]:
        """The configuration, with the defaults for all that concerns other ranks than those of this job."""
        set_threads(detect(os.environ), None)  # before NumPy is loaded, which a checkpoint alone may need to be read
        from hpctrain.cli.loading import load_config
        from hpctrain.run.stored_run import FRESH, find_run

        if self._file is not None:
            return load_config(self._file, (*FRESH, *self._overrides))
        run = find_run(self.source, self._directory)
        self.source = run.source
        return run.parsed(self._overrides)
