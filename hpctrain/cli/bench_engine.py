"""`hpctrain bench engine`: the speed and memory of one model's training steps on this machine, without MPI and data."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from hpctrain.cli.arguments import OutputFile


@click.command()
@click.option(
    "--model", default="resnet50", show_default=True, help="Name of the model in the catalogue (see `hpctrain list models`)."
)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Number of images per step.")
@click.option(
    "--px", "pixels", type=click.IntRange(min=1), help="Side of the square images, in pixels; by default the model's own."
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Number of threads; by default OMP_NUM_THREADS, else this machine's cores."
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "numpy", "onednn", "cuda"]),
    default="auto",
    show_default=True,
    help="Kernel set to time.",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "tf32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Precision of products, on backend cuda.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Number of timed steps (two warm-up steps run first).",
)
@click.option("--vs", "versus", type=click.Choice(["torch"]), help="Compare with PyTorch, whose steps take turns with these.")
@click.option("--peer-python", default=sys.executable, help="Python interpreter that has PyTorch; by default this one.")
@click.option("--out", type=OutputFile(streams=True), help="File to which all figures are written as JSON.")
def engine(
    model: str,
    batch: int,
    pixels: int | None,
    threads: int | None,
    backend: str,
    precision: str,
    steps: int,
    versus: str | None,
    peer_python: str,
    out: Path | None,
) -> None:
    """Time the training steps of a model.

    Times whole steps and each operator in one process, on made-up images, without MPI and data.
    """
    from hpctrain.launch.launcher import detect
    from hpctrain.launch.threads import set_threads

    plan = set_threads(detect(os.environ), threads)  # before NumPy is imported
    from hpctrain.bench.engine import compare, measure, print_tables
    from hpctrain.bench.engine_step import workload
    from hpctrain.core.errors import BackendError
    from hpctrain.storage.atomic_write import write_json

    task = workload(model, batch, pixels)
    measurement = measure(task, backend, steps, plan.threads, precision)
    if versus is not None and measurement.backend == "cuda":
        raise BackendError("--vs torch compares on the CPU, and backend cuda computes on a GPU; give --backend onednn or numpy.")
    compared = compare(task, measurement.backend, peer_python, plan.threads, steps) if versus is not None else None
    print_tables(measurement, compared)
    if out is not None:
        write_json(out, {**measurement.as_dict(), "comparison": compared})
