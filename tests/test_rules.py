"""Rules in our own words, from pydantic's errors."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from hpctrain.rules import joined, rule


class Section(BaseModel, extra="forbid", strict=True):
    number: int = 1
    share: float = Field(0.5, gt=0, le=1)
    kind: Literal["a", "b"] = "a"
    pair: tuple[int, int] = (1, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"number": "x"}, "must be an integer"),
        ({"share": 0}, "must be greater than 0"),
        ({"share": 1.5}, "must be at most 1"),
        ({"kind": "c"}, "must be 'a' or 'b'"),
        ({"pair": [1, 2, 3]}, "must be a list"),
        ({"pair": (1, 2, 3)}, "must be a list of 2 items, not 3"),
        ({"other": 1}, "must not be given"),
    ],
)
def test_an_error_of_pydantic_is_the_second_half_of_a_sentence(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Section.model_validate(values)
    assert rule(caught.value.errors()[0]) == words


def test_an_error_of_the_program_keeps_its_sentence() -> None:
    assert rule({"type": "option", "msg": "The lr is -1, but must be positive."}) == "The lr is -1, but must be positive."


def test_alternatives_are_one_rule() -> None:
    assert joined(["must be an integer", "must be a list", "must be an integer"]) == "must be an integer or a list"
    assert joined(["must be true or false"]) == "must be true or false"
