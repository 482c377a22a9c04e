"""Types of configuration values: numbers, texts, sizes, durations, names with options, sections that may be `auto`.

Sizes of memory and files are written as "64GB", "16 GiB" or a number of bytes; durations as "3h50m", "00:50:00" or a number of
seconds. A section that may be `auto` is chosen at the start of a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hpctrain.core.files import expanded
from hpctrain.core.text import forbidden

_MOST_CHARACTERS = 4096  # the limit of a path on Linux
# Number with an exponent that YAML 1.1 reads as a string: "1e-3", "1.5E4", ".5e1".
_EXPONENT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")
# Number that all parsers read alike. They differ for 010 (8 or 10), 0x10, 1_000 and 1:30.
DECIMAL = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_STARTS_AS_NUMBER = re.compile(r"\s*[-+]?\.?[0-9]")
_EXACT_IN_FLOAT = 2**53


def _text_fault(text: str) -> str | None:
    """Return the rule that a text breaks, as the continuation of "must "; None if it breaks none."""
    if len(text) > _MOST_CHARACTERS:
        return f"have at most {_MOST_CHARACTERS} characters, not {len(text)}"
    character = forbidden(text)
    return None if character is None else f"be text in one line without control characters; it has {character}"


def one_line(text: str) -> str:
    """Return the text if it is safe in scripts, file names and lines of a terminal.

    Raises:
        PydanticCustomError: the text has a forbidden character, or too many characters.
    """
    fault = _text_fault(text)
    if fault is not None:
        raise PydanticCustomError("text_type", "must {rule}", {"rule": fault})
    return text


def plain(value: Any) -> Any:
    """Return an option as plain data: lists become tuples, and "1e-3" becomes a float.

    Raises:
        ValueError: the value is not a scalar, list or mapping with string keys, or it is a number that is not finite, or a text
            that `one_line` refuses.
    """
    fault = _text_fault(value) if isinstance(value, str) else None
    if fault is not None:
        raise ValueError(f"must {fault}")
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item) for key, item in value.items()}
    raise ValueError("must be a number, string, boolean, list or mapping with string keys")


def _number(value: Any, rule: str = "must be a number") -> Any:
    # True is an int in Python, so `batch: true` would be accepted as 1.
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "{rule}", {"rule": rule})
    if isinstance(value, str) and _STARTS_AS_NUMBER.match(value) and not DECIMAL.fullmatch(value):
        is_decimal = DECIMAL.fullmatch(value.strip().replace("_", "").lstrip("0")) is not None
        decimal_rule = "must be a decimal number without leading zeros or underscores"
        raise PydanticCustomError("number_type", "{rule}", {"rule": decimal_rule if is_decimal else rule})
    return value


def _integer(value: Any) -> Any:
    if isinstance(value, str) and DECIMAL.fullmatch(value) and not value.lstrip("+-").isdecimal():
        value = float(value)  # 1e3, which YAML 1.1 reads as a string
    if isinstance(value, float) and _EXACT_IN_FLOAT <= abs(value) < math.inf:
        raise PydanticCustomError("integer_type", "must be written as an integer, because a float of this size loses digits")
    return _number(value, "must be an integer")


def expanded_path(value: str) -> str:
    """Return `expanded(value)`; convert its errors into pydantic's, for validators."""
    try:
        return expanded(value)
    except ValueError as error:
        raise PydanticCustomError("path_type", "{rule}", {"rule": str(error)}) from None


def switch(value: Any) -> Any:
    """Return the boolean of a YAML 1.1 word, such as "yes" or "off"; return any other value unchanged."""
    return _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

Integer = Annotated[int, BeforeValidator(_integer)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1), AfterValidator(one_line)]
#: path that all ranks share; `~` and variables are expanded when the configuration is read
PathText = Annotated[Text, AfterValidator(expanded_path)]


def _count_or_auto(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise PydanticCustomError("threads_type", 'must be "auto" or an integer of at least 1')


#: number of threads, or "auto"
Threads = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]


_LIKE_A_NUMBER = re.compile(r"[-+\d.,\s]+%?")  # "0,1" or "10%", which are no names of files


def _validation(value: Any) -> Any:
    if isinstance(value, str) and DECIMAL.fullmatch(value):
        value = float(value) if set(value) & set(".eE") else int(value)
    if isinstance(value, float) and value >= 1 and value.is_integer():
        value = int(value)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        if value is None or 0 < value < 1 or (isinstance(value, int) and value >= 1):
            return value
    elif isinstance(value, str) and value and not _LIKE_A_NUMBER.fullmatch(value):
        return expanded_path(one_line(value))
    raise PydanticCustomError(
        "validation_type",
        "must be a fraction above 0 and below 1, such as 0.1, a number of samples of at least 1, the path of a file, or null",
    )


#: samples for validation: a fraction of the training file, a number of its samples, the path of another file, or null
Validation = Annotated[
    int | float | str | None,
    BeforeValidator(_validation),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string"}, {"type": "null"}]}),
]


