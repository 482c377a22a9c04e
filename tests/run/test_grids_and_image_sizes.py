"""The grid, image sizes and batch norms of a configuration, and its smoke trial."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.assembly.faults import check_config
from hpctrain.assembly.images import check_files, check_image_shapes, check_single_values, image_sizes, of_largest, size_faults
from hpctrain.assembly.keywords import LOADER_KEYS, keyword_config
from hpctrain.assembly.recipe import Recipe, check_batch, columns
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.cli.main import cli
from hpctrain.comm.base import SingleCommunicator
from hpctrain.config.load import load, parse
from hpctrain.config.schema import Config, ScheduleConfig
from hpctrain.core.errors import ConfigError, DataError, ShapeError
from hpctrain.data.loader import Share
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Mixing, counts
from hpctrain.data.writer import write_data_file
from hpctrain.job.automatic_choice import Resolved
from hpctrain.job.session import Session
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.threads import ThreadPlan
from hpctrain.nn.network import Network
from hpctrain.optim.schedules import SCHEDULES
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.run.build import build
from hpctrain.run.python_job import Job, loader_mixing
from hpctrain.run.smoke import EPOCHS, STEPS, recipe_images, remove_run, short_schedule, shortened
from hpctrain.training.passes import StatisticsSharing, micro_batches_of
from tests.support import nets
from tests.support.sampling import amount

CONFIG = Path(__file__).parents[2] / "configs" / "imagenet-vgg16.yaml"
DOMAIN = ("model={name: vgg11, width: 0.05}", "plan.default=domain", "grid.rows=2")


def config_of(*overrides: str) -> Config:
    return load(CONFIG, overrides)[0]


@pytest.mark.parametrize(
    ("overrides", "ranks", "expected"),
    [((), 6, 6), (("grid.rows=2",), 6, 3), (("grid.rows=4",), 3, 1), (("grid.rows=2", "grid.cols=5"), 6, 5)],
)
def test_the_size_of_a_data_group(overrides: tuple[str, ...], ranks: int, expected: int) -> None:
    assert columns(config_of(*overrides), ranks) == expected


def test_the_plan_has_the_uses_that_patterns_name() -> None:
    config = config_of(*DOMAIN, "plan.classifier.*=model")
    plan = Recipe.of(config, grid=(config.grid.rows, 3)).plan
    assert (plan.rows, plan.cols, plan.default) == (2, 3, Parallelism.DOMAIN)
    assert plan.use_of("classifier.0") is Parallelism.MODEL


@pytest.mark.parametrize(("batch", "rows", "cols", "legal"), [(3, 1, 3, True), (2, 1, 3, False), (1, 2, 3, True)])
def test_every_rank_has_a_sample_to_work_on(batch: int, rows: int, cols: int, legal: bool) -> None:
    """Ranks of a split group work on each other's samples."""
    if legal:
        check_batch(batch, rows, cols)
    else:
        with pytest.raises(ConfigError, match=rf"batch is {batch}.*the smallest batch is {cols}\."):
            check_batch(batch, rows, cols)


SIZES_TEXT = """
{{model: {model}, batch: 8, epochs: 6, optimizer: {{name: sgd, lr: 0.1}}, schedule: constant,
 data: {{train: nowhere.h5, augment: [{{name: random_resized_crop, size: 224}}], sizes: {sizes}}}}}
"""


def sizes_config(sizes: str, model: str = "resnet50") -> Config:
    return parse(SIZES_TEXT.format(sizes=sizes, model=model))[0]


@pytest.mark.parametrize("model", ["resnet50", "vgg16", "alexnet", "resnet9", "resnet20", "small"])
def test_models_take_several_sizes(model: str) -> None:
    assert not list(
        size_faults(Recipe.of(sizes_config("[{size: 96}, {from_epoch: 1, size: 128}, {from_epoch: 3, size: 72}]", model)))
    )


def test_a_model_with_a_fault_of_its_own_is_not_asked() -> None:
    assert not list(size_faults(Recipe.of(sizes_config("[{size: 2}]", "{name: vgg16, depth: 5}"))))


@pytest.mark.parametrize(("epochs", "side"), [(1, 96), (3, 128), (9, 160)])
def test_the_largest_size_is_that_which_the_training_comes_to(epochs: int, side: int) -> None:
    sizes = "[{size: 96}, {from_epoch: 1, size: 128}, {from_epoch: 3, size: 72}, {from_epoch: 4, size: 160}]"
    config = sizes_config(sizes).model_copy(update={"epochs": epochs})
    pipeline = Pipeline([("random_resized_crop", {"size": 224})], 0, np.zeros(3), np.ones(3))
    assert of_largest(config, pipeline).output_shape(256, 256, 3) == (side, side, 3)
    plain = sizes_config("[]")
    assert image_sizes(plain) is None
    assert of_largest(plain, pipeline) is pipeline


