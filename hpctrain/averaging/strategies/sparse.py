"""Sparse averaging: only the largest elements of gradients cross between nodes. It changes the optimisation.

Shi et al., "Towards scalable distributed training of deep learning on public cloud clusters", arXiv 2010.10458 (HiTopKComm): a
dense reduce-scatter within the node, an allgather of the largest elements of each part across nodes among ranks with the same
local number, and a dense allgather within the node. Here the last step gathers parameters, because the ranks with the same local
number all update the part, each for its node. Elements that are not sent are added to the next step's gradient. This saves time
if links between nodes are slow.

Residuals: Seide et al., Interspeech 2014. Largest elements of a shard: Shi et al. Momentum correction and factor masking: Lin,
Han, Mao, Wang and Dally, "Deep gradient compression", ICLR 2018, section 3 (u := m u + g, v := v + u, the largest elements of v
are sent).

Whether compression pays is predicted from bytes and messages. Between m nodes, a part of d elements of b_v bytes costs 2 (m - 1)
(alpha + d b_v beta / m) if all of it is reduced and gathered. It costs (m - 1) (alpha + k (b_v + b_i) beta) if only the k largest
elements are sent, each with a position of b_i bytes. Without alpha, sending the largest elements costs less for k / d < 2 b_v /
(m (b_v + b_i)). Traffic within nodes is the same in both cases and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from hpctrain.averaging import slicing
from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager, PlannedGroup, StrategyCosts, check_at_least_one
from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.link_simulation import Times
from hpctrain.averaging.reduce_scatter import OwnerOperations, ReduceScatterAverager, StepUpdate
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.slicing import INDEX_BYTES, Compression, Slice, cut, fused
from hpctrain.averaging.sufficient_factors import FcExchange
from hpctrain.averaging.top_k import Selection, TopK
from hpctrain.comm.base import Array, Communicator, Complete, Handle
from hpctrain.comm.groups import Levels, within_node
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.errors import ConfigError, OptionError
from hpctrain.nn.parameter import Parameter, Segment


def sparse_pays(elements: int, nodes: int, item_bytes: int, link: LinkModel, kept: int) -> bool:
    """Return whether sending `kept` of the `elements` of a part between nodes takes less time than sending all of them."""
    sparse_seconds = link.allgather_seconds(nodes * kept * (item_bytes + INDEX_BYTES), nodes)
    return nodes > 1 and sparse_seconds < 2 * link.allgather_seconds(elements * item_bytes, nodes)


@dataclass(frozen=True)
class SparseSettings:
    """Options of `sparse` that its averager uses.

    Attributes:
        density: final density.
        warmup_density: density of the first step.
        warmup_steps: number of steps until the final density; 0: no warm-up.
        momentum_correction: momentum factor that is applied before elements are chosen; 0: none.
        factor_masking: whether the momentum of sent elements is reset.
    """

    density: float
    warmup_density: float
    warmup_steps: int
    momentum_correction: float = 0.0
    factor_masking: bool = True

    def density_at(self, step: int) -> float:
        """Return the density of a step, counted from 0 over the whole training; it falls exponentially during the warm-up."""
        if step >= self.warmup_steps:
            return self.density
        return float(self.warmup_density * (self.density / self.warmup_density) ** (step / self.warmup_steps))

    @property
    def largest_density(self) -> float:
        """Largest density of any step, which determines the size of buffers."""
        return self.warmup_density if self.warmup_steps else self.density


class SparsePart:
    """This rank's part of a compressed slice. Ranks with the same local number on all nodes have the same part.

    Buffers are allocated once, for the largest messages.

    Args:
        dtype: "float32" or "float64".
        comm: ranks with this part, by node.
        scratch: scratch memory shared by all slices, which are selected one at a time.
        seed: integers that distinguish slices.

    Attributes:
        residual: gradients that are kept back, (size,).
        velocity: momentum before the selection, (size,); empty without momentum correction.
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
        self.residual = np.zeros(size, dtype)
        self.velocity = np.zeros(size if settings.momentum_correction else 0, dtype)
        self._top = TopK(size, dtype, compression.kept(size, settings.largest_density), seed=seed, scratch=scratch)
        self._buffer = np.empty(comm.size * self._top.message_size, np.uint8)

    def send(self, gradient: np.ndarray, step: int) -> Handle:
        """Choose the elements to send from the residual plus the gradient (size,) or its momentum, and post their allgather.

        Non-finite elements are chosen first, so that at least one of them reaches every node.
        """
        kept = self._compression.kept(self._size, self._settings.density_at(step))
        if kept != self._top.kept:
            self._top.keep(kept)
        if self.velocity.size:
            self.velocity *= self._settings.momentum_correction
            self.velocity += gradient
            gradient = self.velocity
        self.residual += gradient
        top, message = self._top, self._messages()[self._comm.rank]
        top.begin_step(step)
        top.compress(self.residual, message)
        top.subtract_from(message, self.residual)
        if self._settings.factor_masking and self.velocity.size:
            top.subtract_from(message, self.velocity)
        counts = [top.message_size] * self._comm.size
        return self._comm.iallgather(None, self._buffer[: sum(counts)], counts)

    def receive(self, gradient: np.ndarray) -> None:
        """Write the sum of all nodes' messages to `gradient`. They are added in node order, so all nodes have the same bits."""
        gradient[...] = 0.0
        for message in self._messages():
            self._top.add_to(message, gradient)

    def _messages(self) -> list[np.ndarray]:
        """Return each node's message."""
        size = self._top.message_size
        return [self._buffer[node * size : (node + 1) * size] for node in range(self._comm.size)]


