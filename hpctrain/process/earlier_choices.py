"""Reuse measured links and automatic choices of earlier starts on the same nodes, from a file in the user's cache.

The file has choices, links and times of messages. A later start measures these messages first. If they take as long, it reuses
the choice of the same job, or else the links. Measurements that other programs disturbed are not kept.
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
from hpctrain.job.session import StartedJob, on_root, oversubscribed
from hpctrain.planner.costs import machine_file
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.costs.operator_times import setting_here
from hpctrain.planner.measure.calibration import check_links
from hpctrain.run.automatic_search import choose, with_default_plan
from hpctrain.storage import atomic_write
from hpctrain.trace.time_budget import TimeBudget

_log = logging.getLogger(__name__)

# Largest change of the messages' time since the earlier start: a share of it plus a constant, because ranks change cores.
_ALIKE, _ALIKE_SECONDS = 0.15, 1e-4
_MOST_ENTRIES = 100
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
    progress = ProgressEngine(rank=world.rank, deadline_seconds=started.deadline_seconds, abort=world.abort)
    link_seconds = check_links(world, progress)
    found = on_root(started.world, lambda: _kept(file, config, started, backend, hosts, link_seconds))
    (job_key, hosts_key), kept, line, machine = found
    if kept is not None:
        return Resolved(Recipe.of(kept.applied(config)), kept, None, (line,), backend)
    resolved = choose(config, started, None, backend, machine)
    crowded = oversubscribed(world.split_shared_memory("ranks of a node"), world, started.threads)
    reliable = crowded or not any(world.allgather_object(watch.is_busy))
    if reliable and world.rank == 0 and resolved.choice is not None and resolved.machine is not None:
        measured = {} if machine else {hosts_key: {"seconds": link_seconds, "machine": machine_file.text(resolved.machine)}}
        _keep(file, {job_key: {"seconds": link_seconds, "choice": resolved.choice.to_meta()}, **measured})
    return resolved


def _kept(
    file: Path, config: Config, started: StartedJob, backend: Backend, hosts: Sequence[str], link_seconds: float
) -> tuple[list[str], AutomaticChoice | None, str, Machine | None]:
    """Return (keys of job and hosts, choice, its line, machine). The machine is None if there is a choice; both may be None."""
    setting = setting_here(backend.kernels, started.threads, max(map(list(hosts).count, hosts)))
    task = with_default_plan(config, started.world.size, backend)
    facts = (config.model_dump_json(exclude=_IRRELEVANT), model_digest(task), task.job.image_shape, str(setting), hosts)
    keys, entries = [hashlib.sha256(repr(part).encode()).hexdigest() for part in (facts, facts[-2:])], _read(file)
    try:
        times = {key: entries[key]["seconds"] for key in keys if key in entries}
        same = {key for key in times if abs(link_seconds - times[key]) <= _ALIKE * times[key] + _ALIKE_SECONDS}
        if keys[0] in same:
            kept = AutomaticChoice.from_meta(entries[keys[0]]["choice"], str(file))
            line = f"{kept.line(kept.applied(config), task.job.graph_of(1))}; kept from an earlier start on these hosts"
            return keys, kept, line, None
        if keys[1] in same:
            return keys, None, "", machine_file.parse(entries[keys[1]]["machine"])
    except (HpctrainError, KeyError, TypeError, ValueError):
        _log.warning("Cannot read an earlier start in %s; measuring and choosing again.", file)
    return keys, None, "", None


def _read(file: Path) -> dict[str, Any]:
    """Return all entries of the file by key, oldest first; empty if there are none."""
    try:
        content = json.loads(read_bytes(file, own=True))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _keep(file: Path, entries: dict[str, Any]) -> None:
    others = [item for item in _read(file).items() if item[0] not in entries]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.write_json(file, dict(others[len(entries) - _MOST_ENTRIES :]) | entries)
    except OSError as error:
        _log.warning("Cannot write %s (%s); the next start measures and chooses again.", file, error.strerror)
