"""Levels of the tests: the cases that each one leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sampling
from tests.support.sampling import LARGE, Sampling, amount

FILE = """
import pytest

@pytest.mark.parametrize("b", "uvwxy")
@pytest.mark.parametrize("a", range(6))
def test_product(a, b): pass

@pytest.mark.sample(2)
@pytest.mark.once_failed("3")
@pytest.mark.parametrize("a", range(9))
def test_costly(a): pass

@pytest.mark.parametrize("a", range(9))
def test_small(a): pass

@pytest.mark.thorough
def test_long(): pass
"""


class Collected:
    """The names of the cases that are left after `Sampling`."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]


def chosen(folder: Path, monkeypatch: pytest.MonkeyPatch, level: str, seed: str = "1", test: str = "") -> set[str]:
    monkeypatch.setenv(sampling.SEED, seed)
    monkeypatch.setenv(sampling.LEVEL, level)
    (folder / "test_these.py").write_text(FILE)

    class Plugin:
        def pytest_addoption(self, parser: pytest.Parser) -> None:
            sampling.add_option(parser)

        def pytest_configure(self, config: pytest.Config) -> None:
            config.pluginmanager.register(Sampling(config))

    collected = Collected()
    (folder / "none.ini").write_text("[pytest]\nmarkers =\n  sample\n  once_failed\n  thorough\n")
    options = [
        "--collect-only",
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-c",
        f"{folder}/none.ini",
    ]
    assert pytest.main([*options, f"{folder}/test_these.py{test}"], plugins=[Plugin(), collected]) == 0
    return set(collected.names)


def test_a_large_product_is_covered_and_a_costly_test_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = chosen(tmp_path, monkeypatch, "usual")
    product = {name for name in names if name.startswith("test_product")}
    assert LARGE <= len(product) < 30
    assert all(any(f"[{a}-" in name for name in product) for a in range(6))
    assert all(any(f"-{b}]" in name for name in product) for b in "uvwxy")
    costly = {name for name in names if name.startswith("test_costly")}
    assert len(costly) == 3
    assert "test_costly[3]" in costly
    assert sum(name.startswith("test_small") for name in names) == 9
    assert "test_long" not in names


def test_a_seed_draws_the_same_and_another_seed_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = (chosen(tmp_path, monkeypatch, "usual", seed) for seed in ("1", "1", "2"))
    assert first == again != other


def test_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(chosen(tmp_path, monkeypatch, "all")) == 30 + 9 + 9 + 1
    quick = chosen(tmp_path, monkeypatch, "quick")
    assert sum(name.startswith("test_product") for name in quick) == sum(name.startswith("test_small") for name in quick) == 3


def test_a_named_test_runs_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(chosen(tmp_path, monkeypatch, "usual", test="::test_product")) == 30


@pytest.mark.parametrize(("level", "expected"), [("quick", 2), ("usual", 2), ("all", 50)])
def test_amounts_follow_the_level(monkeypatch: pytest.MonkeyPatch, level: str, expected: int) -> None:
    monkeypatch.setenv(sampling.LEVEL, level)
    assert amount(2, 50) == expected