def test_a_network_that_does_not_take_a_shape_is_reported_with_the_layer() -> None:
    network = Network(nets.plain(), (9, 7, 3), NumpyKernelSet())
    check_image_shapes(network, [(9, 7, 3), (10, 8, 3)])
    with pytest.raises(ShapeError, match=r"images of shape \(9, 7, 3\) .*, but not of \(16, 16, 3\), which .*: Layer fc1"):
        check_image_shapes(network, [(9, 7, 3), (16, 16, 3)])


BATCH_NORM_CONFIG = """
{model: resnet18, data: {train: synthetic, synthetic: {height: 32, width: 32, channels: 3, classes: 3, samples: 40}},
 batch: 4, epochs: 1, optimizer: {name: sgd, lr: 0.05}, schedule: constant, threads: 1}
"""


def _single_values(*overrides: str, ranks: int | None = None) -> str:
    checked = check_files(parse(BATCH_NORM_CONFIG, overrides=overrides)[0])
    if checked is None:
        return ""
    (rows, cols), config = checked[0].grid or (1, 1), checked[0].config
    return check_single_values(replace(checked[0], grid=(rows, cols if ranks is None else columns(config, ranks))))


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
    with pytest.raises(ConfigError, match=rf"^Batch norm layer4\.0\.bn1 has a single value per channel.*{re.escape(mend)}"):
        _single_values(*overrides)


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
def test_batch_norms_with_several_values_are_not_refused(overrides: list[str]) -> None:
    assert not _single_values(*overrides)


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
    assert ("in the last step of each epoch" in _single_values(*overrides, ranks=ranks)) is warned


@settings(max_examples=amount(30, 60))
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_the_samples_that_share_statistics_are_those_of_the_passes(samples: int, rows: int, cols: int, passes: int) -> None:
    """The prediction equals the passes that a training makes from the shares of its ranks."""
    of_ranks = counts(samples, rows * cols, rows)
    of_rank, of_group, of_all = set(), set(), [0] * passes
    for group in range(cols):
        share = Share(of_ranks[group * rows : (group + 1) * rows])
        for number, one in enumerate(micro_batches_of(share, passes)):
            of_rank |= {*one.counts}
            of_group.add(sum(one.counts))
            of_all[number] += sum(one.counts)
    plan = ParallelPlan(rows, cols)
    sharing = StatisticsSharing(plan, passes, None)
    for who, expected in (("a rank", of_rank), ("a split group", of_group), ("the step", {*of_all})):
        assert sharing._fewest_samples(samples, who) == min(expected - {0})


def test_config_check_says_it_from_the_header_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(BATCH_NORM_CONFIG)
    refused = CliRunner().invoke(cli, ["config", "check", str(tmp_path / "c.yaml"), "batch=1"])
    assert refused.exit_code == 2
    assert "layer4.0.bn1" in refused.output
    warned = CliRunner().invoke(cli, ["config", "check", str(tmp_path / "c.yaml"), "batch=39"])
    assert warned.exit_code == 0
    assert "warning: Batch norm layer4.0.bn1" in warned.output


def test_a_training_is_refused_before_its_first_step(tmp_path: Path) -> None:
    config = parse(BATCH_NORM_CONFIG, overrides=["batch=1", "backend=numpy", "averager=blocking", f"output={tmp_path}"])[0]
    launcher, threads = Launcher("none"), ThreadPlan(1, 1, "a test")
    session = Session.start(Resolved(Recipe.of(config)), launcher, threads, SingleCommunicator(), {})
    with pytest.raises(ConfigError, match=r"layer4\.0\.bn1 has a single value"):
        build(session)


RECIPE_TEXT = """
{{model: {model}, batch: 256, epochs: 90, optimizer: {{name: sgd, lr: 0.1, momentum: 0.9}},
 schedule: {{name: cosine, warmup_epochs: 5}}, data: {{train: {folder}/train.h5, test: {folder}/test.h5,
 augment: [{{name: random_resized_crop, size: {size}}}], evaluate_augment: [{{name: center_crop, size: {size}}}]}}}}
"""
#: keys that a trial may change; all others are the recipe's
CHANGED = {"name", "batch", "epochs", "optimizer.lr", "schedule.warmup_epochs", "data.train", "data.test", "data.synthetic"}


def configured(folder: Path, *overrides: str, model: str = "small", size: int = 28) -> Config:
    return check_config(*parse(RECIPE_TEXT.format(folder=folder, model=model, size=size), overrides=overrides)).config


def write_images(path: Path, shape: tuple[int, int, int], classes: list[str]) -> None:
    count = len(classes)
    write_data_file(path, count, shape, classes, [(np.ones((count, *shape), np.uint8), np.arange(count))])


def different(one: Any, other: Any, path: str = "") -> set[str]:
    """Dotted keys in which two configurations differ, down to those that are listed above."""
    if one == other:
        return set()
    if path in CHANGED or not isinstance(one, dict) or not isinstance(other, dict):
        return {path}
    keys = one.keys() | other.keys()
    return set().union(*(different(one.get(key), other.get(key), f"{path}.{key}" if path else key) for key in keys))


