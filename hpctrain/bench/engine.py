"""Measure for `hpctrain bench engine`, and print the tables.

`profile` reads the times of oneDNN's primitives in a step from its verbose output. `device_gemm_peak` measures the rate of large
matrix products, the reference for the rates of a device's operators.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, Any

import numpy as np

from hpctrain.backend.cuda.device import Device
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.onednn.binding import load
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.backend.operators import KernelSet
from hpctrain.backend.specs import item_bytes
from hpctrain.bench.engine_step import EngineStep, LayerTime, Workload, fallbacks, gemm_peak, time_layers, timed
from hpctrain.bench.interleaved import Rounds, SteppingError, interleave, ours, peer, with_threads
from hpctrain.launch.control_groups import peak_resident_bytes

_PREFIX = "onednn_verbose,exec,"
_FIELDS = 9  # engine, kind, implementation, propagation, memory, attributes, auxiliary, problem, milliseconds


@dataclass(frozen=True)
class PrimitiveTime:
    """One execution of a primitive.

    Attributes:
        kind: such as "convolution".
        implementation: such as "brgconv:avx512_core".
        propagation: such as "forward_training".
        memory: its formats.
        problem: the shape in oneDNN's notation.
    """

    kind: str
    implementation: str
    propagation: str
    memory: str
    problem: str
    seconds: float


def profile(run: Callable[[], object], steps: int) -> list[list[PrimitiveTime]]:
    """Return the primitives that `run` executed, by step.

    Redirects standard output of the whole process to a file meanwhile. The times of oneDNN do not include its printing.
    """
    library = load()
    by_step = []
    for _ in range(steps):
        with tempfile.TemporaryFile("w+") as file:
            with _stdout_to(file):
                library.dnnl_set_verbose(1)
                try:
                    run()
                finally:
                    library.dnnl_set_verbose(0)
            file.seek(0)
            by_step.append(list(parse(file)))
    return by_step


def parse(lines: Iterable[str]) -> Iterator[PrimitiveTime]:
    """Yield the executions in oneDNN's lines."""
    for line in lines:
        if not line.startswith(_PREFIX):
            continue
        fields = line.removeprefix(_PREFIX).strip().split(",")
        # only an implementation's name may contain commas
        extra = len(fields) - _FIELDS
        assert extra >= 0, line
        implementation = ",".join(fields[2 : 3 + extra])
        propagation, memory, _, _, problem, milliseconds = fields[3 + extra :]
        yield PrimitiveTime(fields[1], implementation, propagation, memory, problem, float(milliseconds) / 1e3)


@contextmanager
def _stdout_to(file: IO[str]) -> Iterator[None]:
    flush_c = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush_c(None)
    descriptor = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        flush_c(None)
        os.dup2(descriptor, 1)
        os.close(descriptor)


_PEAK_SIZE = 8192
_SLOW_SIZE = 128  # if the device is emulated on the CPU
_REPEATS = 9


def device_of(kernels: KernelSet) -> Device | None:
    """Return the device of a kernel set; None for kernel sets of the host."""
    return kernels.runtime.device if isinstance(kernels, CudaKernelSet) else None


def device_gemm_peak(kernels: KernelSet) -> float:
    """Return the GFLOP/s of matrix products of the kernel set's device, in its dtype and precision, one after another."""
    assert isinstance(kernels, CudaKernelSet)
    runtime = kernels.runtime
    size = _SLOW_SIZE if runtime.device.name == "emulated" else _PEAK_SIZE
    a, b, c = (
        runtime.device.allocate(size * size * item_bytes(runtime.dtype)).view(runtime.dtype).reshape(size, size) for _ in range(3)
    )
    runtime.device.gemm(runtime.stream, a, b, c, precision=runtime.precision)
    kernels.wait()
    begin = time.perf_counter()
    for _ in range(_REPEATS):
        runtime.device.gemm(runtime.stream, a, b, c, precision=runtime.precision)
    kernels.wait()
    return _REPEATS * 2 * size**3 / (time.perf_counter() - begin) / 1e9


_WARM_UP = 2

#: variants of "--vs torch": name -> (channels last, huge pages and fused optimiser)
PEERS = {"torch": (False, False), "torch tuned": (False, True), "torch last": (True, False), "torch last tuned": (True, True)}


