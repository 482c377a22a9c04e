"""`hpctrain sites`: the machines, and all that is known of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.site import profile_files
from tests.support.job_scripts import SITES


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a user's own profiles."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "hpctrain" / "sites"
    folder.mkdir(parents=True)
    return folder


def test_sites_are_listed_with_where_they_are_from(own: Path) -> None:
    (own / "ours.yaml").write_text("extends: slurm\ndescription: a cluster of ours\n")
    result = CliRunner().invoke(cli, ["sites"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.output.partition("\n\n")[0].splitlines() if not line.startswith(" ")]
    assert names == sorted([*SITES, "ours"])
    assert str(own / "ours.yaml") in "".join(result.output.split())
    assert result.output.endswith(f"Profiles of your own: {own}/NAME.yaml\n")


@pytest.mark.parametrize("site", SITES)
def test_a_site_is_printed_as_a_profile_that_gives_the_same(own: Path, site: str) -> None:
    result = CliRunner().invoke(cli, ["sites", site])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.output)["scheduler"]
    (own / "copied.yaml").write_text(result.output)
    assert profile_files.read("copied").profile == profile_files.read(site).profile
