"""Reporters in addition to the console reporter. Each module defines one reporter with the name of the module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.core.registry import Registry, parameters_of
from hpctrain.training.metrics import Reporter

REPORTERS: Registry[Reporter] = Registry(__name__, "reporter", Reporter, given=("directory", "done_steps"))


def make_reporter(name: str, options: Mapping[str, Any], directory: Path, done_steps: int) -> Reporter:
    """Return the reporter `name` for the run in `directory`.

    Args:
        done_steps: number of steps done by earlier parts of the run.

    Raises:
        ConfigError: there is no reporter of this name, it rejects an option, or a package that it needs cannot be imported.
    """
    accepted = parameters_of(REPORTERS.find(name))
    given = {"directory": directory, "done_steps": done_steps}
    return REPORTERS.create(name, options, **{key: value for key, value in given.items() if key in accepted})
