"""Plan a job on a site, render its script, and submit it.

The request (sizes, account, queue) is checked against the site's profile before anything is written. The script is rendered from
templates, the profile and the job. It is written to the output directory and passed to the scheduler; without a scheduler it is
started in the background.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpctrain.config.values import is_bare_number, parse_duration
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.core.files import nearest_file, read_text
from hpctrain.core.text import counted, escaped, forbidden, shell_word, shortened
from hpctrain.site.profile import Site
from hpctrain.storage.atomic_write import write_text

#: time limit of the doctor before a training, in case its launcher hangs; usually it ends within a minute
DOCTOR_SECONDS = 80
#: time before the limit at which a script without a scheduler's signal stops a training; see templates/forwarded.j2
_LEAST_SECONDS = 60
_HOSTFILE_BYTES = 1 << 24
_PLAIN = re.compile(r"(?!-)[\w@%+=:.,/~^-]+")


@dataclass(frozen=True)
class JobRequest:
    """The job that a user requests; None selects the default of the site's profile.

    Attributes:
        cores_per_rank: number of physical cores per rank, not hardware threads.
        time: time limit, as HH:MM:SS or 5h30m.
        hostfile: file with one host per line, for sites without a scheduler.
        stage: tar archive of the environment to unpack on each node.
        restarts: maximum number of times that a stopped job is requeued.
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
    """Paths of a job's files as its script names them, and the arguments of its training.

    Attributes:
        logs, log: directory of the logs, and path of the log; empty: the scheduler's default.
        train: configuration and overrides; None: the script receives them as arguments.
        environment: directory of Python's environment; empty: python is on PATH.
    """

    name: str
    script: str
    logs: str = "."
    log: str = ""
    train: tuple[str, ...] | None = None
    environment: str = ""


@dataclass(frozen=True, kw_only=True)
class SiteJob(JobFiles):
    """The values that a template needs in addition to the profile.

    Attributes:
        ranks: number of ranks per node.
        cpus: number of CPUs per rank, as the scheduler counts.
        limits: whether the training gets its time limit as an option, because it receives no signal before the end.
        directives: options of the scheduler, as pairs (option, reason).
        stage: tar archive of the environment; empty: none.
        doctor_seconds: time limit of the doctor; 0: it does not run.
    """

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
        """Time limit in seconds."""
        return int(parse_duration(self.time))


def plan_job(site: Site, request: JobRequest, job_files: JobFiles, *, own_limit: bool = False) -> SiteJob:
    """Return the job that a request describes on a site.

    Args:
        own_limit: whether the configuration has its own max_time.

    Raises:
        ConfigError: the request does not fit the site.
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


def _time(site: Site, requested: str | None, *, least: int) -> str:
    """Return a time limit as HH:MM:SS, which all schedulers accept.

    Args:
        least: time before the limit at which ranks are signalled, in seconds; the limit must be longer.

    Raises:
        ConfigError: the text is not a time, lacks a unit, or the time is too short.
    """
    label, text = (f"time of site {site.name}", site.profile.time) if requested is None else ("--time", requested)
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < math.inf:
        raise ConfigError(f"{label} is {text!r}, but must be a time such as 06:00:00 or 5h30m.")
    if is_bare_number(text):
        raise ConfigError(
            f"{label} is {text!r}, but schedulers differ whether a number without a unit means minutes or seconds; write "
            f"{text.strip()}m or {text.strip()}s, or a time such as 1h30m or 01:30:00."
        )
    if seconds <= least:
        raise ConfigError(
            f"{label} is {text!r}, but must be longer than {least} s, because a training saves a checkpoint {least} s before the "
            "end."
        )
    return _clock(int(seconds))


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _stage(site: Site, request: JobRequest) -> str:
    """Return the tar archive to unpack on each node; empty if there is none."""
    if request.stage is None:
        return ""
    if site.profile.container is not None:
        raise ConfigError(f"--stage is {request.stage}, but site {site.name} runs Python in a container; leave --stage out.")
    if site.profile.scratch is None:
        raise ConfigError(f"--stage is {request.stage}, but site {site.name} has no node-local disk; leave --stage out.")
    if not request.stage.is_file():
        raise ConfigError(f"--stage is {request.stage}, but must be an existing file: a tar archive of the environment.")
    return str(request.stage)


def _check_nodes(site: Site, request: JobRequest) -> None:
    """Raise unless the requested nodes exist, as far as this can be checked here."""
    scheduler = site.profile.scheduler
    if scheduler == "local" and request.nodes != 1:
        raise ConfigError(f"--nodes is {request.nodes}, but must be 1, because site {site.name} is one machine.")
    if scheduler != "hostfile":
        if request.hostfile is not None:
            raise ConfigError(f"--hostfile is {request.hostfile}, but site {site.name} uses no hostfile; leave --hostfile out.")
        return
    if request.hostfile is None:
        return
    hosts = len(_hosts(request.hostfile))
    if hosts < request.nodes:
        raise ConfigError(f"--nodes is {request.nodes}, but must be at most {hosts}, the number of hosts in {request.hostfile}.")


def _hosts(path: Path) -> tuple[str, ...]:
    """Return the hosts of a hostfile in order, each once, without slots and comments.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = read_text(path, _HOSTFILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"Cannot read --hostfile {path}: {reason}; give a readable text file in UTF-8.") from None
    words = (line.partition("#")[0].replace(":", " ").split() for line in text.splitlines())
    return tuple(dict.fromkeys(host for host, *_ in filter(None, words)))


