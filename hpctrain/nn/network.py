"""A model with its parameters, statistics and programs: the network that a rank trains.

The network does not depend on ranks. A `Distribution` supplies one rank's graph and its parts of parameters.

Frozen layers keep their parameters and the running statistics of their batch norms. They have no gradients, so they are not
averaged and have no optimiser state; their batch norms compute as in evaluation. If no layer before a frozen one is trained,
backward skips that layer, and its activations are not kept.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

from hpctrain.backend.graph import Graph, GraphBuilder, Node
from hpctrain.backend.operators import Array, CapturesWork, KernelSet, LocalStatistics, Operator, StatisticsMerger, aligned
from hpctrain.backend.specs import BatchNormSpec, Conv2dSpec, SoftmaxCrossEntropySpec, TensorSpec, parameter_dtype
from hpctrain.core.errors import ConfigError, ShapeError
from hpctrain.core.text import nearest
from hpctrain.nn.captured_program import CapturedProgram, Slices
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import ExecutionPlan
from hpctrain.nn.initialise import first_value
from hpctrain.nn.layers import Layer, Leaf, join
from hpctrain.nn.parameter import FlatGroup, FlatStatistics, Parameter, ParameterSpec, ProgramStatistics, StatisticSpec
from hpctrain.nn.program import Program, SideBySide, alike

#: (H, W, C) of one sample
ImageShape = tuple[int, int, int]


@dataclass(frozen=True)
class Shard:
    """A rank's part of a split parameter or statistic: elements [start, stop) of one dimension."""

    dim: int
    interval: tuple[int, int]

    @property
    def index(self) -> tuple[slice | type(Ellipsis), ...]:  # type: ignore[valid-type]
        """Index of this part in an array that holds the whole tensor."""
        interval = slice(*self.interval)
        return (interval,) if self.dim == 0 else (Ellipsis, interval)


class Distribution(Protocol):
    """The part of a model that one rank computes.

    Attributes:
        ranks: number of ranks that share samples (the size of a split group).
    """

    @property
    def ranks(self) -> int: ...

    def prepare(self, graph: Graph) -> None:
        """Read the model, lowered for one sample. The network calls it first of all, and again for each further image shape."""

    def local(self, graph: Graph, counts: Sequence[int]) -> Graph:
        """Return this rank's part of `graph`.

        Args:
            graph: model lowered for the samples of the whole split group.
            counts: number of samples of each rank of the split group.
        """

    def message_bytes(self, operators: Sequence[Operator]) -> int:
        """Return the bytes that the operators of one program need for messages in the split group, in addition to the arena."""

    def shard(self, name: str) -> Shard | None:
        """Return this rank's part of the parameter or statistic with the full name `name`; None if this rank holds all of it."""

    def contributes(self, name: str) -> tuple[bool, bool]:
        """Return how this rank adds the batch statistic `name` to the step's sums.

        Returns:
            Two flags: whether the term is weighted by this rank's samples, and whether it is weighted by those of its split
            group. Both are false if another rank adds the statistic.
        """


class Undistributed:
    """Distribution of a rank that computes whole layers on its own samples."""

    ranks: int = 1

    def prepare(self, graph: Graph) -> None:
        return None

    def local(self, graph: Graph, counts: Sequence[int]) -> Graph:
        return graph

    def message_bytes(self, operators: Sequence[Operator]) -> int:
        return 0

    def shard(self, name: str) -> Shard | None:
        return None

    def contributes(self, name: str) -> tuple[bool, bool]:
        return True, False


class Lowering:
    """A model that is lowered at any number of samples and any image shape. It caches the latest graphs.

    Args:
        freeze: name patterns of the layers that are not trained (see `frozen_layers`).
    """

    def __init__(self, model: Layer, freeze: Sequence[str] = (), dtype: str = "float32") -> None:
        self.model, self.frozen = model, frozen_layers(model, freeze)
        self._lowered = lru_cache(maxsize=16)(partial(_lowered, model, dtype, self.frozen))

    def graph(self, samples: int, image_shape: ImageShape) -> Graph:
        """Return the graph for images (samples, H, W, C), before fusion. Raise a ShapeError if the layers do not fit them."""
        return self._lowered(samples, (*image_shape,))


