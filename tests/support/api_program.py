"""A program as a user's, for `tests/test_api.py`: trains its task through `import hpctrain`, and keeps where that ended.

    mpiexec -n 2 python -m mpi4py -m tests.support.api_program FILE STEPS KEYWORDS

KEYWORDS: JSON, of `hpctrain.start`, of `Job.replica` and of "loader"s, and "resume", a file to go on from.
"""

import json
import sys
from functools import partial

import hpctrain
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.optim.optimizers import Sgd
from tests.support import nets
from tests.support.training import Task, made_up

TASK = Task(nets.residual, NumpyKernelSet(), partial(Sgd, momentum=0.9), steps=9, smoothing=0.0)


def main(
    path: str,
    steps: int,
    start: dict[str, object],
    replica: dict[str, object],
    loader: dict[str, object],
    resume: str | None = None,
) -> None:
    images, labels, _ = made_up(TASK)
    with hpctrain.start(batch=TASK.batch, **start) as job:  # type: ignore[arg-type]
        trained = job.replica(
            TASK.model(),
            TASK.image_shape,
            optimizer={"name": "sgd", "momentum": 0.9},
            dtype=TASK.dtype,
            backend="numpy",
            seed=TASK.seed,
            **replica,  # type: ignore[arg-type]
        )
        batches = job.array_loader(trained, images, labels, seed=TASK.seed, **loader)  # type: ignore[arg-type]
        if resume is not None:
            job.print(job.load(trained, resume)["steps"])
        sums = hpctrain.RunningSums()
        while trained.global_step < steps:
            epoch, step = divmod(trained.global_step, len(batches))
            for batch in batches.epoch(epoch, step * job.batch):
                sums.add(trained.step(batch, TASK.lr))
                if trained.global_step == steps:
                    break
        sums.add(trained.settle())
        job.print(sums.count, trained.evaluate(batches).count)
        job.save(trained, path, steps=steps)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), **json.loads(sys.argv[3]))