def test_nothing_but_the_length_is_left_out(tmp_path: Path) -> None:
    config = configured(tmp_path, "ema.decay=0.9", "data.mixing.mixup=0.2", "averager=lazy", "loss.label_smoothing=0.1")
    trial = shortened(config, ranks=2)
    assert different(config.model_dump(), trial.config.model_dump()) == CHANGED
    assert Config.model_validate(trial.config.model_dump()) == trial.config
    assert trial.config.optimizer.lr / trial.config.batch == pytest.approx(config.optimizer.lr / config.batch)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 12])
def test_the_grid_splits_layers_over_as_many_ranks_as_it_can(ranks: int, tmp_path: Path) -> None:
    config = configured(tmp_path, "grid={rows: 4, cols: 3, tiles: [2, 2]}", "plan.default=domain")
    trial = shortened(config, ranks)
    rows = trial.config.grid.rows
    assert (ranks % rows, rows) == (0, {1: 1, 2: 2, 3: 3, 4: 4, 5: 1, 6: 3, 12: 4}[ranks])
    assert trial.config.grid == config.grid or any("in place of 4 x 3" in note for note in trial.notes)
    assert trial.config.batch >= ranks


@pytest.mark.parametrize(
    ("sizes", "expected"), [((96,), (96,)), ((96, 128, 72, 160), (96, 160)), ((160, 128, 72), (160, 72)), ((96, 96), (96,))]
)
def test_images_are_the_recipes_in_the_first_and_the_largest_size(
    sizes: tuple[int, ...], expected: tuple[int, ...], tmp_path: Path
) -> None:
    write_images(tmp_path / "train.h5", (256, 240, 3), ["a", "b", "c"])
    by_epoch = ", ".join(f"{{from_epoch: {epoch}, size: {size}}}" for epoch, size in enumerate(sizes))
    trial = shortened(configured(tmp_path, f"data.sizes=[{by_epoch}]", model="resnet18", size=224), 1).config
    made = trial.data.synthetic
    assert (made.height, made.width, made.channels, made.classes) == (256, 240, 3, 3)
    assert [(step.from_epoch, step.size) for step in trial.data.sizes] == list(enumerate(expected))


def test_files_that_are_there_are_looked_at(tmp_path: Path) -> None:
    write_images(tmp_path / "train.h5", (30, 28, 3), ["a", "b"])
    assert recipe_images(configured(tmp_path))[0].shapes[0] == (30, 28, 3)
    assert recipe_images(configured(tmp_path))[1] == (f"there is no {tmp_path}/test.h5 yet",)
    write_images(tmp_path / "test.h5", (30, 28, 3), ["a", "c"])
    with pytest.raises(DataError):
        shortened(configured(tmp_path), 1)
    write_images(tmp_path / "test2.h5", (30, 28, 3), ["a", "b"])
    with pytest.raises(ShapeError):
        shortened(configured(tmp_path, f"data.test={tmp_path}/test2.h5", "data.evaluate_augment.0.size=20"), 1)


@given(
    epochs=st.integers(1, 300), warm=st.floats(0, 1), milestones=st.lists(st.floats(0.01, 2), max_size=4, unique=True).map(sorted)
)
def test_schedules_keep_their_order(epochs: int, warm: float, milestones: list[float]) -> None:
    warmup = warm * epochs
    ends = tuple(warmup + share * epochs for share in milestones)
    schedule = ScheduleConfig(name="step", warmup_epochs=warmup, milestones_epochs=ends)
    fewer = min(epochs, EPOCHS)
    short = short_schedule(schedule, epochs, fewer)
    made = SCHEDULES.create(
        short.name, short.options, base_lr=1.0, epochs=fewer, steps_per_epoch=STEPS, warmup_epochs=short.warmup_epochs
    )
    assert made.warmup_steps >= (warmup > 0 and fewer < epochs)
    assert len(short.options["milestones_epochs"]) == len(ends)


def test_a_directory_is_removed_and_a_failure_to_do_so_is_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    assert remove_run(run) == f"the trial passed; its directory {run} was deleted"
    assert not run.exists()
    assert "could not be deleted (No such file or directory)" in remove_run(run)


def test_a_loader_mixes_images_only_on_the_host() -> None:
    on_host, on_gpu = (
        SimpleNamespace(network=SimpleNamespace(kernels=SimpleNamespace(arithmetic=SimpleNamespace(on_host=is_host))))
        for is_host in (True, False)
    )
    mixed = keyword_config(Job.loader, LOADER_KEYS, {"mixing": {"mixup": np.float32(0.5)}, "seed": 3})
    assert loader_mixing(mixed, on_host) == Mixing(mixup=0.5, seed=3)
    assert loader_mixing(keyword_config(Job.loader, LOADER_KEYS, {"mixing": {"mixup": 0}}), on_gpu) is None
    with pytest.raises(ConfigError, match="leave mixing out"):
        loader_mixing(mixed, on_gpu)
