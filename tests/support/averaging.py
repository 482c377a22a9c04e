"""Support for tests of averagers: all strategies with options, a tiny network driven by hand, and doubles that watch.

The network is y = tanh(x A + a) s B + b with half the squared error, in plain array code, so that hundreds of trainings take
seconds. In addition to its layers the group holds a linear layer and a parameter that no step uses, and an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctrain.averaging.averagers import make_averager
from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager, PlannedGroup, Strategy, for_holders
from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind
from hpctrain.averaging.group_sums import JointNorms
from hpctrain.averaging.slicing import layer_slices
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.comm.base import Array, Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import FlatGroup, GroupLayout, Parameter, ParameterSpec, Segment
from hpctrain.optim.base import NormsNeeded, Optimizer
from hpctrain.optim.optimizers import Lars, Sgd

#: parameters, and by name the state of each
Saved = tuple[np.ndarray, dict[str, dict[str, np.ndarray]]]


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
        """Return the parameters after `steps` steps."""
        group, numbers = make_group(), list(dict.fromkeys(self.nodes))
        w, m = group.data.copy(), np.zeros(group.size)
        self.residual = {node: np.zeros(group.size) for node in numbers}
        self.velocity = {node: np.zeros(group.size) for node in numbers}
        for step in range(steps):
            by_rank = [gradient(w, step, rank, len(self.nodes)) for rank in range(len(self.nodes))]
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


def gradient(w: np.ndarray, step: int, rank: int, ranks: int) -> np.ndarray:
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


INPUTS, HIDDEN, OUTPUTS, LR = 5, 7, 3, 0.1

#: samples of the steps in turn: more than ranks, and fewer than 7 of them
SAMPLES = (9, 9, 4)

#: of `sparse`: nearly all parameters are compressed, though they are tiny
_SPARSE: dict[str, Any] = {"compress": "always", "least_elements": 4, "bucket_bytes": 100}

#: a name -> class and options; all of them must return what blocking returns
STRATEGIES: Mapping[str, tuple[type[Strategy], dict[str, Any]]] = {
    "overlap": (Overlap, {}),
    "bucketed": (Bucketed, {"bucket_bytes": 100}),
    "bucketed, measured": (Bucketed, {}),
    "sharded": (Sharded, {"bucket_bytes": 100, "fc_exchange": "never", "replan": False}),
    "sharded, exchange": (Sharded, {"bucket_bytes": 100, "fc_exchange": "always", "replan": False}),
    "sharded, auto": (Sharded, {"bucket_bytes": 300, "nominal_batch": 9}),
    "priority": (Priority, {"slice_parameters": 8, "window": 1, "fc_exchange": "never", "replan": False}),
    "priority, exchange": (Priority, {"slice_parameters": 8, "window": 3, "fc_exchange": "always"}),
    "lazy, every step": (Lazy, {"layers": 2, "max_interval": 1, "bucket_bytes": 100}),
    "sparse, all of it": (Sparse, {"density": 1.0, **_SPARSE, "two_level": False}),
}

#: the same, that need the nodes of the ranks
OF_NODES: Mapping[str, tuple[type[Strategy], dict[str, Any]]] = {"sparse, by node": (Sparse, {"density": 1.0, **_SPARSE})}

OPTIMIZERS: Mapping[str, Callable[[], Optimizer]] = {
    "sgd": lambda: Sgd(momentum=0.0),
    "momentum": lambda: Sgd(momentum=0.9),
    "nesterov": lambda: Sgd(momentum=0.9, nesterov=True, weight_decay=1e-2),
    "decay of all": lambda: Sgd(momentum=0.9, weight_decay=1e-2, decay_exclude="none"),
    "clipping": lambda: Sgd(momentum=0.5, clip_norm=0.05, weight_decay=1e-2),
    "lars": lambda: Lars(weight_decay=1e-2, trust_coefficient=0.1),
    "lars, clipping": lambda: Lars(weight_decay=1e-2, trust_coefficient=0.1, clip_norm=0.5),
}


def make_group(dtype: str = "float64") -> FlatGroup:
    """The network's parameters, with the same values wherever it is made."""
    random = np.random.default_rng(1)

    def spec(*shape: int, sufficient_factors: bool = False) -> ParameterSpec:
        return ParameterSpec(
            shape,
            lambda chance, shape: chance.standard_normal(shape),
            decay=len(shape) > 1,
            sufficient_factors=sufficient_factors,
        )

    specs = {
        "a.weight": spec(INPUTS, HIDDEN, sufficient_factors=True),
        "a.bias": spec(HIDDEN, sufficient_factors=True),
        "s.scale": spec(1),
        "empty": spec(0),
        "unused.weight": spec(2, 3, sufficient_factors=True),
        "unused.bias": spec(3, sufficient_factors=True),
        "b.weight": spec(HIDDEN, OUTPUTS, sufficient_factors=True),
        "b.bias": spec(OUTPUTS, sufficient_factors=True),
        "unused": spec(1, 2),
    }
    group = FlatGroup(specs, dtype)
    for parameter in group.parameters.values():
        parameter.data[...] = 0.5 * parameter.spec.initialise(random, parameter.spec.shape)
    return group


