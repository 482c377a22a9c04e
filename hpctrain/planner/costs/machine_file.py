"""Read and write machine files: YAML in which every number has a source.

A number is {value: ..., source: ...}, or belongs to a section with a common source. The classes declare the fields of a file with
units and ranges. `read` and `parse` return a `Machine`, and report each fault in one sentence with its line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from hpctrain.config import examples
from hpctrain.config.values import Integer, Number, Section, Text
from hpctrain.core.answers import Fault, config_error, schema_faults
from hpctrain.core.errors import ConfigError
from hpctrain.core.files import TEXT_BYTES, read_text
from hpctrain.core.text import choices
from hpctrain.core.yaml_source import KeyPath, Source, dotted, read_yaml
from hpctrain.planner.costs.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate
from hpctrain.storage.atomic_write import write_text


class SegmentFields(Section):
    """Cost of messages in a range of sizes."""

    from_bytes: Integer = Field(ge=0, description="Smallest size of these messages, in bytes.")
    alpha_seconds: Number = Field(ge=0, description="Time of a message without its bytes, in seconds.")
    beta_seconds_per_byte: Number = Field(ge=0, description="Time of a byte, in seconds.")
    unattended_bytes: Integer | None = Field(
        default=None, ge=0, description="Number of bytes of a message that move between two polls; null: all bytes."
    )
    polls: Integer = Field(default=0, ge=0, description="Number of polls before the first byte of a message moves.")


class LinkFields(Section):
    """Cost of the messages of one rank."""

    segments: tuple[SegmentFields, ...] = Field(
        min_length=1, description="List of ranges of message sizes, each with alpha and beta; the first begins at 0 bytes."
    )
    operation_seconds: Number = Field(ge=0, description="Time of a core to post an operation and complete it, in seconds.")
    byte_seconds: Number = Field(ge=0, description="Time of a core per byte sent or received, in seconds.")
    sum_seconds: Number = Field(ge=0, description="Time of a core per byte that a reduction adds up, in seconds.")
    burst_bytes: Integer = Field(ge=0, description="Number of bytes that pass without delay after a pause.")
    buffered_bytes: Integer | None = Field(
        default=None, gt=0, description="Number of bytes of messages to the same ranks that move between two polls; null: all."
    )

    @field_validator("segments")
    @classmethod
    def _rise(cls, segments: tuple[SegmentFields, ...]) -> tuple[SegmentFields, ...]:
        begins = [segment.from_bytes for segment in segments]
        if begins[0] != 0:
            raise PydanticCustomError("segments", "must begin at 0 bytes; set the first from_bytes to 0")
        if sorted(set(begins)) != begins:
            raise PydanticCustomError("segments", "must be in ascending order of from_bytes")
        return segments

    def link(self) -> Link:
        """Return the `Link` with these values."""
        segments = tuple(LinkSegment(**dict(one)) for one in self.segments)
        return Link(segments, self.operation_seconds, self.byte_seconds, self.sum_seconds, self.burst_bytes, self.buffered_bytes)


class RateFields(Section):
    """Rate of a class of operators on one rank while all ranks of its node compute."""

    flops_per_second: Number = Field(gt=0, description="Number of floating-point operations per second.")
    bytes_per_second: Number = Field(gt=0, description="Number of bytes read and written per second.")
    call_seconds: Number = Field(ge=0, description="Time of a call without its work, in seconds.")
    weight_bytes_per_second: Number | None = Field(
        default=None, gt=0, description="Bytes of weights read, written or copied per second; null: they count as other bytes."
    )
    transposed_bytes_per_second: Number | None = Field(
        default=None, gt=0, description="Bytes per second of copies that transpose weights; null: they count as other bytes."
    )
    winograd_flops_per_second: Number | None = Field(
        default=None, gt=0, description="Operations per second by Winograd; null: they take as long as direct convolutions."
    )

    def rate(self) -> OperatorRate:
        """Return the `OperatorRate` with these values."""
        return OperatorRate(**dict(self))


class RatesFields(Section):
    """Rates by class of operators."""

    convolution: RateFields = Field(description="Rate of convolutions.")
    product: RateFields = Field(description="Rate of linear layers.")
    memory: RateFields = Field(description="Rate of memory-bound operators: batch norm, pooling, copies, updates.")
    convolution_bfloat16: RateFields | None = Field(default=None, description="Rate of convolutions in bfloat16.")
    product_bfloat16: RateFields | None = Field(
        default=None, description="Rate of linear layers between activations in bfloat16."
    )
    memory_bfloat16: RateFields | None = Field(default=None, description="Rate of memory-bound operators in bfloat16.")

    def rates(self) -> dict[OperatorClass, OperatorRate]:
        """Return the `OperatorRate` of each class in the file."""
        return {kind: fields.rate() for kind in OperatorClass if (fields := getattr(self, kind)) is not None}


class MachineFields(Section):
    """Content of a machine file, without the sources."""

    name: Text = Field(description="Name of the machine for display.")
    description: str = Field(default="", description="Description of the machine for display.")
    nodes: Integer = Field(ge=1, description="Number of nodes.")
    ranks_per_node: Integer = Field(ge=1, description="Number of ranks of a job on each node.")
    cores_per_rank: Number = Field(gt=0, description="Number of cores of a rank; below 1 if ranks share a core.")
    memory_bytes: Integer = Field(ge=1, description="Memory of a rank, in bytes.")
    ranks_per_card: Integer = Field(ge=1, description="Number of ranks of a node that share one network card.")
    within: LinkFields = Field(description="Cost of messages between ranks of a node.")
    between: LinkFields = Field(description="Cost of a rank's messages to other nodes if no other rank uses the card.")
    rates: RatesFields = Field(description="Rates of operators.")
    single_thread_rates: RatesFields | None = Field(
        default=None, description="Rates of operators with one thread per rank, while all ranks of a node compute."
    )
    node_bytes_per_second: Number | None = Field(
        default=None, gt=0, description="Number of bytes that all cores of a node together read and write per second."
    )

    @model_validator(mode="after")
    def _cards(self) -> MachineFields:
        if self.ranks_per_card > self.ranks_per_node:
            context = {"key": "ranks_per_card", "value": self.ranks_per_card, "most": self.ranks_per_node}
            raise PydanticCustomError("ranks_per_card", "must be at most ranks_per_node, {most}", context)
        if self.single_thread_rates is not None and self.cores_per_rank < 2:
            rule = "require at least 2 cores_per_rank, but the file has {cores}; remove single_thread_rates"
            raise PydanticCustomError(
                "single_thread_rates", rule, {"key": "single_thread_rates", "cores": f"{self.cores_per_rank:.12g}"}
            )
        return self

    def machine(self, sources: dict[str, str]) -> Machine:
        """Return the `Machine` with these values."""
        return Machine(
            name=self.name,
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            cores_per_rank=self.cores_per_rank,
            memory_bytes=self.memory_bytes,
            within=self.within.link(),
            between=self.between.link(),
            ranks_per_card=self.ranks_per_card,
            rates=self.rates.rates(),
            single_thread_rates={} if self.single_thread_rates is None else self.single_thread_rates.rates(),
            node_bytes_per_second=self.node_bytes_per_second or math.inf,
            description=self.description,
            sources=sources,
        )


_FOLDER = "configs/machines/"
_WORDS = ("name", "description")  # keys without a source


def names() -> list[str]:
    """Return the names of the machines that are installed with hpctrain."""
    return [Path(name).stem for name in examples.names() if name.startswith(_FOLDER)]


def read(path: str | Path) -> Machine:
    """Read a machine from a file, or read an installed one.

    Args:
        path: path of a file, or the name of an installed machine, such as "xc40".

    Raises:
        ConfigError: the machine does not exist or is invalid; one sentence per fault, with file and line.
    """
    file = Path(path)
    if not file.exists():
        if str(path) not in names():
            raise ConfigError(f"There is no machine file {str(path)!r}; among installed machines, {choices(file.stem, names())}.")
        file = examples.path_of(f"{_FOLDER}{path}.yaml")
    try:
        return parse(read_text(file, TEXT_BYTES), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: Byte {error.start} is not valid UTF-8; save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(
            f"Cannot read the machine file {path} ({error.strerror}); pass the path of a readable YAML file."
        ) from None


def parse(text: str, label: str = "machine") -> Machine:
    """Parse the text of a machine file.

    Raises:
        ConfigError: the text is invalid; one sentence per fault.
    """
    data, places = read_yaml(text, label)
    if isinstance(data, dict):
        data.pop("concurrency", None)  # of files that earlier versions wrote
    reader = _Reader(places)
    values = reader.section(MachineFields, data, (), "")
    source = Source(label, reader.places)
    try:
        fields = MachineFields.model_validate(values)
    except ValidationError as error:
        faults = schema_faults(error, MachineFields)
    else:  # missing sources are reported only if all numbers are valid
        how = (
            '; write {value: ..., source: ...} with source "measured" or the origin of the number, or add a source to its section'
        )
        faults = [Fault(path, "has no source", hint=how) for path in reader.without_source]
    if faults:
        raise config_error(faults, source)
    return fields.machine(reader.sources)


def write(path: str | Path, machine: Machine) -> None:
    """Write a machine file from which `read` returns the same machine.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(Path(path), text(machine))


