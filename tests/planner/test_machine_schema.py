"""The schema of machine files has every number of a machine, with a description."""

from __future__ import annotations

from dataclasses import fields

import pytest
from pydantic import BaseModel

from hpctrain.planner import machine, machine_schema


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (machine_schema.SegmentFields, machine.LinkSegment),
        (machine_schema.LinkFields, machine.Link),
        (machine_schema.RateFields, machine.OperatorRate),
        (machine_schema.MachineFields, machine.Machine),
    ],
)
def test_a_section_has_the_fields_of_what_it_gives(schema: type[BaseModel], kind: type) -> None:
    assert set(schema.model_fields) == {field.name for field in fields(kind)} - {"sources"}
    assert all(str(field.description).endswith(".") for field in schema.model_fields.values())


@pytest.mark.parametrize("schema", [machine_schema.RatesFields, machine_schema.ConcurrencyFields])
def test_every_class_of_operators_has_a_rate_and_a_factor(schema: type[BaseModel]) -> None:
    assert set(schema.model_fields) == set(machine.OperatorClass)
