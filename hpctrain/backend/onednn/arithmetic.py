"""Arithmetic service of the oneDNN set: work on flat arrays in the threads that also run the kernels (docs/adr/0033).

A `Pass` is one oneDNN primitive over flat arrays that combines several elementary operations. Updates of parameters are a few
passes over chunks that stay in the caches, and a moving average is one pass. Other operations are NumPy's, on ranges of elements
that a `Team` distributes over OpenMP's threads. Each result depends only on the operands' elements with the same index, and sums
are added in an order that depends only on sizes, so the number of threads does not change a bit.
"""

from __future__ import annotations

import contextvars
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from ctypes import CFUNCTYPE, c_uint, c_void_p
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.arithmetic import Array, Corrections, Descent, MomentDescent, MomentRule, UpdateRun
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Call, Descriptor, Engine, Primitive
from hpctrain.backend.onednn.operator import allocate

_Body = CFUNCTYPE(None, c_void_p)

#: minimum number of elements per thread. Waking the threads and passing the interpreter lock takes about as long as NumPy takes
#: for this number of elements (measured).
GRAIN = 1 << 16


class Team:
    """Workers for Python functions: OpenMP's threads, which also execute oneDNN's primitives.

    The functions hold the interpreter lock outside of NumPy's loops, so ranges should be long.

    Args:
        library: oneDNN's library, through which its OpenMP runtime is called.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes, self._parallel.restype = [_Body, c_void_p, c_uint, c_uint], None
        self._size, self._started, self._number = (
            getattr(library, name) for name in ("omp_get_max_threads", "omp_get_num_threads", "omp_get_thread_num")
        )

    @property
    def size(self) -> int:
        """Maximum number of threads of a parallel region that the calling thread opens."""
        return int(self._size())

    def share(self, count: int, work: Callable[[int, int], object]) -> None:
        """Call work(start, stop) in each thread, on consecutive ranges that cover [0, count), and wait for all calls.

        Each call runs in a copy of the caller's context, which contains NumPy's error state. If calls raise, one of their
        exceptions is raised after all calls have ended.
        """
        failures = list[BaseException]()
        contexts = [contextvars.copy_context() for _ in range(self.size)]

        def body(_: object) -> None:
            # OMP_DYNAMIC and OMP_THREAD_LIMIT may lower the number of threads below `size`.
            number, threads = self._number(), self._started()
            try:
                contexts[number].run(work, count * number // threads, count * (number + 1) // threads)
            except BaseException as failure:  # raised in the caller, since OpenMP's C function cannot pass it on
                failures.append(failure)

        self._parallel(_Body(body), None, 0, 0)
        if failures:
            raise failures[0]


@dataclass(frozen=True)
class Formula:
    """Equation of one pass: t := r + kept * t, where r is the result of `operation` followed by the operations in `then`.

    Operands are named: t, x and y are arrays; a and b are numbers.

    Attributes:
        operation: first operation: "+", "-", "*" or "/".
        first: first operand, an array.
        second: second operand.
        then: further operations on the result, each with its second operand, or ("sqrt", "").
        kept: factor of the previous t; 0: the previous t is read only if an operand is t.
    """

    operation: str
    first: str
    second: str
    then: tuple[tuple[str, str], ...] = ()
    kept: float = 0.0


_OPERATIONS = {"+": c.BINARY_ADD, "-": c.BINARY_SUB, "*": c.BINARY_MUL, "/": c.BINARY_DIV, "sqrt": c.ELTWISE_SQRT}
_ARRAYS = "txy"


class Pass:
    """Evaluation of a `Formula` over flat float32 arrays. One primitive is created for each size.

    Args:
        label: name of the operation in errors.
        numbers: arrays of one element that contain a and b. Their owner may change the values between calls.
    """

    def __init__(self, engine: Engine, label: str, formula: Formula, **numbers: Array) -> None:
        self._engine, self._label, self._formula, self._numbers = engine, label, formula, numbers
        self._calls: dict[int, tuple[Call, tuple[tuple[int, int], ...]]] = {}

    def __call__(self, size: int, *addresses: int) -> None:
        """Compute `size` elements.

        Args:
            addresses: addresses of the first elements of t, x and, if the formula contains it, y.
        """
        prepared = self._calls.get(size)
        if prepared is None:
            prepared = self._calls[size] = self._make(size)
        call, arguments = prepared
        for argument, number in arguments:
            call.set_address(argument, addresses[number])
        call()

    def _make(self, size: int) -> tuple[Call, tuple[tuple[int, int], ...]]:
        """Return the call for `size` elements and, for each operand that is an array, (index of its argument, of its address)."""
        engine, formula = self._engine, self._formula
        formats = {name: Descriptor.tagged(engine, (size if name in _ARRAYS else 1,), "a") for name in "txyab"}
        then = [(_OPERATIONS[operation], formats.get(operand)) for operation, operand in formula.then]
        attributes = Attributes(engine, then=then, kept=formula.kept)
        kinds = (_OPERATIONS[formula.operation], formats[formula.first], formats[formula.second], formats["t"])
        primitive = Primitive(engine, "binary", self._label, *kinds, attributes)
        operands = [(c.ARG_SRC, formula.first), (c.ARG_SRC_1, formula.second), (c.ARG_DST, "t")]
        operands += [(c.post_operand(number), operand) for number, (_, operand) in enumerate(formula.then) if operand]
        call = primitive.bind({kind: (formats[name], self._numbers.get(name)) for kind, name in operands})
        return call, tuple((index, _ARRAYS.index(name)) for index, (_, name) in enumerate(operands) if name in _ARRAYS)


class _Numbers:
    """Named float32 numbers that passes read from memory; initially 0."""

    def __init__(self, *names: str) -> None:
        self._arrays = {name: allocate(4).view(np.float32) for name in names}

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def set(self, **values: float) -> None:
        for name, value in values.items():
            self._arrays[name][0] = value


#: number of elements per thread in a chunk of an update. Data, gradient and momentum of these elements take 3 MiB, which fit a
#: core's share of the last-level cache. With shorter chunks, calls take a larger share of the time (measured).
CHUNK = 1 << 18


def _chunks(run: UpdateRun, longest: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number of elements, byte offset in the flat buffers, byte offset in the optimiser's state) for chunks of a run."""
    for low in range(run.start, run.stop, longest):
        yield min(longest, run.stop - low), 4 * low, 4 * (low + run.offset)