@dataclass(frozen=True)
class Measurement:
    """The steps of one process without others.

    Attributes:
        description: the backend, in words.
        clock: "cpu" with one thread, otherwise "wall": the clock of operators' times, GFLOP/s and the peak (of a large matrix
            product), so that other load has little effect.
        step_seconds: median wall time.
        peak_bytes: peak resident memory before profiling; on a GPU, all memory in use there.
        kernel_seconds: the library's own time of all its kernels in a step; None if the kernel set does not measure it.
        reorder_seconds: time of all copies between layouts (of images, weights and gradients) in a step; None likewise.
        reorders: number of these copies; None likewise.
        own_operators: number of operators of the kernel set itself.
        fallbacks: the layers whose operators fall back to NumPy, by reason.
    """

    model: str
    backend: str
    description: str
    batch: int
    pixels: int
    threads: int
    clock: str
    parameters: int
    step_seconds: float
    cpu_seconds: float
    images_per_second: float
    gflops_per_second: float
    peak_gflops: float
    arena_bytes: int
    peak_bytes: int
    kernel_seconds: float | None
    reorder_seconds: float | None
    reorders: int | None
    own_operators: int
    fallbacks: Mapping[str, Sequence[str]]
    layers: Sequence[LayerTime]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        layers = [
            {**asdict(layer), "seconds": layer.seconds, "gflops_per_second": layer.gflops_per_second} for layer in self.layers
        ]
        return {**asdict(self), "layers": layers}


def measure(task: Workload, backend: str, steps: int, threads: int, precision: str = "float32") -> Measurement:
    """Time whole steps, then each operator, then each primitive if the kernel set is oneDNN.

    Raises:
        BackendError, ShapeError, ConfigError: as `EngineStep`.
    """
    step = EngineStep(task, backend, precision=precision)
    for _ in range(_WARM_UP):
        step.run()
    turns = [timed(step, 1) for _ in range(steps)]
    device = device_of(step.kernels)
    peak_bytes = peak_resident_bytes() if device is None else device.memory_used()
    seconds, cpu_seconds = (float(np.median([turn[:2][i] for turn in turns])) for i in range(2))
    by_cpu = threads == 1 and device is None
    clock = time.process_time if by_cpu else time.perf_counter
    layers = time_layers(step if device is None else _stepwise(step, precision), steps, clock)
    primitives = profile(step.run, steps) if step.backend == "onednn" else None
    kernel, reorder, count = _account(primitives)
    multiply = step.kernels.multiply if isinstance(step.kernels, OnednnKernelSet) else np.matmul
    own_operators, others = fallbacks(step.program, on_host=step.kernels.arithmetic.on_host)
    return Measurement(
        model=task.model,
        backend=step.backend,
        description=step.description,
        batch=task.batch,
        pixels=task.pixels,
        threads=threads,
        clock="cpu" if by_cpu else "wall",
        parameters=step.parameters,
        step_seconds=seconds,
        cpu_seconds=cpu_seconds,
        images_per_second=task.batch / seconds,
        gflops_per_second=sum(layer.flops for layer in layers) / (cpu_seconds if by_cpu else seconds) / 1e9,
        peak_gflops=gemm_peak(clock=clock, multiply=multiply) if device is None else device_gemm_peak(step.kernels),
        arena_bytes=step.program.activation_bytes,
        peak_bytes=peak_bytes,
        kernel_seconds=kernel,
        reorder_seconds=reorder,
        reorders=count,
        own_operators=own_operators,
        fallbacks=others,
        layers=layers,
    )


def _stepwise(step: EngineStep, precision: str) -> EngineStep:
    """Return the same workload operator by operator, after a warm-up."""
    slow = EngineStep(step.task, step.backend, precision=precision, stepwise=True)
    for _ in range(_WARM_UP):
        slow.run()
    return slow


def _account(primitives: Sequence[Sequence[PrimitiveTime]] | None) -> tuple[float | None, float | None, int | None]:
    """Return (seconds of all kernels, seconds of the reorders, number of reorders), medians over steps."""
    if primitives is None:
        return None, None, None
    copies = [[one for one in step if one.kind == "reorder"] for step in primitives]
    every, some = (float(np.median([sum(one.seconds for one in step) for step in steps])) for steps in (primitives, copies))
    return every, some, len(copies[0])


