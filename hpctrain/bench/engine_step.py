"""Whole training steps of one network on synthetic images, without other ranks: the workload of the engine's benchmarks.

As a program (`python -m hpctrain.bench.engine_step`), the module runs steps on request, following the protocol of
`benchmarks/interleaved.py`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO

import numpy as np

from hpctrain.backend.choice import make_backend
from hpctrain.backend.operators import CapturesWork, StepContext
from hpctrain.core.errors import ConfigError
from hpctrain.launch.control_groups import peak_resident_bytes
from hpctrain.models import catalogue
from hpctrain.nn.compile.steps import SelfMade
from hpctrain.nn.network import Network
from hpctrain.nn.program import Program, StepHooks
from hpctrain.optim.optimizers import Sgd

LEARNING_RATE = 1e-4  # small enough to keep every network finite on random labels
MOMENTUM = 0.9
_BATCHES = 3
_NO_HOOKS = StepHooks()


@dataclass(frozen=True)
class Workload:
    """Model of the catalogue with its options, the number of images of a step, and their height and width in pixels."""

    model: str
    batch: int
    pixels: int
    options: Mapping[str, object]

    @property
    def channels(self) -> int:
        """Number of channels of an image: the model's default, unless its options set it."""
        given = self.options.get("channels_in", catalogue.image_shape(self.model)[2])
        return int(str(given))


def workload(model: str, batch: int, pixels: int | None = None, options: Mapping[str, object] | None = None) -> Workload:
    """Return a workload; `pixels` defaults to the model's image size.

    Raises:
        ConfigError: the model or an option does not exist, or the batch or the images would be empty.
    """
    chosen = dict(options or {})
    catalogue.check(model, chosen)
    side = catalogue.image_shape(model)[0] if pixels is None else pixels
    if batch < 1 or side < 1:
        raise ConfigError(f"The batch is {batch} and the side of an image {side} px, but both must be at least 1.")
    return Workload(model, batch, side, chosen)


class EngineStep:
    """Training step: forward, loss, backward, momentum update and running statistics, as on one rank without communication.

    Each step copies its images into the program's input, as it would copy a loader's images. The steps cycle through three
    batches.

    Args:
        backend, precision: see `make_backend`.
        stepwise: whether to run operator by operator, so that operators can be timed, even if the kernel set would launch whole
            passes at once.

    Raises:
        BackendError: the backend cannot be used on this machine.
        ShapeError: the images do not fit the model.
    """

    def __init__(
        self, task: Workload, backend: str = "auto", seed: int = 0, precision: str = "float32", *, stepwise: bool = False
    ) -> None:
        self.task = task
        chosen = make_backend(backend, precision=precision)
        if stepwise and isinstance(chosen.kernels, CapturesWork):
            chosen.kernels.stop_capturing()
        self.backend, self.kernels, self.description = chosen.name, chosen.kernels, chosen.description
        shape = (task.pixels, task.pixels, task.channels)
        model = catalogue.build(task.model, task.options)
        self.network = Network(model, shape, chosen.kernels, dtype=chosen.dtype, seed=seed)
        self.program = self.network.program(task.batch, training=True)
        self._optimizers = [(Sgd(momentum=MOMENTUM), group) for group in self.network.groups.values()]
        for optimizer, group in self._optimizers:
            optimizer.bind(group, group.segments)
        random = np.random.default_rng(seed)
        self._images = [random.standard_normal((task.batch, *shape), np.float32) for _ in range(_BATCHES)]
        self._labels = [random.integers(0, self.network.classes, task.batch) for _ in range(_BATCHES)]
        self._ids = np.arange(task.batch)
        self._step = 0

    @property
    def parameters(self) -> int:
        """Number of trained elements."""
        return sum(group.size for group in self.network.groups.values())

    def run(self, hooks: StepHooks = _NO_HOOKS) -> float:
        """Run one step, and return the mean loss."""
        batch, turn = self.task.batch, self._step % _BATCHES
        self.program.set_input(self._images[turn])
        context = StepContext(step=self._step, sample_ids=self._ids)
        self.program.forward(context, hooks)
        loss, batch_statistics = self.program.loss(self._labels[turn], batch), self.network.statistics.fetch_batch()
        hooks.operator_done("loss", "forward")
        self.program.backward(hooks)
        for optimizer, group in self._optimizers:
            optimizer.update(group.segments, LEARNING_RATE, None)
        hooks.operator_done("update", "parameters")
        statistics = self.network.statistics
        if statistics.size:
            statistics.blend(batch * batch_statistics.result().astype(np.float64), batch)
        self._step += 1
        return loss.result().loss / batch


