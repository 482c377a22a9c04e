"""A job on a site: sizes, account and queue that were asked for, checked against its profile before anything is written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config.duration import is_bare_number, parse_duration
from hpctrain.core.errors import ConfigError
from hpctrain.core.files import read_text
from hpctrain.core.text import shortened
from hpctrain.site.profile_files import Site

#: that a look at the nodes may take before a training; it ends itself within a minute, if its launcher does not hang
DOCTOR_SECONDS = 80
#: time that a script without the scheduler's signal leaves for a training to end, see templates/forwarded.j2
_LEAST_SECONDS = 60
_HOSTFILE_BYTES = 1 << 24
_PLAIN = re.compile(r"(?!-)[\w@%+=:.,/~^-]+")


@dataclass(frozen=True)
class JobRequest:
    """The wishes for a job; None: as the site's profile has it.

    Attributes:
        nodes: number of nodes. ranks_per_node, cores_per_rank: their numbers; cores, not hardware threads.
        time: limit, as HH:MM:SS or 5h30m. account, queue: as the scheduler names them. hostfile: with a host on each line, for
            sites without a scheduler. stage: a tar of the environment to unpack on each node. restarts: how often a stopped job
            is requeued. doctor: whether to examine the nodes before the training.
    """

    nodes: int
    ranks_per_node: int | None = None
    cores_per_rank: int | None = None
    time: str | None = None
    account: str | None = None
    queue: str | None = None
    hostfile: Path | None = None
    stage: Path | None = None
    restarts: int | None = None
    doctor: bool = True


@dataclass(frozen=True)
class JobFiles:
    """Where a job's files lie, as its script names them, and what it trains.

    Attributes:
        name: of the job, as queues show it. script: the script's own path. logs: directory of its logs. log: the log itself;
            empty: as the scheduler names it. train: configuration and overrides; None: the script is given them.
        environment: directory of Python's environment; empty: python is on PATH.
    """

    name: str
    script: str
    logs: str = "."
    log: str = ""
    train: tuple[str, ...] | None = None
    environment: str = ""


@dataclass(frozen=True)
class SiteJob:
    """All that a template needs beside the profile.

    Attributes:
        ranks: on each node. cpus: of a rank, as the scheduler counts them. directives: (option, reason) of the scheduler.
        limits: True where the training is to be told of its time, because no signal comes before the end.
    """

    name: str
    script: str
    logs: str
    log: str
    train: tuple[str, ...] | None
    environment: str
    nodes: int
    ranks: int
    cpus: int
    time: str
    limits: bool
    directives: tuple[tuple[str, str], ...]
    hostfile: str
    stage: str
    restarts: int
    doctor_seconds: int

    @property
    def time_seconds(self) -> int:
        """The time limit in seconds."""
        return int(parse_duration(self.time))


def plan_job(site: Site, request: JobRequest, job_files: JobFiles, *, own_limit: bool = False) -> SiteJob:
    """The job that a request makes on a site.

    Args:
        own_limit: the configuration has a max_time of its own.

    Raises:
        ConfigError: the request does not fit the site; the sentence has the nearest legal value.
    """
    profile = site.profile
    batch = profile.scheduler in ("slurm", "pbs")
    limits = not own_limit and (profile.scheduler == "pbs" or (not batch and request.time is not None))
    _check_nodes(site, request)
    ranks = _ranks(site, request)
    cores = _cores(site, request, ranks)
    return SiteJob(
        **vars(job_files),
        nodes=request.nodes,
        ranks=ranks,
        cpus=cores * profile.node.cpus_per_core,
        time=_time(site, request.time, least=profile.signal_seconds if profile.scheduler == "slurm" else _LEAST_SECONDS * limits),
        limits=limits,
        directives=tuple(_directives(site, request)),
        hostfile=str(request.hostfile or "hosts"),
        stage=_stage(site, request),
        restarts=profile.restarts if request.restarts is None else request.restarts,
        doctor_seconds=DOCTOR_SECONDS if request.doctor else 0,
    )


def _time(site: Site, asked: str | None, *, least: int) -> str:
    """Return a time limit as HH:MM:SS, which all schedulers read.

    Args:
        least: seconds before the end at which ranks are signalled; the limit must be longer.

    Raises:
        ConfigError: not a time, a time without a unit, or one that is too short.
    """
    label, text = (f"time of site {site.name}", site.profile.time) if asked is None else ("--time", asked)
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < math.inf:
        raise ConfigError(f"{label} is {text!r}, but must be a time such as 06:00:00 or 5h30m.")
    if is_bare_number(text):
        raise ConfigError(
            f"{label} is {text!r}, but a number alone means minutes to some schedulers and seconds to others; write "
            f"{text.strip()}m or {text.strip()}s, or a time such as 1h30m or 01:30:00."
        )
    if seconds <= least:
        raise ConfigError(
            f"{label} is {text!r}, which is {_clock(int(seconds))}, but a training is to save a checkpoint {least} s before the "
            f"end; the nearest legal value is {_clock(least + 1)}."
        )
    return _clock(int(seconds))


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _stage(site: Site, request: JobRequest) -> str:
    """The tar to unpack on each node."""
    if request.stage is None:
        return ""
    if site.profile.container is not None:
        raise ConfigError(f"--stage is {request.stage}, but site {site.name} runs Python in an image; leave it out.")
    if site.profile.scratch is None:
        raise ConfigError(f"--stage is {request.stage}, but site {site.name} names no disk of its nodes; leave it out.")
    if not request.stage.is_file():
        raise ConfigError(f"--stage {request.stage} is no file; give a tar of the environment.")
    return str(request.stage)


def _check_nodes(site: Site, request: JobRequest) -> None:
    """The nodes are there, as far as that is known here."""
    scheduler = site.profile.scheduler
    if scheduler == "local" and request.nodes != 1:
        raise ConfigError(f"--nodes is {request.nodes}, but site {site.name} is one machine; the nearest legal value is 1.")
    if scheduler != "hostfile":
        if request.hostfile is not None:
            raise ConfigError(f"--hostfile is {request.hostfile}, but site {site.name} takes no such file; leave it out.")
        return
    if request.hostfile is None:
        return
    lines = (line.partition("#")[0].strip() for line in _read(request.hostfile).splitlines())
    hosts = len({line.partition(":")[0] for line in lines if line})
    if hosts < request.nodes:
        raise ConfigError(
            f"--nodes is {request.nodes}, but {request.hostfile} names {hosts} hosts; the nearest legal value is {hosts}."
        )


def _read(path: Path) -> str:
    try:
        return read_text(path, _HOSTFILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}.") from None


def _ranks(site: Site, request: JobRequest) -> int:
    node, asked = site.profile.node, request.ranks_per_node
    if asked is not None and asked > node.limit:
        raise ConfigError(
            f"--ranks-per-node is {asked}, but a node of site {site.name} takes at most {node.limit}; "
            f"the nearest legal value is {node.limit}."
        )
    return node.ranks if asked is None else asked


def _cores(site: Site, request: JobRequest, ranks: int) -> int:
    most = max(1, site.profile.node.cores // ranks)
    asked = request.cores_per_rank
    if asked is not None and asked > most:
        raise ConfigError(
            f"--cores-per-rank is {asked}, but {ranks} ranks share the {site.profile.node.cores} cores of a node of site "
            f"{site.name}; the nearest legal value is {most}."
        )
    return most if asked is None else asked


def _directives(site: Site, request: JobRequest) -> Sequence[tuple[str, str]]:
    """Account, queue and the profile's own options; what was asked for and no option names is refused."""
    profile = site.profile
    found = []
    for word, field, asked in (("--account", profile.account, request.account), ("--queue", profile.queue, request.queue)):
        if asked is not None and field is None:
            raise ConfigError(f"{word} is {asked}, but site {site.name} has none; leave it out.")
    if profile.account is not None and profile.account.needed and request.account is None:
        raise ConfigError(f"Site {site.name} refuses jobs without an account; give --account.")
    if profile.account is not None and request.account is not None:
        found.append((_with_value(profile.account.option, _word("--account", request.account)), ""))
    queue = profile.queue.value if profile.queue is not None else None
    if request.queue is not None:
        queue = _word("--queue", request.queue)
    if profile.queue is not None and queue is not None:
        found.append((_with_value(profile.queue.option, queue), ""))
    return [*found, *((option, directive.why) for option, directive in profile.directives.items())]


