"""Run directories as earlier versions left them: without a marker."""

from __future__ import annotations

import json
from pathlib import Path


def make_unmarked(path: Path, config: str) -> Path:
    """Make the directory of a run of an earlier version, without records and checkpoints; return it."""
    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(config)
    (path / "versions.json").write_text(json.dumps({"python": "3.11.7", "hpctrain": "0.1.0"}))
    (path / "git.json").write_text("{}")
    return path