def text(machine: Machine) -> str:
    """Return the text of a machine's file."""
    values = {key: value for key, value in asdict(machine).items() if key != "sources"}
    for key in ("rates", "single_thread_rates"):
        values[key] = {str(name): _without_none(rate) for name, rate in values[key].items()}
    values |= {key: _without_none(values[key]) for key in ("within", "between")}
    defaults = {"single_thread_rates": {}, "node_bytes_per_second": math.inf}
    values = {key: value for key, value in values.items() if key not in defaults or value != defaults[key]}
    order = {key: _plain(values[key]) for key in MachineFields.model_fields if key in values}
    with_sources = _with_sources(MachineFields, order, machine, "")
    return yaml.dump(with_sources, Dumper=_Dumper, sort_keys=False, width=160, allow_unicode=True)


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if value is not None}


def source_of(machine: Machine, key: str) -> str:
    """Return the source of the number at a dotted key, or of the nearest section around it; "not stated" if there is none."""
    while key:
        if key in machine.sources:
            return machine.sources[key]
        key = key.rpartition(".")[0]
    return "not stated"


class _Reader:
    """Reader that separates the values of a machine file from their sources.

    Attributes:
        sources: source of each number, by dotted key.
        without_source: paths of numbers without a source.
        places: position of each value, by its path without the key `value`.
    """

    def __init__(self, places: Mapping[KeyPath, str]) -> None:
        self.sources: dict[str, str] = {}
        self.without_source: list[KeyPath] = []
        self.places = dict(places)

    def section(self, schema: type[BaseModel], data: Any, path: KeyPath, source: str) -> Any:
        """Return the values of a section by its schema, without the section's source and all inner sources.

        Data other than mappings are returned unchanged.
        """
        if not isinstance(data, Mapping):
            return data
        values = dict(data)
        source = _words(values.pop("source", source), source)
        for key, value in values.items():
            inner = _section_in(schema, key)
            if inner is not None:
                values[key] = self.section(inner, value, (*path, key), source)
            elif key in schema.model_fields and (path or key not in _WORDS):
                values[key] = self._number(value, (*path, key), source)
        return values

    def _number(self, data: Any, path: KeyPath, source: str) -> Any:
        if isinstance(data, Mapping) and set(data) <= {"value", "source"} and "value" in data:
            self.places[path] = self.places.get((*path, "value"), self.places[path])
            source, data = _words(data.get("source"), source), data["value"]
        if source:
            self.sources[dotted(path)] = source
        else:
            self.without_source.append(path)
        return data


