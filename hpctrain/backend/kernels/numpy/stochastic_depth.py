"""Stochastic depth (Huang et al., ECCV 2016): each sample is kept whole or dropped whole, alike however activations are split."""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.counter_random import keep_mask, key
from hpctrain.backend.kernels.abilities import InPlace
from hpctrain.backend.operators import Buffers, StepContext
from hpctrain.backend.numpy.operator import NumpyOperator
from hpctrain.backend.specs import DropoutSpec, TensorSpec

_BLOCK_ELEMENTS = 1 << 16  # of a gradient that is added: it stays in a near cache


class NumpyStochasticDepth(InPlace, NumpyOperator):
    """y = x * keep / (1 - rate), keep one number per sample. Saved: these factors, (N, 1)."""

    def __init__(self, spec: DropoutSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, (x,), training=training)
        self.dropout = spec
        self.scale = 1.0 / (1.0 - spec.rate)
        self.samples = x.shape[0]
        self.elements = math.prod(x.shape[1:])
        self.step = max(1, _BLOCK_ELEMENTS // max(1, self.elements))
        block = min(self.step, self.samples) * self.elements
        self.declare(saved=[((self.samples, 1), self.dtype)], scratch=[((block,), self.dtype)])

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        shape = self.samples, self.elements
        self.x, self.y = buffers.inputs[0].reshape(shape), buffers.output.reshape(shape)
        grad = self.input_grad()
        self.dx = None if grad is None else grad.reshape(shape)

    def forward(self, context: StepContext) -> None:
        if not context.training:
            np.copyto(self.y, self.x)
            return
        spec, factors = self.dropout, self.saved[0]
        ids = context.sample_ids[spec.first_sample : spec.first_sample + self.samples]
        assert len(ids) == self.samples, "stochastic depth needs the id of every sample"
        stream = key("dropout", spec.seed, context.step, spec.layer)
        np.multiply(keep_mask(stream, ids, range(1), spec.rate), self.scale, out=factors, casting="same_kind")
        np.multiply(self.x, factors, out=self.y)

    def backward_input(self) -> None:
        if self.dx is None:
            return
        dy, factors = self.output_grad.reshape(self.dx.shape), self.saved[0]
        if not self.accumulates():
            np.multiply(dy, factors, out=self.dx)
            return
        for low in range(0, self.samples, self.step):
            rows = slice(low, min(low + self.step, self.samples))
            product = self.scratch[0][: (rows.stop - low) * self.elements].reshape(-1, self.elements)
            np.multiply(dy[rows], factors[rows], out=product)
            np.add(self.dx[rows], product, out=self.dx[rows])
