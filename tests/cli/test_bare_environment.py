"""Commands in an environment without a home, and for a user without an entry in passwd, as containers start them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.experiment.test_planned_shapes import SINGLE_VALUES_CONFIG as CONFIG

# The real user has no entry, the effective one can still read this Python. Each command is given as an exit code and its words.
_PROGRAM = """
import os, sys
os.setresuid(54321, 0, 0)
os.environ.clear()
from click.testing import CliRunner
from hpctrain.cli.main import cli
for line in sys.stdin.read().splitlines():
    code, *words = line.split()
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == int(code), (line, done.exit_code, done.output)
    assert isinstance(done.exception, SystemExit | None), (line, done.exception)
    print(done.output)
"""


_COMMANDS = """0 sites
2 sites nowhere
0 submit c.yaml --site slurm --dry-run
0 config check c.yaml
2 config check c.yaml output=~/runs
2 config check ~/c.yaml
0 list models
0 completion bash
"""


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be a user without an entry in passwd")
def test_no_command_needs_a_home() -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to the real user
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "c.yaml").write_text(CONFIG)
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], input=_COMMANDS, cwd=folder, env={}, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    assert "Profiles of your own: $XDG_CONFIG_HOME/hpctrain/sites/NAME.yaml" in done.stdout
    assert "HOME is not set, and this user has no entry in passwd; set HOME, or write the path out" in done.stdout