def _ranks(site: Site, request: JobRequest) -> int:
    node, requested = site.profile.node, request.ranks_per_node
    if requested is not None and requested > node.limit:
        raise ConfigError(f"--ranks-per-node is {requested}, but must be at most {node.limit} on a node of site {site.name}.")
    return node.ranks if requested is None else requested


def _cores(site: Site, request: JobRequest, ranks: int) -> int:
    most = max(1, site.profile.node.cores // ranks)
    requested = request.cores_per_rank
    if requested is not None and requested > most:
        raise ConfigError(
            f"--cores-per-rank is {requested}, but must be at most {most}, because a node of site {site.name} has "
            f"{counted(site.profile.node.cores, 'core')} for {counted(ranks, 'rank')}."
        )
    return most if requested is None else requested


def _directives(site: Site, request: JobRequest) -> Sequence[tuple[str, str]]:
    """Return pairs (option, reason) for the account, the queue and the profile's own options.

    Raises:
        ConfigError: the request has a value for an option that the site lacks, or lacks an account that the site requires.
    """
    profile = site.profile
    directives = []
    for word, field, requested in (("--account", profile.account, request.account), ("--queue", profile.queue, request.queue)):
        if requested is not None and field is None:
            raise ConfigError(f"{word} is {requested}, but site {site.name} has no such option; leave it out.")
    if profile.account is not None and profile.account.needed and request.account is None:
        raise ConfigError(f"Site {site.name} refuses jobs without an account; give --account.")
    if profile.account is not None and request.account is not None:
        directives.append((_with_value(profile.account.option, _word("--account", request.account)), ""))
    queue = profile.queue.value if profile.queue is not None else None
    if request.queue is not None:
        queue = _word("--queue", request.queue)
    if profile.queue is not None and queue is not None:
        directives.append((_with_value(profile.queue.option, queue), ""))
    return [*directives, *((option, directive.why) for option, directive in profile.directives.items())]


def _word(option: str, text: str) -> str:
    """Return an account or a queue if it is safe in a scheduler's line of options.

    Raises:
        ConfigError: the text has blanks, quotes or other characters that would change the line.
    """
    if not _PLAIN.fullmatch(text):
        raise ConfigError(
            f"{option} is {shortened(text)}, but may have only letters, digits and @ % + = : . , / ~ ^ _ -, and no leading -."
        )
    return text


def _with_value(option: str, value: str) -> str:
    return f"{option}={value}" if option.startswith("--") else f"{option} {value}"


def check_backend(site: Site, backend: str, request: JobRequest) -> None:
    """Raise if the job needs GPUs that the site does not have.

    Raises:
        ConfigError: the site has no NVIDIA GPUs, or a node has fewer GPUs than ranks.
    """
    gpu = site.profile.gpu
    if backend != "cuda":
        return
    if gpu is None or gpu.vendor != "nvidia":
        has = "no GPUs" if gpu is None else f"GPUs of {gpu.vendor.upper()}"
        raise ConfigError(f"backend is cuda, which needs NVIDIA GPUs, but site {site.name} has {has}; set it to onednn.")
    ranks = _ranks(site, request)
    if ranks > len(gpu.order):
        raise ConfigError(
            f"backend is cuda, which needs one GPU per rank, but a node of site {site.name} has {counted(len(gpu.order), 'GPU')} "
            f"for {ranks} ranks; give --ranks-per-node {len(gpu.order)}, or set backend to onednn."
        )


_TEMPLATES = {"slurm": "slurm.j2", "pbs": "pbs.j2", "hostfile": "mpiexec.j2", "local": "mpiexec.j2"}
#: suffix of a script's file name
ENDINGS = {"slurm": ".sbatch", "pbs": ".pbs", "hostfile": ".sh", "local": ".sh"}
_COMMENT_AT = 32
_COLUMNS = 130


def submission_notes(site: Site, files: Sequence[Path]) -> Iterator[str]:
    """Yield a note for each reason why a job may fail after it has waited in the queue.

    Args:
        files: files and directories that the training opens.
    """
    for path in files:
        if not path.exists():
            advice = nearest_file(path) or "; the job fails unless it exists on the nodes when it starts"
            yield f"{path} does not exist on this host{advice}."
    if site.profile.scheduler == "slurm" and site.profile.launch.mpi is None and _is_installed("mpich"):
        yield (
            f"this environment has the wheel of MPICH, which srun starts only with --mpi=pmi2, and the site {site.name} sets no "
            f"launch.mpi; write a profile with `extends: {site.name}` and `launch: {{mpi: pmi2}}` (docs/clusters.md)."
        )


def _is_installed(distribution: str) -> bool:
    return any(importlib.metadata.distributions(name=distribution))


#: placeholder for the account in installed scripts
ACCOUNT = "PROJECT"


def render(site: Site, job: SiteJob) -> str:
    """Return the bash script, without trailing blanks and with a final newline.

    Raises:
        ConfigError: a text of the site or the job has a forbidden character, which may end or reverse a line.
    """
    for name, text in (("site", site.name), *_texts("", vars(job)), *_texts("profile.", site.profile.model_dump())):
        character = forbidden(text)
        if character is not None:
            raise ConfigError(f"{name} is {shortened(text)}, but must not have the character {character} in a job script.")
    template = _environment().get_template(_TEMPLATES[site.profile.scheduler])

    def line(setting: str, comment: str, edit: bool = True) -> str:
        """Return a setting with its comment after it, or above it if the line is too long. Settings to be edited are marked."""
        words = " ".join(word for word in ("<--" if edit and job.train is None else "", comment) if word)
        text = f"{setting:{_COMMENT_AT}}  # {words}" if words else setting
        return text if len(text) <= _COLUMNS else f"{_comment(words)}\n{setting}"

    account = ACCOUNT if site.profile.account is not None and site.profile.account.needed else ""
    # A user's profile may inherit or copy `tested` from an installed one, but only the installed one was tested.
    origin = f"tested {site.profile.tested}" if site.is_installed else "a profile of your own"
    text = template.render(site=site.name, origin=origin, profile=site.profile, job=job, account=account, line=line)
    return "\n".join(each.rstrip() for each in text.strip().split("\n")) + "\n"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hpctrain.site"),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"quote": shell_word, "directive": _directive, "comment": _comment}
    return environment


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for all texts inside a value, including keys."""
    if isinstance(value, str):
        yield name.removesuffix("."), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{name}{escaped(key)}", str(key)
            yield from _texts(f"{name}{escaped(key)}.", item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(name, item)


def _directive(text: str) -> str:
    """Return a text quoted as one word of an #SBATCH line. Slurm reads quotes like a shell, but removes backslashes in them.

    Raises:
        ConfigError: the text has a backslash, which in a path also disables Slurm's replacements such as %j.
    """
    if "\\" in text:
        raise ConfigError(f"output is {shortened(text)}, but Slurm removes backslashes; choose a directory without one.")
    return shell_word(text)


def _comment(text: str) -> str:
    """Return a text as comment lines of a script."""
    return "\n".join(
        textwrap.wrap(text, _COLUMNS, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False)
    )


_FOLDER = "jobs"
_SUBMIT_SECONDS = 120
_IN_BACKGROUND = 'setsid bash "$1" </dev/null >>"$2" 2>&1 & echo $!'
# Job number on a line of its own. Slurm may append the cluster's name; without --parsable, as in wrappers, it prints a sentence.
_JOB_NUMBER = re.compile(
    r"^\s*(?:Submitted batch job )?(\d+(?:\[\])?(?:\.[A-Za-z][\w.-]*)?)(?:;\S*)?(?: on cluster \S+)?\s*$", re.MULTILINE
)
_COMMANDS = {"slurm": ("sbatch", "--parsable"), "pbs": ("qsub",)}


@dataclass(frozen=True)
class Submission:
    """An accepted job.

    Attributes:
        number: number of the job, or ID of the process.
        lines: instructions for following and stopping the job.
    """

    number: str
    lines: tuple[str, ...]
    script: str


def job_files(site: Site, name: str, output: Path, train: Sequence[str]) -> JobFiles:
    """Return the paths of a job's files: in jobs/ below `output`, named after the run and the time in UTC."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("-.") or "run"
    logs, ending = output / _FOLDER, ENDINGS[site.profile.scheduler]
    stem = f"{plain}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    log = str(logs / f"{stem}.log")
    if site.profile.scheduler == "slurm":  # %j: the job number, which stays when the job is requeued
        log = f"{str(logs).replace('%', '%%')}/{stem}-%j.log"
    return JobFiles(plain, str(logs / f"{stem}{ending}"), str(logs), log, tuple(train), _python_environment())


def _python_environment() -> str:
    """Return the directory of this Python's virtual or conda environment; empty for the system's Python."""
    isolated = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()
    return sys.prefix if isolated else ""


def submit(site: Site, job: SiteJob) -> Submission:
    """Write the script and submit it.

    Raises:
        LaunchError: the scheduler's command is missing, does not answer, or rejects the job.
        OSError: the script cannot be written.
    """
    job = _reserved(job)
    try:
        write_text(Path(job.script), render(site, job))
    except BaseException:
        Path(job.script).unlink(missing_ok=True)
        raise
    command = _COMMANDS.get(site.profile.scheduler)
    if command is None:
        return _started(job)
    number = _number([*command, job.script])
    return Submission(number, _following(site, job, number), job.script)


def _reserved(job: SiteJob) -> SiteJob:
    """Return the job with unique paths of script and log, even if another job is submitted in the same second.

    The call creates the script as an empty file, which reserves its name.
    """
    script = Path(job.script)
    script.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        stem = script.stem if number == 1 else f"{script.stem}-{number}"
        named = script.with_name(f"{stem}{script.suffix}")
        with contextlib.suppress(FileExistsError):
            os.close(os.open(named, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            log = Path(job.log).with_name(Path(job.log).name.replace(script.stem, stem, 1))
            return replace(job, script=str(named), log=str(log))
    raise AssertionError("unreachable")


def _number(command: Sequence[str]) -> str:
    """Submit a job; return the number that the scheduler assigns to it."""
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=_SUBMIT_SECONDS, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} is not on PATH; submit on a login node of the site, or print the script with --dry-run."
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{command[0]} did not answer within {_SUBMIT_SECONDS} s; check whether it has accepted {command[-1]}."
        ) from None
    if done.returncode:
        first, *others = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        rest = "".join(f"\n  {line.strip()}" for line in others if line.strip())
        raise LaunchError(f"{command[0]} has rejected {command[-1]}: {first.strip().rstrip('.')}.{rest}")
    return str((_JOB_NUMBER.findall(done.stdout) or [done.stdout.strip()])[-1])  # a site may print a banner first


def _following(site: Site, job: SiteJob, number: str) -> tuple[str, ...]:
    log, number = job.log, shell_word(number)
    if site.profile.scheduler == "pbs":
        follow = f"qstat {number}"
        stop = f"touch {shell_word(f'{job.logs}/no-restart')}; qsig -s USR1 {number}"
    else:
        log = re.sub("%[j%]", lambda match: number if match[0] == "%j" else "%", log)
        follow = f"squeue --jobs={number}"
        stop = f"scontrol update JobId={number} Requeue=0; scancel --signal=USR1 {number}"
    following = ("follow it:", f"  {follow}", f"  tail -F {shell_word(log)}")
    return (*following, "stop it with a checkpoint, without a restart:", f"  {stop}")


def _started(job: SiteJob) -> Submission:
    """Start the script in a new session, so that it outlives this process and its terminal."""
    start = ["bash", "-c", _IN_BACKGROUND, "start", job.script, job.log]
    done = subprocess.run(start, stdout=subprocess.PIPE, errors="replace", timeout=_SUBMIT_SECONDS, check=True)
    number = done.stdout.split()[-1]
    lines = ("follow it:", f"  tail -F {shell_word(job.log)}", "stop it with a checkpoint:", f"  kill -USR1 {number}")
    return Submission(number, lines, job.script)
