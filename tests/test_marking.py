"""The markers by which `make quick` chooses tests say what is true."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.marking import STARTS, JobMarker


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


@pytest.mark.usefixtures("job")
def test_who_asks_for_the_fixture_is_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("job") is not None


def test_nobody_else_is(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("job") is None
