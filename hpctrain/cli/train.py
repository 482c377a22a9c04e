"""`hpctrain train` and `hpctrain eval`: set threads, start the communication, build the experiment, run it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.arguments import FILE, OVERRIDES, PASS_STYLE, FilePath, OutputFile, check_output
from hpctrain.cli.job_process import ConfiguredProcess
from hpctrain.cli.failure import job_ends_on_error
from hpctrain.cli.log_ranks import log_ranks_option
from hpctrain.launch.exit_codes import FINISHED, STOPPED
from hpctrain.launch.signals import SignalWatch

if TYPE_CHECKING:
    from hpctrain.job.session import Session
    from hpctrain.train.reporting import ProgressStyle
    from hpctrain.train.progress_bar import PassStyle

COMPUTE_ONLY_STEPS = 20
_PRINTED = "-"  # in place of a file's name


@click.command()
@FILE
@OVERRIDES
@click.option(
    "--resume",
    type=FilePath(),
    metavar="auto|best|PATH",
    help="Go on from this run directory or checkpoint file; auto takes the newest valid one of the newest run of this name, best "
    "goes back to the best one.",
)
@click.option("--steps", type=click.IntRange(min=0), default=0, help="Stop after this many steps; 0 trains all epochs.")
@click.option(
    "--compute-only",
    is_flag=True,
    help="Time steps without communication, then communication alone; 20 steps, unless --steps says otherwise.",
)
@click.option(
    "--smoke",
    is_flag=True,
    help="Try FILE within a minute: all of it for a few steps on small made-up images; its run directory is removed then.",
)
@click.option(
    "--progress",
    "style",
    type=click.Choice(["bar", "lines", "none"]),
    help="Show where training is by a bar, a line at every interval, or not at all; by default a bar on a terminal, else lines.",
)
@click.option(
    "--schedule-from",
    type=FilePath(),
    metavar="RUN",
    help="Average gradients in the slices and the order of this run, a directory or a checkpoint file, to repeat it bit by bit.",
)
@click.option(
    "--stopped-file",
    type=OutputFile(streams=True, of_job=True),
    help="Write this file and leave with 0 in place of 85, after which some launchers would kill the other ranks.",
)
@log_ranks_option
@click.pass_obj
def train(
    watch: SignalWatch | None,
    file: Path,
    overrides: tuple[str, ...],
    resume: str | None,
    steps: int,
    compute_only: bool,
    smoke: bool,
    style: ProgressStyle | None,
    schedule_from: str | None,
    stopped_file: Path | None,
    log_ranks: str,
) -> None:
    """Train the model of FILE.

    OVERRIDES such as optimizer.lr=0.2 win over the file.
    SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGHUP end the run after a step with a checkpoint and exit code 85.
    """
    _check_options(resume, steps, schedule_from, compute_only=compute_only, smoke=smoke)
    watch = watch or SignalWatch()
    goes_on = {"resume": resume is not None, "schedule_from": schedule_from is not None}
    job = ConfiguredProcess(watch, log_ranks, smoke=smoke, steps=steps, compute_only=compute_only, **goes_on)
    if compute_only:
        watch.end_at_once()

    def work(session: Session, source: str | None, repeated: str | None, complete: Callable[[], None]) -> bool:
        from hpctrain.run.training import run_training

        return run_training(
            session,
            watch,
            resume=source,
            steps=steps,
            schedule_from=repeated,
            style=style,
            memory=job.memory,
            complete=complete,
        )

    stopped = False
    with job_ends_on_error(job.rank, job.abort, job.failed):
        job.refuse_alone()
        if compute_only:
            session = job.start(file, (*overrides, "trace=true"))
            from hpctrain.run.training import run_compute_only

            run_compute_only(session, steps or COMPUTE_ONLY_STEPS, style)
        else:
            stopped = job.train(file, overrides, work, resume, schedule_from)
        job.finish()
    if smoke and not stopped:
        _remove_trial(job)
    if stopped and stopped_file is not None:
        if job.rank() == 0:
            stopped_file.touch()
        stopped = False
    if stopped or job.memory.shrunk:
        job.leave(STOPPED if stopped else FINISHED)


def _check_options(resume: str | None, steps: int, schedule_from: str | None, *, compute_only: bool, smoke: bool) -> None:
    """Refuse options that contradict each other.

    Raises:
        click.UsageError: names the one to leave out.
    """
    if compute_only and resume is not None:
        raise click.UsageError("--compute-only trains nothing that could be resumed; leave --resume out.")
    if compute_only and schedule_from is not None:
        raise click.UsageError("--compute-only averages nothing over ranks; leave --schedule-from out.")
    others = {"--resume": resume, "--steps": steps, "--compute-only": compute_only, "--schedule-from": schedule_from}
    if smoke and any(others.values()):
        option = next(name for name, given in others.items() if given)
        raise click.UsageError(f"--smoke tries a training that is not there yet; leave {option} out.")


def _remove_trial(job: ConfiguredProcess) -> None:
    """Rank 0 removes the run directory of a trial that has passed, which no rank writes to any more, and says so."""
    if job.rank() == 0 and job.memory.directory is not None:
        from hpctrain.run.smoke import remove_run

        print(remove_run(job.memory.directory), flush=True)


@click.command()
@FILE
@OVERRIDES
@click.option(
    "--checkpoint",
    type=FilePath(),
    default="auto",
    metavar="auto|best|PATH",
    help="Checkpoint file or run directory to evaluate; auto takes the newest one of the newest run of this name, best "
    "the one with the best evaluation.",
)
@click.option("--averaged", is_flag=True, help="Evaluate the average of the weights, which a training with ema.decay keeps.")
@click.option("--per-class", is_flag=True, help="Print the accuracy of each class, too, the worst first.")
@click.option(
    "--confusion",
    type=OutputFile(streams=True, of_job=True),
    metavar="[FILE]",
    is_flag=False,
    flag_value=_PRINTED,
    help="Count which class was taken for which, and write it to FILE, .json or .csv; without FILE it is printed.",
)
@click.option("--flip", is_flag=True, help="Average the probabilities of each image and its mirror image.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
@PASS_STYLE
@log_ranks_option
def evaluate(
    file: Path,
    overrides: tuple[str, ...],
    checkpoint: str,
    averaged: bool,
    per_class: bool,
    confusion: Path | None,
    flip: bool,
    as_json: bool,
    style: PassStyle | None,
    log_ranks: str,
) -> None:
    """Evaluate a checkpoint on the test set of FILE."""
    prints = confusion == Path(_PRINTED)
    target = None if prints else confusion
    if target is not None and target.suffix not in (".json", ".csv"):
        raise click.UsageError(f"--confusion {target} is no file that ends in .json or .csv; leave the name out to print it.")
    counts = per_class or confusion is not None
    job = ConfiguredProcess(log_ranks=log_ranks, averaged=averaged, flip=flip, counts=counts)
    with job_ends_on_error(job.rank, job.abort, job.failed):
        session = job.start(file, overrides, checkpoint)
        from hpctrain.cli.result_tables import print_json, print_text, write_confusion
        from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
        from hpctrain.run.evaluation import run_evaluation
        from hpctrain.train.progress_bar import pass_on_stderr

        if target is not None:
            raise_on_all_ranks(
                session.world, lambda: check_output(target, "--confusion", streams=True) if session.is_root else None
            )
        bar = partial(pass_on_stderr, style, visible=session.is_root, description="evaluation")
        evaluation = run_evaluation(session, checkpoint, averaged=averaged, flip=flip, confusion=counts, show=bar)
        if session.is_root:
            show = print_json if as_json else print_text
            show(evaluation, per_class=per_class, confusion=prints)
            if target is not None:
                write_confusion(evaluation, target)
        job.finish()
