"""Reuse the automatic choice of an earlier start of the same job on the same nodes, from a file in the user's cache.

The file has the choice and the times of long messages at that start. A later start measures these messages once, and reuses the
choice if they take as long. Choices from disturbed measurements are not kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.assembly.recipe import Recipe
from hpctrain.backend.choice import Backend, make_backend
from hpctrain.comm.base import raise_on_all_ranks
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.schema import Config
from hpctrain.core.errors import HpctrainError
from hpctrain.core.files import read_bytes, user_directory
from hpctrain.job.automatic_choice import AutomaticChoice, Resolved, model_digest
from hpctrain.job.session import StartedJob, oversubscribed
from hpctrain.planner.costs.operator_times import setting_here
from hpctrain.planner.measure.calibration import check_links
from hpctrain.run.automatic_search import choose, with_default_plan
from hpctrain.storage import atomic_write
from hpctrain.trace.time_budget import TimeBudget

_log = logging.getLogger(__name__)

# Largest relative difference of a message's time from that at the earlier start.
_ALIKE = 0.15
_MOST_CHOICES = 100
# Sections of a configuration on which neither the choice nor the predicted step depends.
_IRRELEVANT = {"name", "output", "seed", "epochs", "schedule", "metrics", "checkpoint", "max_time", "deadline_seconds", "trace"}


def choose_again(config: Config, started: StartedJob, resume: str | None, library: str) -> Resolved:
    """Choose the sections that the configuration leaves open, see `automatic_search.choose`. Collective over the world.

    Args:
        library: name and version of the MPI library.
    """
    path = user_directory("XDG_CACHE_HOME", ".cache")
    if resume is not None or config.machine is not None or path is None or started.world.size == 1:
        return choose(config, started, resume)
    world, place, file = started.world, started.place(), path / "choices.json"
    backend = raise_on_all_ranks(world, lambda: make_backend(config.backend, config.dtype, config.precision, place))
    hosts, watch = (library, *world.allgather_object(platform.node())), TimeBudget()
    key, kept, links, line = started.on_root(lambda: _kept(file, config, started, backend, hosts))
    progress = ProgressEngine(rank=world.rank, deadline_seconds=started.deadline_seconds, abort=world.abort)
    if kept is not None and all(
        abs(now - before) <= _ALIKE * before for now, before in zip(check_links(world, progress), links, strict=False)
    ):
        return Resolved(Recipe.of(kept.applied(config)), kept, None, (line,), backend)
    resolved = choose(config, started, None, backend)
    crowded = oversubscribed(world.split_shared_memory("ranks of a node"), world, started.threads)
    if crowded or not any(world.allgather_object(watch.is_busy)):
        links = check_links(world, progress)
        if world.rank == 0 and resolved.choice is not None:
            _keep(file, key, {"links": links, "choice": resolved.choice.to_meta()})
    return resolved


def _kept(
    file: Path, config: Config, started: StartedJob, backend: Backend, hosts: Sequence[str]
) -> tuple[str, AutomaticChoice | None, list[float], str]:
    """Return (key of this job on these hosts, kept choice or None, seconds of its messages, line on the choice)."""
    ranks = started.world.size
    setting = setting_here(backend.kernels, started.threads, max(map(list(hosts).count, hosts)))
    task = with_default_plan(config, ranks, backend)
    facts = (config.model_dump_json(exclude=_IRRELEVANT), model_digest(task), task.job.image_shape, str(setting), hosts)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    entry = _read(file).get(key)
    try:
        if entry is not None:
            kept = AutomaticChoice.from_meta(entry["choice"], str(file))
            line = f"{kept.line(kept.applied(config), task.job.graph_of(1))}; kept from an earlier start on these hosts"
            return key, kept, [float(one) for one in entry["links"]], line
    except (HpctrainError, KeyError, TypeError, ValueError):
        _log.warning("Cannot read the choice of an earlier start in %s; it is made again.", file)
    return key, None, [], ""


def _read(file: Path) -> dict[str, Any]:
    """Return all entries of the file by key, oldest first; empty if there are none."""
    try:
        content = json.loads(read_bytes(file, own=True))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _keep(file: Path, key: str, entry: dict[str, Any]) -> None:
    others = [item for item in _read(file).items() if item[0] != key]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.write_json(file, dict([*others[1 - _MOST_CHOICES :], (key, entry)]))
    except OSError as error:
        _log.warning("Cannot keep the choice in %s (%s); the next start makes it again.", file, error.strerror)
