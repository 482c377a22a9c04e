"""`hpctrain train FILE --smoke` for every shipped configuration, and on several ranks; earlier runs are not changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain_testing.run import Outcome
from tests.support.here import run_here
from tests.support.runs import make_run

Job = Callable[..., Outcome]

CONFIGS = Path(__file__).parents[2] / "configs"
#: that would take minutes, or gigabytes for their checkpoints, at the width that they have
NARROW = {"imagenet-vgg16": 0.125, "finetune-vgg16-bn": 0.125, "imagenet-resnet50": 0.5, "imagenet-resnet50-lars": 0.25}
#: whose ranks split layers; the test below has two and three
GRIDS = ("quickstart-grid",)
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))

AGAINST_ALL = """
{name: tiny, backend: numpy, model: {name: small, channels: [4], hidden: 9, dropout: 0.2}, batch: 512, epochs: 40,
 micro_batches: 2, init: {weights: nowhere.safetensors, ignore: ["*.bias"], freeze: ["stage1.*"]},
 optimizer: {name: adamw, lr: 0.01, clip_norm: 1.0}, schedule: {name: step, milestones_epochs: [4, 30], warmup_epochs: 3},
 ema: {decay: 0.9}, early_stop: {patience: 1, metric: ema_top1}, checkpoint: {best: ema_loss, layout: sharded},
 data: {train: nowhere.h5, test: nowhere-else.h5, augment: [{name: pad_crop, padding: 1}, flip],
        mixing: {mixup: 0.2, cutmix: 1.0}},
 averager: {name: lazy, layers: 1}, evaluate: {batch: 1000}, max_time: slurm, deadline_seconds: 30}
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_passes_without_data(name: str, tmp_path: Path) -> None:
    narrow = [f"model.width={NARROW[name]}"] if name in NARROW else []
    words = ["train", str(CONFIGS / f"{name}.yaml"), *narrow, "--smoke", "--progress", "lines"]
    result = run_here(0, ["-m", "hpctrain", *words], cwd=tmp_path)
    assert result.code == 0, result.output
    assert "epoch 2/2: train loss" in result.output
    assert "best test accuracy" in result.output, "there was no evaluation, or no checkpoint"
    assert "the trial passed" in result.output
    assert ("a grid of 1 x 1 in place of 2 x n" in result.output) == (name in GRIDS)
    assert not list((tmp_path / "runs").iterdir()), "the run's directory was to be removed"
    named = [line for line in result.output.replace("\n  ", " ").splitlines() if "runs/" in line]
    assert all("deleted" in line for line in named), "a user would look for files that the trial has deleted"


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_grids_are_tried_on_the_ranks_that_there_are(ranks: int, tmp_path: Path) -> None:
    outcome = run_here(ranks, ["-m", "hpctrain", "train", str(CONFIGS / "quickstart-grid.yaml"), "--smoke"], cwd=tmp_path)
    assert outcome.code == 0, outcome.output
    assert ("2 ranks as 2 x 1" in outcome.stdout) == (ranks == 2)
    assert ("smoke: a grid of 1 x 3 in place of 2 x n, which 3 ranks cannot form" in outcome.stdout) == (ranks == 3)
    assert f"{4 * ranks} images each in place of 6 epochs with 128" in outcome.stdout
    assert outcome.stdout.count("the trial passed") == 1
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_all_parts_of_a_recipe_run_and_earlier_runs_stay(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(AGAINST_ALL)
    earlier = tmp_path / "runs" / "tiny-20200101-000000"
    make_run(earlier, "name: tiny\n")
    outcome = run_here(2, ["-m", "hpctrain", "train", "tiny.yaml", "--smoke"], cwd=tmp_path)
    assert outcome.code == 0, outcome.output
    assert "no nowhere.safetensors yet, so all weights are drawn from the seed" in " ".join(outcome.stdout.split())
    assert "layers frozen" in outcome.stdout or "layer frozen" in outcome.stdout
    assert "averaged weights" in outcome.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [earlier.name]
    assert (earlier / "config.yaml").read_text() == "name: tiny\n"


def test_a_trial_that_fails_says_so_and_keeps_its_directory(job: Job, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from hpctrain.data.augmentations.flip import Flip\n"
        "class Broken(Flip):\n"
        "    name = 'broken'\n"
        "    def apply(self, images, u, out):\n"
        "        raise ValueError('a slip in code of the user')\n"
    )
    (tmp_path / "tiny.yaml").write_text(AGAINST_ALL.replace("flip]", '"own.py:Broken"]'))
    outcome = job(0, ["-m", "hpctrain", "train", "tiny.yaml", "--smoke"], cwd=tmp_path)
    assert outcome.code != 0
    assert "a slip in code of the user" in outcome.output
    assert "the trial passed" not in outcome.output
    assert len(list((tmp_path / "runs").iterdir())) == 1
