"""Plain values: numbers that YAML takes for strings, and strings that stay such."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.section import plain


@pytest.mark.parametrize("text", ["e3", "1e", "1e-3 ", "1e-3s", "0x1e3", "resnet1e3", "1", "1.5", ""])
def test_other_strings_stay_strings(text):
    assert plain(text) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_float_written_with_an_exponent_is_read(value):
    assert plain(f"{value:.17e}") == value
