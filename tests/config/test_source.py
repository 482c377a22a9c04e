"""Reading YAML: the same data as PyYAML's safe loader, the line of every value, and what is refused."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.source import Source, dotted, read_yaml
from hpctrain.errors import ConfigError

KEYS = st.text("abcxyz_<=~01.é", min_size=1, max_size=4)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12)


def leaves(tree, path=()):
    """(path, value) of everything in a tree, itself included."""
    yield path, tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))


@settings(deadline=None, max_examples=40)
@given(TREES, st.booleans())
def test_reads_what_the_safe_loader_reads(tree, flow):
    text = yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True)
    data, places = read_yaml(text, "f")
    assert data == yaml.safe_load(text)
    assert set(places) == {path for path, _ in leaves(data)}


NESTED = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers() | st.lists(st.integers(), min_size=1), min_size=1)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), NESTED, min_size=1, max_size=4))
def test_every_value_has_the_line_it_stands_in(tree):
    lines = (text := yaml.safe_dump(tree, default_flow_style=False)).splitlines()
    _, places = read_yaml(text, "f")
    for path, value in leaves(tree):
        if isinstance(value, int):
            line = lines[int(places[path].removeprefix("f:")) - 1]
            assert line.strip().split()[-1] == str(value), (path, line)


@pytest.mark.slow
@pytest.mark.parametrize("nested", ["[" * 20_000, "{a: " * 20_000, "[" * 20_000 + "]" * 20_000])
def test_what_lies_too_deep_is_one_sentence(nested):
    with pytest.raises(ConfigError, match=r"^f: Its lists or mappings lie too deep in one another"):
        read_yaml(nested, "f")


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


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "---\n"])
def test_empty_text_is_none(text):
    assert read_yaml(text, "f")[0] is None


def test_merge_keys_and_aliases():
    text = "base: &base\n  a: 1\n  b: {c: 2, d: 3}\nuse:\n  <<: *base\n  b: {c: 4}\nagain: *base\n"
    data, places = read_yaml(text, "f")
    assert data == yaml.safe_load(text)
    assert places["use", "b", "c"] == "f:6"
    assert places["use", "a"] == "f:2"
    assert ("use", "b", "d") not in places


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, ['"a"', "twice", "line 1"]),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", 4, ['"a.b"', "twice", "line 2"]),
        ("a:\n  - {b: 1,\n     b: 2}\n", 3, ['"a.0.b"', "twice"]),
        ("a: 1\n2: 3\n", 2, ["key 2", "quotes"]),
        ("a: 1\ntrue: 3\n", 2, ["key true", "quotes"]),
        ("a: 1\n? [x, y]\n: 3\n", 2, ["list or mapping"]),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, ["not valid YAML"]),
        ("a: 1\n\tb: 2\n", 2, ["not valid YAML"]),
        ("a: 1\nb: *nowhere\n", 2, ["not valid YAML", "nowhere"]),
        ("a: 1\n---\nb: 2\n", 2, ["not valid YAML"]),
        ("a: 1\nb: !!python/object:os.system {}\n", 2, ["tag", "python/object"]),
        ("a: 1\nb: !!python/name:os.system x\n", 2, ["not valid YAML", "python/name"]),
        ("a: 1\nb: !mine [1]\n", 2, ["tag", "!mine"]),
        ("a: 1\nb: &b\n  - *b\n", 2, ["b.0", "contains itself"]),
        ("a: 1\nb: !!int x\n", 2, ["'x'"]),
        (
            "a: 1\nb: {name:sparse, ratio: 0.1}\n",
            2,
            ['"name:sparse"', "a blank is missing behind the colon; write name: sparse."],
        ),
        ("a: 1\nb: [{c: 2,\n  padding:2}]\n", 3, ['"padding:2"', "write padding: 2."]),
        ("a: 1\nb: {1:2}\n", 2, ['"1:2"', "write 1: 2."]),
    ],
)
def test_refused_with_the_line(text, line, words):
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "dir/f.yaml")
    message = str(caught.value)
    assert message.startswith(f"dir/f.yaml:{line}: ")
    assert message.endswith(".")
    assert all(word in message for word in words), message


@pytest.mark.parametrize("text", ["{'a:b': }", "{a:b: 1}", "{a: }", "{a}", "{a:b: ''}", "a:b: \n"])
def test_a_key_with_a_colon_of_its_own_is_read(text):
    assert read_yaml(text, "f")[0] == yaml.safe_load(text)


def test_control_characters_are_refused():
    with pytest.raises(ConfigError, match=r"^f: This is not valid YAML"):
        read_yaml("a: \x07\n", "f")


def test_what_is_written_nowhere_lies_in_the_nearest_mapping():
    _, places = read_yaml("a:\n  b:\n    c: 1\n", "f")
    source = Source("f", places)
    assert source.locate(("a", "b", "c")) == "f:3"
    assert source.locate(("a", "b", "x", 3)) == "f:2"
    assert source.locate(("a", "x")) == "f:1"
    assert source.locate(("x",)) == "f:1"
    assert Source("label", {}).locate(("a", "b")) == "label"
    assert str(source.error(("a", "b"), "A sentence.")) == "f:2: A sentence."


def test_dotted():
    assert dotted(("data", "augment", 0, "padding")) == "data.augment.0.padding"


def _laughs(levels: int, entry: str) -> str:
    """Return YAML in which each line refers nine times to the line before it."""
    lines = [f"a0: &a0 {entry.format('x')}"]
    lines += [f"a{n}: &a{n} {entry.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        _laughs(9, "[{}]"),
        _laughs(200, "[{}]"),
        "z: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 9)),
        "[" + "a," * 10_100 + "]",
        "[" * 5_000,
        "{a: " * 5_000,
        "a: " + "x" * (1 << 18),
        "- " * 5_000,
    ],
    ids=["aliases", "deep-aliases", "merges", "long", "lists", "mappings", "characters", "indents"],
)
def test_a_text_that_means_more_than_it_may_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_yaml(text, "bomb.yaml")
    assert len(str(error.value)) < 300
    assert str(error.value).startswith("bomb.yaml: It")


@pytest.mark.parametrize("key", [r"a\nb", r"\e[2J", r"\u202E"])
def test_a_key_is_text_in_one_line(key: str) -> None:
    with pytest.raises(ConfigError, match=r"has the character U\+"):
        read_yaml(f'"{key}": 1', "a.yaml")
