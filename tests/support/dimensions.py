"""The table of options that are combined in tests, and what a combination of them is: a configuration, a plan, a training.

A feature joins by a row in `DIMENSIONS`, and by a line where its values become part of the training (see docs/testing.md).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from hpctrain.assembly.faults import device_faults, exact_faults
from hpctrain.assembly.images import check_image_shapes
from hpctrain.assembly.recipe import check_batch
from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.averaging.base import PlannedGroup
from hpctrain.backend.graph import Graph
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import KernelSet
from hpctrain.backend.specs import BatchNormSpec, parameter_dtype
from hpctrain.comm.groups import coordinates
from hpctrain.config.schema import Config, MixingConfig
from hpctrain.core.errors import HpctrainError
from hpctrain.data.pipeline import ImageSizes
from hpctrain.data.sampler import Mixing
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import Lowering, Network
from hpctrain.nn.parameter import GroupLayout
from hpctrain.optim.base import NormsNeeded
from hpctrain.optim.ema import EmaRule
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.run.images import check_skip
from hpctrain.training.passes import ranks_fault, statistics_fault, synchronised
from hpctrain.training.weight_watch import CheckCadence
from hpctrain_testing.emulator.device import EmulatedDevice
from tests.support import nets
from tests.support.emulated import kernels_on
from tests.support.training import Task

#: option -> value, as they are written; options may be missing while a combination is drawn
Row = Mapping[str, str]

_D, _M, _B = Parallelism.DOMAIN, Parallelism.MODEL, Parallelism.BATCH


@dataclass(frozen=True)
class Net:
    """A network, its classes, and a plan of its layers that mixes all uses. tiny: how much larger its tiny slices are."""

    model: Callable[[], Layer]
    mixed: Mapping[str, Parallelism]
    classes: int = 5
    tiny: int = 1


#: so that an epoch ends with a batch of 3, or of 1
SAMPLES = 19

_RESIDUAL_MIXED = {"layer2.*": _M, "fc": _M}

_SGD = {"name": "sgd"}

#: options of averagers that have the same name here
_OPTIONS = ("window", "fc_exchange", "replan", "two_level", "wire", "wire_parameters")

#: option -> value as it is written -> what it stands for. Options that decide what others may be come first; of each option the
#: first value is the program's default, or the plainest.
DIMENSIONS: Mapping[str, Mapping[str, Any]] = {
    "averager": {name: name for name in ("sharded", "blocking", "overlap", "bucketed", "priority", "lazy", "sparse")},
    "grid": {
        f"{rows}x{cols}": (rows, cols)
        for rows, cols in ((1, 2), (1, 3), (1, 5), (2, 1), (3, 1), (4, 1), (7, 1), (2, 2), (2, 3), (3, 2), (1, 1))
    },
    "plan": {name: name for name in ("batch", "model", "domain", "mixed")},
    "net": {
        "plain": Net(partial(nets.plain, dropout=0.3), {"conv2": _M, "relu2": _M, "fc1": _M, "relu3": _B, "fc2": _M}, tiny=3),
        "residual": Net(nets.residual, _RESIDUAL_MIXED, tiny=8),
        "residual-local": Net(partial(nets.residual, synchronised=False), _RESIDUAL_MIXED, tiny=8),
        "stochastic-depth": Net(partial(nets.residual, stochastic_depth=0.4), _RESIDUAL_MIXED, tiny=8),
        "narrow": Net(nets.narrow, {"conv": _M, "fc1": _B}, classes=2),
    },
    "batch": {"8": 8, "3": 3},  # of 19 samples, so that an epoch ends with 3 or 1: fewer than ranks
    "tiles": {"rows": None, "columns": (1, 0), "both": (2, 2)},  # 0: as many as the grid has rows
    "slices": {"default": None, "tiny": (100, 40), "small": (1500, 400)},  # bucket_bytes, slice_parameters
    "window": {"default": None, "1": 1, "3": 3},
    "fc_exchange": {"default": None, "always": "always", "never": "never"},
    "replan": {"default": None, "no": False},
    "two_level": {"default": None, "no": False},
    "wire": {"default": None, "bfloat16": "bfloat16"},
    "wire_parameters": {"default": None, "bfloat16": "bfloat16"},
    "lazy": {
        "default": {},
        "every-step": {"layers": 2, "max_interval": 1},
        "one-layer": {"layers": 1, "max_interval": 3, "check_every": 1},
        "all-layers": {"layers": 99, "max_interval": 4, "check_every": 2},
    },
    "sparse": {  # at density 1 it trains what the others do; below, what the same ranks do without all that hides messages
        "default": {},
        "always": {"compress": "always", "least_elements": 4},
        "warm-up": {"compress": "always", "least_elements": 40, "warmup_density": 1.0, "warmup_steps": 2},
        "third": {"compress": "always", "least_elements": 40, "density": 0.3},
    },
    "optimizer": {
        "momentum": {**_SGD, "momentum": 0.9},
        "sgd": {**_SGD, "momentum": 0.0},
        "nesterov": {**_SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2, "decay_exclude": "none"},
        "clipping": {**_SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2, "clip_norm": 0.3},
        "lars": {"name": "lars", "weight_decay": 1e-2, "trust_coefficient": 0.1},
        "lars-clipping": {"name": "lars", "weight_decay": 1e-2, "trust_coefficient": 0.1, "clip_norm": 0.5},
        # with a small epsilon they would make steps of what is rounding alone, as a gradient of a bias before a batch norm is
        "adamw": {"name": "adamw", "epsilon": 0.1, "beta2": 0.9, "decay_exclude": "none", "clip_norm": 0.5},
        "adam": {"name": "adam", "epsilon": 0.1, "beta2": 0.9, "weight_decay": 1e-2},
        "lamb": {"name": "lamb", "epsilon": 0.1, "weight_decay": 1e-2},
    },
    "ema": {"no": None, "yes": EmaRule(0.3)},  # which the third update reaches
    "mixing": {"no": None, "yes": Mixing(1.0, 1.0, probability=0.8, seed=Task.seed)},
    "image_sizes": {  # the stored shorter side is 7; "plain" takes 8, too, but none that is smaller
        "one": None,
        "smaller-first": ((0, 5), (1, 7)),
        "larger-later": ((0, 7), (1, 8)),
    },
    "micro_batches": {"1": 1, "2": 2, "3": 3},
    "exact": {"no": None, "6": 6, "12": 12},  # shards, which 1, 2 and 3 columns share out, with one sum each or with several
    "smoothing": {
        "0": (0.0, False),
        "0.1": (0.1, False),
        "weighted": (0.1, True),
    },  # (label smoothing, whether classes have weights)
    "nodes": {"one": None, "of-1": 1, "of-2": 2, "of-3": 3},  # ranks of a node
    "steps": {"3": 3, "6": 6},  # orders are measured in the first five
    "on_nonfinite": {  # the answer, and the step in which one rank sees what is not finite; -1: none
        "stop": ("stop", None),
        "skip": ("skip", -1),
        "skip-one": ("skip", 1),
        "rollback": ("rollback", 1),
        "rollback-late": ("rollback", 2),
    },
    "messages": {"prompt": False, "adversarial": True},
    "checks": {  # in each step of all there is, or of parts in turn
        "none": CheckCadence(),
        "every-step": CheckCadence(1),
        "every-3": CheckCadence(3),
        "every-10": CheckCadence(10),
    },
    "hashes": {"none": 0, "every-step": 1, "every-2": 2},  # steps from one record to the next
    "data": {  # samples that cannot be read; of a file, where a rank has all samples that it reads to itself
        "arrays": None,
        "file": (),
        "unreadable": (0, 4, 5, 18),
        "unreadable-last": (17, 18),
    },
    "cache": {
        "no": {"memory": 0},
        "all": {"memory": "1MB"},
        "some": {"memory": 1_800},
        "filled": {"memory": 1_800, "fill": "start"},
    },  # of a file
    "data_threads": {"1": 1, "3": 3},  # that make a batch of a file
    "checkpoint": {  # layout, asynchronous
        "none": None,
        "single": ("single", False),
        "single-background": ("single", True),
        "sharded": ("sharded", False),
        "sharded-background": ("sharded", True),
    },
    "end": {name: name for name in ("own", "request", "max_time", "steps", "kill")},  # and then the run goes on
    "resume": {name: None if name == "same" else name for name in ("same", "1x1", "1x3", "2x1", "2x2")},  # on which grid
    "frozen": {"none": None, "first": slice(0, 2), "last": slice(-1, None), "between": slice(1, None, 2)},  # of layers
    "precision": {"float64": None, "bfloat16": "bfloat16"},  # of activations
    "device": {"host": None, "emulated": True, "emulated-without-graphs": False},  # whether programs are captured
    "transport": {name: name for name in ("staged", "mpi", "nccl")},  # of arrays of devices
}

VALUES = {name: tuple(values) for name, values in DIMENSIONS.items()}


def line(row: Row) -> str:
    """A combination as the command line takes it."""
    return " ".join(f"{name}={value}" for name, value in row.items())


def parsed(words: Sequence[str]) -> dict[str, str]:
    """The combination of a line's words; the first value of what is left out.

    Raises:
        ValueError: an option or a value that is not in the table.
    """
    given = dict(word.split("=", 1) for word in words)
    for name, value in given.items():
        if value not in VALUES.get(name, ()):
            raise ValueError(f"There is no {name}={value}; the table has {', '.join(VALUES.get(name, VALUES))}.")
    return {name: given.get(name, values[0]) for name, values in VALUES.items()}


def value_of(row: Row, name: str) -> Any:
    """The meaning of an option's value; that of the first value if none is chosen yet."""
    return DIMENSIONS[name][row.get(name, VALUES[name][0])]


