"""Checks of names, options and values that must fit: each fault at its own place, all at once, without data."""

from pathlib import Path

import pytest

from hpctrain.config.load import load, parse
from hpctrain.errors import ConfigError
from hpctrain.experiment.averager import AVERAGERS
from hpctrain.experiment.check import check_names
from hpctrain.models import catalogue
from hpctrain.optim.optimizers import OPTIMIZERS

CONFIGS = Path(__file__).parents[2] / "configs"

TEXT = """\
model:
  name: resnet20
  width: 0.5
data:
  train: nowhere.h5
  augment:
    - name: pad_crop
      padding: 2
    - flip
  evaluate_augment:
    - name: center_crop
      size: 24
batch: 9
epochs: 7
optimizer:
  name: sgd
  lr: 0.1
  momentum: 0.9
schedule:
  name: step
  milestones_epochs: [3, 5]
averager:
  name: blocking
grid:
  cols: 3
"""


def faults(text, *overrides):
    """The lines of the error."""
    config, source = parse(text, "f.yaml", overrides)
    with pytest.raises(ConfigError) as caught:
        check_names(config, source)
    return str(caught.value).splitlines()


def passes(text, *overrides):
    check_names(*parse(text, "f.yaml", overrides))


def test_a_sound_configuration_passes():
    passes(TEXT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("name: resnet20", "name: resnet21", 2, ["resnet21", "resnet20"]),
        ("width: 0.5", "widht: 0.5", 3, ["widht", "width"]),
        ("width: 0.5", "width: wide", 3, ["width", "wide", "number"]),
        ("width: 0.5", "width: -1", 3, ["-1"]),
        ("width: 0.5", "depth: 32", 3, ["depth", "20", "32"]),
        ("name: pad_crop", "name: padcrop", 7, ["padcrop", "pad_crop"]),
        ("padding: 2", "pading: 2", 8, ["pading", "padding"]),
        ("padding: 2", "padding: -2", 8, ["-2", "smallest is 0"]),
        ("- flip", "- {name: flip, probability: 2}", 9, ["probability", "2", "[0, 1]"]),
        ("      size: 24\n", "", 11, ["center_crop", "size"]),
        ("size: 24", "size: large", 12, ["size", "large", "integer"]),
        ("name: sgd", "name: sdg", 16, ["sdg", '"sgd"']),
        ("momentum: 0.9", "momentun: 0.9", 18, ["momentun", '"momentum"']),
        ("momentum: 0.9", "momentum: high", 18, ["momentum", "high", "number"]),
        ("momentum: 0.9", "momentum: 1.5", 18, ["momentum", "1.5", "[0, 1)"]),
        ("momentum: 0.9", "nesterov: 1", 18, ["nesterov", "true or false"]),
        ("name: step", "name: stairs", 20, ["stairs", "step"]),
        ("milestones_epochs: [3, 5]", "milestones: [3, 5]", 21, ["milestones", "milestones_epochs"]),
        ("milestones_epochs: [3, 5]", "milestones_epochs: [5, 3]", 21, ["[5, 3]", "increase"]),
        ("milestones_epochs: [3, 5]", "milestones_epochs: 3", 21, ["milestones_epochs", "3"]),
        ("  milestones_epochs: [3, 5]\n", "", 20, ["milestones_epochs"]),
        ("  milestones_epochs: [3, 5]", "  milestones_epochs: [3]\n  gamma: 2", 22, ["gamma", "2"]),
        ("  milestones_epochs: [3, 5]", "  milestones_epochs: [3]\n  base_lr: 2", 22, ["base_lr", "set by the program"]),
        ("name: blocking", "name: blokcing", 23, ["blokcing", '"blocking"']),
        ("name: blocking", "name: blocking\n  window: 3", 24, ["window", "no option"]),
        ("name: blocking", "name: priority\n  windw: 3", 24, ["windw", '"window"']),
        ("name: blocking", "name: priority\n  window: wide", 24, ["window", "wide", "integer"]),
        ("name: blocking", "name: priority\n  group: 3", 24, ["group", "set by the program"]),
        ("name: blocking", "name: priority\n  micro_batches: 2", 24, ["micro_batches", "set by the program"]),
        ("name: blocking", "name: sharded\n  nodes: [0, 0]", 24, ["nodes", "set by the program"]),
        ("name: blocking", "name: priority\n  window: 0", 24, ["window is 0", "at least 1"]),
        ("name: blocking", "name: priority\n  window: 2\n  slice_parameters: -3", 25, ["slice_parameters is -3", "least 1"]),
        ("name: blocking", "name: sharded\n  window: 2\n  bucket_bytes: 0", 25, ["bucket_bytes is 0", "at least 1"]),
        ("name: blocking", "name: sharded\n  fc_exchange: sometimes", 24, ["fc_exchange", "sometimes", "'always' or 'never'"]),
        ("name: blocking", "name: lazy\n  max_interval: 2\n  layers: 0", 25, ["layers is 0", "at least 1"]),
        (
            "name: blocking",
            "name: sharded\n  fc_exchange: always\nmicro_batches: 2",
            24,
            ["fc_exchange is always, but micro_batches is 2", "set fc_exchange to auto or never"],
        ),
        ("batch: 9", "batch: 2", 13, ["batch is 2", "3 ranks (grid.cols)", "smallest batch is 3"]),
        ("cols: 3", "rows: 4\n  tiles: [3, 2]", 26, ["3 x 2 make 6 parts", "grid.rows is 4", "4 x 1"]),
        ("cols: 3", 'cols: 3\nplan:\n  "layer2.*": domain\n  "layers3.*": domain', 28, ["'layers3.*'", '"layer3.']),
        ("cols: 3", 'rows: 2\n  overlap: ["*.conv2", "konv1"]\nplan:\n  default: domain', 26, ["'konv1'", 'nearest is "conv1"']),
        (
            "cols: 3",
            'rows: 2\n  overlap: ["*.conv2", "*.relu1"]\nplan:\n  default: domain',
            26,
            ["'*.relu1', but no such layer", "relu1 is no convolution", "or be left out"],
        ),
        ("cols: 3", 'rows: 1\n  overlap: ["*.conv2"]', 26, ["'*.conv2', but grid.rows is 1", "set grid.rows to 2 or more"]),
        ("cols: 3", 'rows: 2\n  overlap: ["*.conv2"]', 26, ["layer1.0.conv2 is not under domain"]),
        ("cols: 3", "rows: 2\n  overlap: [conv1]\nplan:\n  default: domain", 26, ["conv1 reads its halo from the data file"]),
        ("cols: 3", 'rows: 4\n  tiles: [2, 2]\n  overlap: ["*.conv2"]\nplan:\n  default: domain', 27, ["split by columns too"]),
        ("batch: 9", "batch: 9\nmicro_batches: 10", 14, ["micro_batches is 10", "largest value is 9"]),
        ("batch: 9", "batch: 9\ndtype: float64\nbackend: onednn", 15, ["onednn", "float32 only", '"numpy"']),
        ("batch: 9", "batch: 9\nprecision: bfloat16\nbackend: onednn", 14, ["precision is bfloat16, in which only backend cuda"]),
        ("batch: 9", "batch: 9\nprecision: tf32\ndtype: float64", 14, ["precision is tf32, which goes with dtype float32 only"]),
        (
            "    - flip",
            "    - random_erasing\n    - flip",
            6,
            ['"flip" is number 3 of the list', 'put "random_erasing" at the end'],
        ),
        ("  name: step", "  warmup_epochs: 8\n  name: constant\n", 20, ["warmup_epochs is 8", "largest value is 7"]),
    ],
)
def test_one_sentence_with_the_line(old, new, line, words):
    assert old in TEXT
    text = TEXT.replace(old, new)
    if "warmup" in new:
        text = text.replace("  milestones_epochs: [3, 5]\n", "")
    (message,) = faults(text)
    assert message.startswith(f"f.yaml:{line}: "), message
    assert message[-1] in ".?"
    assert all(word in message for word in words), message


