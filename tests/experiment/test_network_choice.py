"""Networks made in Python: the candidate that their job runs, chosen alike on every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hpctrain.comm.base import Communicator
from hpctrain.errors import ConfigError
from hpctrain.experiment import start_search
from hpctrain.experiment.network_choice import Automatic, named, optimizer_of
from hpctrain.experiment.start_search import BestCandidate, StartedJob
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.planner import machine_file
from hpctrain.virtual.run import run_virtual
from tests.support import nets, planned


def test_every_rank_gets_the_same_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(start_search, "_TIMING_SECONDS", 0.0)
    machine_file.write(tmp_path / "m.yaml", planned.machine())
    network = Automatic(nets.narrow(), (9, 7, 3), backend="numpy", machine=str(tmp_path / "m.yaml"))

    def program(comm: Communicator) -> BestCandidate:
        return network.best(StartedJob(comm, 1, 60.0), 8)

    first, second = run_virtual(2, program)
    assert first == second
    assert first.candidate.ranks == 2
    assert first.candidate.micro_batches == 1


def test_names_and_options_come_as_in_a_configuration() -> None:
    assert named("sgd") == ("sgd", {})
    assert named({"name": "sgd", "momentum": 0.5}) == ("sgd", {"momentum": 0.5})
    with pytest.raises(ConfigError, match="has no name"):
        named({"momentum": 0.5})
    assert optimizer_of({"name": "lars"})().needs_norms
    made = partial(Lars, momentum=0.5)
    assert optimizer_of(made) is made
