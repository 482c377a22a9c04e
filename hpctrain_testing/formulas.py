"""Closed forms of what a step's communication costs by batch, model, 1.5D and domain parallelism, layer by layer.

Gholami, Azad, Jin, Keutzer and Buluc, "Integrated model, batch, and domain parallelism in training neural networks", SPAA 2018.
|W| are a layer's weights, d its output in words per sample, B the step's samples, P = Pr x Pc ranks; a message costs alpha, a
word beta, and log is that of base 2, rounded up. Only layers with weights count; biases and batch norms do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.backend.graph import Graph
from hpctrain.backend.specs import Conv2dSpec, LinearSpec
from hpctrain.parallel.parallel_plan import Parallelism

WORD_BYTES = 4


@dataclass(frozen=True)
class WeightedLayer:
    """A convolution or linear layer, as the formulas see it.

    Attributes:
        weights: |W|, its bias left out. outputs: d, words per sample. inputs: words per sample that it reads: the output of the
            layer before it, pooled.
        passes_back: the gradient of its input is asked for: not that of the images.
        row_words: words of one image row of its input, per sample; 0 of a linear layer.
        halo_rows: of its input that pass an inner boundary between two tiles, in the direction in which more do.
        boundary_rows: those in both directions: extent - stride.
        images: the input is an image, so that it can be cut into tiles.
    """

    name: str
    weights: int
    outputs: int
    inputs: int
    passes_back: bool
    row_words: int = 0
    halo_rows: int = 0
    boundary_rows: int = 0

    @property
    def images(self) -> bool:
        return self.row_words > 0


@dataclass(frozen=True)
class Cost:
    """messages: that follow each other. words: that each rank's link moves, one after the other; the mean over ranks."""

    messages: float
    words: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.messages + other.messages, self.words + other.words)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.messages * times, self.words * times)

    def seconds(self, alpha_seconds: float, beta_seconds_per_word: float) -> float:
        """Return the seconds on links of that latency and inverse rate."""
        return self.messages * alpha_seconds + self.words * beta_seconds_per_word


NOTHING = Cost(0.0, 0.0)


def weighted_layers(graph: Graph) -> tuple[WeightedLayer, ...]:
    """Return the layers with weights, in forward order. graph: the model lowered for any number of samples."""
    trained = {0: False}  # by tensor, whether a layer with parameters lies before it
    layers = []
    for node in graph.nodes:
        before = any(trained[tensor] for tensor in node.inputs)
        trained[node.output] = before or node.trains
        x, y = graph.tensors[node.inputs[0]].shape, graph.tensors[node.output].shape
        if not isinstance(node.spec, Conv2dSpec | LinearSpec):
            continue
        halo = _halo(node.spec, x) if isinstance(node.spec, Conv2dSpec) else (0, 0, 0)
        weights, outputs, inputs = math.prod(node.spec.weight_shape), math.prod(y[1:]), math.prod(x[1:])
        layers.append(WeightedLayer(node.name, weights, outputs, inputs, before, *halo))
    return tuple(layers)


def _halo(spec: Conv2dSpec, x: Sequence[int]) -> tuple[int, int, int]:
    """Return (words of a row, rows that pass a boundary in the one direction that more do, rows in both).

    Output rows from o on read input rows from o stride - padding on; the first o own ones of the tile begin at o stride. So
    `padding` rows come from above and extent - stride - padding from below.
    """
    extent, stride, padding = spec.window.extent[0], spec.window.stride[0], spec.window.padding[0]
    both = max(0, extent - stride)
    return x[2] * x[3], max(min(padding, both), both - padding), both


def log2(ranks: int) -> int:
    """Return ceil(log2 P), the rounds of a tree over P ranks."""
    return (ranks - 1).bit_length()


def gather(words: float, ranks: int) -> Cost:
    """Return an allgather, or a reduce-scatter, of `words` in all: log P alpha + (P - 1) / P n beta."""
    return Cost(log2(ranks), (ranks - 1) / ranks * words)


def batch(layer: WeightedLayer, ranks: int) -> Cost:
    """Return 2 (alpha log P + beta (P - 1) / P |W|): the sum of the weights' gradients over all ranks; equation 3."""
    return gather(layer.weights, ranks) * 2


def model(layer: WeightedLayer, samples: float, ranks: int) -> Cost:
    """Return alpha log P + beta B (P - 1) / P d of the outputs, and twice that of the inputs' gradient, if it is asked for.

    The outputs are gathered in forward; the gradient of the inputs is summed over the ranks in backward.
    """
    backward = gather(samples * layer.inputs, ranks) * 2 if layer.passes_back else NOTHING
    return gather(samples * layer.outputs, ranks) + backward


def integrated(layer: WeightedLayer, samples: int, rows: int, cols: int) -> Cost:
    """Return 1.5D: model parallel over Pr ranks that share B / Pc samples, batch parallel over Pc ranks with |W| / Pr weights."""
    return model(layer, samples / cols, rows) + gather(layer.weights / rows, cols) * 2


def domain(layer: WeightedLayer, samples: int, rows: int, cols: int) -> Cost:
    """Return 2 (alpha + beta B / Pc X_w X_c h) for halos of h rows and their gradients, and batch's term over all ranks.

    Both neighbours' rows travel at the same time, so h is the larger of the two directions, floor(k / 2) of k x k at stride 1.
    """
    halo = Cost(2.0, 2.0 * samples / cols * layer.row_words * layer.halo_rows) if layer.halo_rows and rows > 1 else NOTHING
    return halo + batch(layer, rows * cols)


def halo_words(layer: WeightedLayer, samples: int, rows: int, cols: int) -> float:
    """Return the words that a rank sends in forward for halos, in both directions: the mean over ranks with enough rows."""
    return samples / cols * layer.row_words * layer.boundary_rows * (rows - 1) / rows


def layer_cost(layer: WeightedLayer, use: Parallelism, samples: int, rows: int, cols: int) -> Cost:
    """Return the closed form of one layer on a grid of rows x cols.

    Of a linear layer under DOMAIN, which has no rows, it is batch's.
    """
    if use is Parallelism.MODEL:
        return integrated(layer, samples, rows, cols)
    if use is Parallelism.DOMAIN:
        return domain(layer, samples, rows, cols)
    return batch(layer, rows * cols)


def step_cost(layers: Iterable[WeightedLayer], uses: Mapping[str, Parallelism], samples: int, rows: int, cols: int) -> Cost:
    """Return the cost of all layers of a network. uses: by the layer's name; BATCH by default."""
    total = NOTHING
    for layer in layers:
        total = total + layer_cost(layer, uses.get(layer.name, Parallelism.BATCH), samples, rows, cols)
    return total


def crossover_batch(layer: WeightedLayer) -> float:
    """Return the total batch below which pure model moves fewer words than pure batch, 2 |W| / (d_i + 2 d_(i-1)).

    It is the same for all P.
    """
    return 2 * layer.weights / (layer.outputs + (2 * layer.inputs if layer.passes_back else 0))
