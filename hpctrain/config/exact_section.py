"""The section of a run that has the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_validator

from hpctrain.config.values import Integer, Section, switch

DEFAULT_SHARDS = 8
MOST_SHARDS = 1_000_000  # far beyond any machine: what is larger is a slip of the pen


def _or_switch(schema: dict[str, Any]) -> None:
    """JSON schema of a section that may also be switched on and off as a whole."""
    whole = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"type": "boolean", "description": f"Shorthand: true for {DEFAULT_SHARDS} shards, false for none."}, whole]


class ExactConfig(Section):
    """The order of sums over samples; true takes 8 shards, false leaves the order to the ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=_or_switch)

    shards: Integer | None = Field(
        default=None,
        ge=1,
        le=MOST_SHARDS,
        description="Number of parts of each batch whose sums are added in one fixed order, so that a run has the same bits on "
        "any number of ranks that divides it, such as 8; null leaves the order to the ranks.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_switch(cls, value: Any) -> Any:
        value = switch(value)
        if isinstance(value, bool):
            return {"shards": DEFAULT_SHARDS if value else None}
        return value
