"""Sufficient factors: inputs and errors of a linear layer, exchanged instead of its gradients.

The gradient of a linear layer's weight is x^T dy, so inputs and errors suffice to compute it on any rank (Xie, Kim, Zhou, Ho,
Kumar, Yu and Xing, "Distributed machine learning via sufficient factor broadcasting", 2015, arXiv:1511.08486). Here, following
Lee et al., MLHPC 2018, rank r receives its K / P columns of all ranks' inputs (an all-to-all in forward) and all ranks' errors
(an allgather in backward). It computes its rows of the global gradient with products of depth B, the step's global batch. There
is one product per slice, so that a slice is gathered while the next product is computed. The bias's gradient is the sum of the
gathered errors, complete on every rank. The exchange moves (P - 1) / P (K b + M B) elements, before the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hpctrain.averaging.slicing import Slice
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.comm.base import Array, Communicator, Handle
from hpctrain.core.intervals import even
from hpctrain.nn.parameter import FlatGroup, GroupLayout

FcExchange = Literal["auto", "always", "never"]


def moves_less(inputs: int, outputs: int, batch: int, ranks: int, sent_share: float = 1.0) -> bool:
    """Return whether the exchange of inputs and errors moves less data than gradients: B < s K M / (M + K / P).

    Args:
        inputs: number K of input features.
        outputs: number M of output features.
        batch: global batch B.
        ranks: number P of ranks.
        sent_share: bytes s of a gradient on the wire, divided by its bytes in memory. Inputs and errors are never rounded.
    """
    return batch * (outputs + inputs / ranks) < sent_share * inputs * outputs


class SufficientFactorExchange:
    """Exchange of one linear layer's inputs and errors.

    Its buffers are allocated at set-up for the nominal batch, and grow only for larger batches. They lie on the host, which also
    computes the products. If kernels run on a device, the host waits for inputs and errors and copies them from the device, and
    copies the gradients back.

    Args:
        slices: slices of the weight (K, M), in order.
        comm: communicator of the ranks that exchange.
        batch: nominal samples of a step over all ranks.
    """

    def __init__(self, group: FlatGroup, slices: Sequence[Slice], comm: Communicator, batch: int) -> None:
        self._group = group
        self._comm = comm
        self._outputs = slices[0].unit
        self._inputs = sum(piece.units for piece in slices)
        self._bias = [group.parameters[name] for name in slices[0].replicated]
        first = slices[0].start
        # Columns of the inputs (rows of the weight) that each rank owns, slice by slice, including empty ones.
        spans = [[piece.part(rank, comm.size) for piece in slices] for rank in range(comm.size)]
        self._spans = [
            [((begin - first) // self._outputs, (end - first) // self._outputs) for begin, end in parts] for parts in spans
        ]
        self._columns = [sum(high - low for low, high in columns) for columns in self._spans]
        # A slice's product uses some of this rank's packed columns, after those of earlier slices.
        widths = [high - low for low, high in self._spans[comm.rank]]
        self._packed_columns = [(sum(widths[:piece]), sum(widths[: piece + 1])) for piece in range(len(slices))]
        self._own_gradients = [group.grad[begin:end].reshape(-1, self._outputs) for begin, end in spans[comm.rank]]
        self._counts: Sequence[int] = (0,) * comm.size
        self._samples = self._mine = 0
        self._capacity = batch, max(even(batch, comm.size))
        self._packed, self._all_columns, self._all_errors = self._buffers()

    def _buffers(self) -> tuple[Array, Array, Array]:
        """Allocate buffers for this rank's packed inputs, for its columns of all ranks' inputs, and for all ranks' errors."""
        batch, mine = self._capacity
        sizes = (mine * self._inputs, batch * self._columns[self._comm.rank], batch * self._outputs)
        packed, columns, errors = (np.empty(size, self._group.dtype) for size in sizes)
        return packed, columns, errors

    def begin_step(self, counts: Sequence[int]) -> None:
        """Begin a step. The exchange of the previous step must be complete.

        Args:
            counts: number of samples of the step on each rank.
        """
        self._counts = counts
        self._samples = sum(counts)
        self._mine = counts[self._comm.rank]
        if self._samples > self._capacity[0] or self._mine > self._capacity[1]:
            self._capacity = max(self._samples, self._capacity[0]), max(self._mine, self._capacity[1])
            self._packed, self._all_columns, self._all_errors = self._buffers()

    def pack_inputs(self, x: Array | None) -> None:
        """Copy x (n, K), or zeros if it is None, to the send buffer: the columns of each rank as one block, in rank order."""
        assert x is None or x.shape[0] == self._mine, "the number of samples differs from the step's counts"
        begin, values = 0, None if x is None else self._group.arithmetic.to_host(x)
        for columns, spans in zip(self._columns, self._spans, strict=True):
            block = self._packed[self._mine * begin : self._mine * (begin + columns)].reshape(self._mine, columns)
            place = 0
            for low, high in spans:
                block[:, place : place + high - low] = 0 if values is None else values[:, low:high]
                place += high - low
            begin += columns

    def pack_errors(self, dy: Array | None) -> None:
        """Copy dy (n, M), or zeros if it is None, to this rank's place among the errors of all ranks."""
        begin = sum(self._counts[: self._comm.rank]) * self._outputs
        place = self._all_errors[begin : begin + self._mine * self._outputs]
        place[...] = 0 if dy is None else self._group.arithmetic.to_host(dy).reshape(-1)

    def post_inputs(self) -> Handle:
        """Post the all-to-all of inputs."""
        width = self._columns[self._comm.rank]
        return self._comm.ialltoall(
            self._packed[: self._mine * self._inputs],
            self._all_columns[: self._samples * width],
            [self._mine * columns for columns in self._columns],
            [count * width for count in self._counts],
        )

    def post_errors(self) -> Handle:
        """Post the allgather of errors, in place."""
        counts = [count * self._outputs for count in self._counts]
        return self._comm.iallgather(None, self._all_errors[: self._samples * self._outputs], counts)

    def multiply(self, piece: int) -> None:
        """Write this rank's rows of one slice of the weight's global gradient.

        With the first slice, also write the whole gradient of the bias.
        """
        errors = self._all_errors[: self._samples * self._outputs].reshape(self._samples, self._outputs)
        width = self._columns[self._comm.rank]
        low, high = self._packed_columns[piece]
        inputs = self._all_columns[: self._samples * width].reshape(self._samples, width)[:, low:high]
        arithmetic, gradient = self._group.arithmetic, self._own_gradients[piece]
        if isinstance(arithmetic, HostArithmetic):
            arithmetic.multiply(inputs.T, errors, gradient)
        else:
            arithmetic.from_host(gradient, np.matmul(inputs.T, errors))
        for bias in self._bias if piece == 0 else ():
            arithmetic.from_host(bias.grad, np.sum(errors, axis=0))


