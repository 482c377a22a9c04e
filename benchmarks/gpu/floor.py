"""Seconds that a training step takes at least on a GPU, and what to expect: arithmetic over the project's own graphs.

The step is forward, loss, backward and update of one rank; images are on the device already.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from benchmarks.gpu.costs import Sizes, Work, costs, loss, update
from benchmarks.gpu.devices import Assumptions, DeviceFigures
from hpctrain.backend.graph import Graph, GraphBuilder, fuse
from hpctrain.backend.specs import Conv2dSpec, TensorSpec
from hpctrain.models import catalogue

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Row:
    """The kernels of one kind that one layer starts in one phase. image: (height, width) of its output; none for features."""

    layer: str
    image: tuple[int, ...]
    work: Work

    @property
    def stage(self) -> str:
        """By which tables add up: the size of the images that come out."""
        return "x".join(map(str, self.image)) if self.image else "features"


@dataclass(frozen=True)
class Step:
    """All work of one training step, in forward order."""

    model: str
    batch: int
    precision: str
    parameters: int
    rows: tuple[Row, ...]

    def total(self, name: str) -> int:
        """Sum of "bytes", "flops" or "launches"."""
        return sum(int(getattr(row.work, name)) for row in self.rows)


def graph_of(model: str, batch: int, options: Mapping[str, object] = NO_OPTIONS) -> Graph:
    """The model of the catalogue at its own image size, fused as the cuda set fuses it: convolution, bias and ReLU; batch norm,
    sum and ReLU."""
    builder = GraphBuilder(TensorSpec((batch, *catalogue.image_shape(model))))
    return fuse(builder.build(catalogue.build(model, options).lower(builder, 0, "")), products=(Conv2dSpec,))


def step_of(model: str, batch: int, precision: str, options: Mapping[str, object] = NO_OPTIONS) -> Step:
    """The work of one training step.

    Args:
        model, options: of the catalogue. precision: "bfloat16", "tf32" or "float32".

    Raises:
        ConfigError: no such model.
    """
    graph, sizes = graph_of(model, batch, options), Sizes.of(precision)
    rows = [Row(node.name, graph.tensors[node.output].shape[1:-1], work) for node, work in costs(graph, precision)]
    layers = catalogue.build(model, options).walk()
    parameters = sum(math.prod(spec.shape) for _, layer in layers for spec in layer.parameters().values())
    rows.append(Row("loss", (), loss(math.prod(graph.tensors[graph.output].shape), sizes)))
    rows.append(Row("update", (), update(parameters, sizes)))
    return Step(model, batch, precision, parameters, tuple(rows))


@dataclass(frozen=True)
class Clock:
    """Seconds of work on one device."""

    device: DeviceFigures
    precision: str
    assumptions: Assumptions = field(default_factory=Assumptions)

    def bytes_alone(self, work: Work) -> float:
        """Return the seconds to move all bytes at the bandwidth of a copy."""
        return work.bytes / self.device.copy_bandwidth

    def floor(self, work: Work) -> float:
        """Return the least seconds: the longer of moving the bytes and of computing at a large product's rate."""
        return max(self.bytes_alone(work), self._flops_alone(work))

    def predicted(self, work: Work) -> float:
        """Return the expected seconds: as `floor`, at the assumed shares of both rates, plus the cost of the launches."""
        assumed = self.assumptions
        longer = max(self.bytes_alone(work) / assumed.copy_share, self._flops_alone(work) / assumed.product_share)
        return longer + work.launches * assumed.device_launch_seconds

    def _flops_alone(self, work: Work) -> float:
        return work.flops / self.device.product_flops(self.precision)


def prediction(step: Step, clock: Clock) -> dict[str, float]:
    """Return the seconds of a step and images per second, by what limits it.

    A step in one CUDA graph costs the host one launch and the device the rest; launch by launch it lasts as long as the slower
    of the two takes.
    """
    sums = {
        name: sum(seconds(row.work) for row in step.rows)
        for name, seconds in (("bytes_alone", clock.bytes_alone), ("floor", clock.floor), ("predicted", clock.predicted))
    }
    host = step.total("launches") * clock.assumptions.host_launch_seconds
    seconds = {
        "bytes_alone": sums["bytes_alone"],
        "floor": sums["floor"],
        "with_graph": sums["predicted"] + clock.assumptions.graph_launch_seconds,
        "launch_by_launch": max(sums["predicted"], host),
        "host_launches": host,
    }
    return {f"{name}_seconds": value for name, value in seconds.items()} | {
        f"{name}_images_per_second": step.batch / value for name, value in seconds.items()
    }


