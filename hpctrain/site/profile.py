"""Site profiles: the facts about a machine that a job script needs, as frozen data, each setting with its reason and source.

Profiles are YAML files, installed with hpctrain or written by users, and may extend each other. `read_site` finds a profile by
name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from hpctrain.config.values import Integer, Section, one_line
from hpctrain.core.answers import config_error, schema_faults
from hpctrain.core.errors import ConfigError
from hpctrain.core.files import TEXT_BYTES, read_text, user_directory
from hpctrain.core.text import choices
from hpctrain.core.yaml_source import KeyPath, Source, read_yaml

Scheduler = Literal["slurm", "pbs", "hostfile", "local"]

# A variable such as $USER or ${TMPDIR:-/tmp}. Other expansions of a shell can run commands.
_EXPANSION = r"\$\w+|\$\{[A-Za-z_]\w*(?::?-(?:[^$\"`\\{}]|\$\w+)*)?\}"
_QUOTED = re.compile(rf"(?!~)(?:[^$\"`\\]|{_EXPANSION})*", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def _quotable(text: str) -> str:
    if not _QUOTED.fullmatch(text):
        raise PydanticCustomError(
            "quoted_type",
            "must be text without quotes, backticks, backslashes, a leading ~, and $ except in variables such as $USER or "
            "${TMPDIR:-/tmp}",
        )
    return text


def _identifier(text: str) -> str:
    if not _IDENTIFIER.fullmatch(text):
        raise PydanticCustomError("identifier_type", "must be the name of a variable: letters, digits and underscores")
    return text


def _time(text: str) -> str:
    if not re.fullmatch(r"(\d+-)?\d{1,3}:\d\d:\d\d", text, re.ASCII):
        raise PydanticCustomError("time_type", "must be a time such as 06:00:00")
    return text


#: text in one line of a script
Line = Annotated[str, StringConstraints(min_length=1), AfterValidator(one_line)]
#: text for double quotes in a shell: variables such as $USER are expanded, ~ is not, and no command runs
Quoted = Annotated[str, AfterValidator(one_line), AfterValidator(_quotable)]
Identifier = Annotated[str, AfterValidator(_identifier)]
Time = Annotated[str, AfterValidator(_time)]

UNKNOWN_SOURCE = "not stated"


class Sourced(Section):
    """Settings with the public documentation that they come from."""

    source: Line = Field(
        default=UNKNOWN_SOURCE, description='URL of the guide with this setting, or "unverified" and the reason for the value.'
    )


class NodeFields(Sourced):
    """The cores of a node."""

    cores: Integer = Field(ge=1, description="Number of physical cores of a node that jobs may use.")
    cpus_per_core: Integer = Field(default=1, ge=1, description="Number of CPUs per core, as the scheduler counts.")
    ranks: Integer = Field(ge=1, description="Default number of ranks per node.")
    most_ranks: Integer | None = Field(default=None, ge=1, description="Maximum number of ranks per node; null: its cores.")

    @model_validator(mode="after")
    def _ranks_fit(self) -> NodeFields:
        if self.ranks > self.limit:
            raise PydanticCustomError(
                "ranks", "must have at most {limit} ranks, not {ranks}", {"limit": self.limit, "ranks": self.ranks}
            )
        return self

    @property
    def limit(self) -> int:
        """Maximum number of ranks per node."""
        return self.cores if self.most_ranks is None else min(self.cores, self.most_ranks)


class QueueFields(Sourced):
    """The queue of jobs; for some schedulers, a partition or a quality of service."""

    option: Line = Field(description="Option that names the queue, such as --partition.")
    value: Line | None = Field(default=None, description="Default queue; null leaves it to the scheduler.")


class AccountFields(Sourced):
    """The account to charge."""

    option: Line = Field(description="Option that names the account, such as --account.")
    needed: bool = Field(default=False, description="Whether the site refuses jobs without an account.")


class ChunkFields(Sourced):
    """The kind of node, as a chunk of PBS's select option."""

    value: Line = Field(description="Text of a chunk after -l select=NODES:, such as system=polaris.")


