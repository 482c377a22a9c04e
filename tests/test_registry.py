"""Registries: names are module names, options are keywords, and every refusal names what is near."""

import sys
import textwrap
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import partial
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError, OptionError
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.registry import Registry, check_options, options_of

OPTIMIZERS: Registry[Optimizer] = Registry("hpctrain.optim.optimizers", "optimizer", Optimizer)

MODULES = {
    "__init__": "",
    "base": "class Animal: ...",
    "_private": "raise RuntimeError('imported')",
    "broken": "raise RuntimeError('imported')",
    "cat": """
        from animals.base import Animal
        from animals.parts import Furry
        class _Hidden(Animal): ...
        class Unrelated: ...
        class Cat(Furry):
            def __init__(self, owner, *, lives: int = 9, name_of: str = "Tom"):
                self.owner, self.lives, self.name_of = owner, lives, name_of
        Alias = Cat
        def build(): ...
    """,
    "parts": "from animals.base import Animal\nclass Furry(Animal): ...",
    "pair": "from animals.base import Animal\nclass A(Animal): ...\nclass B(Animal): ...",
    "empty": "",
}


class Colour(StrEnum):
    RED = "red"


def sample(
    count: int,
    rate: float = 0.5,
    flag: bool = False,
    pair: tuple[float, float] = (0.0, 1.0),
    mode: Literal["a", "b"] = "a",
    colour: Colour = Colour.RED,
    limit: float | None = None,
    anything=None,
    fraction: Fraction = Fraction(1),
) -> None:
    """A callable with one parameter of each kind."""


@dataclass(frozen=True)
class _Size:
    """Options of `Box`.

    Args:
        width: Width in metres, above 0.
        label: Text on it.
    """

    width: float
    label: str = "none"

    def __post_init__(self) -> None:
        if self.width <= 0:
            raise OptionError(f"width {self.width} must be above 0; a usual value is 1.", "width")


class Box:
    """An object whose options are a frozen dataclass."""

    Options = _Size

    def __init__(self, place: str, *, options: _Size, nodes: int = 1) -> None:
        self.place, self.options, self.nodes = place, options, nodes


@pytest.fixture
def animals(tmp_path, monkeypatch):
    """The registry of a package `animals` made of MODULES."""
    package = tmp_path / "animals"
    package.mkdir()
    for name, text in MODULES.items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    from animals.base import Animal

    yield Registry("animals", "animal", Animal)
    for name in [name for name in sys.modules if name.split(".")[0] == "animals"]:
        del sys.modules[name]


def test_names_are_modules_without_helpers():
    assert OPTIMIZERS.names() == ("adamw", "lamb", "lars", "sgd")


def test_a_name_finds_its_class():
    assert OPTIMIZERS.find("sgd") is Sgd
    assert OPTIMIZERS.find("lars") is Lars


def test_listing_names_imports_none_of_the_modules(animals):
    assert animals.names() == ("broken", "cat", "empty", "pair", "parts")
    assert {name for name in sys.modules if name.startswith("animals.")} == {"animals.base"}


def test_the_entry_is_the_modules_own_public_subclass(animals):
    assert animals.find("cat").__name__ == "Cat"
    assert animals.find("parts").__name__ == "Furry"


def test_without_a_base_the_entry_is_build(animals):
    builders = Registry("animals", "builder", None)
    assert builders.find("cat").__name__ == "build"
    with pytest.raises(ConfigError, match=r"animals\.pair must define a function build; it defines 0\."):
        builders.find("pair")


@pytest.mark.parametrize(("name", "count"), [("pair", 2), ("empty", 0)])
def test_a_module_with_another_number_of_entries_is_refused(animals, name, count):
    with pytest.raises(ConfigError, match=f"exactly one public subclass of Animal; it defines {count}"):
        animals.find(name)


@pytest.mark.parametrize("name", ["base", "_private", "__init__", "catt", "cat.Cat", "", "..", "os"])
def test_other_names_are_refused_and_not_imported(animals, name):
    with pytest.raises(ConfigError, match=r'^There is no animal ".*"; .*"cat"'):
        animals.find(name)


def test_an_error_inside_a_module_is_not_hidden(animals):
    with pytest.raises(RuntimeError, match="imported"):
        animals.find("broken")


def test_an_object_is_made_from_options_and_the_programs_own_keywords(animals):
    cat = animals.create("cat", {"lives": 7}, owner=[1])
    assert (cat.owner, cat.lives, cat.name_of) == ([1], 7, "Tom")


def test_options_are_the_constructors_keywords():
    made = OPTIMIZERS.create("sgd", {"momentum": 0, "clip_norm": 2})
    assert isinstance(made, Sgd)
    assert made.clip_norm == 2.0


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("sgdd", {}, ['no optimizer "sgdd"', '"sgd"']),
        ("base", {}, ['no optimizer "base"']),
        ("sgd", {"momentun": 0.9}, ['"momentun"', 'nearest is "momentum"']),
        ("sgd", {"zzz": 0.9}, ['"zzz"', '"momentum"', '"clip_norm"']),
        ("sgd", {"momentum": "high"}, ['"momentum"', '"high"', "number"]),
        ("sgd", {"nesterov": 1}, ['"nesterov"', "true or false"]),
        ("sgd", {"decay_exclude": "some"}, ['"decay_exclude"', "norm_and_bias"]),
        ("sgd", {"self": 1}, ['"self"']),
    ],
)
def test_a_refusal_is_one_sentence(name, options, words):
    for attempt in (OPTIMIZERS.check, OPTIMIZERS.create):
        with pytest.raises(ConfigError) as caught:
            attempt(name, options)
        assert all(word in str(caught.value) for word in words), caught.value
        assert str(caught.value).endswith(".")
        assert "\n" not in str(caught.value)