def shares(step: int, ranks: int) -> tuple[int, ...]:
    """Samples of each rank in a step; some have none."""
    count = SAMPLES[step % len(SAMPLES)]
    return tuple((rank + 1) * count // ranks - rank * count // ranks for rank in range(ranks))


def one_step(averager: GradientAverager, step: int) -> None:
    """Forward and backward of this rank's samples, with every call that an averager gets, in the order of a real step."""
    group, comm = averager.group, averager.comm
    counts = shares(step, comm.size)
    random = np.random.default_rng(100 + step)
    x, target = random.standard_normal((sum(counts), INPUTS)), random.standard_normal((sum(counts), OUTPUTS))
    first = sum(counts[: comm.rank])
    share = slice(first, first + counts[comm.rank])
    p = group.parameters
    a, scale, b = _Linear(averager, "a"), p["s.scale"], _Linear(averager, "b")
    averager.begin_step(LR, counts)
    hidden = np.tanh(a.forward(x[share].astype(group.dtype)))
    averager.before_forward([scale])
    scaled = hidden * scale.data
    dy = (b.forward(scaled) - target[share].astype(group.dtype)) / sum(counts)
    d_scaled = b.backward(dy)
    scale.grad[...] = (d_scaled * hidden).sum()
    averager.grad_ready(scale)
    d_hidden = d_scaled * scale.data * (1 - hidden**2)
    averager.data_free(scale)
    a.backward(d_hidden)
    averager.end_backward()


class _Linear:
    """One linear layer, as a program runs it: the parameters' gradients before the input's."""

    def __init__(self, averager: GradientAverager, name: str) -> None:
        self._averager = averager
        self._weight, self._bias = (averager.group.parameters[f"{name}.{role}"] for role in ("weight", "bias"))
        self._both = (self._weight, self._bias)

    def forward(self, x: Array) -> Array:
        self._averager.before_forward(self._both)
        if self._averager.takes_sufficient_factors(self._both):
            self._averager.input_ready(self._both, x)
        self._x = x
        return x @ self._weight.data + self._bias.data

    def backward(self, dy: Array) -> Array:
        averager = self._averager
        if averager.takes_sufficient_factors(self._both):
            averager.error_ready(self._both, dy)
        else:
            self._weight.grad[...], self._bias.grad[...] = self._x.T @ dy, dy.sum(0)
            averager.grad_ready(self._bias)
            averager.grad_ready(self._weight)
        averager.progress.poll()
        dx = dy @ self._weight.data.T
        for parameter in self._both:
            averager.data_free(parameter)
        return dx


def step_with(averager: GradientAverager, lr: float, gradient: Array | Callable[[Parameter], Array]) -> None:
    """A step of one sample on each rank, whose gradients are those of a flat array, or are made parameter by parameter."""
    parameters = tuple(averager.group.parameters.values())
    averager.begin_step(lr, [1] * averager.comm.size)
    averager.before_forward(parameters)
    for parameter in reversed(parameters):
        segment = averager.group.segment(parameter.name)
        found = gradient(parameter) if callable(gradient) else gradient[segment.start : segment.stop]
        parameter.grad[...] = found.reshape(parameter.grad.shape)
        averager.grad_ready(parameter)
        averager.data_free(parameter)
    averager.end_backward()


def run_steps(averager: GradientAverager, steps: int, first: int = 0) -> Array:
    """Train for some steps; a copy of all parameters after the drain."""
    for step in range(first, first + steps):
        one_step(averager, step)
    averager.drain()
    return averager.group.data.copy()


def saved(averager: GradientAverager) -> Saved:
    """Copies of the parameters, and of the whole state of each. Collective."""
    state = {
        name: {key: np.array(values) for key, values in averager.full_state(parameter).items()}
        for name, parameter in averager.group.parameters.items()
    }
    return averager.group.data.copy(), state


def restore(averager: GradientAverager, stored: Saved) -> None:
    """Load what `saved` has returned, on any number of ranks: gradients that are kept back go to the holders."""
    data, states = stored
    averager.group.data[...] = data
    for name, parameter in averager.group.parameters.items():
        state = dict(states[name])
        if averager.pending in state:
            state[averager.pending] = for_holders(state[averager.pending], averager.holders)
        averager.load_state(parameter, state)


def planned(
    kind: type[Strategy],
    group: GroupLayout,
    ranks: int = 1,
    *,
    norms_needed: NormsNeeded = NormsNeeded.NONE,
    several_groups: bool = False,
    nodes: Sequence[int] | None = None,
    nominal_batch: int | None = None,
    micro_batches: int = 1,
    momentum: float = 0.0,
    **options: Any,
) -> Strategy:
    """A strategy with these options for a group on `ranks` ranks."""
    facts = PlannedGroup(group, ranks, nodes, nominal_batch, micro_batches, norms_needed, several_groups, momentum)
    return kind(facts, kind.Options(**options))


def averaged(
    kind: type[Strategy],
    group: FlatGroup,
    optimizer: Optimizer,
    comm: Communicator,
    progress: ProgressEngine,
    *,
    norms: JointNorms | None = None,
    stored: CollectiveSchedule | None = None,
    **given: Any,
) -> GradientAverager:
    """The averager of a strategy, agreed on. Collective. given: as for `planned`."""
    needs: dict[str, Any] = {
        "norms_needed": optimizer.norms_needed,
        "several_groups": norms is not None,
        "momentum": optimizer.momentum,
    }
    strategy = planned(kind, group, comm.size, **needs, **given)
    return make_averager(strategy, AveragerSetup(group, optimizer, comm, progress, norms), stored)


def make(
    strategy: str,
    optimizer: str,
    comm: Communicator,
    progress: ProgressEngine,
    dtype: str = "float64",
    nodes: Sequence[int] | None = None,
) -> GradientAverager:
    """A strategy ("blocking" too) over a group of its own, agreed on. nodes: of the ranks, for strategies that ask."""
    kind, options = (Blocking, {}) if strategy == "blocking" else {**STRATEGIES, **OF_NODES}[strategy]
    return averaged(kind, make_group(dtype), OPTIMIZERS[optimizer](), comm, progress, nodes=nodes, **options)


class Forwarding(GradientAverager):
    """Passes everything on to `inner`."""

    def __init__(self, inner: GradientAverager) -> None:
        super().__init__(AveragerSetup(inner.group, inner.optimizer, inner.comm, inner.progress))
        self.inner = inner

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        self.inner.begin_step(lr, counts)

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        return self.inner.takes_sufficient_factors(parameters)

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        self.inner.before_forward(parameters)

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:
        self.inner.input_ready(parameters, x)

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:
        self.inner.error_ready(parameters, dy)

    def grad_ready(self, parameter: Parameter) -> None:
        self.inner.grad_ready(parameter)

    def data_free(self, parameter: Parameter) -> None:
        self.inner.data_free(parameter)

    def end_backward(self) -> None:
        self.inner.end_backward()

    def drain(self) -> None:
        self.inner.drain()

    def owned(self) -> Sequence[Segment]:
        return self.inner.owned()


class Watched(Forwarding):
    """Fails where a parameter's data changes while a step may read it.

    That is from `before_forward` to `data_free`; messages are driven at both ends, so that what comes too early shows.
    """

    def __init__(self, inner: GradientAverager) -> None:
        super().__init__(inner)
        self._seen: dict[str, bytes] = {}

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        super().before_forward(parameters)
        self._seen |= {parameter.name: parameter.data.tobytes() for parameter in parameters}

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:
        self._look()
        super().input_ready(parameters, x)

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:
        self._look()
        super().error_ready(parameters, dy)
        self._look()

    def grad_ready(self, parameter: Parameter) -> None:
        self._look()
        super().grad_ready(parameter)
        self._look()

    def data_free(self, parameter: Parameter) -> None:
        self._look()
        self._seen.pop(parameter.name, None)
        super().data_free(parameter)

    def end_backward(self) -> None:
        assert not self._seen, "a parameter was never let go"
        super().end_backward()

    def _look(self) -> None:
        self.progress.poll()
        for name, values in self._seen.items():
            same = self.group.parameters[name].data.tobytes() == values
            assert same, f"{name} was written while the step might still read it"


def watched(kind: type[Strategy]) -> type[Strategy]:
    """The strategy with an averager that is `Watched`."""

    class WatchedStrategy(kind):  # type: ignore[misc, valid-type]
        def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
            return Watched(super().averager(setup, agreement))

    return WatchedStrategy


def exchanged(schedule: CollectiveSchedule, rank: int, samples: Sequence[int]) -> dict[OperationKind, int]:
    """The elements that one rank exchanges in a step, by kind, operation by operation; without norms."""
    moving = [operation for operation in schedule.operations if operation.kind is not OperationKind.NORMS]
    elements = dict.fromkeys((operation.kind for operation in moving), 0)
    slices, ranks = schedule.slices, schedule.ranks
    for operation in moving:
        piece = slices[operation.slice]
        owned = piece.owned_size(rank, ranks)
        others = piece.size - owned
        if operation.kind is OperationKind.ALLREDUCE:
            others *= 2
        elif operation.kind is OperationKind.INPUTS:  # columns of this rank's samples that other ranks own
            layer = [slices[k] for k in layer_slices(slices, operation.slice)]
            others = sum(samples[rank] * (part.size - part.owned_size(rank, ranks)) // part.unit for part in layer)
        elif operation.kind is OperationKind.ERRORS:
            others = (sum(samples) - samples[rank]) * piece.unit
        elif operation.kind is OperationKind.SPARSE:  # values and positions
            assert piece.compression is not None
            others = 2 * (piece.compression.nodes - 1) * piece.compression.kept(owned)
        elements[operation.kind] += others
    return elements