def _class_weights(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        weights = handler(value)
        if weights == ():
            raise ValueError
        return weights
    except (ValidationError, ValueError):  # pydantic's sentences name the alternatives in its terms
        raise PydanticCustomError(
            "class_weights_type", "must be balanced, a list of numbers above 0, one per class, or null"
        ) from None


#: weight of each class in the loss; "balanced" for weights in inverse proportion to the numbers of images, null for none
ClassWeights = Annotated[Literal["balanced"] | tuple[Annotated[Number, Field(gt=0)], ...] | None, WrapValidator(_class_weights)]


def or_shorthand(alternative: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds an alternative notation, described by its own JSON schema, to the JSON schema of a section."""

    def add(schema: dict[str, Any]) -> None:
        whole = dict(schema)
        schema.clear()
        schema["anyOf"] = [alternative, whole]

    return add


class Section(BaseModel):
    """Mapping of known keys.

    If a section may also be another value, `alone` describes that value in messages.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


class Named(BaseModel):
    """Registry name with its options; a plain string is shorthand for {name: ...}."""

    alone: ClassVar[str] = "a name"

    model_config = ConfigDict(
        frozen=True,
        extra="allow",
        json_schema_extra=or_shorthand({"type": "string", "description": "Shorthand for {name: ...}."}),
    )

    name: Text = Field(description="Name in the registry: a module or a class.")

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _plain_options(self) -> Named:
        extra = self.__pydantic_extra__ or {}
        for key, item in extra.items():
            try:
                extra[key] = plain(item)
            except ValueError as error:
                shown = {"value": item} if isinstance(item, str | float) else {}
                raise PydanticCustomError("option", "{rule}", {"key": key, "rule": str(error), **shown}) from None
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Keywords other than the declared fields, as a new dict with lists converted to tuples."""
        return dict(self.__pydantic_extra__ or {})


#: value in place of a size, which is then chosen at the start of a run
AUTO_SIZE: Literal["auto"] = "auto"

_TEXT = re.compile(r"((?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e\+?[0-9]{1,2})?)(?:([kmgt])(i?)b?|b)?")
_MOST = 1 << 62
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Return the number of bytes that a text denotes; kB, MB, GB and TB are powers of 1000, KiB and the like of 1024.

    Raises:
        ValueError: the text is not a size.
    """
    match = _TEXT.fullmatch("".join(text.split()).lower())
    if match is None:
        raise ValueError(text)
    number, unit, binary = match.groups()
    return round(float(number) * ((1024 if binary else 1000) ** _POWERS[unit] if unit else 1))


def _size(value: Any) -> Any:
    if value == AUTO_SIZE:
        return value
    try:
        size = math.nan if isinstance(value, bool) else parse_size(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        size = math.nan
    if not 0 <= size < _MOST:
        raise PydanticCustomError(
            "size_type", 'must be "auto", or a size of 0 or more, such as "64GB", "16GiB" or a number of bytes'
        )
    return int(size)


#: type of a key: bytes or "auto", in any notation above
Size = Annotated[
    int | Literal["auto"],
    BeforeValidator(_size),
    WithJsonSchema({"anyOf": [{"const": AUTO_SIZE}, {"type": "integer", "minimum": 0}, {"type": "string"}]}),
]


#: value in place of a duration: the time until the end of the Slurm job
SLURM: Literal["slurm"] = "slurm"

_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_UNITS = re.compile(rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m(?:in)?)?(?:{_NUMBER}s)?")
# Slurm's forms: minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and days-hours:minutes:seconds.
_CLOCKS = (
    re.compile(r"()(?:([0-9]+):(?=[0-5]?[0-9]:))?([0-9]+):([0-5][0-9])"),
    re.compile(r"([0-9]+)-([01]?[0-9]|2[0-3])(?::([0-5][0-9])(?::([0-5][0-9]))?)?"),
)
_SECONDS = (86_400, 3_600, 60, 1)


def parse_duration(text: str) -> float:
    """Return the number of seconds that a text denotes.

    Raises:
        ValueError: the text is not a duration.
    """
    compact = "".join(text.split()).lower()
    if is_bare_number(compact):
        return float(compact)
    match = next((found for clock in _CLOCKS if (found := clock.fullmatch(compact))), None) or _UNITS.fullmatch(compact)
    if match is None or not compact:
        raise ValueError(text)
    return sum(unit * float(part) for unit, part in zip(_SECONDS, match.groups(), strict=True) if part)


def is_bare_number(text: str) -> bool:
    """Return whether a duration has no unit. Such a number means seconds in a configuration, but minutes for users of Slurm."""
    return DECIMAL.fullmatch("".join(text.split())) is not None


def _duration(value: Any) -> Any:
    if value is None or value == SLURM:
        return value
    try:
        seconds = math.nan if isinstance(value, bool) else parse_duration(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise PydanticCustomError(
            "duration_type", 'must be a time above 0, such as "3h50m", "00:50:00" or a number of seconds, or "slurm", or null'
        )
    return seconds


#: type of a key: seconds, "slurm" or null, in any notation above
Duration = Annotated[
    float | Literal["slurm"] | None,
    BeforeValidator(_duration),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string"}, {"type": "null"}]}),
]


#: value in place of a section whose values are chosen at the start of a run
AUTO = "auto"

#: sections that a run can choose at its start
OPEN_SECTIONS = ("grid", "plan", "averager")


#: JSON schema of `AUTO`
OPEN = {"const": AUTO, "description": "Chosen at the start of a run for the shortest predicted step time."}


class OpenSection(BaseModel):
    """Section that may be "auto": a run then chooses its values at its start. Until then it has the defaults."""

    alone: ClassVar[str] = AUTO

    _automatic: bool = PrivateAttr(default=False)

    @property
    def automatic(self) -> bool:
        """Whether the values must still be chosen."""
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