def _lowered(model: Layer, dtype: str, frozen: frozenset[str], samples: int, image_shape: ImageShape) -> Graph:
    builder = GraphBuilder(TensorSpec((samples, *image_shape), dtype))
    try:
        graph = builder.build(model.lower(builder, 0, ""))
    except ShapeError:
        first, second, last = image_shape
        specs = (layer.spec(name) for name, layer in model.walk() if isinstance(layer, Leaf))
        channels = next((spec.channels_in for spec in specs if isinstance(spec, Conv2dSpec)), None)
        if first not in (1, 3) or last == channels:
            raise
        raise ShapeError(
            f"image_shape is {tuple(image_shape)}, but shapes are (height, width, channels); the nearest is "
            f"{second, last, first}."
        ) from None
    shape = graph.tensors[graph.output].shape
    if len(shape) != 2:
        raise ShapeError(f"The model's output must have shape (N, classes), not {shape}; flatten or pool before the last layer.")
    return replace(graph, nodes=tuple(_frozen(node) if node.name in frozen else node for node in graph.nodes))


def frozen_layers(model: Layer, patterns: Sequence[str]) -> frozenset[str]:
    """Return the dotted names of the layers with parameters that match one of the patterns. "*" also matches dots.

    A layer is frozen as a whole: a pattern that matches its name or the name of one of its parameters freezes all its parameters.

    Raises:
        ConfigError: a pattern matches nothing, or the patterns leave no layer to train.
    """
    names = {
        name: [name, *(f"{name}.{role}" for role in layer.parameters())] for name, layer in model.walk() if layer.parameters()
    }
    frozen: set[str] = set()
    for pattern in patterns:
        matching = {layer for layer, parameters in names.items() if any(fnmatchcase(name, pattern) for name in parameters)}
        if not matching:
            near = nearest(pattern, names)
            known = f"the nearest layer is {near}" if near is not None else f"the first layer is {next(iter(names), 'none')}"
            raise ConfigError(f'The pattern "{pattern}" of frozen layers matches no layer with parameters; {known}.')
        frozen |= matching
    if frozen and frozen == names.keys():
        raise ConfigError(
            f"The patterns of frozen layers {list(patterns)} match all {len(names)} layers with parameters, so nothing would be "
            f"trained; exclude at least {list(names)[-1]}."
        )
    return frozenset(frozen)


def _frozen(node: Node) -> Node:
    spec = node.spec
    if isinstance(spec, BatchNormSpec):
        spec = replace(spec, fixed=True, synchronised=False)  # running statistics need no merge
    return replace(node, spec=spec, frozen=True)


def layer_of(name: str) -> str:
    """Return the name of the layer that has the parameter or running statistic `name`."""
    return name.rpartition(".")[0]


ALL, MODEL = "all", "model"  # names of the group of whole parameters and of the group of split parameters
_ALONE: Mapping[str, StatisticsMerger] = MappingProxyType(dict.fromkeys(("all", "data", "split"), LocalStatistics()))
#: (parameter, index of a program among those side by side) -> array for the gradient, in the parameter's shape
GradientBuffers = Callable[[Parameter, int], Array]
_ProgramKey = tuple[ImageShape, tuple[tuple[int, ...], ...], bool, bool, GradientBuffers | None]
_MAX_PROGRAMS = 8  # training, its short last batch, evaluation, its short last batch, and room for a changing batch size


