"""Loading: overrides, and for each kind of fault one sentence with the value, the rule and the place."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.load import load, parse
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from tests.support.nodes import make_node

TEXT = """\
name: seven
model: small
data:
  train: data/train.h5
  augment:
    - flip
    - name: pad_crop
      padding: 2
batch: 9
epochs: 3
optimizer: {name: sgd, lr: 1e-1, momentum: 9e-1}
schedule:
  name: constant
"""


def faults(text, *overrides):
    """The lines of the error."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml", overrides)
    return str(caught.value).splitlines()


def test_loads_a_file(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text(TEXT)
    config, source = load(path)
    assert config == Config.model_validate(yaml.safe_load(TEXT))
    assert config.optimizer.lr == 0.1
    assert config.optimizer.options == {"momentum": 0.9}
    assert config.data.train == "data/train.h5"
    assert source.locate(("data", "augment", 1, "padding")) == f"{path}:8"


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("batch: 9", "batsh: 9", 9, ['Unknown key "batsh"', '"batch"']),
        ("  train:", "  trian:", 4, ['Unknown key "data.trian"', '"data.train"']),
        ("epochs: 3", "epochs: 3\nlr: 0.1", 11, ['Unknown key "lr"', '"optimizer.lr"']),
        ("epochs: 3", "epochs: 3\nzzzzz: 0.1", 11, ['Unknown key "zzzzz"', "known keys are name, seed"]),
        ("epochs: 3", "epochs: 3\ngrid:\n  row: 1", 12, ['Unknown key "grid.row"', '"grid.rows"']),
        ("batch: 9\n", "", 1, ['"batch" is missing', "samples"]),
        ("  train: data/train.h5\n", "", 3, ['"data.train" is missing']),
        ("lr: 1e-1, ", "", 11, ['"optimizer.lr" is missing']),
        ("    - name: pad_crop\n      padding", "    - padding", 7, ['"data.augment.1.name" is missing']),
        ("batch: 9", "batch: many", 9, ["batch is many", "integer"]),
        ("batch: 9", "batch: 9.5", 9, ["batch is 9.5", "integer"]),
        ("batch: 9", "batch: true", 9, ["batch is true", "number"]),
        ("batch: 9", "batch: 0", 9, ["batch is 0", "nearest legal value is 1"]),
        ("batch: 9", "batch:", 9, ["batch is null", "integer"]),
        ("batch: 9", "batch: [9]", 9, ["batch is [9]", "integer"]),
        ("lr: 1e-1", "lr: -1", 11, ["optimizer.lr is -1", "greater than 0"]),
        ("lr: 1e-1", "lr: high", 11, ["optimizer.lr is high", "number"]),
        ("lr: 1e-1", "lr: .nan", 11, ["optimizer.lr is .nan", "greater than 0"]),
        ("momentum: 9e-1", "momentum: .inf", 11, ["optimizer.momentum", "finite"]),
        ("batch: 9", "batch: 9\ndtype: float46", 10, ["dtype is float46", "'float32' or 'float64'", "nearest is 'float64'"]),
        ("batch: 9", "batch: 9\nbackend: fpga", 10, ["backend is fpga", "'onednn' or 'cuda'"]),
        ("batch: 9", "batch: 9\nthreads: all", 10, ["threads is all", '"auto"', "at least 1"]),
        ("batch: 9", "batch: 9\nloss: {label_smoothing: 1}", 10, ["loss.label_smoothing is 1", "less than 1"]),
        ("batch: 9", "batch: 9\ndata_dir: x", 10, ['Unknown key "data_dir"']),
        ("batch: 9", "batch: 9\nmetrics:\n  tensorboard: maybe", 11, ["metrics.tensorboard is maybe", "true or false"]),
        ("batch: 9", "batch: 9\nmetrics: fast", 10, ["metrics is fast", "mapping", "tensorboard"]),
        ("batch: 9", "batch: 9\noutput: ''", 10, ["output is ''", "at least 1 character"]),
        ("name: seven", "name: a/b", 1, ["name is a/b", "directory"]),
        ("name: seven", "name: 7", 1, ["name is 7", "string"]),
        ("model: small", "model: 5", 2, ["model is 5", "a name or a mapping"]),
        ("model: small", "model: {name: 5}", 2, ["model.name is 5", "string"]),
        ("    - flip\n", "    - [flip]\n", 6, ["data.augment.0 is [flip]", "a name or a mapping"]),
        ("  name: constant", "  name: constant\n  warmup_epochs: -1", 14, ["schedule.warmup_epochs is -1", "value is 0"]),
    ],
)
def test_one_sentence_with_the_line(old, new, line, words):
    assert old in TEXT
    (message,) = faults(TEXT.replace(old, new))
    assert message.startswith(f"f.yaml:{line}: ")
    assert message.endswith(".")
    assert all(word in message for word in words), message


