"""Rendered scripts: every word of a user reaches the training as it was, and every script that may be asked for is sound."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hpctrain.errors import ConfigError
from hpctrain.site import profile_files
from hpctrain.site.job import JobFiles, JobRequest, plan_job
from hpctrain.site.profile import ScratchFields, SetupFields, VariableFields
from hpctrain.site.script import render
from hpctrain.site.submission import job_files
from tests.support.job_scripts import SITES

SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0\r\n", exclude_categories=("Zl", "Zp", "Cc", "Cf", "Cs"))
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


#: what ends a line, a quote or a word, and what a shell or a scheduler would run, expand or read as an option
PIECES = st.sampled_from(
    [
        "\n", "\r", "\r\n", "\x0b", "\x0c", "\x1b[2J", "\x7f", "\x85", "\u2028", "\u202e", "\u200b", "\0", "'", '"', "`",
        "\\", "$(touch RAN)", "`touch RAN`", "${X:=touch}", ";touch RAN;", "&& touch RAN", "| touch RAN", "\ntouch RAN\n",
        "'; touch RAN; '", '"; touch RAN; "', "#", " #", "%j", "%", "{{ 1 }}", "{% raw %}", "(", ")", "<", ">", "!", "*", "~",
        " ",        "\t",
        "-", "--wrap=touch", "=", "a", "é", "日本", "END", "\nEND\n",
    ]
)  # fmt: skip
TRICKS = st.lists(PIECES, min_size=1, max_size=6).map("".join)
FIELDS = ("account", "queue", "train", "log", "name", "environment", "hostfile", "stage")


_site = functools.cache(lambda name: profile_files.read(name, {}))


def _with_field(site: str, field: str, text: str, folder: Path) -> str | None:
    """Return the script of a site with a text in one field, or None if the field or the text is refused."""
    found = _site(site)
    account = "mine" if found.profile.account else None
    request = JobRequest(1, account=text if field == "account" else account, queue=text if field == "queue" else None)
    logs = Path(text) / "jobs" if field == "log" else Path("runs/jobs")
    try:
        files = job_files(
            found, text if field == "name" else "run", logs.parent, ("a.yaml", text) if field == "train" else ("a.yaml",)
        )
        job = plan_job(found, request, files)
        if field in ("environment", "hostfile", "stage"):
            job = replace(job, **{field: text})
        return render(found, job)
    except ConfigError:
        return None


@pytest.mark.job
@pytest.mark.parametrize("site", SITES)
@settings(max_examples=8, deadline=None)
@given(texts=st.lists(TRICKS, min_size=len(FIELDS), max_size=len(FIELDS)))
def test_no_field_of_a_job_is_more_than_its_text(site: str, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """With any text in a field, the shell runs the same commands as with a plain word: it reads nothing of the field as code."""
    folder = tmp_path_factory.mktemp("site")
    scripts = [_with_field(site, field, text, folder) for field, text in zip(FIELDS, texts, strict=True)]
    plain = [_with_field(site, field, "plain", folder) for field in FIELDS]
    for script, usual in zip(scripts, plain, strict=True):
        if script is not None:
            assert usual is not None
            assert script.count("\n") in range(usual.count("\n") - 1, usual.count("\n") + 3)  # comments move above long lines
    whole = "\n".join(f"function script_{number} {{\n{script}\n}}" for number, script in enumerate(scripts) if script is not None)
    (folder / "all.sh").write_text(whole)
    subprocess.run(["bash", "-n", folder / "all.sh"], check=True)


@pytest.mark.parametrize("field", ["account", "queue", "train", "log", "environment", "hostfile", "stage"])
@pytest.mark.parametrize("site", SITES)
def test_controls_are_refused_in_every_field(site: str, field: str, tmp_path: Path) -> None:
    for text in ("a\ntouch RAN\n", "a\rb", "a\u202eb", "a\u2028b", "a\x1b[2J", "a\x85b", "a\0b"):
        assert _with_field(site, field, text, tmp_path) is None


@pytest.mark.parametrize(
    "value", ["$(id)", "`id`", "${X:=$(id)}", "${X@P}", "$((1))", "${X[$(id)]}", '"', "\\", "a\nb", "$", "${!X}"]
)
def test_values_of_a_profile_run_nothing(value: str) -> None:
    with pytest.raises(ValidationError):
        VariableFields(value=value, why="w")
    with pytest.raises(ValidationError):
        ScratchFields(directory=value)


@pytest.mark.parametrize("value", ["", "1", "$USER", "/a b/${USER}", "${TMPDIR:-/tmp}", "${A-$B}/c", "50%", "a'b"])
def test_values_of_a_profile_may_name_variables(value: str) -> None:
    assert VariableFields(value=value, why="w").value == value


def test_slurm_reads_the_name_of_the_log_as_it_was(tmp_path: Path) -> None:
    found = profile_files.read("slurm", {})
    text = render(found, plan_job(found, JobRequest(1), job_files(found, "run", Path("it's 50%A #1"), ("a.yaml",))))
    (line,) = [line for line in text.split("\n") if line.startswith("#SBATCH --output=")]
    (word,) = shlex.split(line.removeprefix("#SBATCH "))
    assert re.fullmatch(r"--output=it's 50%%A #1/jobs/run-[\d-]+-%j\.log", word)
    with pytest.raises(ConfigError, match="Slurm takes backslashes away; choose a directory without one"):
        render(found, plan_job(found, JobRequest(1), job_files(found, "run", Path("a\\b"), ("a.yaml",))))
