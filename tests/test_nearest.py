"""Names that are unknown: which one was meant, and which there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.nearest import choices, nearest

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
        ("q", [f"layer{number}.conv" for number in range(50)], 'there are 50, such as "layer0.conv"'),
    ],
)
def test_the_end_of_a_sentence(name: str, names: list[str], end: str) -> None:
    assert choices(name, names) == end
