"""Measurements of `hpctrain bench engine`, and their tables.

`profile` reads the times of oneDNN's primitives in a step from oneDNN's verbose output. `device_gemm_peak` measures the rate of
large matrix products, which is the reference for the rates of a device's operators.
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
from rich.table import Table

from hpctrain.backend.cuda.device import Device
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.onednn.binding import load
from hpctrain.backend.operators import KernelSet
from hpctrain.backend.specs import item_bytes
from hpctrain.bench.engine_step import EngineStep, LayerTime, Workload, fallbacks, gemm_peak, time_layers, timed
from hpctrain.core.console import output_console, plain_table
from hpctrain.core.text import counted, size_text
from hpctrain.launch.control_groups import peak_resident_bytes

_PREFIX = "onednn_verbose,exec,"
_FIELDS = 9  # engine, kind, implementation, propagation, memory, attributes, auxiliary, problem, milliseconds


@dataclass(frozen=True)
class PrimitiveTime:
    """Execution of one of oneDNN's primitives, with its time.

    Attributes:
        kind: kind of the primitive, such as "convolution".
        implementation: name of its code, such as "brgconv:avx512_core".
        propagation: phase of the step, such as "forward_training".
        memory, problem: formats and shape of its arrays, in oneDNN's notation.
    """

    kind: str
    implementation: str
    propagation: str
    memory: str
    problem: str
    seconds: float


def profile(run: Callable[[], object], steps: int) -> list[list[PrimitiveTime]]:
    """Call `run` once per step, and return the primitives that each call executed.

    Standard output of the whole process is redirected to a file during the steps. oneDNN's times do not include the time of
    printing them.
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
    """Yield the executions of primitives in lines of oneDNN's verbose output."""
    for line in lines:
        if not line.startswith(_PREFIX):
            continue
        fields = line.removeprefix(_PREFIX).strip().split(",")
        # names of implementations are the only fields that may contain commas
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
    """Return the device of a kernel set; None if the kernel set computes on the host."""
    return kernels.runtime.device if isinstance(kernels, CudaKernelSet) else None


def device_gemm_peak(kernels: KernelSet) -> float:
    """Return the GFLOP/s of consecutive large matrix products on the kernel set's device, in its dtype and precision."""
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


@dataclass(frozen=True)
class Measurement:
    """Measurement of steps in one process while no other process is measured. Times are medians; GFLOP/s are by `clock`.

    Attributes:
        clock: clock of operator times, GFLOP/s and the peak: "cpu" with one thread, so that other load has little effect;
            otherwise "wall".
        peak_gflops: GFLOP/s of large matrix products, to compare with.
        arena_bytes: memory that the program plans for activations and their gradients.
        peak_bytes: peak resident memory before profiling; on a GPU, all memory in use there.
        kernel_seconds: time of the library's kernels in a step, as the library reports it; None if it does not.
        reorder_seconds: time of all copies between layouts (of images, weights and gradients) in a step; None if unknown.
        reorders: number of these copies; None if unknown.
        own_operators: number of operators that the kernel set itself computes.
        fallbacks: layers whose operators fall back to NumPy, by reason.
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
        """Return the measurement as plain data, for JSON."""
        layers = [
            {**asdict(layer), "seconds": layer.seconds, "gflops_per_second": layer.gflops_per_second} for layer in self.layers
        ]
        return {**asdict(self), "layers": layers}


def measure(task: Workload, backend: str, steps: int, threads: int, precision: str = "float32") -> Measurement:
    """Time whole steps, then each operator, then each primitive if the kernel set is oneDNN.

    Raises:
        BackendError, ShapeError, ConfigError: the step cannot be made, see `EngineStep`.
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
    stepwise = step
    if device is not None:  # operator by operator, instead of whole passes at once
        stepwise = EngineStep(task, step.backend, precision=precision, stepwise=True)
        for _ in range(_WARM_UP):
            stepwise.run()
    layers = time_layers(stepwise, steps, clock)
    primitives = profile(step.run, steps) if step.backend == "onednn" else None
    kernel, reorder, count = _account(primitives)
    multiply = getattr(step.kernels.arithmetic, "multiply", np.matmul)  # the service of kernels on the host has it
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


def _account(primitives: Sequence[Sequence[PrimitiveTime]] | None) -> tuple[float | None, float | None, int | None]:
    """Return (seconds of all kernels, seconds of reorders, number of reorders) in a step, as medians over steps."""
    if primitives is None:
        return None, None, None
    copies = [[one for one in step if one.kind == "reorder"] for step in primitives]
    every, some = (float(np.median([sum(one.seconds for one in step) for step in steps])) for steps in (primitives, copies))
    return every, some, len(copies[0])


def print_tables(measured: Measurement) -> None:
    """Print a line of totals and the table of operators."""
    console = output_console(130)
    console.print(_totals(measured))
    console.print(layer_table(measured))


def _totals(measured: Measurement) -> str:
    share = measured.gflops_per_second / measured.peak_gflops
    lines = [
        f"{measured.model}, {measured.description}, batch {measured.batch}, {measured.pixels} px, "
        f"{counted(measured.threads, 'thread')}: {measured.step_seconds * 1e3:.2f} ms per step, "
        f"{measured.images_per_second:.1f} images/s; CPU time {measured.cpu_seconds * 1e3:.2f} ms",
        f"{measured.gflops_per_second:.1f} GFLOP/s by {measured.clock} time, {share:.0%} of a large matrix product's "
        f"{measured.peak_gflops:.1f}; arena {size_text(measured.arena_bytes)}, "
        f"{'memory in use' if measured.backend == 'cuda' else 'peak resident'} {size_text(measured.peak_bytes)}",
    ]
    if measured.kernel_seconds is not None and measured.reorder_seconds is not None:
        lines.append(
            f"oneDNN's kernels {measured.kernel_seconds * 1e3:.2f} ms per step, "
            f"{measured.reorder_seconds * 1e3:.2f} ms of them in {measured.reorders} reorders"
        )
    lines += _fallback_lines(measured)
    return "\n".join(lines)


def _fallback_lines(measured: Measurement) -> Sequence[str]:
    """Return lines with the operators that fall back to NumPy and the reasons; an empty sequence for backend numpy."""
    if measured.backend == "numpy":
        return ()
    if not measured.fallbacks:
        return (f"all {measured.own_operators} operators run on {measured.backend}",)
    others = [f"{', '.join(layers)} ({reason})" for reason, layers in measured.fallbacks.items()]
    return (f"{measured.own_operators} operators run on {measured.backend}; in NumPy: {'; '.join(others)}",)


def layer_table(measured: Measurement) -> Table:
    """Return a table with one line per operator. Names are folded if the terminal is narrow, so nothing is cut off."""
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
        # element-wise work has few operations per byte, so its rate does not describe arithmetic
        dense = layer.kind in ("Conv2d", "Linear")
        rates = (f"{rate:.1f}", f"{rate / measured.peak_gflops:.0%}") if dense else ("", "")
        table.add_row(layer.name, layer.kind, *map(_milliseconds, times), *rates, f"{layer.seconds / total:.1%}")
    return table


def _milliseconds(seconds: float) -> str:
    """Return a time in milliseconds as text with about four digits, so that tables stay narrow."""
    value = seconds * 1e3
    decimals = next((3 - power for power in range(3) if value < 10 ** (power + 1)), 0)
    return f"{value:.{decimals}f}"
