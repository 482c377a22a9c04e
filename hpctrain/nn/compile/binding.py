"""Last pass: the place of every buffer of every step, from the offsets of the storages that were packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.backend.specs import TensorSpec
from hpctrain.nn.compile.memory import Timeline, adds, partial_gradients
from hpctrain.nn.compile.plan import Key, Region, StepMemory
from hpctrain.nn.compile.sharing import Sharing
from hpctrain.nn.compile.steps import Steps


@dataclass(frozen=True)
class Places:
    """Where tensors and their gradients lie, and what steps have to themselves."""

    steps: Steps
    line: Timeline
    sharing: Sharing
    offsets: Mapping[Key, int]

    def activation(self, tensor: int) -> Region:
        """The buffer of a tensor."""
        return Region(self.offsets["activation", self.sharing.activations[tensor]], self._spec(tensor).bytes)

    def gradient(self, tensor: int) -> Region | None:
        """The buffer of a tensor's gradient; None where nobody asks for it."""
        if not self.steps.needs_grad[tensor]:
            return None
        return Region(self.offsets["gradient", self.sharing.gradients[tensor]], self._spec(tensor).bytes)

    def logits_grad(self) -> Region | None:
        """The loss writes it in training, whether or not a step asks for it."""
        output = self.steps.output
        if not self.steps.training:
            return None
        return Region(self.offsets["gradient", self.sharing.gradients[output]], self._spec(output).bytes)

    def step(self, k: int) -> StepMemory:
        """All buffers of step k."""
        step = self.steps.steps[k]
        operator, targets = step.operator, [self.gradient(tensor) for tensor in step.inputs]
        apart = partial_gradients(self.steps, self.line, k)
        partials = self._partials(k, apart)
        accumulate = adds(self.steps, self.line, k)
        return StepMemory(
            inputs=tuple(self.activation(tensor) for tensor in step.inputs),
            output=self.activation(step.output),
            input_grads=tuple(partials.get(i, target) for i, target in enumerate(targets)),
            output_grad=self.gradient(step.output),
            accumulate=tuple(add and i not in apart for i, add in enumerate(accumulate)),
            sums=tuple((i, target, partials[i]) for i, target in enumerate(targets) if target is not None and i in apart),
            saved=self._alone("saved", k, operator.saved_bytes),
            scratch=self._alone("scratch", k, operator.scratch_bytes),
            copies_gradient=step.is_view and self.steps.passes_back(k),
        )

    def _partials(self, k: int, apart: tuple[int, ...]) -> dict[int, Region]:
        """By input: its part of the step's partial gradients, which lie one behind the other."""
        partials, offset = {}, self.offsets.get(("partial", k), 0)
        for i in apart:
            partials[i] = Region(offset, self._spec(self.steps.steps[k].inputs[i]).bytes)
            offset = partials[i].end
        return partials

    def _alone(self, kind: str, k: int, size_bytes: int) -> Region | None:
        return Region(self.offsets[kind, k], size_bytes) if size_bytes else None

    def _spec(self, tensor: int) -> TensorSpec:
        return self.steps.tensors[tensor]
