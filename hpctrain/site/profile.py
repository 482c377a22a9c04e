"""A site profile as frozen data: all that a job script must know of a machine, each setting with its reason and its source."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from hpctrain.config.values import Integer, Section, one_line

Scheduler = Literal["slurm", "pbs", "hostfile", "local"]

# A variable such as $USER or ${TMPDIR:-/tmp}. Other expansions of a shell can run commands.
_EXPANSION = r"\$\w+|\$\{[A-Za-z_]\w*(?::?-(?:[^$\"`\\{}]|\$\w+)*)?\}"
_QUOTED = re.compile(rf"(?!~)(?:[^$\"`\\]|{_EXPANSION})*", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def _quotable(text: str) -> str:
    if not _QUOTED.fullmatch(text):
        raise PydanticCustomError(
            "quoted_type",
            "must be text without quotes, backticks, backslashes, a ~ in front, and $ other than in variables such as $USER or "
            "${TMPDIR:-/tmp}",
        )
    return text


def _identifier(text: str) -> str:
    if not _IDENTIFIER.fullmatch(text):
        raise PydanticCustomError("identifier_type", "must be the name of a variable, of letters, digits and underscores")
    return text


#: text that stays in its line of a script
Line = Annotated[str, StringConstraints(min_length=1), AfterValidator(one_line)]
#: text within double quotes of a shell: variables such as $USER are expanded, no command is run, and ~ is not expanded
Quoted = Annotated[str, AfterValidator(one_line), AfterValidator(_quotable)]
Identifier = Annotated[str, AfterValidator(_identifier)]
Time = Annotated[str, StringConstraints(pattern=r"^(\d+-)?\d{1,3}:\d\d:\d\d$")]

NOT_SAID = "not said"


class Sourced(Section):
    """A setting, or several, with the public text that they follow."""

    source: Line = Field(
        default=NOT_SAID, description='Address of the guide that says so, or "unverified" and why it is set all the same.'
    )


class NodeFields(Sourced):
    """The cores of a node."""

    cores: Integer = Field(ge=1, description="Number of physical cores of a node that jobs may use.")
    cpus_per_core: Integer = Field(default=1, ge=1, description="Number of CPUs that the scheduler counts for a core.")
    ranks: Integer = Field(ge=1, description="Number of ranks on each node where nothing else is asked for.")
    most_ranks: Integer | None = Field(default=None, ge=1, description="Largest number of ranks on a node; null for its cores.")

    @model_validator(mode="after")
    def _ranks_fit(self) -> NodeFields:
        if self.ranks > self.limit:
            raise PydanticCustomError(
                "ranks", "must have ranks of at most {limit}; the nearest legal value is {limit}", {"limit": self.limit}
            )
        return self

    @property
    def limit(self) -> int:
        """The largest number of ranks on a node."""
        return self.cores if self.most_ranks is None else min(self.cores, self.most_ranks)


class QueueFields(Sourced):
    """The queue that jobs are put into; partition and quality of service are queues, too."""

    option: Line = Field(description="Option that names the queue, such as --partition.")
    value: Line | None = Field(
        default=None, description="Queue where nothing else is asked for; null leaves it to the scheduler."
    )


class AccountFields(Sourced):
    """The account that is charged."""

    option: Line = Field(description="Option that names the account, such as --account.")
    needed: bool = Field(default=False, description="Whether the site refuses jobs without an account.")


class ChunkFields(Sourced):
    """A node in the words of PBS."""

    value: Line = Field(description="Rest of a chunk behind -l select=NODES:, such as system=polaris.")


class DirectiveFields(Sourced):
    """An option of the scheduler in the head of the script."""

    why: Line = Field(description="Reason, for people who read the script.")


class LaunchFields(Sourced):
    """How ranks are started."""

    options: tuple[Line, ...] = Field(default=(), description="List of options of srun or mpiexec, binding among them.")
    mpi: Line | None = Field(default=None, description="Value of srun's --mpi; null leaves it as the site has set it.")


class VariableFields(Sourced):
    """An environment variable of all ranks."""

    value: Quoted = Field(description="Its value; variables such as $USER are filled in when the job runs.")
    why: Line = Field(description="Reason, for people who read the script.")


class SetupFields(Sourced):
    """A command that prepares the job's shell."""

    command: Line = Field(description="Command, such as module load cray-mpich.")
    why: Line = Field(description="Reason, for people who read the script.")


class GpuFields(Sourced):
    """The GPU that each rank of a node sees, chosen before Python starts."""

    vendor: Literal["nvidia", "amd"] = Field(description="Maker of the GPUs.")
    variable: Identifier = Field(description="Environment variable that names the GPU which a rank may see.")
    order: tuple[Integer, ...] = Field(
        min_length=1, description="List of GPUs: the one near the cores of the node's first rank first."
    )


class ScratchFields(Sourced):
    """The nodes' own disks."""

    directory: Quoted = Field(min_length=1, description="Directory on a node's own disk, or in its memory.")


class ContainerFields(Sourced):
    """An image in which Python runs. The launcher stays outside, and starts a container for each rank."""

    image: Quoted = Field(min_length=1, description="Path of the image, such as $HOME/hpctrain.sif.")
    command: tuple[Line, ...] = Field(
        default=("apptainer", "exec"), min_length=1, description="List of words before the image, with options such as --bind."
    )


class SiteProfile(Section):
    """A machine on which jobs are started, and how."""

    description: Line = Field(description="Words for people: the machine and its nodes.")
    tested: Line = Field(description="Where the rendered script has been run.")
    scheduler: Scheduler = Field(description="Program that takes the job.")
    guide: Line = Field(default=NOT_SAID, description="Address of the site's guide to running jobs.")
    time: Time = Field(default="01:00:00", description="Time limit where nothing else is asked for, as HH:MM:SS.")
    signal_seconds: Integer = Field(
        default=120, ge=1, description="Number of seconds before the time limit at which ranks are told."
    )
    restarts: Integer = Field(default=20, ge=0, description="Number of times that a job which was stopped is queued again.")
    node: NodeFields = Field(description="Cores of a node.")
    queue: QueueFields | None = Field(default=None, description="Queue.")
    account: AccountFields | None = Field(default=None, description="Account.")
    chunk: ChunkFields | None = Field(default=None, description="Kind of node, for PBS.")
    directives: dict[Line, DirectiveFields] = Field(default={}, description="Options of the scheduler, such as --constraint=cpu.")
    launch: LaunchFields = Field(default=LaunchFields(), description="Options of srun or mpiexec.")
    setup: tuple[SetupFields, ...] = Field(default=(), description="List of commands before all others.")
    environment: dict[Identifier, VariableFields] = Field(default={}, description="Environment variables by name.")
    gpu: GpuFields | None = Field(default=None, description="Choice of GPUs; null where there are none.")
    container: ContainerFields | None = Field(default=None, description="Image in which Python runs; null for none.")
    scratch: ScratchFields | None = Field(default=None, description="Node-local disk to unpack an environment on.")

    @property
    def stages(self) -> bool:
        """Whether an environment can be unpacked on the nodes, as one in an image cannot."""
        return self.scratch is not None and self.container is None