def test_augment_must_be_a_list():
    text = re.sub(r"augment:.*(?=batch)", "augment: flip\n", TEXT, flags=re.DOTALL)
    assert faults(text) == ["f.yaml:5: data.augment is flip, but must be a list."]


def test_all_faults_are_told_at_once():
    lines = faults(TEXT.replace("batch: 9", "batch: 0\nzebra: 1").replace("name: seven", "name: a/b"))
    assert len(lines) == 3
    assert sorted(line.split(":")[1] for line in lines) == ["1", "10", "9"]


def test_long_values_are_shortened():
    (message,) = faults(TEXT.replace("batch: 9", f"batch: {list(range(999))}"))
    assert len(message) < 150


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_file_lacks_every_needed_key(text):
    lines = faults(text)
    assert len(lines) == 6
    assert all(line.startswith("f.yaml") and "is missing" in line for line in lines)


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just text\n", "17\n"])
def test_a_file_that_is_no_mapping(text):
    (message,) = faults(text)
    assert message.startswith("f.yaml:1: The configuration must be a mapping")
    (message,) = faults(text, "batch=3")
    assert message.startswith('override "batch=3": The configuration ')


def test_a_file_that_cannot_be_read(tmp_path):
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: caf\xe9\n".encode("latin-1"))
    for path, words in [(tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory"), (latin, "UTF-8")]:
        with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: .*{words}.*\\.$"):
            load(path)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("optimizer.lr=0.2", lambda c: c.optimizer.lr, 0.2),
        ("optimizer.lr=2e-1", lambda c: c.optimizer.lr, 0.2),
        ("optimizer.momentum=5e-1", lambda c: c.optimizer.options, {"momentum": 0.5}),
        ("optimizer.nesterov=true", lambda c: c.optimizer.options["nesterov"], True),
        ("data.augment.1.padding=4", lambda c: c.data.augment[1].options, {"padding": 4}),
        ("data.augment.0.probability=1", lambda c: c.data.augment[0].options, {"probability": 1}),
        ("data.augment=[]", lambda c: c.data.augment, ()),
        ("data.augment=[{name: flip}]", lambda c: [step.name for step in c.data.augment], ["flip"]),
        ("data.test=a=b.h5", lambda c: c.data.test, "a=b.h5"),
        ("data.test=", lambda c: c.data.test, None),
        ("model=resnet20", lambda c: c.model.name, "resnet20"),
        ("model.hidden=64", lambda c: (c.model.name, c.model.options), ("small", {"hidden": 64})),
        ("averager=blocking", lambda c: c.averager.name, "blocking"),
        ("averager.window=3", lambda c: (c.averager.name, c.averager.options), ("sharded", {"window": 3})),
        ("grid.cols=3", lambda c: (c.grid.rows, c.grid.cols), (1, 3)),
        ("grid.tiles=[2, 3]", lambda c: c.grid.tiles, (2, 3)),
        ("plan.default=domain", lambda c: (c.plan.default, c.plan.patterns), ("domain", {})),
        ("plan.features.*=model", lambda c: (c.plan.default, c.plan.patterns), ("batch", {"features.*": "model"})),
        (" batch = 3", lambda c: c.batch, 3),
        ("schedule={name: step, gamma: 0.1}", lambda c: (c.schedule.name, c.schedule.options), ("step", {"gamma": 0.1})),
    ],
)
def test_overrides(override, read, value):
    config, _ = parse(TEXT, "f.yaml", [override])
    assert read(config) == value


