"""The training in a command line is found, and gets another word; everything else stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch.train_command import TrainCommand

_MPIEXEC = ["mpiexec", "-n", "4", "python", "-m", "mpi4py", "-m", "hpctrain", "train", "a.yaml", "batch=8", "--steps", "3"]
_SRUN = ["/usr/bin/srun", "--mpi=pmix", "-n", "4", "python", "-m", "mpi4py", "-m", "hpctrain", "train", "a.yaml"]


@pytest.mark.parametrize("words", [_MPIEXEC, _SRUN, ["hpctrain", "train", "a.yaml"], ["x/bin/hpctrain", "train", "a.yaml"]])
def test_a_training_is_found(words: list[str]) -> None:
    assert TrainCommand.find(words).training[0] == "a.yaml"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("sleep 3", "no training"),
        ("hpctrain eval a.yaml", "no training"),
        ("train a.yaml", "no training"),
        ("hpctrain train a.yaml : hpctrain train b.yaml", "2 trainings"),
    ],
)
def test_other_commands_are_refused(command: str, found: str) -> None:
    with pytest.raises(LaunchError, match=f'"{command}" has {found} in it; it must have the words hpctrain train FILE once'):
        TrainCommand.find(command.split())


def test_a_shell_line_is_one_word_and_refused() -> None:
    with pytest.raises(LaunchError, match="no training"):
        TrainCommand.find(["bash", "-c", "hpctrain train a.yaml"])


@pytest.mark.parametrize("earlier", [[], ["--resume", "auto"], ["--resume=runs/old"]])
def test_a_resumed_command_has_one_resume(earlier: list[str]) -> None:
    resumed = TrainCommand.find([*_MPIEXEC, *earlier]).resumed(Path("runs/a-1"))
    at = _MPIEXEC.index("train") + 1
    assert list(resumed.words) == [*_MPIEXEC[:at], "--resume", "runs/a-1", *_MPIEXEC[at:]]
    assert TrainCommand.find(resumed.words) == resumed
    assert resumed.resumed(Path("runs/a-1")) == resumed


@pytest.mark.parametrize(
    ("given", "option"),
    [([], "--exclude=n3,n7"), (["-x", "n1"], "--exclude=n1,n3,n7"), (["--exclude=n3"], "--exclude=n3,n7")],
)
def test_nodes_are_left_out_beside_those_that_were(given: list[str], option: str) -> None:
    command = TrainCommand.find([_SRUN[0], *given, *_SRUN[1:]])
    excluding = command.excluding(["n3", "n7"])
    assert list(excluding.words) == [_SRUN[0], option, *_SRUN[1:]]
    assert TrainCommand.find(excluding.words) == excluding


def test_srun_is_known_by_its_name() -> None:
    assert TrainCommand.find(_SRUN).uses_srun
    assert not TrainCommand.find(_MPIEXEC).uses_srun
