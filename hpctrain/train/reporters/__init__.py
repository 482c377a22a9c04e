"""Reporters beside the console's: each module defines one, under the module's name."""

from __future__ import annotations

from pathlib import Path

from hpctrain.config.schema import ReporterConfig
from hpctrain.core.registry import Registry, parameters_of
from hpctrain.train.metrics import Reporter

REPORTERS: Registry[Reporter] = Registry(__name__, "reporter", Reporter, given=("directory", "done_steps"))


def make_reporter(config: ReporterConfig, directory: Path, done_steps: int) -> Reporter:
    """The configured reporter of a run in `directory`, whose earlier parts have done so many steps.

    Raises:
        ConfigError: as `Registry.create`.
    """
    accepted = parameters_of(REPORTERS.find(config.name))
    given = {"directory": directory, "done_steps": done_steps}
    return REPORTERS.create(config.name, config.options, **{key: value for key, value in given.items() if key in accepted})