def as_dict(step: Step, clocks: Iterable[Clock]) -> dict[str, Any]:
    """For JSON: the predictions of all clocks, and every row as "row" names its values, with the first one's seconds."""
    chosen = list(clocks)
    return {
        "model": step.model,
        "batch": step.batch,
        "precision": step.precision,
        "parameters": step.parameters,
        **{name: step.total(name) for name in ("bytes", "flops", "launches")},
        "assumptions": asdict(chosen[0].assumptions),
        "devices": [{**clock.device.as_dict(), "prediction": prediction(step, clock)} for clock in chosen],
        "rows_of_device": chosen[0].device.name,
        "row": ["layer", "image", "phase", "kind", "launches", "bytes", "flops", "floor_seconds", "predicted_seconds"],
        "rows": [
            [
                row.layer,
                row.stage,
                row.work.phase,
                row.work.kind,
                row.work.launches,
                row.work.bytes,
                row.work.flops,
                float(f"{chosen[0].floor(row.work):.4g}"),
                float(f"{chosen[0].predicted(row.work):.4g}"),
            ]
            for row in step.rows
        ],
    }


def tables(step: Step, clock: Clock) -> str:
    """Rows added up by stage and by kind, and the prediction; 80 columns."""
    head = (
        f"{step.model}, batch {step.batch}, {step.precision}, {clock.device.name}: {step.total('launches')} launches, "
        f"{step.total('bytes') / step.batch / 1e6:.0f} MB\nand {step.total('flops') / step.batch / 1e9:.1f} GFLOP per image"
    )
    by_stage = table("image", step, clock, lambda row: row.stage)
    by_kind = table("kind", step, clock, lambda row: row.work.kind)
    return "\n\n".join([head, by_stage, by_kind, _summary(step, clock)])


def table(title: str, step: Step, clock: Clock, group: Callable[[Row], str]) -> str:
    """Return a table of launches, of bytes and FLOP per image, and of predicted time, by group, forward and backward."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in step.rows:
        groups[group(row)].append(row)
    whole = sum(clock.predicted(row.work) for row in step.rows)
    widths = "{:<20}{:>8}{:>10}{:>10}{:>8}{:>8}{:>8}{:>8}"
    lines = [widths.format(title, "launches", "MB fwd", "MB bwd", "GFLOP", "ms fwd", "ms bwd", "share")]
    for name, rows in [*groups.items(), ("all", list(step.rows))]:
        lines.append(widths.format(name[:20], *_cells(rows, step.batch, clock, whole)))
    return "\n".join(lines)


def _cells(rows: Sequence[Row], batch: int, clock: Clock, whole: float) -> tuple[str, ...]:
    directions = [[row.work for row in rows if row.work.phase == phase] for phase in ("forward", "backward")]
    megabytes = [f"{sum(work.bytes for work in works) / batch / 1e6:.2f}" for works in directions]
    milliseconds = [sum(map(clock.predicted, works)) * 1e3 for works in directions]
    launches, flops = sum(row.work.launches for row in rows), sum(row.work.flops for row in rows)
    share = sum(milliseconds) / 1e3 / whole
    times = (f"{value:.2f}" for value in milliseconds)
    return (str(launches), *megabytes, f"{flops / batch / 1e9:.2f}", *times, f"{share:.1%}")


def _summary(step: Step, clock: Clock) -> str:
    names = {
        "bytes_alone": "bytes alone, at a copy's speed",
        "floor": "FLOOR: bytes, or FLOP at a product's rate",
        "with_graph": "PREDICTED: one CUDA graph",
        "launch_by_launch": "PREDICTED: launch by launch",
        "host_launches": "host's launches alone",
    }
    figures = prediction(step, clock)
    return "\n".join(
        f"{text:<42}{figures[f'{name}_seconds'] * 1e3:>9.2f} ms{figures[f'{name}_images_per_second']:>12,.0f} images/s"
        for name, text in names.items()
    )
