"""Jobs on sites: sizes that fit, and requests that do not in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.site import profile_files
from hpctrain.site.job import JobFiles, JobRequest, SiteJob, check_backend, plan_job
from hpctrain.site.profile import ContainerFields
from tests.support.job_scripts import SITES

FILES = JobFiles("run", "runs/jobs/run.sbatch")


def _plan(site: str, request: JobRequest, *, own_limit: bool = False) -> SiteJob:
    return plan_job(profile_files.read(site, {}), request, FILES, own_limit=own_limit)


@given(site=st.sampled_from(["perlmutter-cpu", "lumi-c", "slurm"]), ranks=st.integers(1, 128))
def test_ranks_never_share_cores(site: str, ranks: int) -> None:
    node = profile_files.read(site, {}).profile.node
    request = JobRequest(3, ranks_per_node=ranks, account="a")
    if ranks > node.limit:
        with pytest.raises(ConfigError, match=f"the nearest legal value is {node.limit}"):
            _plan(site, request)
        return
    job = _plan(site, request)
    assert (job.nodes, job.ranks) == (3, ranks)
    assert job.cpus % node.cpus_per_core == 0
    assert node.cpus_per_core <= job.cpus <= node.cores * node.cpus_per_core // ranks
    assert (job.cpus + node.cpus_per_core) * ranks > node.cores * node.cpus_per_core  # no core is left over for all


@pytest.mark.parametrize(
    ("site", "request_", "sentence"),
    [
        ("polaris", JobRequest(1), "Site polaris refuses jobs without an account; give --account."),
        ("local", JobRequest(2), "--nodes is 2, but site local is one machine; the nearest legal value is 1."),
        ("local", JobRequest(1, account="a"), "--account is a, but site local has none; leave it out."),
        ("local", JobRequest(1, queue="q"), "--queue is q, but site local has none; leave it out."),
        ("slurm", JobRequest(1, hostfile=Path("h")), "--hostfile is h, but site slurm takes no such file; leave it out."),
        ("hostfile", JobRequest(1, hostfile=Path("nowhere")), "--hostfile nowhere cannot be read: No such file or directory."),
        (
            "perlmutter-gpu",
            JobRequest(1, ranks_per_node=5),
            "--ranks-per-node is 5, but a node of site perlmutter-gpu takes",
        ),
        (
            "slurm",
            JobRequest(1, 8, 9),
            "--cores-per-rank is 9, but 8 ranks share the 64 cores of a node of site slurm",
        ),
        ("slurm", JobRequest(1, time="soon"), "--time is 'soon', but must be a time such as 06:00:00 or 5h30m."),
        ("slurm", JobRequest(1, time="0"), "--time is '0', but must be a time"),
        ("slurm", JobRequest(1, stage=Path("nowhere.tar")), "--stage nowhere.tar is no file; give a tar of the environment."),
        ("local", JobRequest(1, stage=Path("x")), "--stage is x, but site local names no disk of its nodes; leave it out."),
    ],
)
def test_a_request_that_does_not_fit_is_one_sentence(site: str, request_: JobRequest, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        _plan(site, request_)
    assert sentence in str(error.value)
    assert str(error.value).endswith(".")


def test_no_environment_is_staged_beside_an_image(tmp_path: Path) -> None:
    (tmp_path / "environment.tar").touch()
    site, request = profile_files.read("slurm", {}), JobRequest(1, stage=tmp_path / "environment.tar")
    assert site.profile.stages
    assert plan_job(site, request, FILES).stage == str(request.stage)
    profile = site.profile.model_copy(update={"container": ContainerFields(image="$HOME/hpctrain.sif")})
    assert not profile.stages
    with pytest.raises(ConfigError, match=r"but site slurm runs Python in an image; leave it out\.$"):
        plan_job(replace(site, profile=profile), request, FILES)


def test_a_hostfile_must_name_enough_hosts(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a:4\n# b\n\nb  # two\na:2\n")
    assert _plan("hostfile", JobRequest(2, hostfile=hosts)).hostfile == str(hosts)
    with pytest.raises(ConfigError, match=r"--nodes is 3, but .*hosts names 2 hosts; the nearest legal value is 2."):
        _plan("hostfile", JobRequest(3, hostfile=hosts))


@pytest.mark.parametrize(
    ("given_time", "shown", "seconds"),
    [
        ("5h30m", "05:30:00", 19_800),
        ("36:00:00", "36:00:00", 129_600),
        ("90m", "01:30:00", 5_400),
        ("90:00", "01:30:00", 5_400),
        ("1-12", "36:00:00", 129_600),
        ("1-12:30", "36:30:00", 131_400),
    ],
)
def test_times_are_written_as_schedulers_read_them(given_time: str, shown: str, seconds: int) -> None:
    job = _plan("slurm", JobRequest(1, time=given_time))
    assert (job.time, job.time_seconds) == (shown, seconds)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("time", ["90", "1", "3600", "1.5", "1e3", " 90 "])
def test_a_time_without_a_unit_is_refused_on_every_site(site: str, time: str) -> None:
    with pytest.raises(ConfigError, match=r"a number alone means minutes .* write .*m or .*s, or a time such as 1h30m"):
        _plan(site, JobRequest(1, account=_account(site), time=time))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize(
    "time", ["1-24", "1-", "-12", "1:60", "1:75:00", "1-12:60", "inf", "nan", "1e999", "9" * 400 + "h", "1h30"]
)
def test_what_is_no_time_is_refused_on_every_site(site: str, time: str) -> None:
    with pytest.raises(ConfigError, match=r"^--time is .*, but must be a time such as 06:00:00 or 5h30m\.$"):
        _plan(site, JobRequest(1, account=_account(site), time=time))


@pytest.mark.parametrize("site", SITES)
def test_a_limit_leaves_time_before_the_checkpoint_at_its_end(site: str) -> None:
    profile = profile_files.read(site, {}).profile
    least = profile.signal_seconds if profile.scheduler == "slurm" else 60
    for seconds in (1, least):
        with pytest.raises(ConfigError, match=rf"saves? a checkpoint {least} s before the end; the nearest legal value is 00:0"):
            _plan(site, JobRequest(1, account=_account(site), time=f"{seconds}s"))
    assert _plan(site, JobRequest(1, account=_account(site), time=f"{least + 1}s")).time_seconds == least + 1


def _account(site: str) -> str | None:
    return None if profile_files.read(site, {}).profile.account is None else "mine"


def test_account_and_queue_become_the_sites_options() -> None:
    options = [option for option, _ in _plan("polaris", JobRequest(1, account="mine", queue="debug")).directives]
    assert options[:2] == ["-A mine", "-q debug"]
    options = [option for option, _ in _plan("perlmutter-cpu", JobRequest(1, account="mine")).directives]
    assert options[:3] == ["--account=mine", "--qos=regular", "--constraint=cpu"]


@pytest.mark.parametrize(
    ("site", "time", "own_limit", "limits"),
    [
        ("slurm", "1h", False, False),  # sends a signal
        ("polaris", None, False, True),
        ("polaris", None, True, False),
        ("local", None, False, False),
        ("local", "1h", False, True),
    ],
)
def test_the_training_is_told_of_a_time_that_nobody_signals(site: str, time: str | None, own_limit: bool, limits: bool) -> None:
    account = "a" if site == "polaris" else None
    assert _plan(site, JobRequest(1, time=time, account=account), own_limit=own_limit).limits == limits


@pytest.mark.parametrize("site", SITES)
def test_gpus_that_cannot_be_used_are_refused(site: str) -> None:
    found = profile_files.read(site, {})
    for backend in ("auto", "onednn", "numpy"):
        check_backend(found, backend, JobRequest(2))
    gpu = found.profile.gpu
    if gpu is None or gpu.vendor == "amd":
        with pytest.raises(ConfigError, match="no GPUs" if gpu is None else "GPUs of AMD"):
            check_backend(found, "cuda", JobRequest(1, 1))
        return
    check_backend(found, "cuda", JobRequest(1, 1))
    gpus = len(gpu.order)
    check_backend(found, "cuda", JobRequest(2, gpus))
    fewer = gpu.model_copy(update={"order": gpu.order[:-1]})
    few = replace(found, profile=found.profile.model_copy(update={"gpu": fewer}))
    with pytest.raises(ConfigError, match=rf"has {gpus - 1} GPUs for {gpus} ranks; give --ranks-per-node {gpus - 1}, or"):
        check_backend(few, "cuda", JobRequest(2, gpus))
