"""The cost of tracing: CPU time of one event, with all that a traced step does for it, times the events of a step.

    python benchmarks/trace_overhead.py [--json FILE]

The cost is measured with operators that do nothing, so that it stands alone; a traced run prints its own share of a step.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.progress import MessageAccount, ProgressEngine
from hpctrain.nn.program import StepHooks
from hpctrain.storage.atomic_write import write_json
from hpctrain.trace.tracer import Tracer, cost_per_event_seconds
from hpctrain.training.step import TracingHooks

_EVENTS = 100_000
_REPEATS = 7


def _least(work: Callable[[], None], prepare: Callable[[], None]) -> float:
    """Least CPU seconds of several runs: what disturbs only adds."""
    found = []
    for _ in range(_REPEATS):
        prepare()
        begin = time.thread_time()
        work()
        found.append(time.thread_time() - begin)
    return min(found)


def hook_seconds() -> float:
    """CPU time that tracing adds to one operator: its own record, the record of the hooks before it, and the calls in between."""
    tracer = Tracer(2 * _EVENTS + 2)
    plain = StepHooks()
    traced = TracingHooks(plain, tracer)

    def run(hooks: StepHooks) -> Callable[[], None]:
        def work() -> None:
            for _ in range(_EVENTS):
                hooks.operator_done("layer", "forward")
                hooks.before_forward(())

        return work

    def prepare() -> None:
        tracer.clear()
        traced.begin()

    with_trace = _least(run(traced), prepare)
    assert len(tracer) > 1.9 * _EVENTS
    return (with_trace - _least(run(plain), prepare)) / _EVENTS


def ticket_seconds() -> float:
    """CPU time that tracing adds to one posted operation that completes at once."""
    tracer = Tracer(_EVENTS + 1)
    comm = SingleCommunicator()
    buffer = np.zeros(4)

    def run(trace: Tracer | None) -> Callable[[], None]:
        progress = ProgressEngine(rank=0, deadline_seconds=60, abort=comm.abort, trace=trace)
        queue = progress.queue(comm)

        def work() -> None:
            for _ in range(_EVENTS):
                queue.post(lambda: comm.iallreduce(buffer), "parameter")

        return work

    return (_least(run(tracer), tracer.clear) - _least(run(None), tracer.clear)) / _EVENTS


def account_seconds() -> float:
    """CPU time that the account of messages adds to one call of the engine, tracing or not: always on."""
    account = MessageAccount()

    def work() -> None:
        for _ in range(_EVENTS):
            account.begin()
            account.end()

    def nothing() -> None:
        for _ in range(_EVENTS):
            pass

    return (_least(work, lambda: None) - _least(nothing, lambda: None)) / _EVENTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    found = {
        "event_seconds": cost_per_event_seconds(_EVENTS),
        "operator_seconds": hook_seconds(),
        "ticket_seconds": ticket_seconds(),
        "account_seconds": account_seconds(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.platform(),
    }
    print(f"one event                    {found['event_seconds'] * 1e6:6.2f} us")
    print(f"one operator (two events)    {found['operator_seconds'] * 1e6:6.2f} us")
    print(f"one operation (two events)   {found['ticket_seconds'] * 1e6:6.2f} us")
    print(f"one call, not traced         {found['account_seconds'] * 1e6:6.2f} us")
    if arguments.json is not None:
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
