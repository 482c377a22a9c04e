"""The commands that run on ranks: `hpctrain train`, `hpctrain eval`, `hpctrain predict` and `hpctrain script`.

Except for `script`, which runs a user's program, each command sets the number of threads, loads the modules that it needs, starts
MPI and runs its work.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from hpctrain.cli.arguments import (
    AUTO,
    FILE,
    OVERRIDES,
    PASS_STYLE,
    RUNS,
    FilePath,
    OutputFile,
    check_output,
    log_ranks_option,
    with_auto,
)
from hpctrain.core.errors import ConfigError
from hpctrain.core.text import echo
from hpctrain.flight import start_records
from hpctrain.launch.launcher import detect
from hpctrain.launch.process_end import STOPPED, USER_ERROR, flush_to_reader
from hpctrain.launch.signals import SignalWatch
from hpctrain.launch.threads import set_threads
from hpctrain.process.ends import job_ends_on_error
from hpctrain.process.rank import RankProcess
from hpctrain.process.start import load_config

if TYPE_CHECKING:
    from hpctrain.config.schema import Config
    from hpctrain.core.yaml_source import Source
    from hpctrain.training.progress_bar import PassStyle
    from hpctrain.training.reporting import ProgressStyle


COMPUTE_ONLY_STEPS = 20


@click.command()
@FILE
@OVERRIDES
@AUTO
@click.option(
    "--resume",
    type=FilePath(),
    metavar="auto|best|PATH",
    help="Resume from this run directory or checkpoint file; auto: from the newest valid checkpoint of the newest run of this "
    "name; best: from its checkpoint with the best evaluation.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    default=0,
    help="Number of steps after which to stop, counted from the start or resume; 0 trains all epochs.",
)
@click.option(
    "--compute-only",
    is_flag=True,
    help="Time steps without communication, then communication alone; 20 steps unless --steps is given.",
)
@click.option(
    "--smoke",
    is_flag=True,
    help="Run the whole pipeline of FILE in about a minute, on synthetic images; the run directory is deleted afterwards.",
)
@click.option(
    "--progress",
    "style",
    type=click.Choice(["bar", "lines", "none"]),
    help="Show the progress as a bar or as a line per interval, or print only warnings and errors (none); default: a bar on a "
    "terminal, lines elsewhere.",
)
@click.option(
    "--stopped-file",
    type=OutputFile(streams=True, of_job=True),
    help="If the run is stopped, write this file and exit with code 0 instead of 85, as some launchers kill the other ranks if "
    "one exits with another code.",
)
@log_ranks_option
@click.pass_obj
def train(
    watch: SignalWatch | None,
    file: Path,
    overrides: tuple[str, ...],
    auto: bool,
    resume: str | None,
    steps: int,
    compute_only: bool,
    smoke: bool,
    style: ProgressStyle | None,
    stopped_file: Path | None,
    log_ranks: str,
) -> None:
    """Train the model of FILE.

    OVERRIDES such as optimizer.lr=0.2 override keys of the file. On SIGINT (Ctrl-C), SIGTERM, SIGUSR1 or SIGHUP, the run finishes
    the current step, writes a checkpoint and exits with code 85.
    """
    _check_options(resume, steps, compute_only=compute_only, smoke=smoke)
    watch = watch or SignalWatch()
    overrides = with_auto(overrides, auto=auto)
    job = RankProcess(
        log_ranks=log_ranks,
        smoke=smoke,
        steps=steps,
        compute_only=compute_only,
        resume=resume is not None,
    )
    stopped = False
    with job_ends_on_error(job.rank, job.abort, job.failed):
        job.refuse_alone()
        if compute_only:
            watch.end_at_once()
            session = job.session(partial(load_config, file, (*overrides, "trace=true")), trains=True)
            from hpctrain.run.training import run_compute_only

            run_compute_only(session, steps or COMPUTE_ONLY_STEPS, style)
        else:
            session = job.session(partial(load_config, file, overrides), trains=True, resume=resume)
            from hpctrain.run.training import TrainingRequest, run_training

            end = run_training(session, watch, TrainingRequest(resume, steps, style, trial=smoke), job.ownership)
            stopped = end.reason is not None
        job.finish()
    if smoke and not stopped and job.rank() == 0:  # no rank writes to the directory any more
        from hpctrain.run.smoke import remove_run

        message = remove_run(end.directory.path)
        if style != "none":
            print(message, flush=True)
    if stopped and stopped_file is not None:
        if job.rank() == 0:
            stopped_file.touch()
    elif stopped:
        job.leave(STOPPED)


def _check_options(resume: str | None, steps: int, *, compute_only: bool, smoke: bool) -> None:
    """Raise if options contradict each other.

    Raises:
        click.UsageError: two options contradict each other; the message names the one to leave out.
    """
    if compute_only and resume is not None:
        raise click.UsageError("--compute-only does not train and cannot resume a run; leave --resume out.")
    others = {"--resume": resume, "--steps": steps, "--compute-only": compute_only}
    if smoke and any(others.values()):
        option = next(name for name, given in others.items() if given)
        raise click.UsageError(f"--smoke runs a short training from its first step; leave {option} out.")


@click.command()
@FILE
@OVERRIDES
@click.option(
    "--checkpoint",
    type=FilePath(),
    default="auto",
    metavar="auto|best|PATH",
    help="Checkpoint file or run directory to evaluate; auto: the newest checkpoint of the newest run of this name; best: its "
    "checkpoint with the best evaluation.",
)
@click.option(
    "--on",
    type=click.Choice(["test", "validation"]),
    help="Set to evaluate on; default: the test set or, if data.test is not set, the validation set.",
)
@click.option("--averaged", is_flag=True, help="Evaluate the averaged weights of a training with ema.decay.")
@click.option("--per-class", is_flag=True, help="Also print the accuracy of each class, the lowest first.")
@click.option("--confusion", is_flag=True, help="Also print the confusion matrix.")
@click.option("--flip", is_flag=True, help="Average the probabilities of each image and its mirror image.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@PASS_STYLE
@log_ranks_option
def evaluate(
    file: Path,
    overrides: tuple[str, ...],
    checkpoint: str,
    on: Literal["test", "validation"] | None,
    averaged: bool,
    per_class: bool,
    confusion: bool,
    flip: bool,
    as_json: bool,
    style: PassStyle | None,
    log_ranks: str,
) -> None:
    """Evaluate a checkpoint on a test or validation set."""
    counts = per_class or confusion
    job = RankProcess(log_ranks=log_ranks, on=on, averaged=averaged, flip=flip, counts=counts)
    with job_ends_on_error(job.rank, job.abort, job.failed):
        session = job.session(partial(load_config, file, overrides), resume=checkpoint)
        from hpctrain.cli.result_tables import print_json, print_text
        from hpctrain.run.evaluation import run_evaluation
        from hpctrain.training.progress_bar import pass_on_stderr

        bar = partial(pass_on_stderr, style, visible=session.is_root, description="evaluation")
        evaluation = run_evaluation(session, checkpoint, on=on, averaged=averaged, flip=flip, confusion=counts, show=bar)
        if session.is_root:
            show = print_json if as_json else print_text
            show(evaluation, per_class=per_class, confusion=confusion)
        job.finish()


_MOST_LISTED = 20


@click.command()
@click.argument("places", metavar="IMAGE...", nargs=-1, required=True, type=FilePath(path_type=Path))
@click.option(
    "--checkpoint",
    type=FilePath(),
    default="auto",
    metavar="auto|best|PATH",
    help="Checkpoint file or run directory to predict with; auto: the newest checkpoint of the newest run that has checkpoints; "
    "best: the best checkpoint of the newest run that has one.",
)
@click.option(
    "--runs",
    type=FilePath(file_okay=False, path_type=Path),
    help="Directory in which auto and best search for runs, regardless of their names; default: runs.",
)
@click.option(
    "--config",
    "file",
    type=FilePath(path_type=Path),
    metavar="FILE",
    help="Configuration file to use instead of the checkpoint's own; required if the run uses your own code. auto and best then "
    "search the runs of this configuration.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the configuration; may be given several times.",
)
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Number of classes to show per image.")
@click.option("--flip", is_flag=True, help="Average the probabilities of each image and its mirror image.")
@click.option("--averaged", is_flag=True, help="Predict with the averaged weights of a training with ema.decay.")
@click.option(
    "--fit",
    type=click.Choice(["crop", "squash"]),
    help="Fit images to the network by cropping the centre (crop) or by changing the aspect ratio (squash); default: as in the "
    "evaluated data file.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="Number of images per batch, over all ranks; default: that of the evaluation, at most 64 per rank.",
)
@click.option("--max-pixels", type=click.IntRange(1), help="Maximum number of pixels of an image; default: 178,956,970.")
@click.option("--json", "as_json", is_flag=True, help="Print one line with a JSON object per image.")
@click.option(
    "--csv",
    "csv_file",
    type=OutputFile(streams=True, of_job=True),
    help="Write a row per image to this file instead of printing a table: the image, and its classes with their probabilities.",
)
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
    csv_file: Path | None,
    style: PassStyle | None,
) -> None:
    """Predict the classes of images.

    IMAGE is a picture file (JPEG, PNG, WebP, TIFF and others), or a directory of pictures. No configuration file is needed: runs
    and checkpoints contain their configuration. If some images cannot be decoded, they are reported, the others are predicted,
    and the exit code is 2.
    """
    if file is not None and runs is not None:
        raise click.UsageError("--config already determines the directory of runs; leave --runs or --config out.")
    if as_json and csv_file is not None:
        raise click.UsageError("--json and --csv both replace the table; leave one of them out.")
    job = RankProcess(top=top, flip=flip, averaged=averaged, fit=fit, batch=batch)
    chosen = _Choice(checkpoint, runs or RUNS, file, overrides)
    with job_ends_on_error(job.rank, job.abort, job.failed):
        session = job.session(chosen.read)
        from hpctrain.cli.result_tables import print_lines, print_table, write_predictions
        from hpctrain.comm.base import raise_on_all_ranks
        from hpctrain.run.evaluation import PredictionRequest, run_prediction
        from hpctrain.training.progress_bar import pass_on_stderr

        source: str = session.world.broadcast_object(chosen.source)
        show = print_lines if as_json else print_table
        if csv_file is not None:
            raise_on_all_ranks(session.world, lambda: check_output(csv_file, "--csv", streams=True) if session.is_root else None)
            show = partial(write_predictions, path=csv_file)
        request = PredictionRequest(places, top, flip, averaged, fit, batch, max_pixels)
        predictions = run_prediction(session, source, request)
        with pass_on_stderr(style, len(predictions.files), visible=session.is_root, description="prediction") as advance:
            broken = show(predictions.counted(advance), visible=session.is_root)
        job.finish()
    if broken:
        if job.rank() == 0:
            echo(_sentence(broken, len(predictions.files)), err=True)
        job.leave(USER_ERROR)


def _sentence(broken: Sequence[Path], pictures: int) -> str:
    """Return the last line of the output if some pictures were not predicted."""
    shown = ", ".join(os.fsencode(path).decode(errors="replace") for path in broken[:_MOST_LISTED])
    more = f", and {len(broken) - _MOST_LISTED} more" if len(broken) > _MOST_LISTED else ""
    return f"hpctrain: {len(broken):,} of {pictures:,} images could not be predicted: {shown}{more}."


class _Choice:
    """The run or checkpoint that the options of `predict` select.

    Attributes:
        source: argument for `find_checkpoint`, final once `read` has returned.
    """

    def __init__(self, checkpoint: str, directory: Path, file: Path | None, overrides: tuple[str, ...]) -> None:
        self.source = checkpoint
        self._directory, self._file, self._overrides = directory, file, overrides

    def read(self) -> tuple[Config, Source]:
        """Return the selected configuration and its source.

        The training's settings of ranks, machine and duration are replaced (see `FRESH`).
        """
        set_threads(detect(os.environ), None)  # before NumPy is loaded: reading a checkpoint needs it
        from hpctrain.run.stored_run import FRESH, find_run

        if self._file is not None:
            return load_config(self._file, (*FRESH, *self._overrides))
        run = find_run(self.source, self._directory)
        self.source = run.source
        return run.parsed(self._overrides)


#: time limit for all ranks to start MPI if a rank ends the job before that
START_SECONDS = 60.0


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("file", type=FilePath(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def script(file: Path, arguments: tuple[str, ...]) -> None:
    """Run the Python program FILE, which calls hpctrain.start.

    If a rank fails, the whole job ends, even before MPI has started. Where possible, hpctrain starts a small parent process for
    each rank, which reports if the rank is killed. ARGUMENTS are passed to the program.
    """
    launcher = detect(os.environ)

    def abort(code: int) -> None:
        if launcher.starts_mpi:
            from hpctrain.comm import mpi

            mpi.abort_job(code, START_SECONDS)

    with job_ends_on_error(lambda: launcher.rank or 0, abort, start_records.failed):
        left = _left_by(file, arguments)
    if left.code not in (0, None):
        code = left.code if isinstance(left.code, int) else 1
        if code is not left.code:
            echo(left.code, err=True)
        flush_to_reader(0.0)
        abort(code)
        raise SystemExit(code)


def _left_by(file: Path, arguments: tuple[str, ...]) -> SystemExit:
    """Run a program and return its SystemExit, or an empty SystemExit if the program returns without one.

    Raises:
        ConfigError: the program does not exist, or is a configuration.
    """
    if file.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{file} is a YAML file, but a program must be a Python file; use `hpctrain train {file}`.")
    if file.is_dir():
        raise ConfigError(f"{file} is a directory, but a program must be a Python file; give the path of a file in it.")
    if not file.is_file():
        raise ConfigError(f"There is no program {file}; give the path of a Python file.")
    sys.argv[:] = [str(file), *arguments]
    sys.path[0] = str(file.resolve().parent)
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as left:
        return left
    return SystemExit()