def test_faults_of_overrides_name_the_override():
    (message,) = faults(TEXT, "optimizer.momentum=2")
    assert message.startswith('override "optimizer.momentum=2": ')


def test_all_faults_are_told_at_once_each_at_its_place():
    lines = faults(
        TEXT, "batch=2", "micro_batches=3", "model=nonet", "optimizer.momentun=1", "schedule=none", "data.augment=[flop]"
    )
    places = [line.split('": ')[0] for line in lines]
    assert places == [
        'override "batch=2',
        'override "micro_batches=3',
        'override "model=nonet',
        'override "optimizer.momentun=1',
        'override "schedule=none',
        'override "data.augment=[flop]',
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch=3", "micro_batches=3"],
        ["grid.cols=", "batch=1"],
        ["dtype=float64", "backend=numpy"],
        ["dtype=float64", "backend=auto"],
        ["schedule={name: cosine, warmup_epochs: 7}"],
        ["epochs=0", "schedule={name: cosine, warmup_epochs: 5}"],
        ["optimizer.momentum=0"],
        ["data.augment=[randaugment, {name: random_erasing, value: random}]", "model.stochastic_depth=0.2"],
        ["optimizer.weight_decay=1e-4"],
        ["optimizer={name: lars, lr: 1, trust_coefficient: 1e-3}"],
    ],
)
def test_legal_values_at_the_edges_pass(overrides):
    passes(TEXT, *overrides)


