"""Memory that must not be read: whatever a plan says is not in use is overwritten before each action.

A program whose lifetimes are too short then computes with values that are no numbers, and its result differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from hpctrain.backend.operators import aligned
from hpctrain.nn.compile.plan import Action
from hpctrain.nn.program import Program

_POISON = 0xFF  # not a number in float32 and float64


@dataclass
class Poisoner:
    """Overwrites what one program does not use at a time. overwritten: bytes so far."""

    program: Program
    overwritten: int = 0

    def __post_init__(self) -> None:
        plan = self.program.plan
        self._loss = len(plan.forward)
        self._forward = {action: time for time, action in enumerate(plan.forward)}
        self._backward = {action: time for time, action in enumerate(plan.backward, self._loss + 1)}
        self._blocks = [(buffer.region.offset, buffer.block) for buffer in plan.buffers]
        self._unused: dict[int, list[slice]] = {}

    def before_forward(self, k: int) -> None:
        self._overwrite(self._forward[Action.FORWARD, k])

    def before_loss(self) -> None:
        self._overwrite(self._loss)

    def before_backward(self, action: Action, k: int) -> None:
        self._overwrite(self._backward[action, k])

    def _overwrite(self, time: int) -> None:
        if time not in self._unused:
            self._unused[time] = list(self._gaps(time))
        for gap in self._unused[time]:
            self.program.memory[gap] = _POISON
            self.overwritten += gap.stop - gap.start

    def _gaps(self, time: int) -> Iterator[slice]:
        begin = 0
        live = [(at, block) for at, block in self._blocks if any(first <= time <= last for first, last in block.spans)]
        for at, block in sorted(live, key=lambda each: each[0]):
            if at > begin:
                yield slice(begin, at)
            begin = max(begin, at + aligned(block.size_bytes))
        if begin < self.program.activation_bytes:
            yield slice(begin, self.program.activation_bytes)


@contextmanager
def poisoned() -> Iterator[list[Poisoner]]:
    """Within this, all programs of the process run so; the poisoners of those that have run."""
    found: dict[int, Poisoner] = {}

    def of(program: Program) -> Poisoner:
        if id(program) not in found:
            found[id(program)] = Poisoner(program)
        return found[id(program)]

    act_forward, loss, act_backward = Program._act_forward, Program.loss, Program._act_backward

    def forward(self: Program, k: int, *rest: Any) -> None:
        of(self).before_forward(k)
        act_forward(self, k, *rest)

    def at_loss(self: Program, *arguments: Any) -> Any:
        of(self).before_loss()
        return loss(self, *arguments)

    def backward(self: Program, action: Action, k: int, *rest: Any) -> None:
        of(self).before_backward(action, k)
        act_backward(self, action, k, *rest)

    listed: list[Poisoner] = []
    with (
        patch.object(Program, "_act_forward", forward),
        patch.object(Program, "loss", at_loss),
        patch.object(Program, "_act_backward", backward),
    ):
        yield listed
    listed += found.values()


def overwritten_share(poisoners: list[Poisoner]) -> float:
    """Bytes overwritten per byte of arena, over all."""
    return float(np.sum([each.overwritten for each in poisoners]) / np.sum([each.program.activation_bytes for each in poisoners]))
