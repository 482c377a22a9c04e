"""Registries, code of the user's, rules and errors: names, options, and a sentence for everything that is wrong with them."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pickle
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core import errors, user_code
from hpctrain.core.errors import ConfigError, HpctrainError, OptionError
from hpctrain.core.registry import Registry, check_options, options_of
from hpctrain.core.text import choices, nearest
from hpctrain.data.augmentations.base import Augmentation
from hpctrain.nn.layers import Layer
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import OPTIMIZERS, Sgd
from hpctrain.optim.schedules import SCHEDULES, LearningRateSchedule
from tests.test_architecture import classes

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


def one_of_each(
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


def test_what_the_program_passes_is_no_option(animals):
    given = Registry("animals", "animal", animals.base, given=["owner"])
    for refuse in (given.check, partial(animals.create, owner=2)):
        with pytest.raises(OptionError, match="set by the program") as caught:
            refuse("cat", {"owner": 1})
        assert caught.value.option == "owner"
    with pytest.raises(OptionError, match='has no option "lifes"; the nearest is "lives"') as caught:
        given.check("cat", {"lifes": 1})
    assert '"owner"' not in str(caught.value)


def test_a_needed_option_must_be_there_unless_the_program_passes_it(animals):
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
    value = check_options(one_of_each, "sample", {"count": 1} | given)[key]
    assert value == made
    assert type(value) is type(made)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("count", value) for value in (True, 1.5, "3", None)),
        *[("rate", False), ("rate", "0.5"), ("flag", 1), ("flag", "yes"), ("mode", "c"), ("mode", 1)],
        *(("pair", value) for value in (3, [1], [1, "x"], [1, True])),
        *[("colour", "blue"), ("limit", "")],
    ],
)
def test_values_of_another_type_are_refused(key, value):
    with pytest.raises(OptionError, match=f'^Option "{key}" of sample is .*, but .*\\.$') as caught:
        check_options(one_of_each, "sample", {"count": 1} | {key: value})
    assert caught.value.option == key


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_pass_unchanged_to_the_last_bit(value):
    assert check_options(one_of_each, "sample", {"count": 1, "rate": value})["rate"].hex() == value.hex()


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


def test_an_annotation_for_type_checkers_only_is_not_checked():
    def hidden(path: NotImported) -> None: ...  # noqa: F821

    assert check_options(hidden, "it", {"path": [1]}) == {"path": [1]}


GOOD = """
from dataclasses import dataclass
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import Sgd

class Own(Sgd):
    '''My own optimizer.'''

@dataclass(frozen=True, kw_only=True, eq=False)
class Scaled(Sgd):
    '''With an option.

    Args:
        scale: Factor on all.
    '''
    scale: float = 1.0

    def __post_init__(self):
        if self.scale <= 0:
            raise ValueError("scale must be above 0")

class Half(Optimizer):
    def bind(self, group, owned): ...

def helper(): ...
NUMBER = 3
"""

_numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of a new name in the working directory."""
    name = f"own_module_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(user_code, "_files", {})
    monkeypatch.setattr(user_code, "_config_folders", [])
    yield name
    for known in [known for known in sys.modules if known.startswith(("own_module_", "own_package"))]:
        del sys.modules[known]


def offer(folder: Path, package: str, group: str, line: str) -> None:
    """An installed package: what pip would have written."""
    info = folder / f"{package.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{line}\n")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def test_a_module_and_a_file_are_found_in_the_working_directory(module: str) -> None:
    by_module, by_file = OPTIMIZERS.find(f"{module}:Own"), OPTIMIZERS.find(f"{module}.py:Own")
    assert (by_module.__name__, by_file.__name__) == ("Own", "Own")
    assert OPTIMIZERS.find(f"{module}.py:Own") is by_file, "a module is imported once"
    assert OPTIMIZERS.find(f"{Path(f'{module}.py').resolve()}:Own") is by_file
    made = OPTIMIZERS.create(f"{module}.py:Scaled", {"scale": 2, "momentum": 0.5})
    assert (made.scale, made.momentum) == (2.0, 0.5)  # type: ignore[attr-defined]


def test_the_directory_of_the_configuration_comes_after_the_working_directory(module: str, tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "own_module_nearby.py").write_text("from own_module_sibling import Own")
    (folder / "own_module_sibling.py").write_text(GOOD)
    (folder / f"{module}.py").write_text("raise RuntimeError('imported')")
    with pytest.raises(ConfigError, match=r"no file own_module_nearby\.py .* in the working directory[.;]"):
        user_code.load("own_module_nearby.py:Own")
    user_code.search_next_to(folder / "my.yaml")
    assert user_code.load("own_module_nearby.py:Own").__name__ == "Own"
    assert user_code.load("own_module_sibling:Own").__name__ == "Own"
    assert user_code.load(f"{module}.py:Own").__name__ == "Own"


