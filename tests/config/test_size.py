"""Sizes in the ways in which people write them."""

from __future__ import annotations

import pytest

from hpctrain.config.data_section import CacheConfig
from hpctrain.config.load import parse
from hpctrain.config.size import parse_size
from hpctrain.errors import ConfigError
from tests.config.test_duration import _REST


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GB", 64 * 10**9),
        ("64 g", 64 * 10**9),
        ("16 GiB", 16 << 30),
        ("1.5kB", 1500),
        ("3MiB", 3 << 20),
        ("2TB", 2 * 10**12),
        ("512", 512),
        ("512 B", 512),
        (".5K", 500),
    ],
)
def test_a_text_is_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1XB", "1 GBit", "1e400", "010", "0x10", "1_000", "064GB"])
def test_others_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def cache(text: str) -> CacheConfig:
    return parse(_REST.replace("train.h5}", f"train.h5, cache: {text}}}"))[0].data.cache


@pytest.mark.parametrize(
    ("text", "memory"),
    [("true", "auto"), ("false", 0), ("{}", "auto"), ("{memory: 0}", 0), ("{memory: 3GB}", 3 * 10**9), ("{memory: 1e3}", 1000)],
)
def test_a_cache_is_a_switch_or_a_section(text: str, memory: object) -> None:
    assert cache(text).memory == memory


@pytest.mark.parametrize("text", ["{memory: -1}", "{memory: true}", "{memory: much}", "{memory: .inf}", "{memory: null}"])
def test_a_memory_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.cache\.memory.*must be \"auto\", or a size of 0 or more"):
        cache(text)
