"""Checks and measures everything that needs a GPU, in at most nine minutes.

    python -m benchmarks.gpu_check --out gpu-check         # on a GPU
    python -m benchmarks.gpu_check --only facts build --out gpu-check
    python -m benchmarks.gpu_check --device emulated --out rehearsal

The last one works on this CPU, with small sizes. Each stage is a process of its
own with a time limit. It writes each figure to OUT/<stage>.json at once, and
its output goes to OUT/<stage>.log. After a stage that fails the others still
run, except after a ladder that makes no device. The exit code is 1 if a stage
failed, else 0. Stages that need a part of the package that is not written are
"not built yet", and do not fail.
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.settings import Settings, add_arguments
from benchmarks.gpu.stage_report import FAILED
from benchmarks.gpu.stages import STAGES, failures, publish, run_all, run_here, setup_failure, table

_NAMES = tuple(stage.name for stage in STAGES)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all stages (default 540)")
    parser.add_argument("--only", nargs="+", choices=_NAMES, default=_NAMES, metavar="STAGE", help=f"of {', '.join(_NAMES)}")
    parser.add_argument(
        "--publish", type=Path, help="folder that gets all results in one JSON and all output in one log after each stage"
    )
    parser.add_argument("--setup-failure", default="", help="what could not be installed; reported as the failed stage setup")
    parser.add_argument("--run-here", choices=_NAMES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    settings = Settings(chosen.device, chosen.out.absolute(), chosen.limit)
    by_name = {stage.name: stage for stage in STAGES}
    settings.out.mkdir(parents=True, exist_ok=True)
    if chosen.run_here is not None:
        faulthandler.register(signal.SIGTERM, chain=True)  # the log then shows where a stage was when its limit ended it
        run_here(by_name[chosen.run_here], settings)
        return 0
    contents = [setup_failure(settings, chosen.setup_failure)] if chosen.setup_failure else []
    setup = list(contents)

    def after(so_far: list[dict[str, Any]]) -> None:
        contents[:] = setup + so_far
        print(f"{so_far[-1]['stage']}: {so_far[-1]['status']}, {so_far[-1]['seconds']:.0f} s", flush=True)
        if chosen.publish is not None:
            publish(chosen.publish, settings.out, contents)

    run_all([by_name[name] for name in chosen.only], settings, chosen.limit, after)
    print(f"\n{table(contents)}\n{failures(contents, settings.out)}")
    return int(any(content["status"] == FAILED for content in contents))


if __name__ == "__main__":
    sys.exit(main())
