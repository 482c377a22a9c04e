"""The oracle of sparse averaging: one process, float64, plain array code that simulates all nodes of a training.

It knows which parts of the flat buffers are compressed, and how much of each part is sent; all else is in its own words. The
training is that of tests/support/averaging.py: plain SGD, with momentum, weight decay and clipping by options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.support.averaging import INPUTS, LR, OUTPUTS, make_group, shares


@dataclass(frozen=True)
class OraclePart:
    """Elements [start, stop) that one rank of every node owns. density: sent of them."""

    start: int
    stop: int
    density: float


@dataclass
class SparseOracle:
    """Training on nodes that each send their largest elements, and keep back the rest.

    Args:
        nodes: the node of each rank. parts: the compressed ones; all else is averaged exactly.
        density: of a step, by its number; None: a part's own. correction, masking: momentum before the choice.
        momentum, clip_norm: of the optimiser. trust: the coefficient of LARS without weight decay; None: plain descent.
    """

    nodes: Sequence[int]
    parts: Sequence[OraclePart]
    density: Callable[[int], float] | None = None
    correction: float = 0.0
    masking: bool = True
    momentum: float = 0.0
    clip_norm: float | None = None
    trust: float | None = None
    residual: dict[int, np.ndarray] = field(default_factory=dict)
    velocity: dict[int, np.ndarray] = field(default_factory=dict)

    def train(self, steps: int) -> np.ndarray:
        """The parameters after so many steps."""
        group, numbers = make_group(), list(dict.fromkeys(self.nodes))
        w, m = group.data.copy(), np.zeros(group.size)
        self.residual = {node: np.zeros(group.size) for node in numbers}
        self.velocity = {node: np.zeros(group.size) for node in numbers}
        for step in range(steps):
            by_rank = [_gradient(w, step, rank, len(self.nodes)) for rank in range(len(self.nodes))]
            by_node = {
                node: np.sum([g for g, of in zip(by_rank, self.nodes, strict=True) if of == node], axis=0) for node in numbers
            }
            total = self._average(by_node, step)
            if self.clip_norm is not None:
                total = total * min(1.0, self.clip_norm / (np.linalg.norm(total) + 1e-6))
            if self.trust is not None:
                for segment in group.segments:
                    place = slice(segment.start, segment.stop)
                    norm, scale = np.linalg.norm(total[place]), np.linalg.norm(w[place])
                    if segment.decay and norm and scale:  # norms and biases have no ratio
                        total[place] *= self.trust * scale / (norm + 1e-9)
            m = self.momentum * m + total
            w = w - LR * m
        return w

    def _average(self, by_node: dict[int, np.ndarray], step: int) -> np.ndarray:
        dense = np.ones(len(next(iter(by_node.values()))), bool)
        for part in self.parts:
            dense[part.start : part.stop] = False
        total = np.zeros(dense.size)
        for node, gradient in by_node.items():
            u = self.velocity[node] = self.correction * self.velocity[node] + gradient
            total[dense] += u[dense]
            v = self.residual[node]
            for part in self.parts:
                place = slice(part.start, part.stop)
                v[place] += u[place]
                density = part.density if self.density is None else self.density(step)
                sent = part.start + np.argsort(-np.abs(v[place]))[: max(1, round(density * (part.stop - part.start)))]
                total[sent] += v[sent]
                v[sent] = 0.0
                if self.masking:
                    u[sent] = 0.0
        return total


def _gradient(w: np.ndarray, step: int, rank: int, ranks: int) -> np.ndarray:
    """The flat gradient of one rank's samples: y = tanh(x A + a) s B + b, half the squared error over the step's samples."""
    group = make_group()
    group.data[...], group.grad[...] = w, 0.0
    counts, random = shares(step, ranks), np.random.default_rng(100 + step)
    x, target = random.standard_normal((sum(counts), INPUTS)), random.standard_normal((sum(counts), OUTPUTS))
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    p = {name: parameter.data for name, parameter in group.parameters.items()}
    h = np.tanh(x[mine] @ p["a.weight"] + p["a.bias"])
    e = ((h * p["s.scale"]) @ p["b.weight"] + p["b.bias"] - target[mine]) / sum(counts)
    back = e @ p["b.weight"].T
    inner = back * p["s.scale"] * (1 - h**2)
    gradients = {
        "a.weight": x[mine].T @ inner,
        "a.bias": inner.sum(0),
        "s.scale": (back * h).sum(),
        "b.weight": (h * p["s.scale"]).T @ e,
        "b.bias": e.sum(0),
    }
    for name, value in gradients.items():
        group.parameters[name].grad[...] = value
    return group.grad.copy()