def test_what_the_program_gives_is_no_option(animals):
    given = Registry("animals", "animal", animals.base, given=["owner"])
    for refuse in (given.check, partial(animals.create, owner=2)):
        with pytest.raises(OptionError, match="set by the program") as caught:
            refuse("cat", {"owner": 1})
        assert caught.value.option == "owner"
    with pytest.raises(OptionError, match='has no option "lifes"; the nearest is "lives"') as caught:
        given.check("cat", {"lifes": 1})
    assert '"owner"' not in str(caught.value)


def test_a_needed_option_must_be_there_unless_the_program_gives_it(animals):
    with pytest.raises(OptionError, match=r'^Animal "cat" needs the option "owner"') as caught:
        animals.check("cat", {})
    assert caught.value.option == "owner"
    Registry("animals", "animal", animals.base, given=["owner"]).check("cat", {})


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"count": 3}, 3),
        ({"rate": 1}, 1.0),
        ({"flag": True}, True),
        ({"pair": (1, 2)}, (1.0, 2.0)),
        ({"pair": [1, 2]}, (1.0, 2.0)),
        ({"mode": "b"}, "b"),
        ({"colour": "red"}, Colour.RED),
        ({"limit": None}, None),
        ({"limit": 2}, 2.0),
        ({"anything": {"deep": [1]}}, {"deep": [1]}),
        ({"fraction": Fraction(1, 3)}, Fraction(1, 3)),
    ],
)
def test_values_become_the_annotated_type(given, made):
    (key,) = given
    value = check_options(sample, "sample", {"count": 1} | given)[key]
    assert value == made
    assert type(value) is type(made)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("count", True),
        ("count", 1.5),
        ("count", "3"),
        ("count", None),
        ("rate", False),
        ("rate", "0.5"),
        ("flag", 1),
        ("flag", "yes"),
        ("pair", 3),
        ("pair", [1]),
        ("pair", [1, "x"]),
        ("pair", [1, True]),
        ("mode", "c"),
        ("mode", 1),
        ("colour", "blue"),
        ("limit", ""),
    ],
)
def test_values_of_another_type_are_refused(key, value):
    with pytest.raises(OptionError, match=f'^Option "{key}" of sample is .*, but .*\\.$') as caught:
        check_options(sample, "sample", {"count": 1} | {key: value})
    assert caught.value.option == key


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_pass_unchanged_to_the_last_bit(value):
    assert check_options(sample, "sample", {"count": 1, "rate": value})["rate"].hex() == value.hex()


def test_a_dataclass_of_options_is_made_from_them():
    assert options_of(Box) is _Size
    keywords = check_options(Box, "box", {"width": 2})
    assert keywords == {"options": _Size(2.0)}
    assert Box("here", **keywords).options.width == 2.0


@pytest.mark.parametrize(
    ("options", "option", "sentence"),
    [
        ({}, "width", 'Box needs the option "width"'),
        ({"width": "wide"}, "width", "must be a number"),
        ({"width": -1}, "width", "width -1.0 must be above 0"),
        ({"width": 1, "with": 1}, "with", 'has no option "with"; the nearest is "width"'),
        ({"width": 1, "place": "x"}, "place", "set by the program"),
        ({"width": 1, "nodes": 2}, "nodes", "set by the program"),
        ({"width": 1, "options": {}}, "options", 'has no option "options"'),
    ],
)
def test_a_dataclass_of_options_is_checked_as_keywords_are(options, option, sentence):
    with pytest.raises(OptionError, match=sentence) as caught:
        check_options(Box, "box", options, reserved=["place"])
    assert caught.value.option == option


def test_keywords_are_the_options_where_the_constructor_takes_no_dataclass():
    class Plain(Box):
        def __init__(self, place: str, *, depth: int = 1) -> None: ...

    assert options_of(Plain) is Plain
    assert check_options(Plain, "plain box", {"depth": 3}, reserved=["place"]) == {"depth": 3}


def test_a_callable_that_takes_anything_gets_anything():
    def open_ended(first: int, **rest: object) -> None: ...

    assert check_options(open_ended, "it", {"first": 1, "other": [2]}) == {"first": 1, "other": [2]}
    with pytest.raises(OptionError, match='needs the option "first"'):
        check_options(open_ended, "it", {"other": 2})


def test_a_callable_without_options_says_so():
    def nothing() -> None: ...

    def one(only: int = 0) -> None: ...

    with pytest.raises(OptionError, match=r'^It has no option "x"; there are none\.$'):
        check_options(nothing, "it", {"x": 1})
    with pytest.raises(OptionError, match=r'^It has no option "x"; there is only "only"\.$'):
        check_options(one, "it", {"x": 1})


def test_an_annotation_for_type_checkers_only_is_not_checked():
    def hidden(path: "NotImported") -> None: ...  # noqa: F821

    assert check_options(hidden, "it", {"path": [1]}) == {"path": [1]}