_SCALED = Formula("*", "x", "a")
_ADDED = Formula("*", "x", "a", kept=1.0)


class OnednnDescent:
    """Implementation of `Descent` in two to five passes over each chunk. Arguments: see `Arithmetic.descent`."""

    def __init__(
        self, engine: Engine, threads: int, data: Array, gradient: Array, momentum: Array, factor: float, nesterov: bool
    ) -> None:
        self._longest = min(CHUNK * threads, max(1, data.size))
        self._factor = float(factor)
        # Usually g' is added to m, and w moves along m. Without momentum, m is empty; with Nesterov's, g' is added to both m and
        # w. In these two cases g' needs a work buffer.
        self._buffered = nesterov or not factor
        self._work = allocate(4 * self._longest if self._buffered else 0).view(np.float32)
        self._arrays = data, gradient, momentum
        self._w, self._g, self._m = (array.ctypes.data for array in self._arrays)
        numbers = self._numbers = _Numbers("scale", "decay", "step", "momentum_step", "one")
        numbers.set(one=1.0)
        label, momentum_kept = "a momentum update", Formula("*", "x", "a", kept=self._factor)
        self._add_gradient = Pass(engine, label, _SCALED if self._buffered else momentum_kept, a=numbers["scale"])
        self._add_decay = Pass(engine, label, _ADDED, a=numbers["decay"])
        self._move = Pass(engine, label, _ADDED, a=numbers["step"])
        self._update_momentum = Pass(engine, label, momentum_kept, a=numbers["one"]) if nesterov else None
        self._move_by_momentum = Pass(engine, label, _ADDED, a=numbers["momentum_step"])

    def update(self, runs: Iterable[UpdateRun], lr: float) -> None:
        self._numbers.set(step=-lr, momentum_step=-lr * self._factor)
        for run in runs:
            self._numbers.set(scale=run.gradient_scale, decay=run.decay)
            for size, low, state in _chunks(run, self._longest):
                w, m = self._w + low, self._m + state
                direction = self._work.ctypes.data if self._buffered else m
                self._add_gradient(size, direction, self._g + low)
                if run.decay:
                    self._add_decay(size, direction, w)
                self._move(size, w, direction)
                if self._update_momentum is not None:
                    self._update_momentum(size, m, direction)
                    self._move_by_momentum(size, w, m)


