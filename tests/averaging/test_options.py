"""Checks that options of several strategies share: an error names the option."""

import pytest

from hpctrain.averaging.options import check_at_least_one, check_sizes, words_of_sizes
from hpctrain.errors import OptionError


def test_counts_are_at_least_one() -> None:
    check_at_least_one(window=1, bucket_bytes=None)
    with pytest.raises(OptionError, match=r"^window is 0, but must be at least 1\.$") as caught:
        check_at_least_one(bucket_bytes=5, window=0)
    assert caught.value.option == "window"


def test_sizes_are_given_or_measured() -> None:
    check_sizes("rule", bucket_bytes=7)
    check_sizes("measured", bucket_bytes=None)
    with pytest.raises(OptionError, match="sizes is measured, but bucket_bytes is 7"):
        check_sizes("measured", bucket_bytes=7)


def test_sizes_by_rule_add_no_words() -> None:
    assert words_of_sizes("rule") == ""
    assert words_of_sizes("measured") == ", sizes measured"
