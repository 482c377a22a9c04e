"""The worked tables of docs/grid.md: `python -m tests.support.grid_tables` prints them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.backend.graph import Graph, GraphBuilder
from hpctrain.backend.specs import BatchNormSpec, TensorSpec
from hpctrain.data.sampler import counts
from hpctrain.models import catalogue
from hpctrain.nn.layers import Conv2d, Dropout, Flatten, Layer, Linear, MaxPool, ReLU, Sequential
from hpctrain.nn.network import declared
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.plan_report import LayerReport, PlanReport, Words, report_plan

_MIXED = {"features.*": Parallelism.DOMAIN, "classifier.*": Parallelism.MODEL}
# Its classifier begins with a dropout: where the samples already lie, it moves nothing.
_ALEXNET = {**_MIXED, "classifier.0": Parallelism.BATCH}


@dataclass(frozen=True)
class Example:
    """A model with a plan. image: (H, W, C). batch: over all ranks of the plan's grid."""

    title: str
    model: Layer
    image: tuple[int, int, int]
    plan: ParallelPlan
    batch: int

    def graph(self, batch: int) -> Graph:
        builder = GraphBuilder(TensorSpec((batch, *self.image), "float32"))
        return builder.build(self.model.lower(builder, 0, ""))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all parameters, whole."""
        return {name: spec.shape for name, spec in declared(self.model, self.graph(1))[0].items()}

    @property
    def counts(self) -> tuple[int, ...]:
        return counts(self.batch, self.plan.rows * self.plan.cols, self.plan.rows)

    def report_plan(self) -> PlanReport:
        return report_plan(self.graph, self.plan, self.counts, self.shapes)


def alexnet() -> Layer:
    """Krizhevsky, Sutskever and Hinton 2012 in one tower, for 227 x 227: names as torchvision's."""
    features: list[Layer] = []
    channels = 3
    for out, kernel, stride, padding, pooled in ((96, 11, 4, 0, True), (256, 5, 1, 2, True), *_THREES):
        features += [Conv2d(channels, out, kernel, stride=stride, padding=padding), ReLU()]
        features += [MaxPool(3, stride=2)] if pooled else []
        channels = out
    shape = (6, 6, channels)
    classifier = [Dropout(0.5, 0), Linear(6 * 6 * channels, 4096, image_shape=shape), ReLU()]
    classifier += [Dropout(0.5, 0), Linear(4096, 4096), ReLU(), Linear(4096, 1000)]
    return Sequential({"features": Sequential(features), "flatten": Flatten(), "classifier": Sequential(classifier)})


_THREES = ((384, 3, 1, 1, False), (384, 3, 1, 1, False), (256, 3, 1, 1, True))


def examples() -> tuple[Example, ...]:
    """Uneven rows in all of them, and uneven samples in the first."""
    vgg, resnet = catalogue.build("vgg16", {}), catalogue.build("resnet50", {})
    return (
        Example(
            "AlexNet, 227 x 227, 3 x 1, 4 samples", alexnet(), (227, 227, 3), ParallelPlan(3, 1, Parallelism.BATCH, _ALEXNET), 4
        ),
        Example("VGG-16, 224 x 224, 3 x 2, 6 samples", vgg, (224, 224, 3), ParallelPlan(3, 2, Parallelism.BATCH, _MIXED), 6),
        Example("ResNet-50, 225 x 225, 3 x 1, 3 samples", resnet, (225, 225, 3), ParallelPlan(3, 1, Parallelism.DOMAIN), 3),
    )


def table(example: Example) -> Iterator[str]:
    """Lines of Markdown: what moves anything, in words by the ranks of the first split group; batch statistics in one line."""
    found, rows = example.report_plan(), example.plan.rows
    yield "| before, or in | what | halo rows | words forward | words backward |"
    yield "|---|---|---|---|---|"
    for entry in found.entries:
        forward, backward = entry.traffic.forward[:rows], entry.traffic.backward[:rows]
        if not any((*forward, *backward)):
            continue
        if isinstance(entry, LayerReport):
            halo = " ".join(str(high) for high, _ in entry.halo[:rows])
            yield _line(entry.name, f"halo of {entry.operation}", halo, forward, backward)
        else:
            yield _line(entry.reader, f"{entry.source} -> {entry.target}", "", forward, backward)
    traffic = found.traffic
    if any(traffic.statistics_forward):
        norms = sum(isinstance(node.spec, BatchNormSpec) for node in example.graph(1).nodes)
        statistics = (traffic.statistics_forward[:rows], traffic.statistics_backward[:rows])
        yield _line(f"{norms} batch norms", "statistics, float64", "", *statistics)
    yield _line("all", "", "", traffic.forward[:rows], traffic.backward[:rows])


def _line(name: str, what: str, halo: str, forward: Words, backward: Words) -> str:
    return f"| {name} | {what} | {halo} | {_words(forward)} | {_words(backward)} |"


def _words(words: Sequence[int]) -> str:
    return " ".join(f"{each:,}" for each in words)


if __name__ == "__main__":
    for example in examples():
        print(f"**{example.title}**\n")
        print("\n".join(table(example)))
        print()
