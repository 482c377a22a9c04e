"""Values that do not go with the same bits on any number of ranks: each has its place and its sentence."""

from __future__ import annotations

import pytest

from hpctrain.config.load import parse
from hpctrain.experiment.exact_faults import exact_faults

CONFIG = """
model: small
data: {train: train.h5}
batch: 8
epochs: 1
optimizer: {name: sgd, lr: 0.1}
schedule: constant
threads: 1
"""


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("threads=auto", ("threads",), "set threads to the number"),
        ("grid.rows=2", ("grid", "rows"), "set grid.rows to 1"),
        ("batch_norm.statistics=synchronised", ("batch_norm", "statistics"), "set batch_norm.statistics to local"),
        ("backend=cuda", ("backend",), "set backend to onednn or numpy"),
        ("averager=auto", ("averager",), "averager is auto"),
        ("grid=auto", ("grid",), "grid is auto"),
        ("plan=auto", ("plan",), "plan is auto"),
    ],
)
def test_each_is_refused_with_shards_only(override: str, path: tuple[str, ...], words: str) -> None:
    config = parse(CONFIG, overrides=[override])[0]
    assert not list(exact_faults(config))
    (found,) = exact_faults(parse(CONFIG, overrides=[override, "exact=true"])[0])
    assert found[0] == path
    assert words in found[1]


def test_a_plain_run_has_none() -> None:
    assert not list(exact_faults(parse(CONFIG, overrides=["exact.shards=6"])[0]))