class DirectiveFields(Sourced):
    """An option of the scheduler at the head of the script."""

    why: Line = Field(description="Reason, printed as a comment in the script.")


class LaunchFields(Sourced):
    """Options for starting ranks."""

    options: tuple[Line, ...] = Field(default=(), description="List of options of srun or mpiexec, such as those for binding.")
    mpi: Line | None = Field(default=None, description="Value of srun's --mpi; null keeps the site's default.")


class VariableFields(Sourced):
    """An environment variable of all ranks."""

    value: Quoted = Field(description="Value; variables such as $USER are expanded when the job runs.")
    why: Line = Field(description="Reason, printed as a comment in the script.")


class SetupFields(Sourced):
    """A command that sets up the job's shell."""

    command: Line = Field(description="Command, such as module load cray-mpich.")
    why: Line = Field(description="Reason, printed as a comment in the script.")


class GpuFields(Sourced):
    """The GPU that each rank of a node uses, selected before Python starts."""

    vendor: Literal["nvidia", "amd"] = Field(description="Maker of the GPUs.")
    variable: Identifier = Field(description="Environment variable that selects the GPU of a rank.")
    order: tuple[Integer, ...] = Field(
        min_length=1, description="List of GPUs by local rank: first the GPU near the cores of the node's first rank."
    )


class ScratchFields(Sourced):
    """The local disks of the nodes."""

    directory: Quoted = Field(min_length=1, description="Directory on the local disk of a node, or in its memory.")


class ContainerFields(Sourced):
    """A container image in which Python runs. The launcher runs outside and starts a container for each rank."""

    image: Quoted = Field(min_length=1, description="Path of the image, such as $HOME/hpctrain.sif.")
    command: tuple[Line, ...] = Field(
        default=("apptainer", "exec"),
        min_length=1,
        description="Command before the image, as a list of words, with options such as --bind.",
    )


class SiteProfile(Section):
    """A machine on which jobs run, and the way to start them."""

    description: Line = Field(description="Description of the machine and its nodes.")
    tested: Line = Field(description="Machines on which the rendered script has been run.")
    scheduler: Scheduler = Field(description="Scheduler that runs the job.")
    guide: Line = Field(default=UNKNOWN_SOURCE, description="URL of the site's guide to running jobs.")
    time: Time = Field(default="01:00:00", description="Default time limit, as HH:MM:SS.")
    signal_seconds: Integer = Field(
        default=120, ge=1, description="Time before the time limit at which ranks receive a signal, in seconds."
    )
    restarts: Integer = Field(default=20, ge=0, description="Maximum number of times that a stopped job is requeued.")
    node: NodeFields = Field(description="Cores of a node.")
    queue: QueueFields | None = Field(default=None, description="Queue.")
    account: AccountFields | None = Field(default=None, description="Account.")
    chunk: ChunkFields | None = Field(default=None, description="Kind of node, for PBS.")
    directives: dict[Line, DirectiveFields] = Field(default={}, description="Options of the scheduler, such as --constraint=cpu.")
    launch: LaunchFields = Field(default=LaunchFields(), description="Options of srun or mpiexec.")
    setup: tuple[SetupFields, ...] = Field(default=(), description="List of commands that run before all others.")
    environment: dict[Identifier, VariableFields] = Field(default={}, description="Environment variables by name.")
    gpu: GpuFields | None = Field(default=None, description="Selection of GPUs; null without GPUs.")
    container: ContainerFields | None = Field(default=None, description="Container in which Python runs; null: none.")
    scratch: ScratchFields | None = Field(default=None, description="Node-local disk to unpack an environment on.")

    @property
    def stages(self) -> bool:
        """Whether an environment can be unpacked on the nodes, which is not possible with a container."""
        return self.scratch is not None and self.container is None


