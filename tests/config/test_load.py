"""Reading YAML and loading: overrides, the line of every value, and for each kind of fault one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.load import load, parse
from hpctrain.config.schema import Config
from hpctrain.core.errors import ConfigError
from hpctrain.core.yaml_source import Source, read_yaml
from tests.support.data_files import make_node
from tests.support.sampling import amount

KEYS = st.text("abcxyz_<=~01.é", min_size=1, max_size=4)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12)


def leaves(tree, path=()):
    """(path, value) of everything in a tree, itself included."""
    yield path, tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))


@settings(deadline=None, max_examples=amount(20, 60))
@given(TREES, st.booleans())
def test_reads_what_the_safe_loader_reads(tree, flow):
    text = yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True)
    data, places = read_yaml(text, "f")
    assert data == yaml.safe_load(text)
    assert set(places) == {path for path, _ in leaves(data)}


NESTED = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers() | st.lists(st.integers(), min_size=1), min_size=1)


@settings(deadline=None, max_examples=amount(20, 60))
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), NESTED, min_size=1, max_size=4))
def test_every_value_has_the_line_it_stands_in(tree):
    lines = (text := yaml.safe_dump(tree, default_flow_style=False)).splitlines()
    _, places = read_yaml(text, "f")
    for path, value in leaves(tree):
        if isinstance(value, int):
            line = lines[int(places[path].removeprefix("f:")) - 1]
            assert line.strip().split()[-1] == str(value), (path, line)


@pytest.mark.parametrize(
    "text",
    [
        *("2026-01-31", "2026-01-31T10:00:00Z", "010", "-010", "00", "0777", "08", "0x10", "0o17", "0b11", "1_000", "1_0.5"),
        *("1:30", "190:20:30", "1:30.5", "01.5", "0_1", "+.5_0", "yes", "Yes", "no", "NO", "on", "off", "Off", "y", "n", "="),
    ],
)
def test_what_versions_of_yaml_read_differently_stays_as_written(text):
    assert read_yaml(f"a: {text}\n", "f")[0] == {"a": text}
    assert read_yaml(f"{text}: 1\n", "f")[0] == {text: 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [("10", 10), ("-3", -3), ("+5", 5), ("0", 0), ("1.0e-05", 1e-05), (".5", 0.5), ("0.5", 0.5), ("2.", 2.0), ("~", None)],
)
def test_numbers_in_decimal_digits_are_numbers(text, value):
    assert read_yaml(f"a: {text}\n", "f")[0] == {"a": value}


def test_merge_keys_and_aliases():
    text = "base: &base\n  a: 1\n  b: {c: 2, d: 3}\nuse:\n  <<: *base\n  b: {c: 4}\nagain: *base\n"
    data, places = read_yaml(text, "f")
    assert data == yaml.safe_load(text)
    assert places["use", "b", "c"] == "f:6"
    assert places["use", "a"] == "f:2"
    assert ("use", "b", "d") not in places


@pytest.mark.parametrize("text", ["{'a:b': }", "{a:b: 1}", "{a: }", "{a}", "{a:b: ''}", "a:b: \n"])
def test_a_key_with_a_colon_of_its_own_is_read(text):
    assert read_yaml(text, "f")[0] == yaml.safe_load(text)


def test_what_is_written_nowhere_lies_in_the_nearest_mapping():
    _, places = read_yaml("a:\n  b:\n    c: 1\n", "f")
    source = Source("f", places)
    assert source.locate(("a", "b", "c")) == "f:3"
    assert source.locate(("a", "b", "x", 3)) == "f:2"
    assert source.locate(("a", "x")) == "f:1"
    assert source.locate(("x",)) == "f:1"
    assert Source("label", {}).locate(("a", "b")) == "label"
    assert str(source.error(("a", "b"), "A sentence.")) == "f:2: A sentence."


def _laughs(levels: int, entry: str) -> str:
    """Return YAML in which each line refers nine times to the line before it."""
    lines = [f"a0: &a0 {entry.format('x')}"]
    lines += [f"a{n}: &a{n} {entry.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        _laughs(9, "[{}]"),
        _laughs(200, "[{}]"),
        "z: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 9)),
        "[" + "a," * (1 << 19) + "]",
        "[" * 5_000,
        "{a: " * 5_000,
        "a: " + "x" * (1 << 20),
        "- " * 5_000,
    ],
    ids=["aliases", "deep-aliases", "merges", "long", "lists", "mappings", "characters", "indents"],
)
def test_a_text_that_means_more_than_it_may_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_yaml(text, "bomb.yaml")
    assert len(str(error.value)) < 300
    assert str(error.value).startswith("bomb.yaml: ")


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


def test_a_file_that_cannot_be_read(tmp_path):
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: caf\xe9\n".encode("latin-1"))
    for path, words in [
        (tmp_path / "none.yaml", " cannot be read .No such file"),
        (tmp_path, " is a directory"),
        (latin, ": .*UTF-8"),
    ]:
        with pytest.raises(ConfigError, match=f"^(The configuration )?{re.escape(str(path))}{words}.*\\.$"):
            load(path)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("optimizer.lr=0.2", lambda c: c.optimizer.lr, 0.2),
        ("optimizer.lr=2e-1", lambda c: c.optimizer.lr, 0.2),
        ("optimizer.momentum=5e-1", lambda c: c.optimizer.options, {"momentum": 0.5}),
        ("optimizer.nesterov=true", lambda c: c.optimizer.options["nesterov"], True),
        ("data.augment.1.padding=4", lambda c: c.data.augment[1].options, {"padding": 4}),
        ("data.augment=[]", lambda c: c.data.augment, ()),
        ("data.augment=[{name: flip}]", lambda c: [step.name for step in c.data.augment], ["flip"]),
        ("data.test=a=b.h5", lambda c: c.data.test, "a=b.h5"),
        ("data.test=", lambda c: c.data.test, None),
        ("model.hidden=64", lambda c: (c.model.name, c.model.options), ("small", {"hidden": 64})),
        ("averager.window=3", lambda c: (c.averager.name, c.averager.options), ("sharded", {"window": 3})),
        ("grid.tiles=[2, 3]", lambda c: c.grid.tiles, (2, 3)),
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


def test_a_key_that_was_removed_is_read_with_its_default_alone():
    """Configurations that version 0.1.0 stored contain the key."""
    assert parse(TEXT + "grid: {rows: 2, overlap: []}\n")[0] == parse(TEXT + "grid: {rows: 2}\n")[0]
    with pytest.raises(ConfigError, match=r'^f:14: The key "grid.overlap" was removed; leave it out'):
        parse(TEXT + "grid: {overlap: [conv1]}\n", "f")


@settings(deadline=None, max_examples=amount(30, 200))
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


def test_an_action_alone_takes_overrides_of_its_section():
    for overrides in (("on_nonfinite=skip", "on_nonfinite.most=3"), ("on_nonfinite.most=3", "on_nonfinite.action=skip")):
        section = parse(TEXT, "f.yaml", overrides)[0].on_nonfinite
        assert (section.action, section.most) == ("skip", 3)


@pytest.mark.parametrize(
    ("neutral", "former"),
    [
        ("on_lost_rank: {action: stop, least: 1}", "on_lost_rank: {action: shrink, least: 2}"),
        ("averager: {name: sharded, sizes: rule}", "averager: {name: sharded, sizes: measured}"),
    ],
)
def test_removed_keys_are_refused_unless_neutral_or_stored_by_an_earlier_release(neutral, former):
    current = parse(TEXT)[0]
    assert parse(f"{TEXT}\n{neutral}\n")[0] == current
    assert parse(f"{TEXT}\n{former}\n", stored=True)[0] == current
    assert parse(TEXT, "f", ["data.cache.keep=true"], stored=True)[0] == current
    (fault,) = faults(f"{TEXT}\n{former}\n")
    assert re.search(r'The key "[a-z_.]+" was removed; leave it out, ', fault)


def test_a_stored_wire_float16_becomes_bfloat16():
    text = f"{TEXT}\naverager: {{name: sharded, wire: float16}}\n"
    assert parse(text, stored=True)[0].averager.options == {"wire": "bfloat16"}


def test_an_averager_of_a_users_own_may_have_options_of_removed_names():
    assert parse(f'{TEXT}\naverager: {{name: "mine.py:Mine", sizes: 3}}\n')[0].averager.options == {"sizes": 3}


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\x7f", "\x85", "\u2028", "\u202e", "\u2066", "\u200b", "\ufeff"])
@pytest.mark.parametrize(
    "key",
    [
        *("name", "output", "flight", "machine", "data.train", "data.test", "init.weights", "model.name", "model.width"),
        "data.cache.local",
    ],
)
def test_a_text_is_one_line_that_moves_no_cursor(key: str, character: str) -> None:
    value = json.dumps(f"a{character}b")
    with pytest.raises(ConfigError) as error:
        parse(TEXT, overrides=[f"{key}={value}"])
    assert f"U+{ord(character):04X} at position 1" in str(error.value)


@pytest.mark.parametrize(("key", "most"), [("name", 200), ("output", 4096), ("model.name", 4096), ("model.depth", 4096)])
def test_a_text_has_a_length(key: str, most: int) -> None:
    parse(TEXT, overrides=[f"{key}={'x' * most}"])
    with pytest.raises(ConfigError, match=rf"must .*have at most {most}") as error:
        parse(TEXT, overrides=[f"{key}={'x' * (most + 1)}"])
    assert len(str(error.value).partition(": ")[2]) < 400


@pytest.mark.parametrize("kind", ["zero", "null", "pipe", "directory"])
def test_a_configuration_that_has_no_end_is_one_sentence(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(it is .*, not a regular file\); give|is a directory, but"):
        load(make_node(tmp_path / "config.yaml", kind))
    (tmp_path / "long.yaml").write_text("# " + "x" * (1 << 20))
    with pytest.raises(ConfigError, match=r"long.yaml cannot be read \(it has more than 1,048,576 bytes"):
        load(tmp_path / "long.yaml")