@pytest.mark.parametrize("name", catalogue.names())
def test_every_model_can_be_named_alone(name):
    passes(TEXT, f"model={{name: {name}}}")


@pytest.mark.parametrize("name", AVERAGERS.names())
def test_every_averager_can_be_named_alone(name):
    passes(TEXT, f"averager={{name: {name}}}")


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_every_optimizer_can_be_named_alone(name):
    passes(TEXT, f"optimizer={{name: {name}, lr: 0.1}}")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_pass(path):
    check_names(*load(path))


def test_the_command_lines_in_shipped_configurations_pass():
    """Each `hpctrain train FILE OVERRIDES` in a comment is one that works."""
    found = 0
    for path in CONFIGS.glob("*.yaml"):
        for line in path.read_text().splitlines():
            if line.startswith("#") and "hpctrain train configs/" in line:
                file, *overrides = line.split("hpctrain train ")[1].split()
                check_names(*load(CONFIGS.parent / file, overrides))
                found += 1
    assert found


@pytest.mark.parametrize("override", ["grid.rows=2", "grid={rows: 4, tiles: [2, 2]}", "plan.layer1.*=model", "plan={fc: model}"])
def test_ranks_without_samples_of_their_own_and_plans_of_the_models_layers_pass(override):
    passes(TEXT, override, "batch=2", "grid.cols=2")


def test_what_is_left_to_the_start_of_a_run_passes():
    passes(TEXT, "grid=auto", "plan=auto", "averager=auto")
    passes(TEXT, "averager=auto", "optimizer.clip_norm=0.5")


def test_an_averager_that_is_chosen_has_no_options_yet():
    (line,) = faults(TEXT, "averager=auto", "averager.window=3")
    assert line.startswith('override "averager.window=3": averager is auto, which chooses options as well')


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("init.freeze=[conv1, layer9.*]", "matches no layer with parameters; the nearest layer is layer"),
        ('init.freeze=["*"]', "so that nothing is trained; leave fc to be trained, at least."),
        ("init.ignore=[fc.*]", "init.ignore is given, but init.weights names no file"),
    ],
)
def test_what_a_training_starts_from_is_checked(override: str, place: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_names(*parse(TEXT, "a.yaml", [override]))
    assert place in str(raised.value)
    assert str(raised.value).count("\n") == 0
    check_names(*parse(TEXT, "a.yaml", ["init.freeze=[conv1, 'layer1.*']", "init.weights=w.pt", "init.ignore=[fc.*]"]))
