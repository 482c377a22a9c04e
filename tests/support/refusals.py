"""The program's own word on which combinations are legal: what refuses a configuration is asked, as far as one is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.grid import coordinates
from hpctrain.config.schema import Config
from hpctrain.data.sizes import ImageSizes
from hpctrain.errors import HpctrainError
from hpctrain.experiment.averager import make_strategy
from hpctrain.experiment.device_faults import mixing_fault, progress_fault, sparse_fault, transport_fault, wire_fault
from hpctrain.experiment.grid import check_batch, check_overlap
from hpctrain.experiment.image_sizes import check_image_shapes
from hpctrain.experiment.unreadable import check_skip
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import GroupLayout
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.train.exact_shards import backend_fault, ranks_fault, statistics_fault, synchronised
from hpctrain.train.exact_shards import split_fault as split_fault_of_exact
from tests.support.dimensions import (
    Row,
    config_of,
    ends_early,
    graph_of,
    parallel_plan,
    splits_parameters,
    task_of,
    value_of,
)
from tests.support.training import Task

#: options that an averager may have
AVERAGING = (
    "averager",
    "slices",
    "sizes",
    "window",
    "fc_exchange",
    "replan",
    "two_level",
    "wire",
    "wire_parameters",
    "lazy",
    "sparse",
    "micro_batches",
    "exact",
)
DATA = ("data", "grid")
PLANNING = ("grid", "plan", "net", "tiles", "interior-first", "hides")
SIZING = ("net", "image_sizes")
NODES = ("averager", "sparse", "two_level", "nodes", *PLANNING)


def refusal(row: Row) -> str | None:
    """The sentence by which the program refuses a combination, of which some options may not be chosen yet.

    Also one by which it refuses to go on, on another grid.
    """
    row = _with_device(row)
    refused = _refused_averager(_only(row, AVERAGING)) or _refused_device(row) or _refused_data(_only(row, DATA))
    refused = refused or _refused_transport(row) or _refused_exact(row) or _refused_mixing(row)
    refused = refused or _refused_sizes(_only(row, SIZING))
    refused = refused or _refused_nodes(_only(row, NODES)) or _refused_plan(_only(row, (*PLANNING, "averager", "batch")))
    return refused if refused or not _changes_grid(row) else refusal(resumed(row))


def _with_device(row: Row) -> Row:
    """A way between devices needs these: what they refuse is refused before the device is chosen."""
    between = "transport" in row and value_of(row, "transport") != "staged"
    return {"device": "emulated", **row} if between else row


def _changes_grid(row: Row) -> bool:
    return {"end", "resume", "grid"} <= row.keys() and ends_early(row) and value_of(row, "resume") is not None


def resumed(row: Row) -> Row:
    """The combination of the part of a run that goes on."""
    return {**row, "grid": value_of(row, "resume") or row["grid"], "resume": "same"}


def _only(row: Row, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, row[name]) for name in names if name in row)


@cache
def _refused_averager(items: tuple[tuple[str, str], ...]) -> str | None:
    return _refused_over_nothing(items, split=False) if "averager" in dict(items) else None


@cache
def _refused_nodes(items: tuple[tuple[str, str], ...]) -> str | None:
    row = dict(items)
    if not {"averager", "two_level", "grid", "nodes"} <= row.keys():
        return None
    ranks = math.prod(value_of(row, "grid"))
    per_node = value_of(row, "nodes") or ranks
    nodes = [rank // per_node for rank in range(ranks)]
    groups = [nodes]
    if {"plan", "net"} <= row.keys() and _refused_plan(_only(row, PLANNING)) is None and splits_parameters(row):
        rows = value_of(row, "grid")[0]
        places = coordinates(nodes, rows)  # of each rank; those with the same part of split layers average it
        groups += [
            [node for node, (place, _) in zip(nodes, places, strict=True) if place == split_rank] for split_rank in range(rows)
        ]

    options = _only(row, ("averager", "sparse", "two_level"))
    refused = (_refused_over_nothing(options, split=False, nodes=tuple(group)) for group in groups)
    return next((sentence for sentence in refused if sentence is not None), None)


def _refused_transport(row: Row) -> str | None:
    if not {"device", "transport", "averager"} <= row.keys() or value_of(row, "transport") == "staged":
        return None
    if value_of(row, "device") is None:
        return transport_fault(value_of(row, "transport"))
    return sparse_fault() if (value_of(row, "transport"), value_of(row, "averager")) == ("nccl", "sparse") else None


def _refused_device(row: Row) -> str | None:
    if not {"grid", "device"} <= row.keys() or value_of(row, "device") is None:
        return None
    ranks = math.prod(value_of(row, "grid"))
    wire = value_of(row, "wire_parameters")
    if wire is not None and ranks > 1:
        return wire_fault(wire)
    return progress_fault("posting") if value_of(row, "posting") and ranks > 1 else None


@cache
def _statistics_fault(net: str) -> str | None:
    """The sentence for a network by its name, of which rows are drawn by the thousand."""
    network = Network(value_of({"net": net}, "net").model(), Task.image_shape, NumpyKernelSet())
    return statistics_fault(synchronised(network))


def _refused_exact(row: Row) -> str | None:
    """What an order of sums does not go with, beside an averager."""
    shards = value_of(row, "exact")
    if shards is None:
        return None
    faults: list[str | None] = []
    if "grid" in row:
        rows, cols = value_of(row, "grid")
        faults += [split_fault_of_exact(rows), ranks_fault(shards, rows * cols)]
    if "net" in row:
        faults.append(_statistics_fault(row["net"]))
    if value_of(row, "device") is not None:
        faults.append(backend_fault("cuda"))
    return next((fault for fault in faults if fault is not None), None)


def _refused_mixing(row: Row) -> str | None:
    if not {"mixing", "device"} <= row.keys() or value_of(row, "device") is None or value_of(row, "mixing") is None:
        return None
    return mixing_fault("cuda")


@cache
def _refused_sizes(items: tuple[tuple[str, str], ...]) -> str | None:
    row = dict(items)
    if not set(SIZING) <= row.keys() or value_of(row, "image_sizes") is None:
        return None
    network = Network(value_of(row, "net").model(), Task.image_shape, NumpyKernelSet())
    sizes = ImageSizes(value_of(row, "image_sizes"))
    shapes = [replace(task_of({"net": row["net"]}), image_sizes=sizes).shape_at(epoch) for epoch, _ in sizes.steps]
    return _sentence(lambda: check_image_shapes(network, shapes))


@cache
def _refused_data(items: tuple[tuple[str, str], ...]) -> str | None:
    row = dict(items)
    if not set(DATA) <= row.keys():
        return None
    return _sentence(lambda: check_skip(config_of(row), value_of(row, "grid")[0]))


@cache
def _refused_plan(items: tuple[tuple[str, str], ...]) -> str | None:
    row = dict(items)
    if not {"grid", "plan", "net"} <= row.keys():
        return None

    def attempt() -> None:
        check_overlap(_config_of_grid(_only(row, ("grid", "interior-first"))), graph_of(row["net"]), parallel_plan(row))
        if "batch" in row:
            check_batch(value_of(row, "batch"), *value_of(row, "grid"))

    sentence = _sentence(attempt)
    if sentence is None and "averager" in row and splits_parameters(row):
        return _refused_over_nothing(_only(row, ("averager",)), split=True)
    return sentence


@cache
def _config_of_grid(items: tuple[tuple[str, str], ...]) -> Config:
    return config_of(dict(items))


@cache
def _refused_over_nothing(items: tuple[tuple[str, str], ...], *, split: bool, nodes: tuple[int, ...] | None = None) -> str | None:
    """The sentence of a strategy for no parameters, on one rank or those on `nodes`: the constructor knows what is legal."""

    def attempt() -> None:
        config = config_of(dict(items))
        norms = OPTIMIZERS.create(config.optimizer.name, config.optimizer.options).norms_needed
        layout, micro_batches = GroupLayout({}, "float64"), config.micro_batches
        size = len(nodes or (0,))
        group = PlannedGroup(layout, size, nodes, config.batch, micro_batches, norms_needed=norms, several_groups=split)
        make_strategy(config.averager.name, config.averager.options, replace(group, shards=config.exact.shards))

    return _sentence(attempt)


def _sentence(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except HpctrainError as error:
        return str(error)
    return None