class Network:
    """One rank's copy of a model.

    Parameters lie in forward order in flat groups, one for each group of ranks that averages them. Initial values are drawn from
    (seed, name), so they are the same on every rank and for every split.

    Args:
        model: root layer.
        smoothing: label smoothing of the loss.
        class_weights: weight of each class in the loss of training steps, above 0; empty: all are 1.
        mergers: mergers of batch statistics by group of ranks: "all", "data" or "split" (see `BatchNormSpec.merge`).
        distribution: this rank's share of the model; default: the whole model.
        frozen: name patterns of the layers that are not trained (see `frozen_layers`).

    Attributes:
        parameter_dtype: dtype of parameters, gradients and statistics.
        groups: groups of trained parameters: "all" has the parameters that are whole on this rank, "model" has the split ones.
        frozen: names of the layers that are not trained.
        frozen_groups: parameters of frozen layers, by the same names as `groups`.
        parameter_specs: declarations of the whole model's parameters by full name.
        shards: this rank's part of each parameter by full name; None for a whole parameter.
        slices: indices of the slices that hold each parameter, by name; a slice is the content of one message.

    Raises:
        ShapeError: the layers do not fit each other or the image; the message names the layer.
        ConfigError: a pattern of frozen layers matches nothing, the patterns leave nothing to train, or the weights of classes
            are not one positive number per class.
    """

    def __init__(
        self,
        model: Layer,
        image_shape: ImageShape,
        kernels: KernelSet,
        *,
        dtype: str = "float32",
        seed: int = 0,
        smoothing: float = 0.0,
        class_weights: Sequence[float] = (),
        mergers: Mapping[str, StatisticsMerger] | None = None,
        distribution: Distribution | None = None,
        frozen: Sequence[str] = (),
    ) -> None:
        self.model, self.image_shape, self.kernels, self.dtype = model, image_shape, kernels, dtype
        self.parameter_dtype = parameter_dtype(dtype)
        self._mergers = {**_ALONE, **(mergers or {})}
        self._captures = isinstance(kernels, CapturesWork) and kernels.captures
        self.slices: Slices = {}
        self.distribution: Distribution = distribution if distribution is not None else Undistributed()
        self.loss_spec = SoftmaxCrossEntropySpec(smoothing, tuple(class_weights))
        self._loss = kernels.make_loss(self.loss_spec)
        self._programs: OrderedDict[_ProgramKey, SideBySide] = OrderedDict()
        self._arena: Array = kernels.allocate(0)
        self._lowering = Lowering(model, frozen, dtype)
        self.frozen = self._lowering.frozen
        graph = self.graph(1)
        self.distribution.prepare(graph)
        self.parameter_specs, statistic_specs = declared(model, graph)
        self.shards = {name: self.distribution.shard(name) for name in self.parameter_specs}
        parameter_specs = {name: local_spec(spec, self.shards[name]) for name, spec in self.parameter_specs.items()}
        self.groups = self._make_groups(parameter_specs, are_frozen=False)
        self.frozen_groups = self._make_groups(parameter_specs, are_frozen=True)
        grouped = {name: parameter for group in self._all_groups() for name, parameter in group.parameters.items()}
        self.parameters: dict[str, Parameter] = {name: grouped[name] for name in parameter_specs}
        statistic_specs = {
            name: replace(spec, momentum=0.0) if layer_of(name) in self.frozen else spec for name, spec in statistic_specs.items()
        }
        parts = {name: shard.interval for name in statistic_specs if (shard := self.distribution.shard(name)) is not None}
        self.statistics = FlatStatistics(
            statistic_specs, self.parameter_dtype, parts, self.distribution.contributes, arithmetic=kernels.arithmetic
        )
        for name, parameter in self.parameters.items():
            value, shard = first_value(self.parameter_specs[name], name, seed, self.parameter_dtype), self.shards[name]
            kernels.arithmetic.from_host(parameter.data, value if shard is None else value[shard.index])
        for group in self._all_groups():
            group.refresh_shadow()
        self._check_class_weights()

    def _check_class_weights(self) -> None:
        weights = self.loss_spec.class_weights
        if weights and len(weights) != self.classes:
            raise ConfigError(
                f"There are {len(weights)} weights of classes, but each of the {self.classes} classes must have one."
            )
        wrong = next((label for label, weight in enumerate(weights) if not 0.0 < weight < math.inf), None)
        if wrong is not None:
            raise ConfigError(f"The weight of class {wrong} is {weights[wrong]}, but must be a finite number above 0, such as 1.")

    @property
    def classes(self) -> int:
        """Number of classes, the width of the logits."""
        graph = self.graph(1)
        return graph.tensors[graph.output].shape[1]

    def check_shape(self, image_shape: ImageShape) -> None:
        """Raise a ShapeError unless images of this shape need the same parameters, with the same parts on this rank."""
        self.distribution.prepare(self.graph(1, image_shape))
        if any(self.distribution.shard(name) != shard for name, shard in self.shards.items()):
            raise ShapeError(
                f"Images of {image_shape} need another split of the parameters over the ranks than images of "
                f"{self.image_shape}; use that size."
            )

    def graph(self, batch: int, image_shape: ImageShape | None = None) -> Graph:
        """Return the model lowered at (batch, H, W, C), before fusion. `image_shape` defaults to the network's image shape."""
        return self._lowering.graph(batch, image_shape or self.image_shape)

    def program(
        self, batch: int | Sequence[int], *, training: bool, input_gradient: bool = False, image_shape: ImageShape | None = None
    ) -> Program:
        """Return the program for N = batch from a small cache; it is made at its first use.

        Args:
            batch: number of samples N. If the model is split: number of samples of each rank of the split group.
            training: whether the program has a backward pass.
            input_gradient: whether backward also computes the gradient of the images.
            image_shape: (H, W, C) of whole images; default: the network's image shape.

        Raises:
            BackendError: the kernel set does not support a layer.
            ShapeError: the layers do not fit `image_shape`.
        """
        counts, shape = (batch,) if isinstance(batch, int) else tuple(batch), image_shape or self.image_shape
        return next(iter(self._alone(counts, shape, training=training, input_gradient=input_gradient)))

    def _alone(self, counts: tuple[int, ...], shape: ImageShape, *, training: bool, input_gradient: bool = False) -> SideBySide:
        """Return the program for `counts` and `shape`, as the single member of a `SideBySide`."""

        def make() -> SideBySide:
            plan = compile_graph(self._local_graph(counts, shape), self.kernels, training=training, input_gradient=input_gradient)
            return SideBySide([self._bound(plan, self.statistics, self._reserve(shape, plan.arena_bytes))])

        return self._cached((shape, (counts,), training, input_gradient, None), make)

    def side_by_side(
        self,
        batches: Sequence[Sequence[int]],
        *,
        image_shape: ImageShape | None = None,
        gradient_buffers: GradientBuffers | None = None,
    ) -> SideBySide:
        """Return training programs, one per batch, that run side by side. They come from the same cache as `program`.

        Args:
            batches: batch of each program, in the form that `program` accepts. A single batch uses the program that `program`
                returns, which writes its gradients to the groups.
            gradient_buffers: function that returns the buffer of a program's gradient; None: all programs write to the groups.
        """
        shape, counts = image_shape or self.image_shape, tuple(map(tuple, batches))
        if len(counts) == 1:
            return self._alone(counts[0], shape, training=True)

        def make() -> SideBySide:
            plans = [compile_graph(self._local_graph(batch, shape), self.kernels, training=True) for batch in counts]
            starts = [0, *accumulate(aligned(plan.arena_bytes) for plan in plans)]
            arena = self._reserve(shape, starts[-1])
            leads = alike(plans)
            programs: list[Program] = []
            for start, plan in zip(starts, plans, strict=False):
                statistics = self.statistics.with_own_batch() if programs else self.statistics
                leader = programs[0] if programs and leads else None
                memory = arena[start : start + plan.arena_bytes]
                programs.append(self._bound(plan, statistics, memory, leader, _at_place(gradient_buffers, len(programs))))
            return SideBySide(programs)

        return self._cached((shape, counts, True, False, gradient_buffers), make)

    def _cached(self, key: _ProgramKey, make: Callable[[], SideBySide]) -> SideBySide:
        if key not in self._programs:
            if len(self._programs) >= _MAX_PROGRAMS:
                self.kernels.wait()  # captured work of the oldest program may still run, and does not keep its memory alive
                self._programs.popitem(last=False)
            self._programs[key] = make()
        self._programs.move_to_end(key)
        return self._programs[key]

    def set_slices(self, slices: Slices) -> None:
        """Set the slices that hold each parameter, which bound the spans of captured programs. Call it before the second step."""
        self.slices = slices

    def _bound(
        self,
        plan: ExecutionPlan,
        statistics: ProgramStatistics,
        memory: Array,
        leader: Program | None = None,
        gradient_buffer: Callable[[Parameter], Array] | None = None,
    ) -> Program:
        kind = partial(CapturedProgram, slices=lambda: self.slices) if self._captures else Program
        return kind(
            plan,
            kernels=self.kernels,
            parameters=self.parameters,
            statistics=statistics,
            memory=memory,
            loss=self._loss,
            mergers=self._mergers,
            leader=leader,
            gradient_buffer=gradient_buffer,
        )

    def arena_bytes(self, batch: int, *, training: bool) -> int:
        """Return the bytes that a program for `batch` samples per rank needs besides the parameters, without allocating them."""
        graph = self._local_graph((batch,) * self.distribution.ranks, None)
        plan = compile_graph(graph, self.kernels, training=training)
        return plan.arena_bytes + self.distribution.message_bytes([step.operator for step in plan.steps])

    def _local_graph(self, counts: Sequence[int], image_shape: ImageShape | None) -> Graph:
        return self.distribution.local(self.graph(sum(counts), image_shape), counts)

    def parameters_changed(self) -> None:
        """Refresh all copies of parameters and running statistics after a write outside of a training step."""
        self.statistics.running_changed()
        for group in self._all_groups():
            group.refresh_shadow()
        for programs in self._programs.values():
            programs.parameters_changed()

    def _reserve(self, image_shape: ImageShape, size_bytes: int) -> Array:
        """Return the shared arena; allocate a larger one if a program needs more.

        Older programs keep the smaller arena that they were bound to. If some programs are for images of another shape, all
        programs are dropped, so that a training with growing images holds only one arena. Dropped programs are made again at
        their next use.
        """
        if self._arena.size < size_bytes:
            if any(shape != image_shape for shape, *_ in self._programs):
                self.kernels.wait()  # captured work of these programs may still run, and does not keep its memory alive
                self._programs.clear()
                self._arena = self.kernels.allocate(0)  # frees the old arena before the larger one is allocated
            self._arena = self.kernels.allocate(size_bytes)
        return self._arena

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of all trained parameters of the model in forward order, including those on other ranks."""
        return tuple(name for name in self.parameter_specs if layer_of(name) not in self.frozen)

    def _all_groups(self) -> tuple[FlatGroup, ...]:
        return (*self.groups.values(), *self.frozen_groups.values())

    def _make_groups(self, specs: Mapping[str, ParameterSpec], *, are_frozen: bool) -> dict[str, FlatGroup]:
        orders = {name: order for order, name in enumerate(specs)}
        members: dict[str, dict[str, ParameterSpec]] = {}
        for name, spec in specs.items():
            if (layer_of(name) in self.frozen) is are_frozen:
                members.setdefault(ALL if self.shards[name] is None else MODEL, {})[name] = spec
        arithmetic, shadow_dtype = self.kernels.arithmetic, self.kernels.shadow_dtype
        return {
            group: FlatGroup(inside, self.parameter_dtype, arithmetic=arithmetic, shadow_dtype=shadow_dtype, orders=orders)
            for group, inside in members.items()
        }


def declared(model: Layer, graph: Graph) -> tuple[dict[str, ParameterSpec], dict[str, StatisticSpec]]:
    """Return parameters and statistics by full name, in the order in which forward uses them.

    Raises:
        ShapeError: a parameter is used by no node, or by more than one, or two layers with parameters are the same object.
    """
    names: dict[int, tuple[str, Layer]] = {}  # with the layers, so that no other object has the same number
    parameters: dict[str, ParameterSpec] = {}
    statistics: dict[str, StatisticSpec] = {}
    for prefix, layer in model.walk():
        parameters.update({join(prefix, role): spec for role, spec in layer.parameters().items()})
        first, _ = names.setdefault(id(layer), (prefix, layer))
        if first != prefix and (layer.parameters() or layer.statistics()):
            raise ShapeError(f"Layers {first} and {prefix} are one object, but layers share no parameters; create one for each.")
        statistics.update({join(prefix, role): spec for role, spec in layer.statistics().items()})
    used = [name for node in graph.nodes for name in node.parameters.values()]
    for name in parameters:
        if used.count(name) != 1:
            raise ShapeError(f"Parameter {name} is used by {used.count(name)} operations; each must be used by exactly one.")
    order = [name for node in graph.nodes for name in node.statistics.values()]
    return {name: parameters[name] for name in used}, {name: statistics[name] for name in order}


def local_spec(spec: ParameterSpec, shard: Shard | None) -> ParameterSpec:
    """Return the declaration of a parameter on a rank that holds `shard`; None: the whole parameter."""
    if shard is None:
        return spec
    start, stop = shard.interval
    shape = tuple(stop - start if dim == shard.dim % len(spec.shape) else size for dim, size in enumerate(spec.shape))
    return replace(spec, shape=shape)


def _at_place(buffers: GradientBuffers | None, place: int) -> Callable[[Parameter], Array] | None:
    return None if buffers is None else lambda parameter: buffers(parameter, place)
