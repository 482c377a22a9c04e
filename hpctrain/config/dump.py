"""A configuration as text: YAML that loads to the same configuration, and the JSON schema for editors."""

from __future__ import annotations

from typing import Any

import yaml

from hpctrain.config.schema import Config


def dump(config: Config) -> str:
    """The whole configuration, defaults included, as YAML; `parse(dump(config))` gives an equal one."""
    # Not allow_unicode: PyYAML would write U+0085 and its like as line breaks, which fold to spaces when read.
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120)


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a configuration file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
