"""The plugins of the tests: which cases a level leaves out, who is marked as a job, and kernels that are built before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.core.errors import BackendError
from hpctrain_testing.emulator import kernels
from tests.support import emulated, sampling
from tests.support.emulated import EmulatedDevices
from tests.support.marking import STARTS, JobMarker
from tests.support.sampling import LARGE, Sampling

FILE = Path(__file__).parent / "test_these.py"

Choose = Callable[..., set[str]]


class Case(SimpleNamespace):
    """A collected case."""

    __hash__ = object.__hash__


def case(test: str, marks: Mapping[str, tuple[object, ...]] | None = None, **parameters: object) -> Case:
    marked = {name: SimpleNamespace(args=arguments) for name, arguments in (marks or {}).items()}
    return Case(
        nodeid=f"test_these.py::{test}[{'-'.join(map(str, parameters.values()))}]",
        path=FILE,
        callspec=SimpleNamespace(params=parameters),
        get_closest_marker=marked.get,
        iter_markers=lambda name: [marked[name]] if name in marked else [],
    )


CASES = [
    *(case("test_product", a=a, b=b) for a, b in product(range(6), "uvwxy")),
    *(case("test_slow", {"slow": ()}, a=a, b=b) for a, b in product(range(6), "uvwxy")),
    *(case("test_costly", {"sample": (2,), "once_failed": ("3",)}, a=a) for a in range(9)),
    *(case("test_small", a=a) for a in range(9)),
    case("test_long", {"thorough": ()}),
]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Return a function that returns the names of the cases that a level and a seed leave."""

    def chosen(level: str, seed: str = "1", arguments: tuple[str, ...] = ()) -> set[str]:
        monkeypatch.setenv(sampling.SEED, seed)
        monkeypatch.setenv(sampling.LEVEL, level)
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        config: Any = SimpleNamespace(args=arguments, hook=hook, getoption=lambda name: level)
        items: list[Any] = list(CASES)
        Sampling(config).pytest_collection_modifyitems(config, items)
        return {item.nodeid.partition("::")[2] for item in items}

    return chosen


def test_a_large_product_is_covered_and_a_costly_test_sampled(choose: Choose) -> None:
    names = choose("usual")
    for test, least, most in (("test_product", LARGE, 29), ("test_slow", 6, 11)):  # 11 cases have one new value each
        of_product = {name for name in names if name.startswith(test)}
        assert least <= len(of_product) <= most
        assert all(any(f"[{a}-" in name for name in of_product) for a in range(6))
        assert all(any(f"-{b}]" in name for name in of_product) for b in "uvwxy")
    costly = {name for name in names if name.startswith("test_costly")}
    assert len(costly) == 3
    assert "test_costly[3]" in costly
    assert sum(name.startswith("test_small") for name in names) == 9
    assert "test_long[]" not in names


def test_shares_of_the_files_are_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(args=(), getoption=lambda name: "usual")
    seen = list[Path]()
    for share in ("1/3", "2/3", "3/3"):
        monkeypatch.setenv(sampling.SHARE, share)
        plugin = Sampling(config)
        seen += [file for file in sampling.TESTS.rglob("test_*.py") if plugin.pytest_ignore_collect(file) is None]
    assert sorted(seen) == sorted(sampling.TESTS.rglob("test_*.py"))


def _item(*marks: str) -> Any:
    return SimpleNamespace(get_closest_marker=lambda name: name if name in marks else None)


@pytest.mark.job  # it says so, though it starts nothing
@pytest.mark.parametrize("event", sorted(STARTS))
def test_a_test_that_starts_a_process_has_the_marker(event: str) -> None:
    marker = JobMarker()
    with marker.watching(_item("job")):
        sys.audit(event, "a program")
    with pytest.raises(pytest.fail.Exception, match=r"a program.*pytest\.mark\.job"), marker.watching(_item("slow")):
        sys.audit(event, "a program")
    with marker.watching(_item()):
        sys.audit("open", "a file")


def _session(*fixtures: str) -> Any:
    return SimpleNamespace(items=[SimpleNamespace(fixturenames=fixtures), SimpleNamespace()])


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("integration", [True, False])
def test_tests_without_kernels_are_skipped_or_fail(monkeypatch: pytest.MonkeyPatch, missing: bool, integration: bool) -> None:
    def refuse() -> None:
        raise BackendError("g++ refuses")

    monkeypatch.setattr(emulated, "prepare", refuse)
    monkeypatch.setattr(kernels, "compiler", lambda: None if missing else "g++")
    monkeypatch.setenv("CI", "true" if integration else "")
    devices = EmulatedDevices()
    devices.pytest_collection_finish(_session("emulated_device"))
    outcome = pytest.skip.Exception if missing and not integration else pytest.fail.Exception
    with pytest.raises(outcome, match=r"g\+\+"):
        devices.require()