def _dtype(row: Row) -> str:
    """The dtype of activations."""
    return value_of(row, "precision") or Task.dtype


def averager_options(row: Row) -> dict[str, Any]:
    """The averager's options, as a configuration has them."""
    name = value_of(row, "averager")
    options: dict[str, Any] = {key: value_of(row, key) for key in _OPTIONS}
    options = {key: value for key, value in options.items() if value is not None}
    if name == "sparse":
        options["density"] = 1.0
    options |= value_of(row, "lazy") | value_of(row, "sparse")
    slices = value_of(row, "slices")
    if slices is not None:
        factor = value_of(row, "net").tiny if row["slices"] == "tiny" else 1  # a few dozen slices show what hundreds show
        options |= {"slice_parameters": factor * slices[1]} if name == "priority" else {"bucket_bytes": factor * slices[0]}
    return options


def config_of(row: Row, folder: Path = Path(), every_steps: int = 0) -> Config:
    """A configuration as the checks, registries, `Trainer` and resumes read it; the network is the row's, not its model.

    Args:
        folder: of the data file and of runs. every_steps: from one checkpoint to the next, where there are any.
    """
    checkpoint = value_of(row, "checkpoint")
    ema, mixing = value_of(row, "ema"), value_of(row, "mixing")
    layout, asynchronous = checkpoint or ("auto", True)
    return Config.model_validate(
        {
            "seed": Task.seed,
            "dtype": parameter_dtype(_dtype(row)),
            "precision": value_of(row, "precision") or "float32",
            "model": "small",
            "data": {
                "train": str(folder / "train.h5"),
                "normalise": False,
                "cache": value_of(row, "cache"),
                "threads": value_of(row, "data_threads"),
                "mixing": {key: getattr(mixing, key) for key in MixingConfig.model_fields} if mixing is not None else {},
                "sizes": [{"from_epoch": epoch, "size": size} for epoch, size in value_of(row, "image_sizes") or ()],
                "on_unreadable": "skip" if value_of(row, "data") else "stop",
                "max_unreadable": 0.5,
            },
            "output": str(folder / "runs"),
            "checkpoint": {
                "every_epochs": int(checkpoint is not None),
                "every_steps": every_steps if checkpoint else 0,
                "layout": layout,
                "asynchronous": asynchronous,
            },
            "hashes": {"every_steps": value_of(row, "hashes")},
            "on_nonfinite": value_of(row, "on_nonfinite")[0],
            "batch": value_of(row, "batch"),
            "micro_batches": value_of(row, "micro_batches"),
            "exact": {"shards": value_of(row, "exact")},
            "ema": {} if ema is None else {"decay": ema.decay, "warm_up": ema.warm_up},
            "epochs": -(-steps_of(row) // steps_per_epoch(row)),
            "optimizer": {"lr": 0.05, **value_of(row, "optimizer")},
            "schedule": "constant",
            "grid": {"rows": value_of(row, "grid")[0]},
            "averager": {"name": value_of(row, "averager"), **averager_options(row)},
        }
    )


def parallel_plan(row: Row) -> ParallelPlan:
    """The plan; refused where the program refuses it."""
    net, (rows, cols), use = value_of(row, "net"), value_of(row, "grid"), value_of(row, "plan")
    mixed = use == "mixed"
    tiles = value_of(row, "tiles")
    if tiles is not None:
        tiles = (tiles[0], tiles[1] or rows)
    plan = ParallelPlan(rows, cols, _D if mixed else Parallelism(use), net.mixed if mixed else {}, tiles)
    plan.check([node.name for node in graph_of(row.get("net", VALUES["net"][0])).nodes])
    return plan


@cache
def graph_of(net: str) -> Graph:
    return Lowering(DIMENSIONS["net"][net].model(), dtype="float64").graph(1, Task.image_shape)


def frozen_layers(row: Row) -> tuple[str, ...]:
    """The names of the layers that are not trained."""
    chosen = value_of(row, "frozen")
    names = [node.name for node in graph_of(row.get("net", VALUES["net"][0])).nodes if node.parameters]
    return () if chosen is None else tuple(names[chosen])


def has_batch_norm(net: str) -> bool:
    return any(isinstance(node.spec, BatchNormSpec) for node in graph_of(net).nodes)


def splits_parameters(row: Row) -> bool:
    plan = parallel_plan(row)
    if plan.rows == 1:
        return False
    partitioned = partition_graph(graph_of(row["net"]), plan, (1, *(0,) * (plan.rows - 1)))
    return any(
        step.node and step.node.parameters and step.sharding and step.sharding.channel_intervals for step in partitioned.steps
    )


def kernels_of(row: Row, rank: int = 0) -> KernelSet:
    """The kernel set of one rank of a combination: NumPy's, or that of an emulated device with an order of work of its own."""
    graphs = value_of(row, "device")
    if graphs is None:
        return NumpyKernelSet()
    device = EmulatedDevice(zlib.crc32(line(row).encode()) + rank)
    precision = value_of(row, "precision") or "float64"
    return kernels_on(device, precision, graphs=graphs)


def steps_of(row: Row) -> int:
    """More for lazy averaging, whose seventh step follows from a comparison; rounded messages may bring another decision.

    A run that goes back ends with an epoch: it does some steps twice, and so does not end after a number of them.
    """
    compares = value_of(row, "averager") == "lazy" and value_of(row, "wire") is value_of(row, "wire_parameters") is None
    steps = (2 if compares else 1) * int(value_of(row, "steps"))
    return -(-steps // steps_per_epoch(row)) * steps_per_epoch(row) if goes_back(row) else steps


def steps_per_epoch(row: Row) -> int:
    return -(-SAMPLES // int(value_of(row, "batch")))


def is_run(row: Row) -> bool:
    """Whether the program's own loop drives the training, with a run directory."""
    return (
        value_of(row, "data") is not None
        or value_of(row, "checkpoint") is not None
        or value_of(row, "end") != "own"
        or goes_back(row)
    )


def goes_back(row: Row) -> bool:
    return bool(value_of(row, "on_nonfinite")[0] == "rollback")


def ends_early(row: Row) -> bool:
    return bool(value_of(row, "end") != "own")


def task_of(row: Row) -> Task:
    """The training of a combination."""
    net = value_of(row, "net")
    optimizer = dict(value_of(row, "optimizer"))
    return Task(
        net.model,
        kernels_of(row),
        partial(OPTIMIZERS.create, optimizer.pop("name"), optimizer),
        classes=net.classes,
        samples=SAMPLES,
        batch=value_of(row, "batch"),
        steps=steps_of(row),
        micro_batches=value_of(row, "micro_batches"),
        exact_shards=value_of(row, "exact"),
        dtype=_dtype(row),
        smoothing=value_of(row, "smoothing")[0],
        weighted=value_of(row, "smoothing")[1],
        plan=parallel_plan(row),
        checks=value_of(row, "checks"),
        hash_steps=value_of(row, "hashes"),
        skips=value_of(row, "on_nonfinite")[0] == "skip",
        poisoned_step=value_of(row, "on_nonfinite")[1],
        unreadable=value_of(row, "data"),
        ema=value_of(row, "ema"),
        mixing=value_of(row, "mixing"),
        frozen=frozen_layers(row),
        image_sizes=ImageSizes(value_of(row, "image_sizes")) if value_of(row, "image_sizes") else None,
        transport=value_of(row, "transport"),
    )


#: options that an averager may have
AVERAGING = ("averager", "slices", *_OPTIONS, "lazy", "sparse", "micro_batches", "exact")

DATA = ("data", "grid")

DEVICE = ("averager", "wire_parameters", "mixing", "exact", "grid", "device", "transport")

PLANNING = ("grid", "plan", "net", "tiles")

SIZING = ("net", "image_sizes")

NODES = ("averager", "sparse", "two_level", "nodes", *PLANNING)


def refusal(row: Row) -> str | None:
    """The sentence by which the program refuses a combination, of which some options may not be chosen yet.

    Also one by which it refuses to go on, on another grid.
    """
    row = _with_device(row)
    refused = _refused_averager(_only(row, AVERAGING)) or _refused_device(_only(row, DEVICE))
    refused = refused or _refused_data(_only(row, DATA)) or _refused_exact(row) or _refused_sizes(_only(row, SIZING))
    refused = refused or _refused_nodes(_only(row, NODES)) or _refused_plan(_only(row, (*PLANNING, "averager", "batch")))
    changes_grid = {"end", "resume", "grid"} <= row.keys() and ends_early(row) and value_of(row, "resume") is not None
    return refused if refused or not changes_grid else refusal(resumed(row))


def _with_device(row: Row) -> Row:
    """A way between devices needs these: what they refuse is refused before the device is chosen."""
    between = "transport" in row and value_of(row, "transport") != "staged"
    return {"device": "emulated", **row} if between else row


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


@cache
def _refused_device(items: tuple[tuple[str, str], ...]) -> str | None:
    row = dict(items)
    on_device, transport = value_of(row, "device") is not None, value_of(row, "transport")
    changes = {"backend": "cuda" if on_device else "numpy", "threads": 1}
    changes["transport"] = transport if on_device or transport != "staged" else "auto"
    config = config_of(row).model_copy(update=changes)
    return next((str(fault) for fault in (*device_faults(config), *exact_faults(config))), None)


@cache
def _statistics_fault(net: str) -> str | None:
    """The sentence for a network by its name, of which rows are drawn by the thousand."""
    network = Network(value_of({"net": net}, "net").model(), Task.image_shape, NumpyKernelSet())
    return statistics_fault(synchronised(network))


def _refused_exact(row: Row) -> str | None:
    """What an order of sums does not go with, other than an averager, split layers and a device."""
    shards = value_of(row, "exact")
    if shards is None:
        return None
    fault = ranks_fault(shards, math.prod(value_of(row, "grid"))) if "grid" in row else None
    return fault or (_statistics_fault(row["net"]) if "net" in row else None)


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
        parallel_plan(row)
        if "batch" in row:
            check_batch(value_of(row, "batch"), *value_of(row, "grid"))

    sentence = _sentence(attempt)
    if sentence is None and "averager" in row and splits_parameters(row):
        return _refused_over_nothing(_only(row, ("averager",)), split=True)
    return sentence


@cache
def _norms_needed() -> NormsNeeded:
    """Of an optimiser that is not chosen yet."""
    chosen = config_of({}).optimizer
    return OPTIMIZERS.create(chosen.name, chosen.options).norms_needed


@cache
def _refused_over_nothing(items: tuple[tuple[str, str], ...], *, split: bool, nodes: tuple[int, ...] | None = None) -> str | None:
    """The sentence of a strategy for no parameters, on one rank or those on `nodes`: the constructor knows what is legal."""

    def attempt() -> None:
        config = config_of(dict(items))
        layout, micro_batches = GroupLayout({}, "float64"), config.micro_batches
        size = len(nodes or (0,))
        group = PlannedGroup(layout, size, nodes, config.batch, micro_batches, norms_needed=_norms_needed(), several_groups=split)
        AveragerChoice(config.averager.name, config.averager.options).strategy(replace(group, shards=config.exact.shards))

    return _sentence(attempt)


def _sentence(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except HpctrainError as error:
        return str(error)
    return None
