"""`hpctrain bench`: measure the speed of data loading, the step time of a model, and the scaling of a training."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.arguments import FILE, MODE, OVERRIDES, Commands, FilePath, Finite, OutputFile
from hpctrain.core.text import counted, echo, echo_block, wrapped

if TYPE_CHECKING:
    from hpctrain.bench.data import DataRates


_MOST_RANKS = 1_000_000


class RankCounts(click.ParamType):
    """Parameter type for numbers of ranks, such as 1,2,4."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isdecimal() and 1 <= int(word) <= _MOST_RANKS for word in words):
            self.fail(f"{value!r} must be numbers of {self.name}, each from 1 to {_MOST_RANKS}, such as 1,2,4", param, ctx)
        return tuple(sorted({int(word) for word in words}))


@click.command()
@OVERRIDES
@click.option(
    "--config", "file", type=FilePath(path_type=Path), metavar="FILE", required=True, help="Configuration file to train."
)
@click.option("--ranks", type=RankCounts(), required=True, help="Numbers of ranks to compare, such as 1,2,4.")
@MODE
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=20,
    show_default=True,
    help="Number of steps per run; the first one is not counted.",
)
@click.option(
    "--launcher",
    metavar="COMMAND",
    help='Command that starts a job, such as "srun -n {ranks}"; default: the mpiexec next to this Python.',
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Number of threads per rank; default: this machine's cores divided by the largest number of ranks.",
)
@click.option(
    "--out",
    type=OutputFile(streams=True),
    default=Path("scaling.json"),
    show_default=True,
    help="File to which all figures are written as JSON.",
)
@click.option(
    "--timeout-seconds",
    type=Finite(min=1),
    default=3600.0,
    show_default=True,
    help="Time limit of one run, in seconds.",
)
def scaling(
    overrides: tuple[str, ...],
    file: Path,
    ranks: tuple[int, ...],
    mode: Any,
    steps: int,
    launcher: str | None,
    threads: int | None,
    out: Path,
    timeout_seconds: float,
) -> None:
    """Compare the step times of several numbers of ranks.

    The command prints efficiency, exposed communication and a lower limit of the step time for each number of ranks. The training
    runs twice on each number of ranks, once with --compute-only. OVERRIDES such as averager=sharded override keys of the file.
    """
    from hpctrain.bench import scaling as study

    task = study.ScalingStudy(
        file=file,
        overrides=overrides,
        mode=mode,
        steps=steps,
        launcher=launcher,
        threads=threads,
        timeout_seconds=timeout_seconds,
    )
    points = study.run(task, ranks, say=echo)
    for line in study.lines(points, mode):
        echo(line)
    study.write(out, task, points)
    echo(out)


_COLUMNS = 80
_NAME, _NUMBER = 16, 12


class ThreadCounts(RankCounts):
    """Parameter type for numbers of threads, such as 1,2,4."""

    name = "threads"


@click.command()
@FILE
@OVERRIDES
@click.option(
    "--threads",
    type=ThreadCounts(),
    help="Numbers of threads to compare, such as 1,2,4; default: powers of 2 up to this machine's cores.",
)
@click.option("--no-step", is_flag=True, help="Do not time a training step for comparison.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def data(file: Path, overrides: tuple[str, ...], threads: tuple[int, ...] | None, no_step: bool, as_json: bool) -> None:
    """Time the stages of data loading, from the file to the batch.

    The command prints the images per second of each stage for several numbers of threads, and the stage that limits FILE's
    training with OVERRIDES. It runs in one process, without MPI.
    """
    from hpctrain.launch.launcher import detect
    from hpctrain.launch.threads import set_threads
    from hpctrain.process.start import load_config

    config, source = load_config(file, overrides)
    plan = set_threads(detect(os.environ), None if config.threads == "auto" else config.threads)  # before NumPy is imported
    from hpctrain.assembly.faults import check_config
    from hpctrain.bench.data import measure
    from hpctrain.bench.machine import machine_facts

    check_config(config, source)
    counts = threads or tuple(1 << power for power in range(plan.cores.bit_length()))
    rates = measure(config, counts, plan.threads, times_step=not no_step)
    sentences = [rates.sentence(count) for count in rates.threads]
    if as_json:
        content = {"config": str(file), **asdict(rates), "sentences": sentences, "machine": machine_facts()}
        echo_block(json.dumps(content, indent=1))
        return
    for line in (*rates_table(rates), *sentences):
        echo_block(wrapped(line, _COLUMNS))


def rates_table(rates: DataRates) -> list[str]:
    """Return lines with images per second by stage. Numbers of threads that do not fit the width are in a second table below."""
    from hpctrain.bench.data import READ

    height, width, channels = rates.shape
    lines = [f"images/s, in batches of {rates.images} images of {height} x {width} x {channels}"]
    at_once = (_COLUMNS - _NAME) // _NUMBER
    for begin in range(0, len(rates.threads), at_once):
        counts = rates.threads[begin : begin + at_once]
        lines.append("stage".ljust(_NAME) + "".join(counted(count, "thread").rjust(_NUMBER) for count in counts))
        for stage in rates.names:
            name = "read, decode" if stage == READ and rates.decodes else stage
            lines.append(name.ljust(_NAME) + "".join(f"{rates.rate(stage, count):,.0f}".rjust(_NUMBER) for count in counts))
    return lines


@click.command()
@click.option(
    "--model", default="resnet50", show_default=True, help="Name of the model in the catalogue (see `hpctrain list models`)."
)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Number of images per step.")
@click.option(
    "--px", "pixels", type=click.IntRange(min=1), help="Side of the square images, in pixels; default: that of the model."
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Number of threads; default: OMP_NUM_THREADS, else this machine's cores."
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
    help="Precision of matrix products and convolutions; tf32 on backend cuda only.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Number of timed steps (two warm-up steps run first).",
)
@click.option("--out", type=OutputFile(streams=True), help="File to which all figures are written as JSON.")
def engine(
    model: str,
    batch: int,
    pixels: int | None,
    threads: int | None,
    backend: str,
    precision: str,
    steps: int,
    out: Path | None,
) -> None:
    """Time the training steps of a model.

    The command times whole steps and each operator in one process, on synthetic images. It needs neither MPI nor data files.
    """
    from hpctrain.launch.launcher import detect
    from hpctrain.launch.threads import set_threads

    plan = set_threads(detect(os.environ), threads)  # before NumPy is imported
    from hpctrain.bench.engine import measure, print_tables
    from hpctrain.bench.engine_step import workload
    from hpctrain.storage.atomic_write import write_json

    task = workload(model, batch, pixels)
    measurement = measure(task, backend, steps, plan.threads, precision)
    print_tables(measurement)
    if out is not None:
        write_json(out, measurement.as_dict())


@click.group(cls=Commands)
def bench() -> None:
    """Measure data loading, training steps or scaling."""


bench.add_command(data)
bench.add_command(engine)
bench.add_command(scaling)
