"""Durations in all ways in which people and schedulers write them."""

from __future__ import annotations

import pytest

from hpctrain.config.duration import parse_duration
from hpctrain.config.load import parse
from hpctrain.errors import ConfigError

_REST = """
model: small
data: {train: train.h5}
batch: 4
epochs: 1
optimizer: {name: sgd, lr: 0.1}
schedule: constant
"""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3h50m", 13_800),
        ("3h 50min", 13_800),
        ("50m", 3_000),
        ("1.5h", 5_400),
        ("2d", 172_800),
        ("90s", 90),
        ("90", 90),
        ("2.5", 2.5),
        ("00:50:00", 3_000),
        ("03:50:00", 13_800),
        ("50:00", 3_000),
        ("1-02:00:00", 93_600),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("90:00", 5_400),
    ],
)
def test_a_text_is_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("3h50m", 13_800.0), ("3:50:00", 13_800.0), ("00:50:00", 3_000.0), ("90", 90.0), ("slurm", "slurm"), ("null", None)],
)
def test_a_configuration_takes_all_of_them(written: str, seconds: float | str | None) -> None:
    """YAML reads 3:50:00 as a number of seconds by itself, and 00:50:00 as a text."""
    assert parse(_REST, overrides=[f"max_time={written}"])[0].max_time == seconds


@pytest.mark.parametrize(
    "written", ["0", "-5", "soon", "3h50", "1:75", "1-24", "1:75:00", "010", "0x10", "1_000", "yes", ".inf", "[1]", "0:00"]
)
def test_what_is_no_time_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match=r'must be a time above 0, such as "3h50m", "00:50:00" or a number of seconds'):
        parse(_REST, overrides=[f"max_time={written}"])
