"""Registries: names are module names, options are keywords, and every refusal names what is near."""

import pytest

from hpctrain.errors import ConfigError
from hpctrain.optim.base import Optimizer
from hpctrain.optim.lars import Lars
from hpctrain.optim.sgd import Sgd
from hpctrain.registry import OptionError, Registry

OPTIMIZERS: Registry[Optimizer] = Registry("hpctrain.optim", "optimizer", Optimizer)


def test_names_are_modules_without_helpers() -> None:
    assert OPTIMIZERS.names() == ("lars", "sgd")


def test_a_name_finds_its_class() -> None:
    assert OPTIMIZERS.find("sgd") is Sgd
    assert OPTIMIZERS.find("lars") is Lars


def test_options_are_the_constructors_keywords() -> None:
    made = OPTIMIZERS.create("sgd", {"momentum": 0, "clip_norm": 2})
    assert isinstance(made, Sgd)
    assert made.clip_norm == 2.0


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("sgdd", {}, ['no optimizer "sgdd"', '"sgd"']),
        ("base", {}, ['no optimizer "base"']),
        ("sgd", {"momentun": 0.9}, ['"momentun"', '"momentum"']),
        ("sgd", {"momentum": "high"}, ['"momentum"', '"high"', "number"]),
        ("sgd", {"nesterov": 1}, ['"nesterov"', "boolean"]),
        ("sgd", {"decay_exclude": "some"}, ['"decay_exclude"', "norm_and_bias"]),
    ],
)
def test_a_refusal_is_one_sentence(name: str, options: dict[str, object], words: list[str]) -> None:
    for attempt in (OPTIMIZERS.check, OPTIMIZERS.create):
        with pytest.raises(ConfigError) as caught:
            attempt(name, options)
        assert all(word in str(caught.value) for word in words), caught.value
        assert str(caught.value).endswith(".")


def test_what_the_program_gives_is_no_option() -> None:
    with pytest.raises(OptionError, match="set by the program"):
        OPTIMIZERS.check("sgd", {"momentum": 0.9}, reserved=["momentum"])
