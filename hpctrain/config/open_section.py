"""Sections of a configuration that may be left open, by `auto` in their place: a run chooses them at its start."""

from __future__ import annotations

from typing import Any, Self

from pydantic import (
    BaseModel,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

#: in place of a section: it is chosen at the start of a run
AUTO = "auto"

#: sections that a run can choose at its start
OPEN_SECTIONS = ("grid", "plan", "averager")


def or_auto(schema: dict[str, Any]) -> None:
    """JSON schema of a section that may also be left to the start of a run."""
    whole = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"const": AUTO, "description": "OpenSection at the start of a run: the fastest by prediction."}, whole]


class OpenSection(BaseModel):
    """A section in whose place "auto" may stand: a run chooses its values at its start then; until then it has the defaults."""

    _automatic: bool = PrivateAttr(default=False)

    @property
    def automatic(self) -> bool:
        """True where the values are still to be chosen."""
        return self._automatic

    @model_validator(mode="wrap")
    @classmethod
    def _from_auto(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if value != AUTO:
            return handler(value)
        section = handler({})
        section._automatic = True
        return section

    @model_serializer(mode="wrap")
    def _to_auto(self, handler: SerializerFunctionWrapHandler) -> Any:
        return AUTO if self._automatic else handler(self)