def compare(task: Workload, backend: str, python: str, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measure our engine and PyTorch's variants in turn, each in its own process.

    Return the milliseconds per step, the peak memory, and the speed of ours relative to PyTorch's (median of the rounds'
    ratios of wall time).

    Args:
        python: a Python with PyTorch.

    Raises:
        SteppingError: our process fails, or all of PyTorch's fail.
    """
    shape = {"model": task.model, "batch": task.batch, "pixels": task.pixels}
    plain = with_threads(os.environ, threads)
    commands: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
        "ours": (ours({**shape, "options": dict(task.options), "backend": backend}), plain)
    }
    for name, (last, tuned) in PEERS.items():
        settings = {**shape, "threads": threads, "last": last, "fused": tuned, "compiled": False}
        commands[name] = (peer(python, settings), {**plain, "THP_MEM_ALLOC_ENABLE": "1"} if tuned else plain)
    series = interleave(commands, Rounds(rounds, 1), list(PEERS))
    if not any(series[name].turns for name in PEERS):
        raise SteppingError(f"No variant of PyTorch ran with {python}: {series['torch'].failure}")
    our_seconds = series["ours"].seconds("wall")
    return {
        name: {
            "step_seconds": one.median("wall"),
            "peak_bytes": one.peak_bytes,
            "times_as_fast": float(np.median([t / o for t, o in zip(one.seconds("wall"), our_seconds, strict=False)])),
        }
        for name, one in series.items()
        if one.turns
    }


def print_tables(measured: Measurement, compared: Mapping[str, Mapping[str, float]] | None) -> None:
    """Print a line of totals, the operators with their times, and the comparison if there is one."""
    from hpctrain.core.console import PlainConsole

    console = PlainConsole(file=sys.stdout, width=None if sys.stdout.isatty() else 130)
    console.print(_totals(measured), highlight=False)
    console.print(layer_table(measured))
    if compared is not None:
        console.print(_comparison_table(compared))


def _totals(measured: Measurement) -> str:
    share = measured.gflops_per_second / measured.peak_gflops
    lines = [
        f"{measured.model}, {measured.description}, batch {measured.batch}, {measured.pixels} px, {measured.threads} "
        f"{'thread' if measured.threads == 1 else 'threads'}: {measured.step_seconds * 1e3:.2f} ms a step, "
        f"{measured.images_per_second:.1f} images/s; CPU time {measured.cpu_seconds * 1e3:.2f} ms",
        f"{measured.gflops_per_second:.1f} GFLOP/s by {measured.clock} time, {share:.0%} of a large matrix product's "
        f"{measured.peak_gflops:.1f}; arena {measured.arena_bytes / 1e6:.1f} MB, "
        f"{'memory in use' if measured.backend == 'cuda' else 'peak resident'} {measured.peak_bytes / 1e6:.0f} MB",
    ]
    if measured.kernel_seconds is not None and measured.reorder_seconds is not None:
        lines.append(
            f"oneDNN's kernels {measured.kernel_seconds * 1e3:.2f} ms a step, "
            f"{measured.reorder_seconds * 1e3:.2f} ms of them in {measured.reorders} reorders"
        )
    lines += _whose(measured)
    return "\n".join(lines)


def _whose(measured: Measurement) -> Sequence[str]:
    """Return lines with the operators that are not the kernel set's own, and the reasons; nothing for NumPy."""
    if measured.backend == "numpy":
        return ()
    if not measured.fallbacks:
        return (f"all {measured.own_operators} operators run on {measured.backend}",)
    others = [f"{', '.join(layers)} ({reason})" for reason, layers in measured.fallbacks.items()]
    return (f"{measured.own_operators} operators run on {measured.backend}; in NumPy: {'; '.join(others)}",)


def layer_table(measured: Measurement) -> Any:
    """Return a table with a line for each operator. A narrow terminal folds names and cuts nothing off."""
    from hpctrain.core.console import plain_table

    table = plain_table(gap=1, bold=True)
    table.show_header = True
    table.add_column("operator", overflow="fold", min_width=20)
    table.add_column("kind", overflow="fold", min_width=9, max_width=15)
    for title in ("forward\nms", "weights\nms", "input\nms", "GFLOP/s", "of\npeak", "of\nstep"):
        table.add_column(title, justify="right", no_wrap=True)
    total = sum(layer.seconds for layer in measured.layers)
    for layer in measured.layers:
        times = (layer.forward_seconds, layer.parameters_seconds, layer.input_seconds)
        rate = layer.gflops_per_second
        # element-wise work has a few operations per byte: its rate does not describe arithmetic
        dense = layer.kind in ("Conv2d", "Linear")
        rates = (f"{rate:.1f}", f"{rate / measured.peak_gflops:.0%}") if dense else ("", "")
        table.add_row(layer.name, layer.kind, *map(_milliseconds, times), *rates, f"{layer.seconds / total:.1%}")
    return table


def _milliseconds(seconds: float) -> str:
    """Return five characters for times up to a minute, so that a table keeps its width: at most three decimals."""
    value = seconds * 1e3
    decimals = next((3 - power for power in range(3) if value < 10 ** (power + 1)), 0)
    return f"{value:.{decimals}f}"


def _comparison_table(compared: Mapping[str, Mapping[str, float]]) -> Any:
    from rich.table import Table

    table = Table("variant", "ms a step", "ours, times as fast", "peak MB")
    for name, row in compared.items():
        table.add_row(name, f"{row['step_seconds'] * 1e3:.2f}", f"{row['times_as_fast']:.2f}", f"{row['peak_bytes'] / 1e6:.0f}")
    for column in table.columns[1:]:
        column.justify = "right"
    return table