class SparseOperations(OwnerOperations):
    """Operations of the ranks that own parts, including the exchange of the largest elements. Creation is collective.

    Args:
        two: levels of the streams' communicators; None: every rank is a node.

    Attributes:
        nodes: number of nodes that exchange elements.
    """

    def __init__(
        self,
        setup: AveragerSetup,
        schedule: CollectiveSchedule,
        streams: Mapping[Stream, Communicator],
        settings: SparseSettings,
        two: Levels | None,
    ) -> None:
        super().__init__(setup, schedule, streams, 0)
        self.nodes = self.comm.size if two is None else two.nodes
        self._settings = settings
        self._number, self._node = divmod(self.comm.rank, self.nodes)
        # Each communicator has the order of operations of the stream on which they are posted.
        self._reduce_within, self._gather_within = (
            None if two is None else within_node(streams[stream], two, f"{setup.comm.name} {stream}")
            for stream in (Stream.GRADIENTS, Stream.PARAMETERS)
        )
        scratch = Selection(setup.group.dtype)
        self._parts: dict[int, SparsePart] = {}
        for k, piece in enumerate(schedule.slices):
            if piece.compression is not None:
                size, dtype = piece.owned_size(self.comm.rank, self.comm.size), setup.group.dtype
                self._parts[k] = SparsePart(size, dtype, piece.compression, settings, streams[Stream.NODES], scratch, (k,))
        #: momentum of dense slices, kept by the owner; compressed slices have theirs before the selection
        self._velocities: dict[int, np.ndarray] = {}
        #: residuals of an earlier run for dense slices, until the first step adds them; the same slices on every rank
        self._left: dict[int, np.ndarray] = {}
        self._added: dict[int, np.ndarray] = {}  # residuals that the current step has added
        if settings.momentum_correction:
            sizes = {k: self._bounds(k)[1] - self._bounds(k)[0] for k in range(len(schedule.slices)) if k not in self._parts}
            self._velocities = {k: np.zeros(size, setup.group.dtype) for k, size in sizes.items()}

    def _bounds(self, k: int) -> tuple[int, int]:
        """Return [start, stop) of this rank's part of a slice."""
        return self.schedule.slices[k].part(self.comm.rank, self.comm.size)

    def begin_step(self) -> None:
        """Begin a step. After this call, the previous step can no longer be undone."""
        self._added.clear()

    def undo(self) -> None:
        """Restore the residuals of an earlier run that the last step has added, so that the next step adds them again."""
        self._left |= self._added

    def kept_back(self) -> list[np.ndarray]:
        """Return the arrays with residuals and momentum, which steps change."""
        arrays = (array for part in self._parts.values() for array in (part.residual, part.velocity))
        return [*arrays, *self._velocities.values()]

    # -- starts ----------------------------------------------------------------------------------------------------------------

    def start(self, operation: Operation, update: StepUpdate) -> Handle:
        if operation.kind is not OperationKind.SPARSE:
            return super().start(operation, update)
        begin, end = self._bounds(operation.slice)
        gradient = self.sums.get(operation.slice, self.group.grad[begin:end])
        return self._parts[operation.slice].send(self.group.arithmetic.to_host(gradient), update.number)

    def sum_slice(self, k: int) -> Handle:
        if k not in self._parts:
            return super().sum_slice(k)
        assert self._reduce_within is not None, "a node of one rank has nothing to sum"
        piece = self.schedule.slices[k]
        gradient = self.group.grad[piece.start : piece.stop]
        return self._reduce_within.ireduce_scatter(gradient, self.sums[k], piece.counts(self.comm.size))

    def gather_slice(self, k: int, comm: Communicator) -> Handle:
        if k not in self._parts:
            return super().gather_slice(k, comm)
        if self._gather_within is None:
            return Complete()
        piece = self.schedule.slices[k]
        return self._gather_within.iallgather(None, self.group.data[piece.start : piece.stop], piece.counts(self.comm.size))

    def finish_gradient(self, k: int) -> None:
        begin, end = self._bounds(k)
        gradient = self.group.grad[begin:end]
        if k in self._parts:
            self._receive(k, gradient)
            return
        super().finish_gradient(k)
        if k in self._left or k in self._velocities:
            values = self.group.arithmetic.to_host(gradient)
            self.group.arithmetic.from_host(gradient, self._corrected(k, values))

    def _receive(self, k: int, gradient: Array) -> None:
        """Write the sum of all nodes' messages to a gradient on the host or on a device. Messages are summed on the host."""
        if self.group.arithmetic.on_host:
            self._parts[k].receive(gradient)
            return
        total = np.empty(gradient.size, self.group.dtype)
        self._parts[k].receive(total)
        self.group.arithmetic.from_host(gradient, total)

    def _corrected(self, k: int, gradient: np.ndarray) -> np.ndarray:
        """Return the gradient of a dense slice plus the residual of an earlier run, with momentum applied if configured."""
        left = self._left.pop(k, None)
        if left is not None:
            self._added[k] = left
            gradient = gradient + left
        velocity = self._velocities.get(k)
        if velocity is None:
            return gradient
        velocity *= self._settings.momentum_correction
        velocity += gradient
        return velocity

    # -- residuals and momentum in a checkpoint: one array per node, of which only the sum matters ----------------------------

    def keeps_back(self, name: str) -> bool:
        """Return whether a part of a parameter's gradient is or may be kept back, the same on every rank."""
        return any(k in self._parts or k in self._left for k in self.touching[name])

    def residual(self, name: str, progress: ProgressEngine) -> np.ndarray:
        """Return the residuals (nodes, size) of a whole parameter; the first row has those of dense slices. Collective."""
        return self._by_node(name, lambda k: self._parts[k].residual if k in self._parts else self._left.get(k), progress)

    def velocity(self, name: str, progress: ProgressEngine) -> np.ndarray:
        """Return the momentum before the selection, in the same form as `residual`. Collective."""
        return self._by_node(name, lambda k: self._parts[k].velocity if k in self._parts else self._velocities[k], progress)

    def load_residual(self, name: str, by_node: np.ndarray) -> None:
        """Load the residuals that `residual` returned; `by_node` includes the rows of other nodes."""
        segment = self.group.segment(name)
        for k in self.touching[name]:
            begin, end = self._bounds(k)
            if k in self._parts:
                self._load(segment, begin, by_node[self._node], self._parts[k].residual)
                continue
            piece = self.schedule.slices[k]
            inside = segment.part(piece.start, piece.stop)
            if by_node[:, inside.start - segment.start : inside.stop - segment.start].any():
                left = self._left.setdefault(k, np.zeros(end - begin, by_node.dtype))
                self._load(segment, begin, by_node.sum(axis=0), left)

    def load_velocity(self, name: str, by_node: np.ndarray) -> None:
        """Load the momentum that `velocity` returned."""
        segment = self.group.segment(name)
        for k in self.touching[name]:
            begin, _ = self._bounds(k)
            if k in self._parts:
                self._load(segment, begin, by_node[self._node], self._parts[k].velocity)
            else:
                self._load(segment, begin, by_node.sum(axis=0), self._velocities[k])

    def _load(self, segment: Segment, begin: int, whole: np.ndarray, part: np.ndarray) -> None:
        """Copy the elements of one whole parameter that lie in a rank's part of a slice.

        Args:
            begin: start of the part in the flat buffers.
            whole: elements of the parameter.
            part: elements of the part, to which they are copied.
        """
        inside = segment.part(begin, begin + part.size)
        part[inside.start - begin : inside.stop - begin] = whole[inside.start - segment.start : inside.stop - segment.start]

    def _by_node(self, name: str, slice_array: Callable[[int], np.ndarray | None], progress: ProgressEngine) -> np.ndarray:
        """Return an array (nodes, size) of a parameter, gathered from the parts of all ranks. Collective.

        Args:
            slice_array: function slice -> array of this rank's part; None if no rank has an array for the slice.
        """
        segment, comm = self.group.segment(name), self.comm
        by_node = np.zeros((self.nodes, segment.size), self.group.dtype)
        for k in self.touching[name]:
            values = slice_array(k)
            if values is None:
                continue
            piece, begin = self.schedule.slices[k], self._bounds(k)[0]
            parts = [segment.part(*piece.part(rank, comm.size)) for rank in range(comm.size)]
            mine, counts = parts[comm.rank], [share.size for share in parts]
            gathered = np.empty(sum(counts), self.group.dtype)
            handle = comm.iallgather(np.ascontiguousarray(values[mine.start - begin : mine.stop - begin]), gathered, counts)
            progress.wait_handle(handle, f"gradients kept back of {name}")
            place = 0
            for rank, share in enumerate(parts):
                target = by_node[rank % piece.copies, share.start - segment.start : share.stop - segment.start]
                target[...] = gathered[place : place + share.size]
                place += share.size
        return by_node


