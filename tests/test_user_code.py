"""Code of the user's: what references and entry points find, where, and the sentence for everything that is wrong with them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain import user_code
from hpctrain.errors import ConfigError, OptionError
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.registry import Registry

GOOD = """
from dataclasses import dataclass
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers.sgd import Sgd

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
    monkeypatch.setattr(user_code, "_beside", [])
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


def test_beside_the_configuration_comes_after_the_working_directory(module: str, tmp_path: Path) -> None:
    beside = tmp_path / "configs"
    beside.mkdir()
    (beside / "own_module_beside.py").write_text("from own_module_sibling import Own")
    (beside / "own_module_sibling.py").write_text(GOOD)
    (beside / f"{module}.py").write_text("raise RuntimeError('imported')")
    with pytest.raises(ConfigError, match=r"no file own_module_beside\.py .* in the working directory\.$"):
        user_code.load("own_module_beside.py:Own")
    user_code.search_beside(beside / "my.yaml")
    assert user_code.load("own_module_beside.py:Own").__name__ == "Own"
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
    assert OPTIMIZERS.names() == ("adamw", "lamb", "lars", "sgd")
    assert OPTIMIZERS.offers() == (user_code.Offer("fine", f"{module}:Own", "my-opt 1.2"),)
    assert OPTIMIZERS.find("sgd") is Sgd
    assert module not in sys.modules
    assert OPTIMIZERS.find("fine").__name__ == "Own"
    assert module in sys.modules


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("MODULE:Onw", ['MODULE.py) defines no "Onw"', 'nearest is "Own" (of "Own", "Scaled", "Half", "helper")']),
        ("MODULE.py:zzz", ['defines no "zzz"', '"Own"']),
        ("MODUL:Own", ['no module "MODUL"', "working directory", "MODUL.py:Own"]),
        ("nowhere.sub:Own", ['no module "nowhere.sub"', "nowhere/sub.py:Own"]),
        ("MODUL.py:Own", ["no file MODUL.py"]),
        ("MODULE:", ["module:Name"]),
        (":Own", ["module:Name"]),
        ("MODULE:Own.deep", ["module:Name"]),
        ("a b:Own", ["no module"]),
        ("../x:Own", ["no module", ".py"]),
        ("MODULE:helper", ["is <function helper", "an optimizer is a class derived from hpctrain.optim.base.Optimizer"]),
        ("MODULE:NUMBER", ["is 3, but an optimizer"]),
        ("MODULE:Half", ["does not define state, update"]),
    ],
)
def test_a_wrong_reference_is_one_sentence(module: str, reference: str, words: list[str]) -> None:
    reference = reference.replace("MODULE", module).replace("MODUL:", f"{module[:-1]}x:").replace("MODUL.", f"{module[:-1]}x.")
    with pytest.raises(ConfigError) as caught:
        OPTIMIZERS.find(reference)
    expected = [word.replace("MODULE", module).replace("MODUL", f"{module[:-1]}x") for word in words]
    assert all(word in str(caught.value) for word in expected), caught.value
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\nraise RuntimeError('two\\nlines')", ["RuntimeError: two lines", "line 2"]),
        ("def f(:", ["SyntaxError", "line 1"]),
        ("import numpy as np\nnp.zeros((2, -1))", ["ValueError", "line 2"]),
        ("\n\nimport module_that_nobody_has", ["ModuleNotFoundError", "module_that_nobody_has", "line 3"]),
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


def test_options_of_the_users_code_are_checked_as_ours_are(module: str) -> None:
    with pytest.raises(OptionError, match='has no option "scael"; the nearest is "scale"') as caught:
        OPTIMIZERS.create(f"{module}:Scaled", {"scael": 2})
    assert caught.value.option == "scael"
    with pytest.raises(OptionError, match="must be a number"):
        OPTIMIZERS.create(f"{module}:Scaled", {"scale": "x"})
    with pytest.raises(ConfigError, match=f'^Optimizer "{module}:Scaled" is refused: scale must be above 0.$'):
        OPTIMIZERS.create(f"{module}:Scaled", {"scale": -1})


def test_a_name_of_ours_that_a_package_offers_is_refused(module: str, tmp_path: Path) -> None:
    offer(tmp_path / "site", "my-opt", "hpctrain.optimizers", f"sgd = {module}:Own")
    with pytest.raises(
        ConfigError, match=f'"sgd" is one of hpctrain and one of the package my-opt 1.2; name it .*"{module}:Own"'
    ):
        OPTIMIZERS.find("sgd")
    assert OPTIMIZERS.find("lars").__name__ == "Lars"
    assert OPTIMIZERS.find("hpctrain.optim.optimizers.sgd:Sgd") is Sgd


def test_a_name_that_two_packages_offer_is_refused(module: str, tmp_path: Path) -> None:
    for package, name in (("one", "Own"), ("two", "Scaled")):
        offer(tmp_path / "site", package, "hpctrain.optimizers", f"fine = {module}:{name}")
    with pytest.raises(ConfigError, match=r'"fine" is one of the package one 1\.2 and one of the package two 1\.2; name it'):
        OPTIMIZERS.find("fine")
    assert OPTIMIZERS.find("sgd") is Sgd
    assert [offer.package for offer in OPTIMIZERS.offers()] == ["one 1.2", "two 1.2"]


def test_an_unknown_name_is_told_with_the_offered_ones(module: str, tmp_path: Path) -> None:
    offer(tmp_path / "site", "my-opt", "hpctrain.optimizers", f"adamw = {module}:Own")
    with pytest.raises(ConfigError, match='no optimizer "adam"; the nearest is "adamw"'):
        OPTIMIZERS.find("adam")


def test_digests_tell_files_apart(module: str) -> None:
    assert user_code.digests() == {}
    user_code.load(f"{module}.py:Own")
    assert user_code.is_loaded(f"{module}.py:Own")
    (before,) = user_code.digests().values()
    assert before.startswith(f"{module}.py sha256 ")
    Path(f"{module}.py").write_text(GOOD + "\n# changed")
    assert user_code.digests() != {f"{module}.py:Own": before}


def test_a_function_is_an_entry_where_there_is_no_base_class(module: str) -> None:
    builders: Registry[object] = Registry("hpctrain.models.families", "model", None)
    assert builders.find(f"{module}:helper").__name__ == "helper"
    with pytest.raises(ConfigError, match="is 3, but a model is a function"):
        builders.find(f"{module}:NUMBER")


def test_base_classes_of_registries_are_no_entries() -> None:
    with pytest.raises(ConfigError, match="does not define"):
        OPTIMIZERS.find(f"hpctrain.optim.base:{Optimizer.__name__}")
