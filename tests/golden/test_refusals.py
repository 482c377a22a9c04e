"""Wrong calls and files are refused as recorded in `refusals.txt`."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
def test_wrong_calls_are_refused_as_recorded() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.refusals"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    recorded = (ROOT / "tests" / "golden" / "refusals.txt").read_text()
    changes = difflib.unified_diff(recorded.splitlines(), done.stdout.splitlines(), "refusals.txt", "now", n=2, lineterm="")
    assert done.stdout == recorded, "read the changes, then run `make refusals`:\n" + "\n".join(changes)