_RESIDUAL, _VELOCITY = "sparse_gradient", "sparse_momentum"
_STEPS = "sparse_steps"


class SparseAverager(ReduceScatterAverager):
    """Averager that updates this rank's part of every slice.

    Its part is 1/P of a dense slice, and a part of its node's copy of a compressed slice. Gradients are kept back per node
    (`holders`); each rank holds its part of its node's gradients.

    Args:
        two: levels of the streams' communicators; None: every rank is a node.
    """

    pending = _RESIDUAL

    def __init__(
        self,
        setup: AveragerSetup,
        agreement: Agreement,
        *,
        settings: SparseSettings,
        two: Levels | None,
        **others: Any,
    ) -> None:
        assert agreement.schedule is not None
        self._sparse = SparseOperations(setup, agreement.schedule, agreement.streams, settings, two)
        super().__init__(setup, agreement, operations=self._sparse, **others)
        self.holders = self._sparse.nodes
        self._has_velocity = settings.momentum_correction > 0.0

    def changed(self) -> Sequence[Array]:
        return [*super().changed(), *self._sparse.kept_back()]

    def undone(self) -> None:
        self._sparse.undo()

    # -- gradients that are kept back, in a checkpoint -------------------------------------------------------------------------

    @property
    def by_holder(self) -> Collection[str]:
        return (_RESIDUAL, _VELOCITY) if self._has_velocity else (_RESIDUAL,)

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """Return the state of the base, and by node the residuals and, if any, the momentum before the selection. Collective."""
        state = super().full_state(parameter)
        if self._sparse.keeps_back(parameter.name):
            state[_RESIDUAL] = self._sparse.residual(parameter.name, self.progress)
        if self._has_velocity:
            state[_VELOCITY] = self._sparse.velocity(parameter.name, self.progress)
        return state

    def state_names(self, parameter: Parameter) -> Collection[str]:
        """Return the names of the base's states and of residuals. Dense parameters may have residuals of an earlier run."""
        return {**dict.fromkeys(super().state_names(parameter)), **dict.fromkeys(self.by_holder)}

    def load_state(self, parameter: Parameter, state: Mapping[str, np.ndarray]) -> None:
        super().load_state(parameter, state)
        if _RESIDUAL in state:
            self._sparse.load_residual(parameter.name, state[_RESIDUAL])
        if self._has_velocity and _VELOCITY in state:
            self._sparse.load_velocity(parameter.name, state[_VELOCITY])

    def counters(self) -> dict[str, int]:
        return {**super().counters(), _STEPS: self.step_number}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        super().load_counters(counters)
        self.step_number = counters.get(_STEPS, 0)


