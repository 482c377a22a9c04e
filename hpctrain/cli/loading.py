"""How every command reads its configuration: an unknown name is told before what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.config.schema import Config
    from hpctrain.core.yaml_source import KeyPath, Source


def load_config(file: Path, overrides: tuple[str, ...]) -> tuple[Config, Source]:
    """The configuration in FILE with OVERRIDES, by its schema; `check_names` checks the options. Imports no NumPy if it is right.

    Raises:
        ConfigError: one sentence for each fault, each with its place.
    """
    from hpctrain.config.load import load  # here: it loads pydantic and YAML, which `hpctrain --help` does not need

    return load(file, overrides, _refusal)


def _refusal(path: KeyPath, name: str) -> str | None:
    from hpctrain.config.checks import refusal

    return refusal(path, name)
