"""The fields of a machine file, with their units and ranges."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from hpctrain.config.values import Integer, Number, Section, Text
from hpctrain.planner.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate


class SegmentFields(Section):
    """The cost of messages of a range of sizes."""

    from_bytes: Integer = Field(ge=0, description="Least size of such messages, in bytes.")
    alpha_seconds: Number = Field(ge=0, description="Time of a message beside its bytes, in seconds.")
    beta_seconds_per_byte: Number = Field(ge=0, description="Time of a byte, in seconds.")
    unattended_bytes: Integer | None = Field(
        default=None, ge=0, description="Number of bytes of such a message that move between two polls; null for all of them."
    )
    polls: Integer = Field(default=0, ge=0, description="Number of polls that such a message needs before its first byte moves.")


class LinkFields(Section):
    """The messages of one rank."""

    segments: tuple[SegmentFields, ...] = Field(
        min_length=1, description="List of ranges of sizes, the first from 0 bytes on, each with alpha and beta."
    )
    operation_seconds: Number = Field(ge=0, description="Time of a core to post an operation and to see it complete, in seconds.")
    byte_seconds: Number = Field(ge=0, description="Time of a core for a byte that is sent or received, in seconds.")
    sum_seconds: Number = Field(ge=0, description="Time of a core for a byte that a reduction adds up, in seconds.")
    burst_bytes: Integer = Field(ge=0, description="Number of bytes that pass at once after a pause.")

    @field_validator("segments")
    @classmethod
    def _rise(cls, segments: tuple[SegmentFields, ...]) -> tuple[SegmentFields, ...]:
        begins = [segment.from_bytes for segment in segments]
        if begins[0] != 0:
            raise PydanticCustomError("segments", "must begin with a segment from 0 bytes on; the nearest legal from_bytes is 0")
        if sorted(set(begins)) != begins:
            raise PydanticCustomError("segments", "must rise in from_bytes from each segment to the next")
        return segments

    def link(self) -> Link:
        """The same as planners use it."""
        segments = tuple(LinkSegment(**dict(one)) for one in self.segments)
        return Link(segments, self.operation_seconds, self.byte_seconds, self.sum_seconds, self.burst_bytes)


class RateFields(Section):
    """The rate of a class of operators on one rank while all ranks of its node compute."""

    flops_per_second: Number = Field(gt=0, description="Number of floating-point operations in a second.")
    bytes_per_second: Number = Field(gt=0, description="Number of bytes read and written in a second.")
    call_seconds: Number = Field(ge=0, description="Time of a call beside its work, in seconds.")

    def rate(self) -> OperatorRate:
        """The same as planners use it."""
        return OperatorRate(self.flops_per_second, self.bytes_per_second, self.call_seconds)


class RatesFields(Section):
    """The rates by class of operators."""

    convolution: RateFields = Field(description="Rate of convolutions.")
    product: RateFields = Field(description="Rate of linear layers.")
    memory: RateFields = Field(description="Rate of operators that memory bounds: batch norm, pooling, copies, updates.")


class ConcurrencyFields(Section):
    """How many times longer an operator takes while all ranks of its node compute than on a rank alone."""

    convolution: Number = Field(default=1.0, gt=0, description="Factor for convolutions.")
    product: Number = Field(default=1.0, gt=0, description="Factor for linear layers.")
    memory: Number = Field(default=1.0, gt=0, description="Factor for operators that memory bounds.")


class MachineFields(Section):
    """A machine file without its sources."""

    name: Text = Field(description="Name of the machine, for people.")
    description: str = Field(default="", description="Further words about it.")
    nodes: Integer = Field(ge=1, description="Number of nodes that there are.")
    ranks_per_node: Integer = Field(ge=1, description="Number of ranks of a job on each node.")
    cores_per_rank: Number = Field(gt=0, description="Number of cores of a rank; below 1 where ranks share a core.")
    memory_bytes: Integer = Field(ge=1, description="Memory of a rank, in bytes.")
    ranks_per_card: Integer = Field(ge=1, description="Number of ranks of a node that share one network card.")
    within: LinkFields = Field(description="Messages among ranks of a node.")
    between: LinkFields = Field(description="Messages of a rank to other nodes, when it has the card to itself.")
    rates: RatesFields = Field(description="Rates of operators.")
    concurrency: ConcurrencyFields = Field(default_factory=ConcurrencyFields, description="Slowdown while all ranks compute.")

    @model_validator(mode="after")
    def _cards(self) -> MachineFields:
        if self.ranks_per_card > self.ranks_per_node:
            rule = "must be at most ranks_per_node, {most}; the nearest legal value is {most}"
            raise PydanticCustomError("ranks_per_card", rule, {"most": self.ranks_per_node})
        return self

    def machine(self, sources: dict[str, str]) -> Machine:
        """The same as planners use it."""
        slowed = self.concurrency.model_fields_set
        return Machine(
            name=self.name,
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            cores_per_rank=self.cores_per_rank,
            memory_bytes=self.memory_bytes,
            within=self.within.link(),
            between=self.between.link(),
            ranks_per_card=self.ranks_per_card,
            rates={name: getattr(self.rates, name).rate() for name in OperatorClass},
            concurrency={name: getattr(self.concurrency, name) for name in OperatorClass if name in slowed},
            description=self.description,
            sources=sources,
        )
