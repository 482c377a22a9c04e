"""Closed-form communication costs of a step under batch, model, 1.5D and domain parallelism, layer by layer.

Gholami, Azad, Jin, Keutzer and Buluc, "Integrated model, batch, and domain parallelism in training neural networks", SPAA 2018.
|W| is the number of a layer's weights, d its output in words per sample, B the number of samples per step, P = Pr x Pc the number
of ranks. A message costs alpha, a word beta; log is the base-2 logarithm, rounded up. Only layers with weights are counted,
without biases and batch norms.
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
    """A convolution or linear layer with the quantities of the formulas.

    Attributes:
        weights: number of weights |W|, without the bias.
        outputs: output words per sample, d.
        inputs: input words per sample: the output of the previous layer, pooled.
        passes_back: whether the gradient of the input is computed; False for images.
        row_words: words of one image row of the input, per sample; 0 for a linear layer.
        halo_rows: number of input rows that cross an inner boundary between two tiles, in the direction with more rows.
        boundary_rows: number of input rows that cross in both directions: extent - stride.
        images: whether the input is an image and can be split into tiles.
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
    """Cost of communication.

    Attributes:
        messages: number of consecutive messages.
        words: number of words sent over the link of each rank in sequence; the mean over ranks.
    """

    messages: float
    words: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.messages + other.messages, self.words + other.words)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.messages * times, self.words * times)

    def seconds(self, alpha_seconds: float, beta_seconds_per_word: float) -> float:
        """Return the time in seconds on links with this latency and inverse bandwidth."""
        return self.messages * alpha_seconds + self.words * beta_seconds_per_word


NOTHING = Cost(0.0, 0.0)


def weighted_layers(graph: Graph) -> tuple[WeightedLayer, ...]:
    """Return the layers with weights, in forward order.

    Args:
        graph: model lowered for any number of samples.
    """
    trained = {0: False}  # tensor -> whether a layer with parameters precedes it
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
    """Return (words of a row, rows that cross a boundary in the direction with more rows, rows in both directions).

    Output rows from o on read input rows from o stride - padding on; the tile's own input rows begin at o stride. So `padding`
    rows come from above and extent - stride - padding from below.
    """
    extent, stride, padding = spec.window.extent[0], spec.window.stride[0], spec.window.padding[0]
    both = max(0, extent - stride)
    return x[2] * x[3], max(min(padding, both), both - padding), both


def log2(ranks: int) -> int:
    """Return ceil(log2 P), the number of rounds of a tree over P ranks."""
    return (ranks - 1).bit_length()


def gather(words: float, ranks: int) -> Cost:
    """Return the cost of an allgather, or a reduce-scatter, of `words` words in total: log P alpha + (P - 1) / P n beta."""
    return Cost(log2(ranks), (ranks - 1) / ranks * words)


def batch(layer: WeightedLayer, ranks: int) -> Cost:
    """Return the cost of the sum of the weights' gradients over all ranks, 2 (alpha log P + beta (P - 1) / P |W|); equation 3."""
    return gather(layer.weights, ranks) * 2


def model(layer: WeightedLayer, samples: float, ranks: int) -> Cost:
    """Return the cost of model parallelism: alpha log P + beta B (P - 1) / P d, and twice that for the inputs' gradient.

    The outputs are gathered in forward; the gradient of the inputs, if it is needed, is summed over the ranks in backward.
    """
    backward = gather(samples * layer.inputs, ranks) * 2 if layer.passes_back else NOTHING
    return gather(samples * layer.outputs, ranks) + backward


def integrated(layer: WeightedLayer, samples: int, rows: int, cols: int) -> Cost:
    """Return the cost of 1.5D: model parallel over Pr ranks and batch parallel over Pc ranks.

    The Pr ranks share B / Pc samples; the Pc ranks hold |W| / Pr weights each.
    """
    return model(layer, samples / cols, rows) + gather(layer.weights / rows, cols) * 2


def domain(layer: WeightedLayer, samples: int, rows: int, cols: int) -> Cost:
    """Return the cost of domain parallelism: 2 (alpha + beta B / Pc X_w X_c h) for halos of h rows, plus that of batch.

    Halos and their gradients are exchanged. The rows of both neighbours travel at the same time, so h is the larger of the two
    directions, floor(k / 2) for k x k at stride 1. The cost of batch is over all ranks.
    """
    halo = Cost(2.0, 2.0 * samples / cols * layer.row_words * layer.halo_rows) if layer.halo_rows and rows > 1 else NOTHING
    return halo + batch(layer, rows * cols)


def halo_words(layer: WeightedLayer, samples: int, rows: int, cols: int) -> float:
    """Return the number of words that a rank sends for halos in forward, in both directions.

    It is the mean over ranks, if all have enough rows.
    """
    return samples / cols * layer.row_words * layer.boundary_rows * (rows - 1) / rows


def layer_cost(layer: WeightedLayer, use: Parallelism, samples: int, rows: int, cols: int) -> Cost:
    """Return the closed-form cost of one layer on a grid of rows x cols.

    A linear layer under DOMAIN, which has no rows, has the cost of batch.
    """
    if use is Parallelism.MODEL:
        return integrated(layer, samples, rows, cols)
    if use is Parallelism.DOMAIN:
        return domain(layer, samples, rows, cols)
    return batch(layer, rows * cols)


def step_cost(layers: Iterable[WeightedLayer], uses: Mapping[str, Parallelism], samples: int, rows: int, cols: int) -> Cost:
    """Return the cost of all layers of a network.

    Args:
        uses: parallelism by the name of the layer; default: BATCH.
    """
    total = NOTHING
    for layer in layers:
        total = total + layer_cost(layer, uses.get(layer.name, Parallelism.BATCH), samples, rows, cols)
    return total


def crossover_batch(layer: WeightedLayer) -> float:
    """Return the global batch below which pure model parallelism moves fewer words than batch, 2 |W| / (d_i + 2 d_(i-1)).

    It is independent of P.
    """
    return 2 * layer.weights / (layer.outputs + (2 * layer.inputs if layer.passes_back else 0))
