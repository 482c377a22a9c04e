"""A job's script written where its runs lie, and handed to the scheduler; without one it is started in the background."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from hpctrain.core.errors import LaunchError
from hpctrain.core.text import shell_word
from hpctrain.site.job import JobFiles, SiteJob
from hpctrain.site.profile_files import Site
from hpctrain.site.script import ENDINGS, render
from hpctrain.storage.atomic_write import write_text

_FOLDER = "jobs"
_SUBMIT_SECONDS = 120
_IN_BACKGROUND = 'setsid bash "$1" </dev/null >>"$2" 2>&1 & echo $!'
_COMMANDS = {"slurm": ("sbatch", "--parsable"), "pbs": ("qsub",)}


@dataclass(frozen=True)
class Submission:
    """An accepted job. number: of the job, or of the process. lines: how to follow and stop it. script: path of its script."""

    number: str
    lines: tuple[str, ...]
    script: str


def job_files(site: Site, name: str, output: Path, train: Sequence[str]) -> JobFiles:
    """Return the paths of a job's files: next to the runs, below `output`, named after the run and the time in UTC.

    Args:
        name: of the run. train: configuration and overrides.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("-.") or "run"
    logs, ending = output / _FOLDER, ENDINGS[site.profile.scheduler]
    begun = f"{plain}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    stems = (begun if number == 1 else f"{begun}-{number}" for number in count(1))
    stem = next(stem for stem in stems if not os.path.lexists(logs / f"{stem}{ending}"))
    log = str(logs / f"{stem}.log")
    if site.profile.scheduler == "slurm":  # a requeued job keeps its number; other scripts write their log themselves
        log = f"{str(logs).replace('%', '%%')}/{stem}-%j.log"
    return JobFiles(
        name=plain,
        script=str(logs / f"{stem}{ending}"),
        logs=str(logs),
        log=log,
        train=tuple(train),
        environment=_environment(),
    )


def _environment() -> str:
    """The virtual or conda environment of this Python; empty where it is the system's."""
    isolated = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()
    return sys.prefix if isolated else ""


def submit(site: Site, job: SiteJob) -> Submission:
    """Write the script and hand it over.

    Raises:
        LaunchError: the scheduler's command is missing or refuses the job. OSError: the script cannot be written.
    """
    job = _reserved(job)
    try:
        write_text(Path(job.script), render(site, job))
    except BaseException:
        Path(job.script).unlink(missing_ok=True)
        raise
    command = _COMMANDS.get(site.profile.scheduler)
    if command is None:
        return _started(job)
    number = _number([*command, job.script])
    return Submission(number, _following(site, job, number), job.script)


def _reserved(job: SiteJob) -> SiteJob:
    """Return the job with a script and a log of its own, even if another job is submitted in the same second.

    Creates the script as an empty file, which reserves its name.
    """
    script = Path(job.script)
    script.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        stem = script.stem if number == 1 else f"{script.stem}-{number}"
        named = script.with_name(f"{stem}{script.suffix}")
        with contextlib.suppress(FileExistsError):
            os.close(os.open(named, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            log = Path(job.log).with_name(Path(job.log).name.replace(script.stem, stem, 1))
            return replace(job, script=str(named), log=str(log))
    raise AssertionError("unreachable")


def _number(command: Sequence[str]) -> str:
    """The number that the scheduler gives to a job."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SUBMIT_SECONDS, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"There is no {command[0]} on PATH; submit on a login node of the site, or print the script with --dry-run."
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{command[0]} did not answer within {_SUBMIT_SECONDS} s; look whether it has taken {command[-1]}."
        ) from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise LaunchError(f"{command[0]} refuses {command[-1]}: {words.rstrip('.')}.")
    # Slurm puts the cluster's name behind a semicolon.
    return done.stdout.strip().partition(";")[0]


def _following(site: Site, job: SiteJob, number: str) -> tuple[str, ...]:
    log, number = job.log, shell_word(number)
    if site.profile.scheduler == "pbs":
        follow = f"qstat {number}"
        stop = f"touch {shell_word(f'{job.logs}/no-restart')}; qsig -s USR1 {number}"
    else:
        log = re.sub("%[j%]", lambda match: number if match[0] == "%j" else "%", log)
        follow = f"squeue --jobs={number}"
        stop = f"scontrol update JobId={number} Requeue=0; scancel --signal=USR1 {number}"
    following = _with_commands("follow it:", follow, f"tail -F {shell_word(log)}")
    return (*following, *_with_commands("stop it with a checkpoint, for good:", stop))


def _with_commands(title: str, *commands: str) -> tuple[str, ...]:
    """A title, and commands to copy on lines of their own."""
    return (title, *(f"  {command}" for command in commands))


def _started(job: SiteJob) -> Submission:
    """The script as a process of its own session, which outlives this one and its terminal."""
    start = ["bash", "-c", _IN_BACKGROUND, "start", job.script, job.log]
    done = subprocess.run(start, stdout=subprocess.PIPE, text=True, timeout=_SUBMIT_SECONDS, check=True)
    number = done.stdout.strip()
    follow = _with_commands("follow it:", f"tail -F {shell_word(job.log)}")
    return Submission(number, (*follow, *_with_commands("stop it with a checkpoint:", f"kill -USR1 {number}")), job.script)