def test_code_of_the_users_hides_no_installed_module(module: str, tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "tabnanny.py").write_text("raise RuntimeError('imported')")
    user_code.load(f"{module}:Own")
    import tabnanny

    assert Path(str(tabnanny.__file__)).parent != tmp_path


def test_nothing_is_imported_but_what_is_named(module: str, tmp_path: Path) -> None:
    offer(tmp_path / "site", "my-opt", "hpctrain.optimizers", f"fine = {module}:Own")
    assert OPTIMIZERS.names() == ("adam", "adamw", "lamb", "lars", "sgd")
    assert SCHEDULES.names() == ("constant", "cosine", "one_cycle", "plateau", "polynomial", "step")
    assert OPTIMIZERS.offers() == (user_code.Offer("fine", f"{module}:Own", "my-opt 1.2"),)
    assert OPTIMIZERS.find("sgd") is Sgd
    assert module not in sys.modules
    assert OPTIMIZERS.find("fine").__name__ == "Own"
    assert module in sys.modules


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\nraise RuntimeError('two\\nlines')", ["RuntimeError: two lines", "line 2"]),
        ("def f(:", ["SyntaxError", "line 1"]),
        ("import numpy as np\nnp.zeros((2, -1))", ["ValueError", "line 2"]),
        ("\n\nimport module_that_is_missing", ["ModuleNotFoundError", "module_that_is_missing", "line 3"]),
        ("import sys\nsys.exit(3)", ["SystemExit: 3", "line 2"]),
        ("def f():\n    return 1 / 0\nf()", ["ZeroDivisionError: division by zero", "line 2"]),
    ],
)
@pytest.mark.parametrize("form", ["{}:Own", "{}.py:Own"])
def test_an_error_at_import_is_one_sentence_with_its_line(module: str, text: str, words: list[str], form: str) -> None:
    Path(f"{module}.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        user_code.load(form.format(module))
    message = str(caught.value)
    assert all(word in message for word in (*words, f"{module}.py")), message
    assert "\n" not in message
    with pytest.raises(ConfigError, match="cannot be imported"):  # and again: no half of a module is kept
        user_code.load(form.format(module))


def test_a_name_of_ours_that_a_package_offers_is_refused(module: str, tmp_path: Path) -> None:
    offer(tmp_path / "site", "my-opt", "hpctrain.optimizers", f"sgd = {module}:Own")
    with pytest.raises(
        ConfigError, match=f'"sgd" is defined by hpctrain and by the package my-opt 1.2; write its .*"{module}:Own"'
    ):
        OPTIMIZERS.find("sgd")
    assert OPTIMIZERS.find("lars").__name__ == "Lars"
    assert OPTIMIZERS.find("hpctrain.optim.optimizers:Sgd") is Sgd


def test_a_name_that_two_packages_offer_is_refused(module: str, tmp_path: Path) -> None:
    for package, name in (("one", "Own"), ("two", "Scaled")):
        offer(tmp_path / "site", package, "hpctrain.optimizers", f"fine = {module}:{name}")
    with pytest.raises(ConfigError, match=r'"fine" is defined by the package one 1\.2 and by the package two 1\.2; write its'):
        OPTIMIZERS.find("fine")
    assert OPTIMIZERS.find("sgd") is Sgd
    assert [offer.package for offer in OPTIMIZERS.offers()] == ["one 1.2", "two 1.2"]


def test_an_unknown_name_is_reported_with_the_offered_ones(module: str, tmp_path: Path) -> None:
    offer(tmp_path / "site", "my-opt", "hpctrain.optimizers", f"adamw = {module}:Own")
    with pytest.raises(ConfigError, match='no optimizer "adamww"; the nearest is "adamw"'):
        OPTIMIZERS.find("adamww")


def test_digests_tell_files_apart(module: str) -> None:
    assert user_code.digests() == {}
    user_code.load(f"{module}.py:Own")
    (before,) = user_code.digests().values()
    assert before.startswith(f"{module}.py sha256 ")
    Path(f"{module}.py").write_text(GOOD + "\n# changed")
    assert user_code.digests() != {f"{module}.py:Own": before}


def test_a_function_is_an_entry_where_there_is_no_base_class(module: str) -> None:
    builders: Registry[object] = Registry("hpctrain.models.families", "model", None)
    assert builders.find(f"{module}:helper").__name__ == "helper"
    with pytest.raises(ConfigError, match="is 3, but a model must be a function"):
        builders.find(f"{module}:NUMBER")


def test_base_classes_of_registries_are_no_entries() -> None:
    with pytest.raises(ConfigError, match="does not define"):
        OPTIMIZERS.find(f"hpctrain.optim.base:{Optimizer.__name__}")
    with pytest.raises(ConfigError, match=r"is <function nearest .*, but an optimizer must be a class derived from"):
        OPTIMIZERS.find("hpctrain.core.text:nearest")


_WORDS = st.text("abcxyz_", min_size=1, max_size=8)


@given(st.lists(_WORDS, min_size=1, max_size=6), _WORDS)
def test_a_known_name_is_its_own_nearest_and_none_is_made_up(names: list[str], name: str) -> None:
    assert all(nearest(known, names) == known for known in names)
    assert nearest(name, names) in (*names, None)


@pytest.mark.parametrize(
    ("name", "names", "end"),
    [
        ("sharted", ("blocking", "sharded"), 'the nearest is "sharded" (of "blocking", "sharded")'),
        ("q", ("blocking", "sharded"), 'there are "blocking", "sharded"'),
        ("q", ("sharded",), 'there is only "sharded"'),
        ("q", (), "there are none"),
        ("layer7", [f"layer{number}.conv" for number in range(50)], 'the nearest is "layer7.conv"'),
        ("q", [f"layer{number}.conv" for number in range(50)], 'there are 50 names, such as "layer0.conv"'),
    ],
)
def test_the_end_of_a_sentence(name: str, names: list[str], end: str) -> None:
    assert choices(name, names) == end


OURS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HpctrainError)]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_an_error_is_its_sentence_also_on_another_rank(kind: type[HpctrainError]) -> None:
    sentence = "The batch is 0, but must be at least 1."
    there = pickle.loads(pickle.dumps(kind(sentence)))
    assert type(there) is kind
    assert str(there) == sentence
    error = kind(sentence, ranks=[2])  # what other ranks raise it from
    assert (str(error), error.ranks) == (sentence, (2,))


