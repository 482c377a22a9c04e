"""What the doctor finds about jobs: launchers, memory, MPI, links, and the start of a training."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.choice import NodePlace
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.errors import HpctrainError
from hpctrain.core.text import size_text
from hpctrain.doctor import nodes as node_checks
from hpctrain.doctor import ranks as rank_checks
from hpctrain.doctor.check import Check, DoctorFinding, JobView, OwnPlace, Severity
from hpctrain.doctor.nodes import MemoryFacts
from hpctrain.doctor.ranks import LauncherFacts, LibraryFacts
from hpctrain.job import same_start
from hpctrain.launch.launcher import Launcher
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.support.doctored import configuration, view


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6))
def test_a_grid_fits_where_it_multiplies_to_the_ranks(ranks: int, rows: int, cols: int) -> None:
    config = configuration(f"grid.rows={rows}", f"grid.cols={cols}")
    if rows * cols == ranks:
        assert rank_checks._grid(config, ranks).startswith(f"{rows} x {cols}")
        return
    with pytest.raises(HpctrainError, match=rf"must be {ranks}\."):
        rank_checks._grid(config, ranks)


def test_a_batch_that_is_smaller_than_the_ranks_is_named() -> None:
    with pytest.raises(HpctrainError, match="smallest batch is 3"):
        rank_checks._grid(configuration("batch=2", "micro_batches=1"), 3)
    assert "auto" in rank_checks._grid(configuration("grid=auto", "batch=2", "micro_batches=1"), 3)


OWN, NONE = LauncherFacts("/venv/bin/mpiexec"), LauncherFacts("")
FACTS = LibraryFacts("/venv/bin/mpiexec", "MPICH Version: 5.0.2")
ALONE, OPEN_MPI = Launcher("none"), Launcher("Open MPI mpiexec", 4, 0)
EACH_ALONE = "{} has started 4 processes, but each is rank 0 of 1"
LOADED = "Rank 1 (nid1) loaded in {:.1f} s."
STARTED = "started by MPICH hydra mpiexec."


#: by what is judged: the job, its facts, the key, words of the sentence, and of its fix
JUDGED: list[tuple[Check, JobView, Sequence[Any], str, str, str]] = [
    *(
        (rank_checks.LAUNCHER, view(1, launcher=by), [facts], "singletons", EACH_ALONE.format(by.name), fix)
        for by, facts, fix in (
            (OPEN_MPI, OWN, "/venv/bin/mpiexec -n 4 python -m mpi4py"),
            (OPEN_MPI, NONE, "mpi-lib-version"),
            (Launcher("Slurm srun", 4, 0), OWN, "srun --mpi=pmi2"),
        )
    ),
    (
        rank_checks.LAUNCHER,
        view(2, launcher=Launcher("MPICH hydra mpiexec", 3, 0, overruled_size=2)),
        [OWN] * 2,
        *("world-size", "", "Start 3 ranks, or unset HPCTRAIN_EXPECT_RANKS."),
    ),
    (rank_checks.LAUNCHER, view(1, launcher=Launcher("none", 3)), [OWN], "world-size", "", ""),
    (rank_checks.LAUNCHER, view(1, launcher=ALONE), [OWN], "alone", "", ""),
    (rank_checks.LAUNCHER, view(2, 2), [OWN] * 4, "", f"4 ranks on 2 nodes, {STARTED}", ""),
    (rank_checks.LAUNCHER, view(1), [OWN], "", f"1 rank on 1 node, {STARTED}", ""),
    (rank_checks.MPI_LIBRARY, view(2), [FACTS, None], "", "MPICH Version: 5.0.2, thread level serialized.", ""),
    (
        rank_checks.MPI_LIBRARY,
        view(1, library=""),
        [replace(FACTS, error="MPI cannot be started (no libmpi.so.12); install one with `pip install mpich`.")],
        *("no-mpi-library", "", "Install one with `pip install mpich`."),
    ),
    (rank_checks.MPI_LIBRARY, view(1, library=""), [LibraryFacts()], "no-mpi-library", "", ""),
    (rank_checks.MPI_LIBRARY, view(1, library=""), [LibraryFacts(library=None)], "", "Not checked: mpi4py did not name", ""),
    (rank_checks.MPI_LIBRARY, view(1, library=""), [FACTS], "", "", ""),  # it has not started, but it is there
    (node_checks.START_UP, view(1, 1, 1), [1.0, 4.9, None], "", LOADED.format(4.9), ""),
    (node_checks.START_UP, view(1, 1, 1), [1.0, 5.1, None], "slow-import", LOADED.format(5.1), ""),
    (node_checks.START_UP, view(1), [None], "", "", ""),  # not measured
    (node_checks.LINK, view(2), [None] * 2, "", "One node.", ""),
    (node_checks.LINK, view(2, 1), [1e10, None, 9e9], "", "Nodes exchange messages at 9 GB/s or more.", ""),
    (node_checks.LINK, view(1, 1), [9e7, 8e7], "slow-link", "nid1 exchanges messages at 80 MB/s.", "FI_PROVIDER"),
    (
        node_checks.LINK,
        view(1, 1, 1),
        [1e10, 2e9, 1e10],
        "slow-link",
        "nid1 exchanges messages at 2 GB/s; the median of all nodes is 10 GB/s.",
        "Exclude the node",
    ),
]


@pytest.mark.parametrize("number", range(len(JUDGED)))
def test_a_job_is_judged(number: int) -> None:
    check, job, facts, key, words, fix = JUDGED[number]
    [found] = check.judge(job, facts)
    assert found.key == key
    assert words in found.sentence
    assert fix in found.fix
    assert (found.severity is Severity.FAULT) == (key in ("singletons", "no-mpi-library", "world-size"))


@pytest.mark.parametrize(
    ("name", "library", "wrong"),
    [
        ("Open MPI mpiexec", "MPICH Version: 5.0.2", True),
        ("MPICH hydra mpiexec", "Open MPI v5.0.11", True),
        ("Cray PALS mpiexec", "Open MPI v5.0.11", True),
        ("Open MPI mpiexec", "Open MPI v5.0.11", False),
        ("Intel MPI mpiexec", "MPICH Version: 5.0.2", False),
        ("Slurm srun", "Open MPI v5.0.11", False),
        ("Open MPI mpiexec", "", False),
    ],
)
def test_a_launcher_of_another_mpi_is_known_by_names(name: str, library: str, wrong: bool) -> None:
    found = rank_checks.wrong_launcher(Launcher(name, 4, 0), library, "/venv/bin/mpiexec")
    assert (found is not None) == wrong
    if found is not None:
        assert found.fix == "/venv/bin/mpiexec -n 4 python -m mpi4py -m hpctrain ..."
        general = rank_checks.wrong_launcher(Launcher(name, 4, 0), library, "")
        assert general.fix == rank_checks.WRONG_LAUNCHER.remedy


GB = 10**9


@given(st.integers(1, 8), st.integers(1, 400), st.integers(1, 40), st.integers(0, 40))
def test_the_node_with_the_least_room_is_judged(ranks: int, node_gb: int, pass_gb: int, held_gb: int) -> None:
    """The second node has the least room, or both have enough."""
    facts = [MemoryFacts(10**15, pass_gb * GB, held_gb * GB), *[None] * (ranks - 1), MemoryFacts(node_gb * GB)]
    [found] = node_checks.judge_memory(view(ranks, ranks), [*facts, *[None] * (ranks - 1)])
    need = ranks * (pass_gb + held_gb)
    assert found.key == ("too-little-memory" if need > node_gb else "tight-memory" if need > 0.85 * node_gb else "")
    assert (found.severity is Severity.FAULT) == (need > node_gb)
    assert f"need{'s' if ranks == 1 else ''} {size_text(need * GB)} " in found.sentence


def test_a_rank_needs_less_for_a_pass_where_more_share_the_batch() -> None:
    one, held = node_checks.planned_bytes(configuration("batch=64"), NodePlace(1))
    four, held_by_four = node_checks.planned_bytes(configuration("batch=64"), NodePlace(4))
    assert 3 < one / four < 5
    assert held == held_by_four > 0
    micro, _ = node_checks.planned_bytes(configuration("batch=64", "micro_batches=4"), NodePlace(1))
    assert 3 < one / micro < 5


def test_ranks_that_split_layers_hold_less() -> None:
    _, held = node_checks.planned_bytes(configuration("batch=64"), NodePlace(2))
    _, split = node_checks.planned_bytes(configuration("batch=64", "grid.rows=2", "plan.default=model"), NodePlace(2))
    assert split < held


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [(["grid=auto"], "the plan is auto"), (["backend=cuda"], "backend cuda"), (["batch=1", "grid.cols=1"], "")],
)
def test_where_there_is_no_plan_nothing_is_said(overrides: list[str], reason: str) -> None:
    facts = node_checks.gather_memory(OwnPlace(Launcher("none"), configuration(*overrides), Path("runs")))
    assert reason in facts.reason
    assert (bool(facts.reason), node_checks.judge_memory(view(1), [facts])[0].key) == (bool(reason), "")
    assert node_checks.gather_memory(OwnPlace(Launcher("x", 2, 1, 2, 1), None, Path("runs"))) is None
    leader = node_checks.gather_memory(OwnPlace(Launcher("x", 2, 1, 1, 0), None, Path("runs")))
    assert leader.node_bytes > 0


@pytest.mark.job
def test_the_mpi_library_is_known_on_the_first_rank(tmp_path: Path) -> None:
    assert rank_checks.gather_library(OwnPlace(Launcher("none"), None, tmp_path)).library
    assert rank_checks.gather_library(OwnPlace(Launcher("x", 2, 1, 2, 1), None, tmp_path)) is None


PLACE = OwnPlace(Launcher("x", 3, 0, 1, 0), None, Path("runs"))


def trained(ranks: int) -> DoctorFinding:
    """The finding on what a training of several nodes compares, without a configuration."""

    def program(comm: ThreadCommunicator) -> tuple[str, str]:
        place: Any = SimpleNamespace(world=comm, own=PLACE)
        return rank_checks.gather_training(place)

    [found] = rank_checks.judge_training(view(*[1] * ranks), run_virtual(ranks, program))
    return found


def test_equal_nodes_have_no_finding() -> None:
    assert (trained(3).key, trained(1).key) == ("", "")


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("software_versions", "Give all nodes the same environment."),
        ("package_files", "Install the same version of hpctrain on all nodes."),
    ],
)
def test_a_node_that_differs_is_named_with_rank_and_host(monkeypatch: pytest.MonkeyPatch, kind: str, fix: str) -> None:
    calls: list[int] = []

    def facts(*_: object) -> dict[str, int]:
        calls.append(1)
        return {"numpy": 2 if len(calls) == 3 else 1}

    monkeypatch.setattr(same_start, kind, facts)
    found = trained(3)
    assert (found.key, found.fix) == ("refused", fix)
    assert "numpy" in found.sentence
    assert "(rank " in found.sentence
    assert "is on nid" in found.sentence


def test_each_node_measures_its_link_with_its_neighbours() -> None:
    def program(comm: ThreadCommunicator) -> float | None:
        progress = ProgressEngine(rank=comm.rank, deadline_seconds=30, abort=comm.abort)
        place: Any = SimpleNamespace(world=comm, node=SimpleNamespace(rank=comm.rank % 2), progress=progress)
        return node_checks.gather_link(place)

    rates = run_virtual(6, program)
    assert [rate is None for rate in rates] == [False, True] * 3
    assert all(rate > 0 for rate in rates[::2])
    assert run_virtual(2, program) == [None, None]