def _words(value: Any, otherwise: str) -> str:
    return value.strip() if isinstance(value, str) and value.strip() else otherwise


def _section_in(schema: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the class of the section at a key, which is annotated as `Section` or `Section | None`; None for other keys."""
    annotation = schema.model_fields[key].annotation if key in schema.model_fields else None
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _with_sources(schema: type[BaseModel], values: Mapping[str, Any], machine: Machine, prefix: str) -> dict[str, Any]:
    """Return values with their sources: the most frequent source at the section, other sources next to their numbers."""
    leaves = {
        key: source_of(machine, prefix + key) for key in values if not _section_in(schema, key) and (prefix or key not in _WORDS)
    }
    written: dict[str, Any] = {}
    usual = Counter(leaves.values()).most_common(1)[0][0] if prefix and leaves else None
    if usual is not None:
        written["source"] = usual
    for key, value in values.items():
        inner = _section_in(schema, key)
        if inner is not None:
            written[key] = _with_sources(inner, value, machine, f"{prefix}{key}.")
        elif key not in leaves or leaves[key] == usual:
            written[key] = value
        else:
            written[key] = {"value": value, "source": leaves[key]}
    return written


def _plain(value: Any) -> Any:
    """Return the value with tuples converted to lists at all levels, because YAML has no tuples."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes the segments of links on one line each."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        scalars = all(isinstance(value, yaml.ScalarNode) for _, value in node.value)
        node.flow_style = scalars and "alpha_seconds" in {key.value for key, _ in node.value}
        return node
