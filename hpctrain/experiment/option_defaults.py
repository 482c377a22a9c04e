"""The defaults of options that a configuration leaves out: those of what its names stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hpctrain.config.schema import Config
from hpctrain.experiment.averager import AVERAGERS
from hpctrain.experiment.check import OPTIMIZERS
from hpctrain.models import catalogue
from hpctrain.optim import schedules


def option_defaults(config: Config) -> dict[str, Any]:
    """By dotted key ("optimizer.momentum"), for the model, the optimiser, the schedule and the averager; plain values only."""
    sections: dict[str, dict[str, Any]] = {
        "model": dict(catalogue.options(config.model.name)),
        "optimizer": _defaults(OPTIMIZERS.find(config.optimizer.name)),
        "schedule": _defaults(schedules.schedule_class(config.schedule.name)),
        "averager": _defaults(AVERAGERS.find(config.averager.name)),
    }
    return {f"{section}.{key}": _plain(value) for section, options in sections.items() for key, value in options.items()}


def _defaults(entry: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(entry).parameters.items()
    return {key: parameter.default for key, parameter in parameters if parameter.default is not inspect.Parameter.empty}


def _plain(value: Any) -> Any:
    """As YAML gives it."""
    if value is inspect.Parameter.empty:
        return None
    return list(value) if isinstance(value, tuple) else value
