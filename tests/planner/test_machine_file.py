"""Machine files: sources of every number, round trips, faults in one sentence each, installed machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.planner import machine_file
from hpctrain.planner.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate

TOP = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (TOP / "configs" / "machines").glob("*.yaml"))
TEXT = (TOP / "configs" / "machines" / "xc40.yaml").read_text()
NODES = "nodes: {value: 1630, source: compute nodes of Cori Phase I as NERSC published them}"


@pytest.mark.parametrize("name", NAMES)
def test_an_installed_machine_is_found_by_its_name_and_every_number_has_a_source(name: str) -> None:
    machine = machine_file.read(name)
    assert machine == machine_file.read(TOP / "configs" / "machines" / f"{name}.yaml")
    assert machine.name == name
    assert set(machine.rates) == set(OperatorClass)
    numbers = {"nodes", "ranks_per_node", "cores_per_rank", "memory_bytes", "ranks_per_card"}
    numbers |= {f"{link}.{key}" for link in ("within", "between") for key in vars(machine.within)}
    numbers |= {f"rates.{kind}.{key}" for kind, rate in machine.rates.items() for key in vars(rate)}
    numbers |= {f"concurrency.{kind}" for kind in machine.concurrency}
    assert set(machine.sources) == numbers
    assert all(len(source.split()) >= 2 for source in machine.sources.values())
    assert machine_file.parse(machine_file.text(machine)) == machine


def test_installed_machines_are_named() -> None:
    assert machine_file.names() == NAMES
    with pytest.raises(ConfigError, match=r"There is no machine file 'xc41'; as for installed machines, the nearest is \"xc40\""):
        machine_file.read("xc41")


SECONDS = st.floats(0, 1, allow_nan=False)
COUNTS = st.integers(1, 2**40)
SOURCES = st.sampled_from(["measured", "not measured; guessed", "a: b # c", "yes"])


@st.composite
def links(draw: st.DrawFn) -> Link:
    begins = sorted(draw(st.sets(st.integers(1, 2**30), max_size=3)))
    unattended = st.none() | st.integers(0, 2**40)
    segments = tuple(
        LinkSegment(begin, draw(SECONDS), draw(SECONDS), draw(unattended), draw(st.integers(0, 9))) for begin in (0, *begins)
    )
    return Link(segments, draw(SECONDS), draw(SECONDS), draw(SECONDS), draw(st.integers(0, 2**30)))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    rates = {kind: OperatorRate(draw(st.floats(1, 1e15)), draw(st.floats(1, 1e15)), draw(SECONDS)) for kind in OperatorClass}
    ranks = draw(st.integers(1, 200))
    machine = Machine(
        draw(st.sampled_from(["a", "null", "12"])),
        draw(COUNTS),
        ranks,
        draw(st.floats(0.01, 100)),
        draw(COUNTS),
        draw(links()),
        draw(links()),
        draw(st.integers(1, ranks)),
        rates,
        draw(st.just({}) | st.just({OperatorClass.CONVOLUTION: 1.25})),
        draw(st.sampled_from(["", "words: and more"])),
    )
    keys = machine_file.parse(machine_file.text(machine)).sources  # of a machine without sources: each says so
    assert set(keys.values()) == {"not said"}
    return replace(machine, sources={key: draw(SOURCES) for key in keys})


@settings(max_examples=25, deadline=None)
@given(machine=machines())
def test_any_machine_comes_back_from_its_text_with_its_sources(machine: Machine) -> None:
    assert machine_file.parse(machine_file.text(machine)) == machine


def test_a_machine_is_written_to_a_file(tmp_path: Path) -> None:
    machine = machine_file.read("xc40")
    machine_file.write(tmp_path / "copy.yaml", machine)
    assert machine_file.read(tmp_path / "copy.yaml") == machine
    assert [path.name for path in tmp_path.iterdir()] == ["copy.yaml"]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (NODES, "", 'The key "nodes" is missing: Number of nodes'),
        (
            NODES,
            "nodes: {value: -3, source: mine}",
            "m.yaml:4: nodes is -3, but must be at least 1; the nearest legal value is 1.",
        ),
        (NODES, "nodes: {value: many, source: mine}", "m.yaml:4: nodes is many, but must be an integer."),
        (NODES, "nodes: {value: 1.5, source: mine}", "m.yaml:4: nodes is 1.5, but must be an integer."),
        (NODES, "nodes: 3", "m.yaml:4: nodes does not say where it is from; write {value: ..., source: ...}"),
        (NODES, "nodes: {value: 3, source: ''}", "m.yaml:4: nodes does not say where it is from"),
        (NODES, "node: {value: 3, source: mine}", 'Unknown key "node"; the nearest is "nodes"'),
        (
            "alpha_seconds: 0.6e-6",
            "alpha_seconds: -1.0",
            "m.yaml:13: within.segments.0.alpha_seconds is -1.0, but must be at least 0",
        ),
        ("alpha_seconds: 0.6e-6, ", "", 'The key "within.segments.0.alpha_seconds" is missing: Time of a message'),
        ("alpha_seconds: 0.6e-6", "alpha_seconds: .inf", "within.segments.0.alpha_seconds is .inf, but must be a finite number."),
        ("from_bytes: 0,", "from_bytes: 1,", "must begin with a segment from 0 bytes on; the nearest legal from_bytes is 0."),
        ("from_bytes: 8192,", "from_bytes: 0,", "must rise in from_bytes from each segment to the next."),
        (
            "flops_per_second: 40.0e9",
            "flops_per_second: 0",
            "rates.convolution.flops_per_second is 0, but must be greater than 0.",
        ),
        ("flops_per_second: 40.0e9", "flops_per_second: true", "is true, but must be a number."),
        ("ranks_per_card: {value: 32", "ranks_per_card: {value: 64", "must be at most ranks_per_node, 32; the nearest legal"),
        ("  convolution:", "  convolutoin:", 'Unknown key "rates.convolutoin"; the nearest is "convolution"'),
        ("rates:", "within: 3\nrates:", 'The key "within" is given twice'),
    ],
)
def test_a_fault_is_one_sentence_with_its_place(old: str, new: str, sentence: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError) as fault:
        machine_file.parse(TEXT.replace(old, new, 1), "m.yaml")
    (line,) = str(fault.value).splitlines()
    assert sentence in line
    assert line.startswith("m.yaml:")
    assert line.endswith(".")


@pytest.mark.parametrize("text", ["", "3", "- a", "[]"])
def test_what_is_no_mapping_is_no_machine(text: str) -> None:
    with pytest.raises(ConfigError, match="A machine file must be a mapping of keys such as name, nodes, within"):
        machine_file.parse(text, "m.yaml")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        machine_file.read(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="The byte at 6 is not UTF-8"):
        machine_file.read(tmp_path / "bytes.yaml")


def test_a_number_takes_the_source_of_the_nearest_section() -> None:
    line = next(line for line in TEXT.splitlines() if "operation_seconds" in line)
    machine = machine_file.parse(TEXT.replace(line, "  operation_seconds: 1e-6", 1))
    assert machine.within.operation_seconds == 1e-6
    assert machine.sources["within.operation_seconds"] == machine.sources["within.segments"]
    assert machine_file.source_of(replace(machine, sources={"within": "w"}), "within.segments") == "w"