def _word(option: str, text: str) -> str:
    """Return an account or a queue if it is safe in a scheduler's line of options.

    Raises:
        ConfigError: it has blanks, quotes or other characters that would change the line.
    """
    if not _PLAIN.fullmatch(text):
        raise ConfigError(
            f"{option} is {shortened(text)}, but must have letters, digits and @ % + = : . , / ~ ^ _ - alone, and no - in front."
        )
    return text


def _with_value(option: str, value: str) -> str:
    return f"{option}={value}" if option.startswith("--") else f"{option} {value}"


def check_backend(site: Site, backend: str, request: JobRequest) -> None:
    """Refuse a job on GPUs that the site does not have.

    Raises:
        ConfigError: the sentence says which.
    """
    gpu = site.profile.gpu
    if backend != "cuda":
        return
    if gpu is None or gpu.vendor != "nvidia":
        has = "no GPUs" if gpu is None else f"GPUs of {gpu.vendor.upper()}"
        raise ConfigError(f"backend is cuda, which computes on NVIDIA's GPUs, and site {site.name} has {has}; set it to onednn.")
    ranks = _ranks(site, request)
    if ranks > len(gpu.order):
        raise ConfigError(
            f"backend is cuda, which gives each rank a GPU of its own, and a node of site {site.name} has {len(gpu.order)} GPUs "
            f"for {ranks} ranks; give --ranks-per-node {len(gpu.order)}, or set backend to onednn."
        )