class Laps(StepHooks):
    """Times of operators by (name, phase) and step, each from the end of the previous operator to the end of this one.

    Their sum is the time of the step up to and including the update of the parameters.

    Args:
        clock: function that returns seconds; CPU time is better for a process with one thread on a busy machine.
        wait: function that waits until an operator's work is done, if operators run asynchronously.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, wait: Callable[[], None] = lambda: None) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self._clock, self._wait = clock, wait
        self._last = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._wait()
        self._last = self._clock()

    def operator_done(self, name: str, phase: str) -> None:
        self._wait()
        now = self._clock()
        self.seconds.setdefault((name, phase), []).append(now - self._last)
        self._last = now


@dataclass(frozen=True)
class LayerTime:
    """Median seconds of an operator's phases, and the number of its floating-point operations: in forward, and in all phases.

    Attributes:
        parameters_seconds, input_seconds: times of the gradients of the parameters and of the input.
    """

    name: str
    kind: str
    forward_seconds: float
    parameters_seconds: float
    input_seconds: float
    forward_flops: int
    flops: int

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.parameters_seconds + self.input_seconds

    @property
    def gflops_per_second(self) -> float:
        """Rate of all phases in GFLOP/s; 0 if the time is too short to measure."""
        return self.flops / self.seconds / 1e9 if self.seconds > 0.0 else 0.0


def time_layers(step: EngineStep, steps: int, clock: Callable[[], float] = time.perf_counter) -> list[LayerTime]:
    """Return the times of the operators in forward order, then of "loss" and "update", as medians over `steps` steps."""
    laps = Laps(clock, step.kernels.wait)
    for _ in range(steps):
        laps.start()
        step.run(laps)

    def median(name: str, phase: str) -> float:
        return float(np.median(laps.seconds.get((name, phase), [0.0])))

    nodes = {node.name: node for node in step.network.graph(step.task.batch).nodes}
    tensors = step.network.graph(step.task.batch).tensors
    layers = []
    for bound in step.program.steps:
        node = nodes.get(bound.name)
        forward = node.spec.flops(*(tensors[i] for i in node.inputs)) if node is not None else 0
        phases = 1 + bool(bound.parameters) + bound.passes_back
        kind = (
            type(bound.operator).__name__.removeprefix("Adding").removeprefix("Cuda").removeprefix("_").removesuffix("Operator")
        )
        first, weights, inputs = (median(bound.name, phase) for phase in ("forward", "parameters", "input"))
        layers.append(LayerTime(bound.name, kind, first, weights, inputs, forward, phases * forward))
    layers.append(LayerTime("loss", "loss", median("loss", "forward"), 0.0, 0.0, 0, 0))
    layers.append(LayerTime("update", "update", 0.0, median("update", "parameters"), 0.0, 0, 0))
    return layers


def fallbacks(program: Program, *, on_host: bool = True) -> tuple[int, dict[str, list[str]]]:
    """Return (number of operators that the kernel set computes, layers that fall back to other operators, by reason).

    Views compute nothing and are not counted.

    Args:
        on_host: whether the arrays of the kernel set are NumPy arrays. Otherwise, a layer that defines its own operator computes
            with the kernel set's arithmetic, and counts as an operator of the kernel set.
    """
    computing, by_reason = 0, dict[str, list[str]]()
    for step in program.plan.steps:
        if step.is_view:
            continue
        users = on_host and step.node is not None and isinstance(step.node.spec, SelfMade)
        reason = "its layer defines its own operator" if users else step.operator.fallback_reason
        if reason:
            by_reason.setdefault(reason, []).append(step.name)
        else:
            computing += step.node is not None
    return computing, by_reason


def gemm_peak(
    size: int = 1536, repeats: int = 9, clock: Callable[[], float] = time.perf_counter, multiply: Callable = np.matmul
) -> float:
    """Return the GFLOP/s of the fastest of several float32 products of square matrices in this process's threads.

    `multiply` writes the product of the first two arrays to the third.
    """
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((size, size), np.float32) for _ in range(2))
    out = np.empty_like(a)
    best = math.inf
    for _ in range(repeats + 1):
        begin = clock()
        multiply(a, b, out)
        best = min(best, clock() - begin)
    return 2 * size**3 / best / 1e9


def timed(step: EngineStep, steps: int) -> tuple[float, float, Sequence[float]]:
    """Run `steps` steps, and return (wall seconds, CPU seconds of the process, losses)."""
    begin, cpu = time.perf_counter(), time.process_time()
    losses = [step.run() for _ in range(steps)]
    return time.perf_counter() - begin, time.process_time() - cpu, losses


@dataclass(frozen=True)
class Turn:
    """Measurement of one turn of a process, over all its steps.

    Attributes:
        finite: whether the losses of all steps are finite.
        loss: mean loss of the last step.
        cpu_before_seconds, cpu_after_seconds: CPU clock of the process before and after the turn.
    """

    wall_seconds: float
    cpu_seconds: float
    finite: bool
    loss: float
    cpu_before_seconds: float
    cpu_after_seconds: float
    peak_bytes: int


def serve(step: EngineStep, requests: IO[str]) -> None:
    """Run the number of steps that each input line requests, and print a `Turn` as JSON, until the input ends."""
    for line in requests:
        before = time.process_time()
        wall, cpu, losses = timed(step, json.loads(line)["steps"])
        finite = all(map(math.isfinite, losses))
        turn = Turn(wall, cpu, finite, losses[-1], before, time.process_time(), peak_resident_bytes())
        print(json.dumps(asdict(turn)), flush=True)


def main(arguments: list[str]) -> int:
    """Serve steps of the workload that the first argument describes in JSON, and return the exit code."""
    settings = json.loads(arguments[0])
    task = workload(settings["model"], settings["batch"], settings["pixels"], settings["options"])
    step = EngineStep(task, settings["backend"], precision=settings.get("precision", "float32"))
    facts = {"version": step.backend, "parameters": step.parameters, "arena_bytes": step.program.activation_bytes}
    print(json.dumps(facts), flush=True)
    serve(step, sys.stdin)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
