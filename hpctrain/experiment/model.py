"""The options of the configured model."""

from __future__ import annotations

from typing import Any

from hpctrain.config.schema import Config
from hpctrain.models import catalogue


def model_options(config: Config, classes: int, image_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Those of the configuration, with what the data and the batch_norm section say where it is silent.

    classes, image_shape: of the data, (H, W, C).
    """
    following = {
        "classes": classes,
        "channels_in": image_shape[2],
        "seed": config.seed,
        "momentum": config.batch_norm.momentum,
        "epsilon": config.batch_norm.epsilon,
        "synchronised": config.batch_norm.statistics == "synchronised",
    }
    accepted = catalogue.options(config.model.name)
    return {name: value for name, value in following.items() if name in accepted} | config.model.options
