"""Site profiles and jobs that fit them; what does not fit is refused in one sentence."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from hpctrain.core.errors import ConfigError
from hpctrain.site import profile as profile_files
from hpctrain.site.job import JobFiles, JobRequest, SiteJob, check_backend, plan_job
from hpctrain.site.profile import UNKNOWN_SOURCE, ContainerFields, NodeFields, Sourced
from tests.support.job_scripts import JOBS, SITES


def _sourced(value: Any) -> Iterator[Sourced]:
    """All sections that name a source."""
    if isinstance(value, Sourced):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    fields = (getattr(value, name) for name in type(value).model_fields) if isinstance(value, BaseModel) else inner
    for item in fields:
        yield from _sourced(item)


@pytest.mark.parametrize("site", SITES)
def test_every_setting_of_a_shipped_profile_names_its_source(site: str) -> None:
    profile = profile_files.read_site(site, {}).profile
    settings = [section for section in _sourced(profile) if section.model_dump(exclude={"source"}, exclude_defaults=True)]
    assert settings
    for section in settings:
        assert section.source != UNKNOWN_SOURCE, section
        assert section.source.startswith(("https://", "github.com/", "unverified: ")), section.source
    assert profile.guide.startswith("https://")


@given(cores=st.integers(1, 300), most=st.none() | st.integers(1, 300), ranks=st.integers(1, 300))
def test_ranks_fit_a_node(cores: int, most: int | None, ranks: int) -> None:
    limit = cores if most is None else min(cores, most)
    if ranks <= limit:
        assert NodeFields(cores=cores, ranks=ranks, most_ranks=most).limit == limit
    else:
        with pytest.raises(ValidationError, match=f"must have at most {limit} ranks"):
            NodeFields(cores=cores, ranks=ranks, most_ranks=most)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The directory of a user's own profiles."""
    folder = tmp_path / "hpctrain" / "sites"
    folder.mkdir(parents=True)
    return folder


def _read(own: Path, name: str) -> profile_files.Site:
    return profile_files.read_site(name, _environ(own))


def _environ(own: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(own.parents[1])}


def test_shipped_profiles_are_the_repositorys() -> None:
    assert sorted(path.stem for path in (JOBS / "sites").glob("*.yaml")) == SITES
    wished = {"slurm", "perlmutter-cpu", "perlmutter-gpu", "frontier", "polaris", "lumi-c", "lumi-g", "hostfile", "local"}
    assert set(SITES) == wished
    for name, path in profile_files.profile_paths({"XDG_CONFIG_HOME": "/nowhere"}).items():
        assert path.samefile(JOBS / "sites" / f"{name}.yaml")
        assert profile_files.read_site(name, {"XDG_CONFIG_HOME": "/nowhere"}).is_installed


def test_the_configuration_directory_follows_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    usual = Path("/home/somebody/.config/hpctrain/sites")
    assert profile_files.own_directory() == usual
    assert profile_files.own_directory({"XDG_CONFIG_HOME": "relative", "HOME": "/home/somebody"}) == usual
    assert profile_files.own_directory({"XDG_CONFIG_HOME": "/x"}) == Path("/x/hpctrain/sites")


def test_a_profile_of_ones_own_extends_a_shipped_one(own: Path) -> None:
    (own / "ours.yaml").write_text(
        "extends: lumi-c\n"
        "node: {ranks: 32}\n"
        "queue: {value: small}\n"
        "directives: {--mem=0: null, --hint=nomultithread: {why: one thread a core}}\n"
        "scratch: null\n"
        "launch: {options: [--cpu-bind=threads]}\n"
    )
    ours, base = _read(own, "ours").profile, _read(own, "lumi-c").profile
    assert (ours.node.ranks, ours.node.cores) == (32, base.node.cores)
    assert ours.queue is not None
    assert (ours.queue.option, ours.queue.value) == ("--partition", "small")
    assert list(ours.directives) == ["--hint=nomultithread"]
    assert ours.scratch is None
    assert ours.launch.options == ("--cpu-bind=threads",)
    assert ours.environment == base.environment


def test_one_of_the_same_name_hides_the_shipped_one_and_may_extend_it(own: Path) -> None:
    (own / "slurm.yaml").write_text("extends: slurm\ndescription: ours\nnode: {cores: 96}\n")
    (own / "wide.yaml").write_text("extends: slurm\nnode: {ranks: 2}\n")
    site = _read(own, "slurm")
    assert (site.profile.description, site.profile.node.cores, site.is_installed) == ("ours", 96, False)
    assert _read(own, "wide").profile.node.cores == 96  # of ours, not of the shipped one