def test_later_overrides_win_and_nothing_else_changes():
    config, source = parse(TEXT, "f.yaml", ["batch=4", "grid.rows=1", "batch=5"])
    assert config == parse(TEXT.replace("batch: 9", "batch: 5"))[0]
    assert source.locate(("batch",)) == 'override "batch=5"'
    assert source.locate(("grid", "rows")) == 'override "grid.rows=1"'
    assert source.locate(("epochs",)) == "f.yaml:10"


def test_an_override_replaces_the_places_of_what_it_replaces():
    _, source = parse(TEXT, "f.yaml", ["data.augment=[pad_crop, flip]"])
    assert source.locate(("data", "augment", 1, "padding")) == 'override "data.augment=[pad_crop, flip]"'
    assert source.locate(("data", "train")) == "f.yaml:4"


def test_overrides_alone_make_a_configuration():
    names = ["model=small", "data.train=x.h5", "optimizer={name: sgd, lr: 1}", "schedule=constant"]
    config, _ = parse("", "f.yaml", ["batch=3", "epochs=0", *names])
    assert (config.data.train, config.epochs) == ("x.h5", 0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("batch", ["key=value"]),
        ("=3", ["key=value"]),
        ("data..train=3", ["key=value"]),
        ("batsh=3", ['Unknown key "batsh"', '"batch"']),
        ("optimzer.lr=3", ["There is no optimzer", '"optimizer"']),
        ("batch=many", ["batch is many", "integer"]),
        ("batch=[1", ["not valid YAML"]),
        ("data.augment.1={a: 1, a: 2}", ['"a"', "twice"]),
        ("optimizer.lr=-1", ["optimizer.lr is -1", "greater than 0"]),
        ("data.augment.2.padding=1", ["data.augment", '"2"', "0 to 1"]),
        ("data.augment.x=1", ["data.augment", '"x"', "0 to 1"]),
        ("data.evaluate_augment.0=flip", ["data.evaluate_augment", "as a whole"]),
        ("batch.size=1", ["batch is a single value", '"size"']),
        ("output.dir=1", ['"dir"']),
        ("model={}", ['"model.name" is missing']),
        ("data=3", ["data is 3", "mapping"]),
    ],
)
def test_faults_name_the_override(override, words):
    lines = faults(TEXT, override)
    assert len(lines) == 1
    assert lines[0].startswith(f'override "{override}": ')
    assert lines[0].endswith(".")
    assert all(word in lines[0] for word in words), lines[0]


def test_an_override_of_an_empty_list():
    text = re.sub(r"augment:.*(?=batch)", "augment: []\n", TEXT, flags=re.DOTALL)
    assert faults(text, "data.augment.0=flip") == [
        'override "data.augment.0=flip": data.augment has no item "0"; the list is empty.'
    ]


def test_an_override_of_an_empty_section_fills_it():
    assert parse(TEXT + "grid:\n", "f.yaml", ["grid.rows=3"])[0].grid.rows == 3


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_override_is_applied_or_refused_by_name(key, value):
    override = f"{key}={value}"
    try:
        parse(TEXT, "f.yaml", [override])
    except ConfigError as error:
        named = 'override "' in str(error) or "f.yaml" in str(error)
        assert named


@given(st.text("abc:-[]{}&*!|>'\"%@`#,?\n\t 01.e", max_size=60))
def test_any_text_is_loaded_or_refused(text):
    with pytest.raises(ConfigError):
        parse(text, "f.yaml")


AUTO = TEXT + "grid: auto\nplan: auto\naverager: auto\n"


