"""Jobs as the doctor's judges see them, made up, and environments in which real ones are started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.load import load
from hpctrain.config.schema import Config
from hpctrain.doctor.check import DoctorFinding, JobView
from hpctrain.launch.launcher import Launcher

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
HYDRA = Launcher("MPICH hydra mpiexec", 4, 0, 4, 0, "PMI_RANK")
MPICH = "MPICH Version: 5.0.2, thread level serialized"


def view(*ranks_of_nodes: int, launcher: Launcher | None = None, library: str = MPICH, config: Config | None = None) -> JobView:
    """A job with these numbers of ranks on the nodes nid0, nid1, ..."""
    node_of = tuple(node for node, ranks in enumerate(ranks_of_nodes) for _ in range(ranks))
    size = len(node_of)
    launcher = launcher or Launcher("MPICH hydra mpiexec", size, 0, ranks_of_nodes[0], 0, "PMI_RANK")
    return JobView(launcher, size, tuple(f"nid{node}" for node in node_of), node_of, library, config)


def configuration(*overrides: str) -> Config:
    """The quickstart's."""
    return load(QUICKSTART, overrides)[0]


def keys(findings: Sequence[DoctorFinding]) -> list[str]:
    """The kinds of findings, "" for what is well."""
    return [finding.key for finding in findings]


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders before what it has."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
