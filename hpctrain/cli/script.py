"""`hpctrain script`: a program of the user's own, kept and ended as a run is."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import click

from hpctrain.cli.arguments import FilePath
from hpctrain.cli.failure import job_ends_on_error
from hpctrain.core.errors import ConfigError
from hpctrain.flight import start_records
from hpctrain.launch.launcher import detect
from hpctrain.core.text import echo

#: that ranks which have not started MPI yet may take to do it, where one of them ends the job
START_SECONDS = 60.0


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("file", type=FilePath(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def script(file: Path, arguments: tuple[str, ...]) -> None:
    """Run the Python program FILE, which calls hpctrain.start.

    A rank that ends by an error ends the job, also before MPI has started, and a parent process says so of one that is killed.
    ARGUMENTS are those of the program.
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
        sys.stdout.flush()
        sys.stderr.flush()
        abort(code)
        raise SystemExit(code)


def _left_by(file: Path, arguments: tuple[str, ...]) -> SystemExit:
    """The way in which a program has left, once it has.

    Raises:
        ConfigError: there is no such file.
    """
    if not file.is_file():
        raise ConfigError(f"There is no program {file}; give the path of a Python file.")
    sys.argv[:] = [str(file), *arguments]
    sys.path[0] = str(file.resolve().parent)
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as left:
        return left
    return SystemExit()
