"""A reporter, as code of a user's own, that holds rank 0 up in a phase of the training until the job's log tells of a signal.

Copied into the directory of a job, which names it `holding_reporter.py:Hold`. `JOB.here`, in the working directory, says that
rank 0 is held up; a run that is resumed is not held up again. Each process of a job writes `from-NUMBER-HOST` at the import: its
Python and the files of hpctrain. The number is the job's, as another job can start on the same host meanwhile.
"""

import os
import socket
import sys
import time
from pathlib import Path

import hpctrain
from hpctrain.nn.network import Network
from hpctrain.storage import atomic_write
from hpctrain.training.metrics import Reporter

_LIMIT_SECONDS = 100
_STEP = 7

Path(f"from-{os.environ.get('SLURM_JOB_ID', 'none')}-{socket.gethostname()}").write_text(f"{sys.prefix}\n{hpctrain.__file__}\n")


class Hold(Reporter):
    """Waits in a step, in an evaluation or while a checkpoint is on its way to the disk.

    Args:
        phase: "step", "evaluation" or "checkpoint"; another word holds up nothing.
        job: the output directory of the job, whose name the file has, too.
    """

    def __init__(self, *, phase: str, job: str):
        self._phase, self._here, self._logs = phase, Path(f"{job}.here"), Path(job) / "jobs"
        self._held = self._here.exists()
        if not self._held and phase == "evaluation":
            self._hold_evaluations()
        if not self._held and phase == "checkpoint":
            self._hold_checkpoints()

    def step(self, epoch, step, sums, lr, images_per_second):
        # A checkpoint may be written in the background: the steps behind it wait with it, else they might reach the end before.
        if (self._phase == "step" and step == _STEP) or (self._phase == "checkpoint" and self._held):
            self._wait()

    def _hold_evaluations(self):
        program = Network.program

        def held(network, *arguments, training, **options):
            if not training:
                self._wait()
            return program(network, *arguments, training=training, **options)

        Network.program = held

    def _hold_checkpoints(self):
        """Between the bytes of a checkpoint and its name."""
        publish = atomic_write.publish

        def held(partial, path):
            if path.suffix == ".h5":
                self._wait()
            publish(partial, path)

        atomic_write.publish = held

    def _wait(self):
        if not self._held:
            self._held = True
            self._here.touch()
        end = time.monotonic() + _LIMIT_SECONDS
        while not any("SIGUSR1 received" in log.read_text(errors="replace") for log in self._logs.glob("*.log")):
            if time.monotonic() > end:
                raise RuntimeError(f"no signal has come to {self._logs}")
            time.sleep(0.02)