# Link to the folder at the top of the repository; a wheel contains the files themselves.
INSTALLED = Path(__file__).parents[1] / "examples" / "jobs" / "sites"
_EXTENDS = "extends"


@dataclass(frozen=True)
class Site:
    """A profile with its name and file."""

    name: str
    path: Path
    profile: SiteProfile

    @property
    def is_installed(self) -> bool:
        """Whether the profile was installed with hpctrain."""
        return self.path.parent == INSTALLED


def own_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of the user's own profiles, hpctrain/sites in $XDG_CONFIG_HOME or ~/.config; None without a home."""
    directory = user_directory("XDG_CONFIG_HOME", ".config", environ)
    return None if directory is None else directory / "sites"


def where_own(environ: Mapping[str, str] = os.environ) -> str:
    """Return the directory of the user's own profiles, for messages."""
    directory = own_directory(environ)
    return "$XDG_CONFIG_HOME/hpctrain/sites" if directory is None else str(directory)


def profile_paths(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return the file of each profile by name, in alphabetical order. A user's own profile hides an installed one."""
    folders = [folder for folder in (INSTALLED, own_directory(environ)) if folder is not None]
    by_name = {path.stem: path for folder in folders for path in folder.glob("*.yaml")}
    return {name: by_name[name] for name in sorted(by_name)}


def read_site(name: str, environ: Mapping[str, str] = os.environ) -> Site:
    """Return the profile of a name, merged with the profiles that it extends.

    Raises:
        ConfigError: there is no such profile, or it has faults; one sentence for each, with file and line.
    """
    known = profile_paths(environ)
    if name not in known:
        raise ConfigError(
            f"There is no site {name!r}; {choices(name, known)}. For another machine, write a profile "
            f'{where_own(environ)}/NAME.yaml (docs/clusters.md, "A site of your own").'
        )
    data, places = _extended(known[name], environ, ())
    source = Source(str(known[name]), places)
    try:
        return Site(name, known[name], SiteProfile.model_validate(data))
    except ValidationError as error:
        faults = schema_faults(error, SiteProfile)
    raise config_error(faults, source)


def _extended(path: Path, environ: Mapping[str, str], below: tuple[Path, ...]) -> tuple[Any, dict[KeyPath, str]]:
    """Return the data of a file merged over the profile that it extends, and the positions of both; files `below` extend it."""
    data, places = _data(path)
    if not isinstance(data, dict) or _EXTENDS not in data:
        return data, places
    base = data.pop(_EXTENDS)
    # A profile that extends its own name extends the installed profile that it hides.
    known = {**profile_paths(environ), **({path.stem: INSTALLED / path.name} if path.parent != INSTALLED else {})}
    known = {name: file for name, file in known.items() if file != path and file.exists()}
    place = places.get((_EXTENDS,), str(path))
    if not isinstance(base, str) or base not in known:
        raise ConfigError(f"{place}: extends is {base!r}, but must be the name of a site; {choices(str(base), known)}.")
    if known[base] in below:
        raise ConfigError(f"{place}: extends is {base}, which extends this profile itself; remove one of the two.")
    base_data, base_places = _extended(known[base], environ, (*below, path))
    return _merged(base_data, data), {**base_places, **places}


def _data(path: Path) -> tuple[Any, dict[KeyPath, str]]:
    try:
        return read_yaml(read_text(path, TEXT_BYTES), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: Byte {error.start} is not valid UTF-8; save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path}: Cannot read the site profile: {error.strerror}.") from None


def _merged(base: Any, over: Any) -> Any:
    """Merge mappings key by key. null removes an entry; any other value replaces the old one."""
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    merged = {**base, **{key: _merged(base.get(key), value) for key, value in over.items()}}
    return {key: value for key, value in merged.items() if value is not None or key not in base}
