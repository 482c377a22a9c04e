"""A rank's part of a compressed slice: what it sends in a step, and what it keeps back.

Residuals: Seide et al., Interspeech 2014; the largest elements of a shard: Shi et al., arXiv 2010.10458. Momentum correction and
factor masking: Lin, Han, Mao, Wang and Dally, "Deep gradient compression", ICLR 2018, section 3 (u := m u + g, v := v + u, the
largest elements of v are sent).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.averaging.slicing import Compression
from hpctrain.comm.base import Communicator, Handle
from hpctrain.compress.error_feedback import ErrorFeedback
from hpctrain.compress.selection import Selection
from hpctrain.averaging.top_k import TopK


@dataclass(frozen=True)
class SparseSettings:
    """Options that change no schedule.

    Attributes:
        density: in the end. warmup_density: at first. warmup_steps: until then; 0: none.
        momentum_correction: factor of the momentum that is kept before elements are chosen; 0: none.
        factor_masking: it is forgotten where elements are sent.
    """

    density: float
    warmup_density: float
    warmup_steps: int
    momentum_correction: float = 0.0
    factor_masking: bool = True

    def density_at(self, step: int) -> float:
        """The share of elements that step `step`, counted from 0 over the whole training, sends: falling exponentially."""
        if step >= self.warmup_steps:
            return self.density
        return float(self.warmup_density * (self.density / self.warmup_density) ** (step / self.warmup_steps))

    @property
    def largest_density(self) -> float:
        """The largest share of any step, which buffers must hold."""
        return self.warmup_density if self.warmup_steps else self.density


class SparsePart:
    """This rank's part of a compressed slice; on all nodes the ranks of its number have the same part.

    Buffers are made once, for the largest messages.

    Args:
        size: elements of the part. dtype: "float32" or "float64". seed: tells slices apart.
        comm: the ranks with this part, by node. scratch: of all slices, as one is chosen at a time.

    Attributes:
        residual: what is kept back, (size,). velocity: the momentum before the choice, (size,), or of no elements.
    """

    def __init__(
        self,
        size: int,
        dtype: str,
        compression: Compression,
        settings: SparseSettings,
        comm: Communicator,
        scratch: Selection,
        seed: Sequence[int],
    ) -> None:
        self._size, self._compression, self._settings, self._comm = size, compression, settings, comm
        self._feedback = ErrorFeedback(size, dtype)
        self.residual = self._feedback.values
        self.velocity = np.zeros(size if settings.momentum_correction else 0, dtype)
        self._top = TopK(size, dtype, compression.kept(size, settings.largest_density), seed=seed, scratch=scratch)
        self._buffer = np.empty(comm.size * self._top.message_size, np.uint8)

    def send(self, gradient: np.ndarray, step: int) -> Handle:
        """Choose what a step sends, of its gradient (size,) and of what was kept back, and post its allgather.

        What is not finite is always chosen, so that every node learns of it.
        """
        kept = self._compression.kept(self._size, self._settings.density_at(step))
        if kept != self._top.kept:
            self._top.keep(kept)
        top, values = self._top, self._accumulate(gradient)
        message = self._messages()[self._comm.rank]
        top.begin_step(step)
        top.compress(values, message)
        top.subtract_from(message, values)
        if self._settings.factor_masking and self.velocity.size:
            top.subtract_from(message, self.velocity)
        counts = [top.message_size] * self._comm.size
        return self._comm.iallgather(None, self._buffer[: sum(counts)], counts)

    def _accumulate(self, gradient: np.ndarray) -> np.ndarray:
        """Add the gradient, or the momentum that it gives, to what was kept back."""
        if self.velocity.size:
            self.velocity *= self._settings.momentum_correction
            self.velocity += gradient
            gradient = self.velocity
        self._feedback.add(gradient)
        return self._feedback.values

    def receive(self, gradient: np.ndarray) -> None:
        """Write the sum of what all nodes sent, in their order, so that it has the same bits on all of them."""
        gradient[...] = 0.0
        for message in self._messages():
            self._top.add_to(message, gradient)

    def _messages(self) -> list[np.ndarray]:
        """Each node's."""
        size = self._top.message_size
        return [self._buffer[node * size : (node + 1) * size] for node in range(self._comm.size)]
