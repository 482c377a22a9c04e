"""The documentation describes every key, option, command and finding; the examples are the repository's own files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.config import examples
from hpctrain.config.schema import Config
from hpctrain.core.errors import ConfigError
from tests.support.reference_pages import (
    DOCS,
    FINDINGS_HEADING,
    KEYS_HEADING,
    commands_page,
    findings_section,
    keys_section,
    options_page,
)

PAGE = DOCS / "config.md"


def test_the_table_of_keys_is_the_schema():
    section = PAGE.read_text(encoding="utf-8").split(KEYS_HEADING)[1]
    assert section == keys_section(), "docs/config.md is out of date: run `make docs`"


def test_the_options_are_those_of_the_constructors():
    assert (DOCS / "options.md").read_text(encoding="utf-8") == options_page(), "docs/options.md is out of date: run `make docs`"


def test_the_commands_are_those_of_the_program():
    assert (DOCS / "commands.md").read_text(encoding="utf-8") == commands_page(), (
        "docs/commands.md is out of date: run `make docs`"
    )


def test_the_findings_are_those_of_the_doctors_checks():
    section = (DOCS / "doctor.md").read_text(encoding="utf-8").split(FINDINGS_HEADING)[1]
    assert section == findings_section(), "docs/doctor.md is out of date: run `make docs`"


def test_every_section_is_in_the_overview():
    text = PAGE.read_text(encoding="utf-8")
    assert [key for key in Config.model_fields if f"`{key}`" not in text] == []


def test_every_variable_of_the_environment_is_described():
    sources = (Path(__file__).parents[2] / "hpctrain").rglob("*.py")
    read = {name for path in sources for name in re.findall(r"\"(HPCTRAIN_[A-Z_]+)\"", path.read_text(encoding="utf-8"))}
    table = PAGE.read_text(encoding="utf-8").split("## The environment\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(HPCTRAIN_[A-Z_]+)", table)) == read


TOP = Path(__file__).parents[2]


def test_the_examples_are_the_repositorys_files() -> None:
    files = [*TOP.glob("configs/*.yaml"), *TOP.glob("configs/machines/*.yaml")]
    files += [path for path in TOP.glob("jobs/*.*") if path.suffix != ".md"]
    assert examples.names() == sorted(path.relative_to(TOP).as_posix() for path in files)
    assert all(examples.path_of(name).samefile(TOP / name) for name in examples.names())
    assert all(len(examples.purpose(name)) > 10 for name in examples.names())


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml"])
def test_an_example_is_known_by_its_path_its_name_and_its_stem(name: str) -> None:
    assert examples.path_of(name).name == "quickstart.yaml"


def test_the_most_similar_example_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no example 'quikstart'; the nearest is .quickstart."):
        examples.path_of("quikstart")


def test_examples_are_copied_once(tmp_path: Path) -> None:
    paths = examples.copy([], tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == examples.names()
    assert all(paths.values())
    assert (tmp_path / "jobs" / "slurm.sbatch").read_bytes() == (TOP / "jobs" / "slurm.sbatch").read_bytes()
    assert examples.copy(["slurm"], tmp_path) == {tmp_path / "jobs" / "slurm.sbatch": False}


def test_an_example_that_is_named_twice_is_copied_once(tmp_path: Path) -> None:
    """A second copy does not fail because the file exists already."""
    assert examples.copy(["slurm", "slurm"], tmp_path) == {tmp_path / "jobs" / "slurm.sbatch": True}


def test_an_edited_copy_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    edited = tmp_path / "configs" / "quickstart.yaml"
    edited.write_text("mine")
    with pytest.raises(ConfigError, match=r"quickstart.yaml already exists and differs"):
        examples.copy([], tmp_path)
    assert edited.read_text() == "mine"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["quickstart.yaml"]


def test_users_list_and_copy_them(tmp_path: Path) -> None:
    listed = CliRunner().invoke(cli, ["config", "list"], env={"COLUMNS": "80"})
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines() if not line.startswith(" ")] == examples.names()
    for name in examples.names():
        assert "".join(examples.purpose(name).split()) in "".join(listed.output.split())  # lines break at hyphens, too
    assert all(len(line) <= 80 for line in listed.output.splitlines())
    copied = CliRunner().invoke(cli, ["config", "copy", "quickstart", "--to", str(tmp_path)])
    assert copied.output == f"{tmp_path / 'configs' / 'quickstart.yaml'}\n"
    again = CliRunner().invoke(cli, ["config", "copy", "quickstart", "--to", str(tmp_path)])
    assert again.stdout == copied.stdout, "a script reads the path"
    assert again.stderr.endswith("exists already and is unchanged\n")
    assert CliRunner().invoke(cli, ["config", "copy", "cifar10-fast", "--to", str(tmp_path)]).exit_code == 0
    several = CliRunner().invoke(cli, ["config", "copy", "quickstart", "cifar10-fast", "--to", str(tmp_path)])
    assert several.stderr == "2 of these files exist already and are unchanged\n", "not one line per file"
    unknown = CliRunner().invoke(cli, ["config", "copy", "nothing", "--to", str(tmp_path)])
    assert unknown.exit_code == 2
    assert "There is no example 'nothing'" in unknown.output
