"""The tab key: a real shell completes commands, options, sites and keys."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_TRY = """
eval "$(hpctrain completion bash)"
compopt() { NO_BLANK=$2; }
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_hpctrain_completion hpctrain
echo "${COMPREPLY[*]}" "${NO_BLANK-}"
"""
_ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("hpctrain trai", "train"),
        ("hpctrain train --stopped", "--stopped-file"),
        ("hpctrain submit x.yaml --site lu", "lumi-c lumi-g"),
        ("hpctrain train x.yaml sched", "schedule. nospace"),
        ("hpctrain train x.yaml checkpoint.every_e", "checkpoint.every_epochs= nospace"),
    ],
)
def test_bash_completes(words: str, completed: str) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", _TRY, "try", *words.split()],
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == completed


@pytest.mark.job
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_understands_its_own(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "completion", shell], capture_output=True, text=True, timeout=60, check=True
    )
    assert "_HPCTRAIN_COMPLETE" in done.stdout
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=done.stdout, text=True, timeout=60, check=True)