Compress = Literal["auto", "always"]


@dataclass(frozen=True)
class SparseOptions:
    """Options of `sparse`.

    Args:
        density: Share of a gradient's elements that a node sends to the other nodes, above 0 and at most 1.
        warmup_density: Share in the first step, from which it falls exponentially to `density` in `warmup_steps` steps.
        warmup_steps: Number of steps until `density` is reached; 0 starts with it.
        compress: Large parameters that are compressed: "auto" compresses a parameter if that takes less time than sending it
            whole, as predicted from bytes and messages; "always" compresses all of them.
        least_elements: Minimum number of elements of a compressed parameter; smaller ones, biases and the parameters of batch
            norms are sent whole.
        momentum_correction: Factor, in [0, 1), of a momentum that each node accumulates before it chooses the elements to send;
            requires an optimizer without momentum. 0 leaves the momentum to the optimizer.
        factor_masking: Whether, with momentum correction, to set the momentum of sent elements to zero.
        bucket_bytes: Minimum bytes of a slice of fused small layers. Null computes them from the numbers of parameters and ranks.
        two_level: Whether to sum the gradients of a node's ranks before the elements to send are chosen. If false, or if nodes
            have different numbers of ranks, every rank chooses elements of its own gradients.
        replan: Whether to plan the order of the allgathers again after a few steps, from measured times.
        window: Maximum number of operations in flight on each communicator; null: no limit.

    Raises:
        OptionError: a density is outside (0, 1], the warm-up begins below the density, or another value is out of range.
    """

    #: gradients of linear layers are compressed like all others
    fc_exchange: ClassVar[FcExchange] = "never"

    density: float = 0.01
    warmup_density: float = 0.25
    warmup_steps: int = 0
    compress: Compress = "auto"
    least_elements: int = 2048
    momentum_correction: float = 0.0
    factor_masking: bool = True
    bucket_bytes: int | None = None
    two_level: bool = True
    replan: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        check_at_least_one(least_elements=self.least_elements, bucket_bytes=self.bucket_bytes, window=self.window)
        if not 0.0 < self.density <= 1.0:
            raise OptionError(f"density is {self.density}, but must be above 0 and at most 1; a usual value is 0.01.", "density")
        if self.warmup_steps < 0:
            raise OptionError(f"warmup_steps is {self.warmup_steps}, but must be at least 0.", "warmup_steps")
        if self.warmup_steps and not self.density <= self.warmup_density <= 1.0:
            raise OptionError(
                f"warmup_density is {self.warmup_density}, but must be from density, {self.density}, to 1.",
                "warmup_density",
            )
        if not 0.0 <= self.momentum_correction < 1.0:
            raise OptionError(
                f"momentum_correction is {self.momentum_correction}, but must be in [0, 1); a usual value is 0.9.",
                "momentum_correction",
            )


