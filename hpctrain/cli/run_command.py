"""`hpctrain run`: restart a training that fails. It loads neither MPI nor NumPy; only the training does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.arguments import Finite
from hpctrain.core.errors import LaunchError
from hpctrain.core.files import open_own
from hpctrain.core.text import echo

if TYPE_CHECKING:
    from hpctrain.launch.supervisor import Attempt, TrainCommand

#: name of the file in the output directory with one line per attempt
ATTEMPTS_FILE = "restarts.jsonl"


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Maximum number of consecutive restarts without a new checkpoint.",
)
@click.option(
    "--pause",
    type=Finite(min=0),
    default=5.0,
    show_default=True,
    help="Pause before a restart, in seconds; it doubles up to 300 with each failure without a new checkpoint.",
)
@click.option("--requeue", is_flag=True, help="Also restart after exit code 85 (time limit reached).")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(restarts: int, pause: float, requeue: bool, command: tuple[str, ...]) -> None:
    """Start a training, and restart it if it fails.

    A restart resumes from the newest checkpoint, or starts from scratch if there is none. COMMAND includes the launcher: hpctrain
    run -- mpiexec -n 4 python -m mpi4py -m hpctrain train FILE. A signal that stops the training is passed on, and no restart
    follows. The exit code is that of the last attempt.
    """
    from hpctrain.launch.supervisor import RestartPolicy, Supervisor, TrainCommand, summary

    training = TrainCommand.find(command)
    _refuse_ranks()
    output, name = _output_and_name(training)
    from hpctrain.launch import processes
    from hpctrain.launch.supervisor import SupervisedCommand
    from hpctrain.runs.attempts import RunTraces
    from hpctrain.runs.owner import SUPERVISOR

    rules = RestartPolicy(restarts, pause, requeue, excludes=training.uses_srun and "SLURM_JOB_ID" in os.environ)
    os.environ[SUPERVISOR] = str(processes.own_mark())
    traces, runner = RunTraces(output, name, os.environ[SUPERVISOR]), SupervisedCommand(_say)
    supervisor = Supervisor(training, rules, runner, look=traces.look, keep=lambda done: _keep(output, name, done), say=_say)
    try:
        code = supervisor.run()
    finally:
        runner.close()
        if len(supervisor.attempts) > 1 or (supervisor.attempts and supervisor.attempts[-1].code):
            for line in summary(supervisor.attempts):
                _say(line)
    raise SystemExit(code)


def _refuse_ranks() -> None:
    """Raise if this process is a rank, because `hpctrain run` must start the launcher itself.

    Raises:
        LaunchError: this process is a rank.
    """
    from hpctrain.launch.launcher import detect

    launcher = detect(os.environ)
    if launcher.rank is not None:
        raise LaunchError(
            f"hpctrain run was started by {launcher.name} as one of several ranks; start it once, without a launcher, and pass "
            "the launcher's command to it."
        )


def _output_and_name(command: TrainCommand) -> tuple[Path, str]:
    """Return the output directory and the name of the training's run, from its configuration.

    Raises:
        ConfigError: the configuration has a fault.
        click.UsageError: the options of the training have a fault.
    """
    from hpctrain.cli.train import train
    from hpctrain.process.start import load_config

    words = list(command.training)
    if "--help" in words or "-h" in words:
        raise click.UsageError("--help in the command starts no training; run hpctrain train --help instead.")
    given: dict[str, Any] = train.make_context("hpctrain train", words).params
    if given["compute_only"]:
        raise click.UsageError("--compute-only does not train and cannot be restarted; leave it out.")
    config, _ = load_config(given["file"], given["overrides"])
    return Path(config.output), config.name


def _keep(output: Path, name: str, attempt: Attempt) -> None:
    """Append an attempt to `ATTEMPTS_FILE` in the output directory."""
    line = json.dumps({"name": name, **attempt.as_json()})
    try:
        output.mkdir(parents=True, exist_ok=True)
        with open(open_own(output / ATTEMPTS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        _say(f"{output / ATTEMPTS_FILE} cannot be written: {error.strerror}")


def _say(sentence: str) -> None:
    echo(f"hpctrain run: {sentence}", err=True)
