"""Code of the user's is the same on all ranks, and a checkpoint has none imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain import user_code
from hpctrain.comm.single import SingleCommunicator
from hpctrain.config.load import load
from hpctrain.errors import ConfigError
from hpctrain.experiment.user_code import check_alike, is_trusted

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


class Ranks(SingleCommunicator):
    """Ranks whose code is known beforehand."""

    def __init__(self, digests: list[dict[str, str]]) -> None:
        super().__init__()
        self._digests = digests

    def allgather_object(self, value: object) -> list:
        assert value == user_code.digests()
        return self._digests


def test_all_ranks_must_have_the_same_code() -> None:
    same = {"own.py:A": "own.py sha256 1"}
    check_alike(Ranks([{}, {}]))
    check_alike(Ranks([same, dict(same), same]))
    for other in ({}, {"own.py:A": "own.py sha256 2"}, {**same, "own.py:B": "own.py sha256 1"}):
        with pytest.raises(ConfigError, match=r'^Rank 2 has other code for "own\.py:[AB]" than rank 0') as caught:
            check_alike(Ranks([same, same, other]))
        assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("override", "trusted"),
    [
        ("optimizer={name: lars, lr: 1}", True),
        ("optimizer={name: 'own.py:A', lr: 1}", False),
        ("optimizer={name: offered, lr: 1}", False),
        ("averager=own.py:A", False),
        ("model=own.py:A", False),
        ("schedule=own:A", False),
        ("data.augment=[flip, 'own:A']", False),
        ("metrics.reporters=['own:A']", False),
    ],
)
def test_code_that_only_a_checkpoint_names_is_not_trusted(override: str, trusted: bool) -> None:
    stored, now = load(CONFIG, [override])[0], load(CONFIG)[0]
    assert is_trusted(stored, now) == trusted
    assert is_trusted(stored, stored)
    assert is_trusted(now, stored)
