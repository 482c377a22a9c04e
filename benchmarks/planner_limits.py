"""The planner's own cost: a search for ResNet-152 on 8192 ranks and one simulated step of them, on one core.

    python -m benchmarks.planner_limits                # prints seconds, CPU seconds and peak memory of both

CPU seconds are those of the process, which has one thread; peak memory is the most that it held resident, libraries included.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # before NumPy is imported
    os.environ[_variable] = "1"

from benchmarks.planner_scaling import job_of  # noqa: E402
from benchmarks.process import cpu_seconds  # noqa: E402
from hpctrain.launch.control_groups import peak_resident_bytes  # noqa: E402
from hpctrain.planner import machine_file  # noqa: E402
from hpctrain.planner.compute_costs import RateCosts  # noqa: E402
from hpctrain.planner.search import search  # noqa: E402
from hpctrain.planner.step_program import predict  # noqa: E402

_T = TypeVar("_T")


def timed(text: str, work: Callable[[], _T]) -> _T:
    """Do it, and print what it took."""
    begin, cpu = time.perf_counter(), cpu_seconds()
    result = work()
    seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
    print(f"{text}: {seconds:.1f} s, {cpu:.1f} s of CPU time, peak memory {peak_resident_bytes() / 1e9:.2f} GB", flush=True)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=4, help="of a rank")
    parser.add_argument("--machine", default="xc40")
    chosen = parser.parse_args(arguments)
    machine = machine_file.read(chosen.machine)
    job = timed("job", lambda: job_of("ResNet-50", chosen.ranks * chosen.samples, "model.name=resnet152"))
    costs = RateCosts(machine, job.dtype)
    found = timed("search", lambda: search(job, machine, costs, chosen.ranks, predicted_by=predict))
    best = found.best
    timed("one simulated step of its choice", lambda: predict(job, best.candidate, machine, costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