@pytest.mark.slow
def test_all_errors_of_the_package_are_of_this_family() -> None:
    """All but one that its only caller turns into a DataError, and two that tell of defects: in plans, in kernels."""
    for name, node in classes():
        if node.name.endswith("Error") and node.name not in ("EmulatedDeviceError", "InvalidPlanError"):
            module, _, word = name.rpartition(".")
            assert issubclass(getattr(importlib.import_module(module), word), HpctrainError), name


WRONG: dict[str, object] = {
    "None": None,
    "text": "0.1",
    "list": [0.1, 0.2],
    "array": np.zeros((2, 3)),
    "object": object(),
    "true": True,
    "number": 0.5,
}
#: methods of user classes -> names of the correct results in `WRONG`
RESULTS: dict[tuple[type, str], set[str]] = {
    (LearningRateSchedule, "after_warmup"): {"number"},
    (LearningRateSchedule, "lr"): {"number"},
    (LearningRateSchedule, "observed"): {"None"},
    (Augmentation, "apply"): {"None"},
    (Augmentation, "output_shape"): set(),
    (Augmentation, "resized"): {"None"},
    (Optimizer, "state"): set(),
    (Optimizer, "counters"): set(),
    (Optimizer, "update"): {"None"},
    (Layer, "parameters"): set(),
    (Layer, "children"): set(),
    (Layer, "lower"): set(),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("base", "method"), RESULTS)
def test_a_wrong_result_of_a_users_method_is_one_sentence(base: type, method: str, wrong: str) -> None:
    """The sentence names the class, the method, its line, the result, and the result that the base class declares."""

    def returns(self: object, *arguments: object, **keywords: object) -> object:
        return WRONG[wrong]

    made = type(base)("Mine", (base,), {"__module__": __name__, method: returns})
    made.__abstractmethods__ = frozenset()
    mine = object.__new__(made)
    if wrong in RESULTS[base, method]:
        assert getattr(mine, method)() == WRONG[wrong]
        return
    with pytest.raises(ConfigError, match=rf"^Mine.{method} \(.*test_registry.py, line \d+\) returns .*, but must return \w+"):
        getattr(mine, method)()