def test_a_value_that_is_given_ends_the_choice_of_its_section_alone():
    for override, left in [
        ("grid.rows=2", ("plan", "averager")),
        ("plan.default=domain", ("grid", "averager")),
        ("plan.features.*=domain", ("grid", "averager")),
        ("averager.name=blocking", ("grid", "plan")),
        ("averager=blocking", ("grid", "plan")),
        ("grid={}", ("plan", "averager")),
    ]:
        config, _ = parse(AUTO, "f.yaml", [override])
        assert config.automatic == left, override
    assert parse(AUTO, "f.yaml", ["grid.rows=2"])[0].grid.rows == 2
    assert parse(TEXT, "f.yaml", ["grid=auto", "plan=auto"])[0].automatic == ("grid", "plan")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("grid=outo", "grid is outo, but must be auto or a mapping with keys such as rows, cols, tiles, overlap."),
        ("plan=5", "plan is 5, but must be auto or a mapping with keys such as default."),
        ("machine=5", "machine is 5, but must be a string."),
        ("machine=''", "machine is '', but must have at least 1 character."),
    ],
)
def test_what_is_neither_auto_nor_a_section(override, words):
    (line,) = faults(TEXT, override)
    assert words in line


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        (("data=synthetic",), ("synthetic", "synthetic", 32)),
        (("data=synthetic", "data.test="), ("synthetic", None, 32)),
        (("data=synthetic", "data.synthetic.height=64"), ("synthetic", "synthetic", 64)),
        (("data.train=synthetic", "data.synthetic={height: 8}"), ("synthetic", None, 8)),
    ],
)
def test_made_up_images_by_overrides(overrides, value):
    data = parse(TEXT, "f.yaml", overrides)[0].data
    assert (data.train, data.test, data.synthetic.height) == value
    assert bool(data.augment) == (overrides[0] != "data=synthetic")


def test_a_word_for_the_images_that_stands_for_nothing():
    (fault,) = faults(TEXT, "data=made-up")
    assert 'override "data=made-up"' in fault
    assert "must be synthetic or a mapping with keys such as train" in fault


def test_an_action_alone_takes_overrides_of_its_section():
    for overrides in (("on_nonfinite=skip", "on_nonfinite.most=3"), ("on_nonfinite.most=3", "on_nonfinite.action=skip")):
        section = parse(TEXT, "f.yaml", overrides)[0].on_nonfinite
        assert (section.action, section.most) == ("skip", 3)
    for overrides in (("on_lost_rank=shrink", "on_lost_rank.least=3"), ("on_lost_rank.least=3", "on_lost_rank.action=shrink")):
        lost = parse(TEXT, "f.yaml", overrides)[0].on_lost_rank
        assert (lost.shrinks, lost.least) == (True, 3)
    (fault,) = faults(TEXT, "on_nonfinite=skipp")
    assert "the nearest is 'skip'" in fault


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\x7f", "\x85", "\u2028", "\u202e", "\u2066", "\u200b", "\ufeff"])
@pytest.mark.parametrize(
    "key",
    [
        "name",
        "output",
        "flight",
        "machine",
        "data.train",
        "data.test",
        "init.weights",
        "model.name",
        "model.width",
        "data.cache.local",
    ],
)
def test_a_text_is_one_line_that_moves_no_cursor(key: str, character: str) -> None:
    value = json.dumps(f"a{character}b")
    with pytest.raises(ConfigError) as error:
        parse(TEXT, overrides=[f"{key}={value}"])
    assert f"U+{ord(character):04X} at position 1" in str(error.value)


@pytest.mark.parametrize(("key", "most"), [("name", 200), ("output", 4096), ("model.name", 4096)])
def test_a_text_has_a_length(key: str, most: int) -> None:
    parse(TEXT, overrides=[f"{key}={'x' * most}"])
    with pytest.raises(ConfigError, match=rf"at most {most}") as error:
        parse(TEXT, overrides=[f"{key}={'x' * (most + 1)}"])
    assert len(str(error.value).partition(": ")[2]) < 400


@pytest.mark.parametrize("kind", ["zero", "null", "pipe", "directory"])
def test_a_configuration_that_has_no_end_is_one_sentence(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The configuration cannot be read: (it is .*, not a regular file|Is a directory)\."):
        load(make_node(tmp_path / "config.yaml", kind))
    (tmp_path / "long.yaml").write_text("# " + "x" * (1 << 18))
    with pytest.raises(ConfigError, match=r"long.yaml: The configuration cannot be read: it has more than 262,144 bytes"):
        load(tmp_path / "long.yaml")
