"""Code of the user's is the same on all ranks, and a checkpoint has none imported."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from hpctrain import user_code
from hpctrain.config.load import load
from hpctrain.errors import ConfigError
from hpctrain.experiment.user_code import check_alike, is_trusted
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def sentences(monkeypatch: pytest.MonkeyPatch, kind: str, of_ranks: list[dict[str, str]]) -> list[str]:
    """Return what each rank raises if its code has these digests."""

    def program(comm: ThreadCommunicator) -> str:
        monkeypatch.setattr(user_code, kind, lambda: of_ranks[comm.rank])  # virtual ranks take turns, one goes on at a time
        try:
            check_alike(comm)
        except ConfigError as error:
            return str(error)
        return ""

    return run_virtual(len(of_ranks), program)


def test_all_ranks_must_have_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"own.py:A": "own.py sha256 1"}
    assert sentences(monkeypatch, "digests", [{}, {}]) == [""] * 2
    assert sentences(monkeypatch, "digests", [same, dict(same), same]) == [""] * 3
    for other in ({}, {"own.py:A": "own.py sha256 2"}, {**same, "own.py:B": "own.py sha256 1"}):
        [sentence] = set(sentences(monkeypatch, "digests", [same, same, other]))
        assert re.match(r"Rank 2 has other code than rank 0: own\.py:[AB] is ", sentence)
        assert sentence.endswith("; give all nodes the same files.")


def test_modules_that_code_imports_are_compared_where_several_ranks_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sentences(monkeypatch, "modules", [{"blocks": "1"}, {"blocks": "1", "plots": "2"}, {}]) == [""] * 3
    [sentence] = set(sentences(monkeypatch, "modules", [{"blocks": "1"}, {"plots": "1"}, {"blocks": "2", "plots": "1"}]))
    assert sentence == "Rank 2 has other code than rank 0: blocks is 2, not 1; give all nodes the same files."


def test_modules_are_those_of_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_blocks.py").write_text("x = 1\n")
    (tmp_path / "own_net.py").write_text("import own_blocks\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("own_net")
    before = user_code.modules()
    assert {"own_net", "own_blocks", __name__} <= before.keys()
    assert not before.keys() & {"numpy", "json", "hpctrain", "hpctrain.user_code", "pytest", "__main__"}
    (tmp_path / "own_blocks.py").write_text("x = 2\n")
    assert {name for name, value in user_code.modules().items() if value != before[name]} == {"own_blocks"}


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