class Sparse(ReduceScatterStrategy):
    """Averaging of only the largest gradients between nodes. The rest is added to later gradients, so the optimisation changes.

    Gradients of large parameters are summed within a node to the ranks that own a part. A node sends the largest elements of each
    part with their positions. Ranks that own the same part on all nodes add the received elements in the same order and update
    the part. Then parameters are gathered within the node. Small parameters are averaged as with `sharded`, with the same
    overlap.

    Raises:
        ConfigError: several ranks are all on one node, and two_level is true.
        OptionError: momentum correction is combined with an optimizer's momentum.
    """

    sums_shards = False
    chooses_on_host = True
    Options = SparseOptions
    options: SparseOptions
    streams = (Stream.GRADIENTS, Stream.NODES, Stream.PARAMETERS)

    @classmethod
    def check(cls, group: PlannedGroup, options: Any) -> None:
        super().check(group, options)
        if options.momentum_correction and group.momentum:
            raise OptionError(
                f"momentum_correction is {options.momentum_correction}, but the optimizer already has a momentum of "
                f"{group.momentum}; use sgd or lars with optimizer.momentum 0, or remove momentum_correction.",
                "momentum_correction",
            )
        if options.two_level and group.nodes is not None and group.ranks > 1 and len(set(group.nodes)) == 1:
            raise ConfigError(
                f"The averager sparse saves bytes between nodes, but all {group.ranks} ranks are on one node; choose sharded, or "
                f"set averager.two_level to false to treat every rank as a node."
            )

    @classmethod
    def costs(cls, options: Any) -> StrategyCosts:
        """Return the costs of a step after the warm-up."""
        differ = "The numbers for sparse are for a step after the warm-up; earlier steps send more."
        return replace(super().costs(options), density=options.density, note=differ if options.warmup_steps else None)

    def words(self) -> str:
        options = self.options
        return (
            f"sparse, density {options.density}, compress {options.compress}, least_elements {options.least_elements}, "
            f"bucket_bytes {options.bucket_bytes}, replan {options.replan}, window {options.window}"
        )

    @property
    def nodes(self) -> int:
        """Number of nodes that exchange elements; with one level, the number of ranks."""
        return self.group.ranks if self.levels is None else self.levels.nodes

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        """Return compressed slices of large parameters, if compression pays, and slices of all other parameters.

        The other slices are fused and cut as by `sharded`.
        """
        layout, (least, most) = self.group.layout, self.slice_elements(link)
        small = [one.parameter for one in layout.segments if not one.decay or one.size < self.options.least_elements]
        candidates = fused(layout, least, small if self.nodes > 1 else list(layout.specs))
        compressed: list[Slice] = []
        for candidate in candidates:
            pieces = cut(layout, [candidate], most)
            compression = Compression(self.nodes, self.options.density)
            elements = -(-max(piece.size for piece in pieces) * self.nodes // self.group.ranks)  # of the first rank, the most
            costs = elements, self.nodes, layout.item_bytes, link or slicing.RULE_LINK, compression.kept(elements)
            if self.options.compress == "always" or sparse_pays(*costs):
                compressed += [replace(piece, compression=compression) for piece in pieces]
        chosen = {name for piece in compressed for name in piece.parameters}
        dense = cut(layout, fused(layout, least, chosen), most)
        return tuple(sorted((*compressed, *dense), key=lambda piece: piece.start))

    def operations(self, slices: Sequence[Slice], times: Times, link: LinkModel | None) -> tuple[Operation, ...]:
        """Return the operations of a reduce-scatter strategy with the exchange across nodes.

        The exchange follows the sum within nodes, or replaces it if every rank is a node.
        """
        operations: list[Operation] = []
        for operation in super().operations(slices, times, link):
            within = operation.kind is OperationKind.REDUCE_SCATTER and slices[operation.slice].compression is not None
            if not within or self.nodes < self.group.ranks:
                operations.append(operation)
            if within:
                operations.append(Operation(OperationKind.SPARSE, operation.slice, Stream.NODES))
        return tuple(operations)

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        options = self.options
        settings = SparseSettings(
            options.density, options.warmup_density, options.warmup_steps, options.momentum_correction, options.factor_masking
        )
        return SparseAverager(setup, agreement, settings=settings, two=self.levels, **self.averager_arguments(agreement))
