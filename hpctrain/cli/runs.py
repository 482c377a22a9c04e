"""`hpctrain report`: runs as one HTML page that people look at."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.arguments import FilePath, OutputFile
from hpctrain.cli.job_process import ConfiguredProcess
from hpctrain.cli.failure import job_ends_on_error
from hpctrain.launch.launcher import detect
from hpctrain.launch.threads import set_threads
from hpctrain.core.text import echo

if TYPE_CHECKING:
    from hpctrain.config.schema import Config
    from hpctrain.core.yaml_source import Source
    from hpctrain.report.judged_set import JudgedSet
    from hpctrain.report.page import Page

_MOST_PICTURES = 24


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=FilePath(path_type=Path))
@click.option(
    "--out",
    type=OutputFile(streams=True, of_job=True),
    help="File of the page; by default report.html in the directory of a single RUN, and in this directory for several.",
)
@click.option("--png", type=FilePath(file_okay=False, path_type=Path), help="Directory to which each figure is written as PNG.")
@click.option(
    "--test",
    "judges",
    is_flag=True,
    help="Judge the configured test set by the newest checkpoint of a single RUN: confusions, and pictures right and wrong.",
)
def report(runs: tuple[Path, ...], out: Path | None, png: Path | None, judges: bool) -> None:
    """Make a page of one run or of several, to look at.

    The page is one HTML file that needs no network: curves, where the time of a traced step went, events, checkpoints, the
    configuration and how it differs between runs. A RUN is a run directory, which may go on meanwhile.
    """
    from hpctrain.core.errors import ConfigError
    from hpctrain.report.figures import check_matplotlib

    if judges and len(runs) > 1:
        raise ConfigError(f"--test judges the test set of one run, and there are {len(runs)}; give one, or leave --test out.")
    check_matplotlib()
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if not judges:
        write_report(runs, target, png)
        return
    job = ConfiguredProcess()
    with job_ends_on_error(job.rank, job.abort, job.failed):
        results = _judged(job, runs[0])
        if job.rank() == 0:
            write_report(runs, target, png, results)
        job.finish()


def _judged(job: ConfiguredProcess, run: Path) -> list[JudgedSet]:
    """The test set of a run. Collective."""

    def read() -> tuple[Config, Source]:
        set_threads(detect(os.environ), None)  # before NumPy is loaded
        if job.rank() == 0:
            import matplotlib.font_manager  # noqa: F401  may start a process to list fonts: no one should once MPI runs
        from hpctrain.run.stored_run import find_run

        return find_run(str(run), run.parent).parsed(())

    session = job.start_from(read)
    from hpctrain.experiment.judgement import judge
    from hpctrain.report.judged_set import result_of

    return [result_of(run.resolve().name, judge(session, str(run), _MOST_PICTURES))]


def write_report(runs: Sequence[Path], target: Path, png: Path | None, results: Sequence[JudgedSet] = ()) -> None:
    """Write the page, and say where it is.

    Raises:
        ConfigError: a place that cannot be written to. CheckpointError, DataError: as `read_runs`.
    """
    from hpctrain.report.contents import report_page
    from hpctrain.report.page import html
    from hpctrain.report.record import read_runs
    from hpctrain.storage.atomic_write import write_text

    page = report_page(read_runs(runs), results)
    text = html(page)
    _write(target, lambda: write_text(target, text))
    echo(f"{target}: {len(text.encode()) / 1e6:.2f} MB")
    if png is not None:
        _write(png, lambda: png.mkdir(parents=True, exist_ok=True))
        _write_figures(page, png)


def _write_figures(page: Page, directory: Path) -> None:
    from hpctrain.report.figures import write_png

    for drawing in page.drawings:
        path = directory / f"{drawing.key}.png"
        _write(path, partial(write_png, drawing, path))
    echo(f"{directory}: {len(page.drawings)} pictures")


def _write(path: Path, write: Callable[[], object]) -> None:
    from hpctrain.core.errors import ConfigError

    try:
        write()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}); give another path.") from error