def linear_layers(layout: GroupLayout) -> dict[str, tuple[str, ...]]:
    """Return weight -> (bias,) or () of each linear layer that can exchange sufficient factors, in forward order."""
    layers: dict[str, tuple[str, ...]] = {}
    for name, spec in layout.specs.items():
        if not spec.sufficient_factors:
            continue
        if len(spec.shape) == 2:
            layers[name] = ()
        else:
            weight = list(layers)[-1]
            assert name.rpartition(".")[0] == weight.rpartition(".")[0], "a bias must follow its weight"
            layers[weight] += (name,)
    return layers


def exchanging_layers(
    layout: GroupLayout,
    ranks: int,
    choice: FcExchange,
    nominal_batch: int | None,
    micro_batches: int,
    sent_share: float = 1.0,
) -> dict[str, tuple[str, ...]]:
    """Return weight -> biases of the linear layers that exchange sufficient factors.

    Layers without elements on these ranks are excluded.

    Args:
        choice: "always", "never", or "auto" to exchange if that moves less data, which requires the nominal batch.
        nominal_batch: samples of a step over all ranks; None: unknown.
        micro_batches: number of passes of a step. With several passes there is no exchange, because the inputs of all passes
            would have to be kept.
        ranks, sent_share: see `moves_less`.
    """
    if choice == "never" or micro_batches > 1:
        return {}
    exchanging = {}
    for weight, biases in linear_layers(layout).items():
        inputs, outputs = layout.specs[weight].shape
        if not inputs * outputs:  # fewer features than the grid has rows
            continue
        less = nominal_batch is not None and moves_less(inputs, outputs, nominal_batch, ranks, sent_share)
        if choice == "always" or (ranks > 1 and less):
            exchanging[weight] = biases
    return exchanging
