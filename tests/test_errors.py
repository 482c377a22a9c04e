"""Errors that a user can mend: one family, which the command line turns into sentences."""

from __future__ import annotations

import importlib
import inspect
import pickle

import pytest

from hpctrain import errors
from hpctrain.errors import HpctrainError, OptionError
from tests.test_architecture import classes

OURS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HpctrainError)]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_an_error_is_its_sentence_also_on_another_rank(kind: type[HpctrainError]) -> None:
    sentence = "The batch is 0, but must be at least 1."
    there = pickle.loads(pickle.dumps(kind(sentence)))
    assert type(there) is kind
    assert str(there) == sentence


def test_the_option_of_an_error_is_known_where_it_was_raised() -> None:
    assert OptionError("lr is -1.", "lr").option == "lr"


def test_all_errors_of_the_package_are_of_this_family() -> None:
    """All but one that its only caller turns into a DataError, and two that tell of defects: in plans, in kernels."""
    for name, node in classes():
        if node.name.endswith("Error") and node.name not in ("DamageError", "EmulatedDeviceError", "InvalidPlanError"):
            module, _, word = name.rpartition(".")
            assert issubclass(getattr(importlib.import_module(module), word), HpctrainError), name
