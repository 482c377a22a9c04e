"""Stand-ins for the commands of a site: they write down how they were called, and start two ranks where a launcher would.

srun and mpiexec leave their options out and run the ranks' command twice, one rank after the other, with the variables that the
real ones set. python pretends to be the doctor or the training, and ends as variables such as TRAIN_STATUS say.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain_testing.run import clean_environment

RANKS = 2
JOB = "7"

_LOG = 'printf "%s" "$(basename "$0")" >>"$CALLS"; printf " %q" "$@" >>"$CALLS"; echo >>"$CALLS"\n'
_LAUNCHER = """
[ "$*" != --version ] || { echo "${MPIEXEC_VERSION:-HYDRA build details:}"; exit 0; }
while [ "$1" != python ] && [ "$1" != bash ] && [ "$1" != rm ] && [ "$1" != apptainer ]; do shift; done
worst=0
# What is unpacked, on a disk that both nodes share here, is unpacked once.
[ "$2" = -ec ] && ranks=0 || ranks="0 1"
for rank in $ranks; do
    status=0
    SLURM_PROCID=$rank SLURM_LOCALID=$rank PMI_RANK=$rank PMI_LOCAL_RANK=$rank MPI_LOCALRANKID=$rank RANK=$rank "$@" || status=$?
    [ "$status" -le "$worst" ] || worst=$status
    # Where a rank fails, the others are killed.
    [ "$status" -eq 0 ] || break
done
exit "$worst"
"""
_PYTHON = """
env -0 >"$CALLS.$RANK.environment"
case " $* " in
    *" doctor "*) sleep "${DOCTOR_SLEEPS:-0}"; exit "${DOCTOR_STATUS:-0}" ;;
    *" --stopped-file "*)
        [ "${TRAIN_STATUS:-0}" -eq 85 ] || exit "${TRAIN_STATUS:-0}"
        while [ "$1" != --stopped-file ]; do shift; done
        [ "$RANK" -ne 0 ] || : >"$2" ;;
esac
"""
_REFUSED = '[ "${SUBMIT_STATUS:-0}" -eq 0 ] || { echo "error: Invalid account" >&2; exit 1; }\n'
# What follows the image; a container has no mpiexec of the machine, so python alone is started there.
_APPTAINER = 'while [ "$1" != python ]; do shift; done\nexec "$@"\n'
_COMMANDS = {
    "apptainer": _APPTAINER,
    "srun": _LAUNCHER,
    "mpiexec": _LAUNCHER,
    "python": _PYTHON,
    "sbcast": '[ "${SBCAST_STATUS:-0}" -eq 0 ] || exit "$SBCAST_STATUS"\nshift; cp "$1" "$2"\n',
    "scontrol": 'exit "${SCONTROL_STATUS:-0}"\n',
    "sbatch": f'{_REFUSED}printf "${{BANNER:-}}"\nprintf "${{NUMBER:-12345;cluster}}\n"\n',
    "qsub": f"{_REFUSED}echo 77.pbs-01\n",
}


@dataclass(frozen=True)
class ScriptOutcome:
    """How a script ended. calls: the words of each command, in order; said: all that it printed, logs included."""

    code: int
    calls: tuple[tuple[str, ...], ...]
    said: str
    environments: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def of(self, *words: str) -> list[tuple[str, ...]]:
        """The calls of a command that have all further words."""
        return [call for call in self.calls if call[0] == words[0] and set(words) <= set(call)]


def install(folder: Path) -> dict[str, str]:
    """Put the stand-ins into `folder`/bin and give an environment in which they are found first."""
    (folder / "bin").mkdir()
    for name, text in _COMMANDS.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{_LOG}{text}")
        path.chmod(0o755)
    (folder / "nodes").write_text("a\na\nb\n")
    (folder / "home").mkdir()  # without the profile of a login shell
    environment = clean_environment({"CALLS": str(folder / "calls"), "HOME": str(folder / "home"), "USER": "somebody"})
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    slurm = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NUM_NODES": str(RANKS), "SLURM_CPUS_PER_TASK": "6"}
    pbs = {"PBS_JOBID": JOB, "PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": str(folder / "nodes")}
    return {**environment, **slurm, **pbs}


def run_script(folder: Path, text: str, *arguments: str, timeout_seconds: float = 60, **environ: str) -> ScriptOutcome:
    """Run a script's text as its scheduler would, with the stand-ins that `install` has put into `folder`."""
    environment = {**install(folder), **environ} if not (folder / "bin").exists() else {**_again(folder), **environ}
    for old in (*folder.glob("calls*"), *folder.glob("hpctrain.log")):
        old.unlink()
    (folder / "script").write_text(text)
    command = ["bash", *(["-l"] if text.startswith("#!/bin/bash -l") else []), "script", *arguments]
    if command[1] == "-l":  # a login shell sets PATH by itself
        (folder / "home" / ".bash_profile").write_text(f"PATH={shlex.quote(environment['PATH'])}\n")
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    log = folder / "hpctrain.log"
    said = done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    return ScriptOutcome(done.returncode, calls(folder), said, _environments(folder))


def calls(folder: Path) -> tuple[tuple[str, ...], ...]:
    """The calls of stand-ins so far."""
    path = folder / "calls"
    return tuple(tuple(shlex.split(line)) for line in path.read_text().splitlines()) if path.exists() else ()


def _again(folder: Path) -> dict[str, str]:
    """The environment of stand-ins that are there already."""
    for path in (folder / "bin", folder / "home"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    return install(folder)


def _environments(folder: Path) -> dict[int, dict[str, str]]:
    """By rank, the variables of the latest python."""
    found = {}
    for path in folder.glob("calls.*.environment"):
        pairs = (pair.partition("=") for pair in path.read_text().split("\0") if pair)
        found[int(path.name.split(".")[1])] = {name: value for name, _, value in pairs}
    return found


def edited(text: str, **settings: str) -> str:
    """The script with settings at the beginning of a line replaced, as a person edits them; each must be there once."""
    for name, value in settings.items():
        text, count = re.subn(rf"^( *{name}=)\S*", lambda match, value=value: match[1] + value, text, flags=re.MULTILINE)
        assert count == 1, f"{name} is set {count} times"
    return text