def test_profiles_that_extend_each_other_are_refused(own: Path) -> None:
    for one, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (own / f"{one}.yaml").write_text(f"extends: {other}\n")
    with pytest.raises(ConfigError, match=r"c.yaml:1: extends is a, which extends this profile itself; remove one of the two."):
        _read(own, "a")


def test_a_file_that_cannot_be_read_is_one_sentence(own: Path) -> None:
    (own / "bytes.yaml").write_bytes(b"name: \xff\n")
    (own / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"bytes.yaml: Byte 6 is not valid UTF-8"):
        _read(own, "bytes")
    with pytest.raises(ConfigError, match=r"folder.yaml: Cannot read the site profile: Is a directory\."):
        _read(own, "folder")


FILES = JobFiles("run", "runs/jobs/run.sbatch")


def _plan(site: str, request: JobRequest, *, own_limit: bool = False) -> SiteJob:
    return plan_job(profile_files.read_site(site, {}), request, FILES, own_limit=own_limit)


@given(site=st.sampled_from(["perlmutter-cpu", "lumi-c", "slurm"]), ranks=st.integers(1, 128))
def test_ranks_never_share_cores(site: str, ranks: int) -> None:
    node = profile_files.read_site(site, {}).profile.node
    request = JobRequest(3, ranks_per_node=ranks, account="a")
    if ranks > node.limit:
        with pytest.raises(ConfigError, match=f"must be at most {node.limit} on a node"):
            _plan(site, request)
        return
    job = _plan(site, request)
    assert (job.nodes, job.ranks) == (3, ranks)
    assert job.cpus % node.cpus_per_core == 0
    assert node.cpus_per_core <= job.cpus <= node.cores * node.cpus_per_core // ranks
    assert (job.cpus + node.cpus_per_core) * ranks > node.cores * node.cpus_per_core  # no core is left over for all


def test_no_environment_is_staged_with_an_image(tmp_path: Path) -> None:
    (tmp_path / "environment.tar").touch()
    site, request = profile_files.read_site("slurm", {}), JobRequest(1, stage=tmp_path / "environment.tar")
    assert site.profile.stages
    assert plan_job(site, request, FILES).stage == str(request.stage)
    profile = site.profile.model_copy(update={"container": ContainerFields(image="$HOME/hpctrain.sif")})
    assert not profile.stages
    with pytest.raises(ConfigError, match=r"but site slurm runs Python in a container; leave --stage out\.$"):
        plan_job(replace(site, profile=profile), request, FILES)


def test_a_hostfile_must_name_enough_hosts(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a:4\n# b\n\nb  # two\na:2\n")
    assert _plan("hostfile", JobRequest(2, hostfile=hosts)).hostfile == str(hosts)
    with pytest.raises(ConfigError, match=r"--nodes is 3, but must be at most 2, the number of hosts in .*hosts\."):
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
    with pytest.raises(ConfigError, match=r"schedulers differ .* write .*m or .*s, or a time such as 1h30m"):
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
    profile = profile_files.read_site(site, {}).profile
    least = profile.signal_seconds if profile.scheduler == "slurm" else 60
    for seconds in (1, least):
        with pytest.raises(ConfigError, match=rf"must be longer than {least} s"):
            _plan(site, JobRequest(1, account=_account(site), time=f"{seconds}s"))
    assert _plan(site, JobRequest(1, account=_account(site), time=f"{least + 1}s")).time_seconds == least + 1


def _account(site: str) -> str | None:
    return None if profile_files.read_site(site, {}).profile.account is None else "mine"


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
def test_the_training_receives_a_time_limit_without_a_signal(site: str, time: str | None, own_limit: bool, limits: bool) -> None:
    account = "a" if site == "polaris" else None
    assert _plan(site, JobRequest(1, time=time, account=account), own_limit=own_limit).limits == limits


@pytest.mark.parametrize("site", SITES)
def test_gpus_that_cannot_be_used_are_refused(site: str) -> None:
    found = profile_files.read_site(site, {})
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
    with pytest.raises(ConfigError, match=rf"has {gpus - 1} GPUs? for {gpus} ranks; give --ranks-per-node {gpus - 1}, or"):
        check_backend(few, "cuda", JobRequest(2, gpus))
