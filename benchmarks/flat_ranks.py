"""The part of `flat.py` that runs on each rank: `hpctrain train`, with a look at the process at some steps."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def look(outstanding: int) -> dict[str, int]:
    """The state of this process now. outstanding: operations among ranks that are not complete."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, shared = (int(words) for words in Path("/proc/self/statm").read_text().split()[1:3])
    return {
        "resident_bytes": resident * _PAGE_BYTES,
        "own_bytes": (resident - shared) * _PAGE_BYTES,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "outstanding": outstanding,
    }


def watch(out: Path, steps: int, every: int) -> None:
    """Make trainings record facts about their process every `every` steps, and write them to `out` at step `steps`."""
    from hpctrain.training.step import TrainingStep

    run, looks = TrainingStep.run, {}

    def watched(self: Any, batch: Any, global_step: int, lr: float) -> None:
        if global_step % every == 0 or global_step == steps - 1:
            looks[global_step] = look(self._progress.outstanding)
        run(self, batch, global_step, lr)
        if global_step == steps - 1:
            out.with_name(f"{out.name}-{self._progress.rank}.json").write_text(json.dumps(looks))

    TrainingStep.run = watched  # type: ignore[method-assign]


def main() -> None:
    """OUT STEPS EVERY, then the words of the command."""
    out, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    del sys.argv[1:4]
    from hpctrain.cli import main as commands

    found = commands.LazyGroup.get_command

    def patched(*arguments: Any) -> Any:
        watch(out, steps, every)
        return found(*arguments)

    commands.LazyGroup.get_command = patched  # type: ignore[method-assign]
    runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
