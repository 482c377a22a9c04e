"""Flatten: another name for the same memory."""

from __future__ import annotations

from hpctrain.backend.kernels.abilities import InputView
from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.specs import FlattenSpec, TensorSpec


def test_no_launch_and_no_memory(cuda_kernels, monkeypatch) -> None:
    kernels = cuda_kernels("bfloat16")
    monkeypatch.setattr(kernels.runtime.device, "kernel", None)
    operator = kernels.make(FlattenSpec(), (TensorSpec((3, 7, 5, 6), "bfloat16"),), training=True)
    assert isinstance(operator, InputView)
    assert operator.output == TensorSpec((3, 210), "bfloat16")
    assert (operator.saved_bytes, operator.scratch_bytes) == (0, 0)
    operator.forward(StepContext())
    operator.backward_input()
