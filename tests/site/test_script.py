"""Rendered scripts: every word of a user reaches the training as it was, and every script that may be asked for is sound."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.site import profile_files
from hpctrain.site.job import JobFiles, JobRequest, plan_job
from hpctrain.site.profile import SetupFields
from hpctrain.site.script import render
from tests.support.job_scripts import SITES

SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0\r\n", exclude_categories=("Zl", "Zp", "Cc"))
TEXTS = st.text(CHARACTERS, min_size=1, max_size=12)


def _script(site: str, train: tuple[str, ...] = ("a.yaml",), request: JobRequest | None = None) -> str:
    found = profile_files.read(site, {})
    request = request or JobRequest(1, account="mine" if found.profile.account else None)
    return render(found, plan_job(found, request, JobFiles("run", "jobs/run", "runs/jobs", "runs/jobs/run.log", train)))


@given(words=st.lists(TEXTS, min_size=1, max_size=3))
@settings(max_examples=50, deadline=None)
def test_words_come_through_the_shell_as_they_are(words: list[str]) -> None:
    (line,) = [line for line in _script("local", tuple(words)).split("\n") if line.startswith("TRAIN=(")]
    assert shlex.split(line.removeprefix("TRAIN=(").removesuffix(")")) == words


@pytest.mark.job
@pytest.mark.parametrize("site", SITES)
def test_scripts_for_a_configuration_are_sound(site: str, tmp_path: Path) -> None:
    assert SHELLCHECK is not None, "requirements-dev.txt brings shellcheck"
    (tmp_path / "environment.tar").touch()
    profile = profile_files.read(site, {}).profile
    account = "mine" if profile.account else None
    stage = tmp_path / "environment.tar" if profile.scratch else None
    for number, request in enumerate(
        (
            JobRequest(1, account=account),
            JobRequest(1, 1, 1, "10m", account, "q" if profile.queue else None, None, stage, 0, doctor=False),
        )
    ):
        text = _script(site, ("configs/a.yaml", "name=it's a 'run'", "--steps", "3"), request)
        path = tmp_path / f"{number}.sh"
        path.write_text(text)
        subprocess.run(["bash", "-n", path], check=True)
        done = subprocess.run([SHELLCHECK, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        assert "<--" not in text  # nothing is left to edit
        assert all(line == line.rstrip() for line in text.split("\n"))


def test_commands_of_a_profile_come_first() -> None:
    found = profile_files.read("slurm", {})
    step = SetupFields(command="module load cray-python", why="the site's Python", source="the site's guide")
    profile = found.profile.model_copy(update={"setup": (step,)})
    site = profile_files.Site("slurm", found.path, profile)
    text = render(site, plan_job(site, JobRequest(1), JobFiles("run", "jobs/run")))
    head, tail = text.split("# the site's Python (the site's guide)\nmodule load cray-python\n")
    assert "set -eo pipefail" in head  # modules read variables that are not set
    assert tail.startswith("set -u\n")
    assert "srun" not in head
