"""Jobs of schedulers: the job that a process belongs to, and whether the answer of a scheduler means that a job is over."""

from __future__ import annotations

import subprocess

import pytest

from hpctrain.launch import scheduler
from hpctrain.launch.scheduler import SchedulerJob, own_job


def test_a_job_is_the_same_one_however_often_it_is_queued() -> None:
    first = own_job({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "a"})
    again = own_job({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "a", "SLURM_RESTART_COUNT": "1"})
    assert (first.restart, again.restart, str(again)) == (0, 1, "Slurm job 7")
    assert again.follows(first)
    assert not first.follows(again)
    assert not again.follows(again)
    assert not again.follows(own_job({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "b"}))
    begun = own_job({"PBS_JOBID": "12.host"})
    submitted = own_job({"PBS_JOBID": "15.host", "HPCTRAIN_RESTARTS": "1", "HPCTRAIN_FIRST_JOB": "12.host"})
    assert submitted.follows(begun)
    assert own_job({"PBS_JOBID": "15.host", "HPCTRAIN_RESTARTS": "x"}).restart == 0
    assert own_job({}) == SchedulerJob()
    assert not own_job({}).follows(own_job({}))
    assert own_job({}).lives() is None


@pytest.mark.parametrize(
    ("code", "out", "err", "lives"),
    [
        (0, "RUNNING\n", "", None),
        (0, "COMPLETING\n", "", None),
        (0, "SUSPENDED\n", "", True),
        (0, "COMPLETED\n", "", False),
        (0, "PENDING\n", "", False),
        (0, "", "", None),
        (1, "", "slurm_load_jobs error: Invalid job id specified", False),
        (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", None),
    ],
)
def test_answers_of_slurm(code: int, out: str, err: str, lives: bool | None) -> None:
    assert scheduler._slurm_answer(subprocess.CompletedProcess([], code, out, err)) is lives


@pytest.mark.parametrize(
    ("code", "out", "err", "lives"),
    [
        (0, "12.host  run  user  0 R batch", "", None),
        (153, "", "qstat: Unknown Job Id 12.host", False),
        (35, "", "qstat: 12.host Job has finished, use -x or -H to obtain historical job information", False),
        (111, "", "Connection refused", None),
    ],
)
def test_answers_of_pbs(code: int, out: str, err: str, lives: bool | None) -> None:
    assert scheduler._pbs_answer(subprocess.CompletedProcess([], code, out, err)) is lives
