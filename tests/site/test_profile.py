"""The fields of a site profile: what is refused, and that each setting of a shipped one names its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from hpctrain.site import profile_files
from hpctrain.site.profile import NOT_SAID, NodeFields, Sourced
from tests.support.job_scripts import SITES


def _sourced(value: Any) -> Iterator[Sourced]:
    """All sections that name a source."""
    if isinstance(value, Sourced):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    fields = (getattr(value, name) for name in type(value).model_fields) if isinstance(value, BaseModel) else inner
    for item in fields:
        yield from _sourced(item)


@pytest.mark.parametrize("site", SITES)
def test_every_setting_of_a_shipped_profile_names_its_source(site: str) -> None:
    profile = profile_files.read(site, {}).profile
    settings = [section for section in _sourced(profile) if section.model_dump(exclude={"source"}, exclude_defaults=True)]
    assert settings
    for section in settings:
        assert section.source != NOT_SAID, section
        assert section.source.startswith(("https://", "github.com/", "unverified: ")), section.source
    assert profile.guide.startswith("https://")


def test_machines_that_nobody_has_tried_say_so() -> None:
    profile = profile_files.read("frontier", {}).profile
    assert "untested" in profile.description
    assert "not on the machine" in profile.tested


@given(cores=st.integers(1, 300), most=st.none() | st.integers(1, 300), ranks=st.integers(1, 300))
def test_ranks_fit_a_node(cores: int, most: int | None, ranks: int) -> None:
    limit = cores if most is None else min(cores, most)
    if ranks <= limit:
        assert NodeFields(cores=cores, ranks=ranks, most_ranks=most).limit == limit
    else:
        with pytest.raises(ValidationError, match=f"the nearest legal value is {limit}"):
            NodeFields(cores=cores, ranks=ranks, most_ranks=most)