class OnednnMomentDescent:
    """Implementation of `MomentDescent` in four to six passes over each chunk. Arguments: see `Arithmetic.moment_descent`."""

    def __init__(
        self, engine: Engine, threads: int, data: Array, gradient: Array, first: Array, second: Array, rule: MomentRule
    ) -> None:
        self._longest = min(CHUNK * threads, max(1, data.size))
        self._rule = rule
        # The last array holds the gradient with its decay until the moments are updated, and then the denominator.
        self._arrays = data, gradient, first, second, allocate(4 * self._longest)
        self._w, self._g, self._m, self._v, self._denominator = (array.ctypes.data for array in self._arrays)
        names = ("gradient_scale", "scale", "first_weight", "second_weight", "root_squared", "epsilon", "step", "decay")
        numbers = self._numbers = _Numbers(*names)
        numbers.set(epsilon=rule.epsilon)
        label = "an update by moments"
        self._update_first = Pass(engine, label, Formula("*", "x", "a", kept=float(rule.beta1)), a=numbers["first_weight"])
        square = Formula("*", "x", "a", then=(("*", "x"), ("*", "b")), kept=float(rule.beta2))
        self._update_second = Pass(engine, label, square, a=numbers["scale"], b=numbers["second_weight"])
        root = Formula("*", "x", "a", then=(("sqrt", ""), ("+", "b")))
        self._compute_denominator = Pass(engine, label, root, a=numbers["root_squared"], b=numbers["epsilon"])
        self._set_direction, self._move = (
            Pass(engine, label, Formula("/", "x", "y", then=(("*", "a"),), kept=kept), a=numbers["step"]) for kept in (0.0, 1.0)
        )
        self._add_decay, self._shrink = (Pass(engine, label, formula, a=numbers["decay"]) for formula in (_ADDED, _SCALED))
        self._scale_gradient = Pass(engine, label, _SCALED, a=numbers["gradient_scale"])

    def update(self, runs: Iterable[UpdateRun], corrections: Corrections, lr: float) -> None:
        # w - lr * (first * m / denominator + decay * w) = (1 - lr * decay) * w - lr * first * m / denominator
        for run in runs:
            decoupled = self._rule.decoupled
            self._numbers.set(step=-lr * corrections.first, decay=1.0 - lr * run.decay if decoupled else run.decay)
            for size, low, state in self._moments(run, corrections):
                if run.decay and decoupled:
                    self._shrink(size, self._w + low, self._w + low)
                self._move(size, self._w + low, self._m + state, self._denominator)

    def direct(self, runs: Iterable[UpdateRun], corrections: Corrections) -> None:
        for run in runs:
            self._numbers.set(step=corrections.first, decay=run.decay)
            for size, low, state in self._moments(run, corrections):
                self._set_direction(size, self._g + low, self._m + state, self._denominator)
                if run.decay and self._rule.decoupled:
                    self._add_decay(size, self._g + low, self._w + low)

    def _moments(self, run: UpdateRun, corrections: Corrections) -> Iterator[tuple[int, int, int]]:
        """Update m and v and compute the denominator root * sqrt(v) + epsilon, chunk by chunk; yield each chunk as `_chunks`.

        The caller sets the number `decay`, which is that of the run if the decay is not decoupled.
        """
        rule, decays = self._rule, bool(run.decay) and not self._rule.decoupled
        scale = 1.0 if decays else run.gradient_scale
        first, second = (1.0 - rule.beta1) * scale, (1.0 - rule.beta2) * scale
        self._numbers.set(scale=scale, first_weight=first, second_weight=second, root_squared=corrections.root**2)
        self._numbers.set(gradient_scale=run.gradient_scale)
        for size, low, state in _chunks(run, self._longest):
            gradient = self._g + low
            if decays:
                self._scale_gradient(size, self._denominator, gradient)
                self._add_decay(size, self._denominator, self._w + low)
                gradient = self._denominator
            self._update_first(size, self._m + state, gradient)
            self._update_second(size, self._v + state, gradient)
            self._compute_denominator(size, self._denominator, self._v + state)
            yield size, low, state


class OnednnArithmetic(HostArithmetic):
    """Implementation of `Arithmetic` in OpenMP's threads.

    oneDNN computes updates and moving averages of float32 arrays. `HostArithmetic` computes everything else: work that it passes
    to `share` in several threads if the arrays are large, the rest in one.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(allocate)
        self._engine, self._team = engine, Team(engine.library)
        self._numbers = _Numbers("kept")
        average = Formula("-", "t", "x", then=(("*", "a"), ("+", "x")))
        self._average, self._averaging = Pass(engine, "a moving average", average, a=self._numbers["kept"]), threading.Lock()

    def share(self, count: int, work: Callable[[int, int], object], items: int) -> None:
        if items >= GRAIN * self._team.size > GRAIN:
            self._team.share(count, work)
        else:
            work(0, count)

    def average_into(self, target: Array, source: Array, kept: float) -> None:
        if not target.dtype == source.dtype == np.float32:
            super().average_into(target, source, kept)
            return
        with self._averaging:  # ranks that are threads of one process share the pass
            self._numbers.set(kept=kept)
            self._average(target.size, target.ctypes.data, source.ctypes.data)

    def multiply(self, a: Array, b: Array, out: Array) -> None:
        if out.size and a.size and a.dtype == b.dtype == out.dtype == np.float32:
            self._engine.multiply(a, b, out)
        else:
            super().multiply(a, b, out)

    def descent(
        self, data: Array, gradient: Array, momentum: Array, *, factor: float, nesterov: bool, shadow: Array | None = None
    ) -> Descent:
        if data.dtype != np.float32:
            return super().descent(data, gradient, momentum, factor=factor, nesterov=nesterov, shadow=shadow)
        assert shadow is None, "kernels of the host read the parameters themselves"
        return OnednnDescent(self._engine, self._team.size, data, gradient, momentum, factor, nesterov)

    def moment_descent(
        self, data: Array, gradient: Array, first: Array, second: Array, rule: MomentRule, *, shadow: Array | None = None
    ) -> MomentDescent:
        if data.dtype != np.float32:
            return super().moment_descent(data, gradient, first, second, rule, shadow=shadow)
        assert shadow is None, "kernels of the host read the parameters themselves"
        return OnednnMomentDescent(self._engine, self._team.size, data, gradient, first, second, rule)
