"""Batch norms over a single value per channel are found from the shares of the ranks, and reported before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cli.main import cli
from hpctrain.comm.single import SingleCommunicator
from hpctrain.config.load import parse
from hpctrain.data.loader import Share
from hpctrain.data.sampler import counts
from hpctrain.errors import ConfigError
from hpctrain.experiment import single_values as module
from hpctrain.experiment.automatic_choice import Resolved
from hpctrain.experiment.build import build
from hpctrain.experiment.session import Session
from hpctrain.experiment.single_values import single_values_of
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.threads import ThreadPlan
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.train.micro_batches import micro_batches_of

CONFIG = """
model: resnet18
data: {train: synthetic, synthetic: {height: 32, width: 32, channels: 3, classes: 3, samples: 40}}
batch: 4
epochs: 1
optimizer: {name: sgd, lr: 0.05}
schedule: constant
threads: 1
"""


def _of(*overrides: str, ranks: int | None = None) -> module.SingleValues:
    return single_values_of(parse(CONFIG, overrides=overrides)[0], ranks)


@pytest.mark.parametrize(
    ("overrides", "mend"),
    [
        (["batch=1"], "set batch to at least 2, or use larger images."),
        (["grid.cols=4"], "set batch to at least 8, or set batch_norm.statistics to synchronised, or use larger images."),
        (["grid.cols=3"], "set batch to at least 6"),  # one rank has two images
        (["micro_batches=4"], "set batch to at least 8, or use larger images."),
        (["micro_batches=3"], "set batch to at least 6"),
        (["micro_batches=4", "batch_norm.statistics=synchronised"], "set batch to at least 8"),
        (["exact=true", "batch=8"], "set batch to at least 16, or set exact.shards to at most 4, or use larger images."),
        (["data.synthetic.samples=3", "grid.cols=3"], "set batch to at least 6"),
        (["data.sizes=[{size: 64}, {size: 32, from_epoch: 1}]", "epochs=2", "batch=1"], "set batch to at least 2"),
        (["grid={rows: 2, cols: 2}", "batch=2"], "set batch to at least 8"),
        (["grid={rows: 2, cols: 2}", "plan.default=domain", "batch=2"], "set batch to at least 4"),
    ],
)
def test_a_single_value_in_every_step_is_refused_with_the_layer(overrides: list[str], mend: str) -> None:
    found = _of(*overrides)
    assert found.refusal is not None
    assert found.refusal.startswith("Batch norm layer4.0.bn1 has a single value per channel")
    assert mend in found.refusal
    with pytest.raises(ConfigError):
        found.check()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["batch=1", "epochs=0"],
        ["batch=1", "init.freeze=['layer4.*']"],
        ["batch=1", "data.synthetic.height=64"],
        ["batch=1", "data.train=nowhere.h5"],
        ["batch=1", "data.sizes=[{size: 64}, {size: 32, from_epoch: 1}]"],  # which one epoch does not come to
        ["grid.cols=4", "batch_norm.statistics=synchronised"],
        ["grid={rows: 2, cols: 2}", "plan.default=domain"],
        ["exact={shards: 2}"],
        ["batch=1", "model=small", "data.synthetic.channels=1"],
    ],
)
def test_others_are_not(overrides: list[str]) -> None:
    found = _of(*overrides)
    assert (found.refusal, found.warning) == (None, None)


@pytest.mark.parametrize(
    ("overrides", "ranks", "warned"),
    [
        (["batch=39"], 1, True),
        (["batch=38"], 1, False),
        (["batch=38"], 2, True),
        (["batch=40"], 2, False),
        (["batch=20"], 2, False),
    ],
)
def test_a_single_value_in_the_last_step_is_a_warning(overrides: list[str], ranks: int, warned: bool) -> None:
    found = _of(*overrides, ranks=ranks)
    assert found.refusal is None
    assert (found.warning is not None) is warned
    if found.warning:
        assert "in the last step of each epoch" in found.warning


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_the_samples_that_share_statistics_are_those_of_the_passes(samples: int, rows: int, cols: int, passes: int) -> None:
    """The prediction equals the passes that a training makes from the shares of its ranks."""
    config = parse(CONFIG, overrides=[f"micro_batches={passes}", "batch=40"])[0]
    of_ranks = counts(samples, rows * cols, rows)
    of_rank, of_group, of_all = set(), set(), [0] * passes
    for group in range(cols):
        share = Share(of_ranks[group * rows : (group + 1) * rows])
        for number, one in enumerate(micro_batches_of(share, passes)):
            of_rank |= {*one.counts}
            of_group.add(sum(one.counts))
            of_all[number] += sum(one.counts)
    plan = ParallelPlan(rows, cols)
    for who, expected in ((module._RANK, of_rank), (module._GROUP, of_group), (module._ALL, {*of_all})):
        assert module._least(config, samples, plan, who) == min(expected - {0})


def test_config_check_says_it_from_the_header_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    refused = CliRunner().invoke(cli, ["config", "check", str(tmp_path / "c.yaml"), "batch=1"])
    assert refused.exit_code == 2
    assert "layer4.0.bn1" in refused.output
    warned = CliRunner().invoke(cli, ["config", "check", str(tmp_path / "c.yaml"), "batch=39"])
    assert warned.exit_code == 0
    assert "warning: Batch norm layer4.0.bn1" in warned.output


def test_a_training_is_refused_before_its_first_step(tmp_path: Path) -> None:
    config = parse(CONFIG, overrides=["batch=1", "backend=numpy", "averager=blocking", f"output={tmp_path}"])[0]
    launcher, threads = Launcher("none"), ThreadPlan(1, 1, "a test")
    session = Session.start(Resolved(config), launcher, threads, SingleCommunicator(), {})
    with pytest.raises(ConfigError, match=r"layer4\.0\.bn1 has a single value"):
        build(session)
