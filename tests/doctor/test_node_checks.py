"""What the doctor finds about nodes: cores, directories, GPUs, kernels and scratch."""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.base import SingleCommunicator
from hpctrain.config.load import load
from hpctrain.data.writer import write_data_file
from hpctrain.doctor import files as file_checks
from hpctrain.doctor import nodes as node_checks
from hpctrain.doctor import ranks as rank_checks
from hpctrain.doctor.check import OwnPlace, Severity
from hpctrain.doctor.files import DirectoryFacts, ScratchFacts
from hpctrain.doctor.nodes import AWARE, UNAWARE, GpuFacts, KernelFacts
from hpctrain.doctor.ranks import CoreFacts
from hpctrain.launch.launcher import Launcher
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.cli.test_starting import folder as folder
from tests.support.doctored import HYDRA, configuration, keys, view


def rank(cpus: Sequence[int], threads: int | None = 1, variables: Mapping[str, str] | None = None, **pools: int) -> CoreFacts:
    """A rank on a machine with two hardware threads per core: CPUs 0 and 1 are core 0."""
    return CoreFacts(frozenset(cpus), frozenset(str(cpu // 2) for cpu in cpus), threads, pools, "", variables or {})


@pytest.mark.parametrize(
    ("facts", "key", "severity", "words"),
    [
        ([rank([0, 1]), rank([2, 3])] * 2, "", Severity.OK, ""),
        ([rank(range(8))] * 4, "unbound", Severity.REMARK, "shared by 2 ranks"),
        ([rank(range(8))] * 2 + [rank([0, 1, 2, 3]), rank([2, 3, 4, 5])], "overlapping-cores", Severity.WARNING, "they overlap"),
    ],
)
def test_ranks_have_cores_of_their_own(facts: list[CoreFacts], key: str, severity: Severity, words: str) -> None:
    [found] = rank_checks.judge_binding(view(2, 2), facts)
    assert (found.key, found.severity, words in found.sentence) == (key, severity, True)
    if key == "unbound":
        assert found.fix == "mpiexec -bind-to core:2 -n 4 ..."
    for name, line in (
        ("Slurm srun", "srun --cpus-per-task=4 --cpu-bind=cores ..."),
        ("Open MPI mpiexec", "mpiexec --map-by slot:PE=4 --bind-to core ..."),
        ("Cray PALS mpiexec", "mpiexec --depth=4 --cpu-bind depth ..."),
    ):
        assert rank_checks.bind_line(view(2, launcher=Launcher(name, 2, 0)), 4) == line


@given(
    st.lists(
        st.lists(st.tuples(st.sets(st.integers(0, 7), min_size=1), st.integers(1, 4)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    )
)
def test_threads_fit_where_no_node_has_more_than_cores(nodes: list[list[tuple[set[int], int]]]) -> None:
    facts = [rank(sorted(cpus), threads) for node in nodes for cpus, threads in node]
    [found] = rank_checks.judge_threads(view(*map(len, nodes)), facts)
    over = [node for node in nodes if sum(threads for _, threads in node) > len({cpu // 2 for cpus, _ in node for cpu in cpus})]
    assert bool(found.key) == bool(over)
    if over:
        alone = all(threads == 1 for _, threads in over[0])
        assert found.key == ("too-many-ranks" if alone else "too-many-threads")


def test_the_variables_that_are_too_large_are_named() -> None:
    variables = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "8"}
    facts = [rank(range(8), 2, variables, openblas=8)] * 2
    [found] = rank_checks.judge_threads(view(2), facts)
    assert found.sentence == "2 ranks compute with 16 threads on 4 cores (OPENBLAS_NUM_THREADS=8)."
    assert found.fix == "export OPENBLAS_NUM_THREADS=2"
    assert found.severity is Severity.WARNING  # a training accepts these threads


def test_threads_that_a_training_refuses_are_named_by_its_sentence() -> None:
    facts = CoreFacts(frozenset({0}), frozenset({"0"}), None, {}, "threads is 8, but a rank has 1 core; set threads to 1.", {})
    [found] = rank_checks.judge_threads(view(1), [facts])
    assert (found.key, found.fix) == ("threads-refused", "Set threads to 1.")


def test_pools_that_have_started_are_counted(tmp_path: object) -> None:
    facts = rank_checks.gather_cores(OwnPlace(HYDRA, None, None, 1, "", {"OMP_NUM_THREADS": "1"}))
    assert facts.cpus
    assert facts.cores
    assert facts.most_threads >= 1
    assert "openblas" in facts.pools


ALONE = Launcher("none")


def test_a_directory_is_tried_where_it_will_be_made(tmp_path: Path) -> None:
    facts = file_checks.gather_directory(OwnPlace(ALONE, None, tmp_path / "not" / "yet"))
    assert (facts.directory, facts.error) == (str(tmp_path), 0)
    assert list(tmp_path.iterdir()) == []
    assert file_checks.gather_directory(OwnPlace(Launcher("x", 2, 1, 2, 1), None, tmp_path)) is None


def test_a_file_in_the_way_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    facts = file_checks.gather_directory(OwnPlace(ALONE, None, tmp_path / "file"))
    assert facts.error == errno.ENOTDIR


@pytest.mark.parametrize(
    ("facts", "key", "fix"),
    [
        (DirectoryFacts("/d", errno.EROFS), "run-directory", "Train with output=DIR"),
        (DirectoryFacts("/d", errno.EACCES), "run-directory", "Train with output=DIR"),
        (DirectoryFacts("/d", errno.ENOSPC), "run-directory", "Free space"),
        (DirectoryFacts("/d"), "", ""),
    ],
)
def test_outcomes_are_judged(facts: DirectoryFacts, key: str, fix: str) -> None:
    [found] = file_checks.judge_directory(view(1, 1), [facts, None])
    assert found.key == key
    assert found.fix.startswith(fix)
    if facts.error:
        assert os.strerror(facts.error) in found.sentence


@pytest.mark.parametrize("blind", [(), (1,), (1, 2)])
def test_nodes_that_do_not_see_the_directory_are_named(tmp_path: Path, blind: tuple[int, ...]) -> None:
    def program(comm: ThreadCommunicator) -> bool | None:
        place = OwnPlace(Launcher("x", 3, comm.rank, 1, 0), None, tmp_path)
        joined: Any = SimpleNamespace(world=comm, node=SimpleNamespace(rank=0), own=place)
        return file_checks.gather_shared(joined)

    facts = run_virtual(3, program) if not blind else [rank not in blind for rank in range(3)]
    [found] = file_checks.judge_shared(view(1, 1, 1), facts)
    assert found.key == ("not-shared" if blind else "")
    assert all((f"nid{rank}" in found.sentence) == (rank in blind) for rank in (0, 1, 2))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_said_of_sharing_where_nothing_can_be_written() -> None:
    assert "cannot write" in file_checks.judge_shared(view(1, 1), [None, None])[0].sentence


CRAY = "MPICH ERROR [Rank 0]: MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked"


@pytest.mark.parametrize(
    ("facts", "key", "words", "fix"),
    [
        ([GpuFacts()] * 3, "", "No node shows a GPU.", ""),
        (
            [GpuFacts(("0", "1"), probe=AWARE), GpuFacts(("0", "1")), GpuFacts(("0",))],
            *("", "GPUs per node: 1 to 2; MPI can send from their memory (transport mpi).", ""),
        ),
        ([GpuFacts(("0",), probe=CRAY), *[GpuFacts(("0",))] * 2], "no-gtl", "", "export MPICH_GPU_SUPPORT_ENABLED=0"),
        (
            [GpuFacts(("0",), probe=f"{UNAWARE}: Segmentation fault"), *[GpuFacts(("0",))] * 2],
            *("not-gpu-aware", "on nid0: Segmentation fault.", "nccl"),
        ),
    ],
)
def test_gpus_are_counted_by_node_and_tried(facts: list[GpuFacts], key: str, words: str, fix: str) -> None:
    [found] = node_checks.judge_gpus(view(2, 1), facts)
    assert found.key == key
    assert words in found.sentence
    assert fix in found.fix
    assert node_checks.from_start("all is well") is None


@pytest.mark.parametrize(
    ("facts", "key"),
    [
        ([GpuFacts(("0", "1"))] * 3, "too-few-gpus"),
        ([GpuFacts()] * 3, "too-few-gpus"),
        ([GpuFacts(("0",), True), GpuFacts(("1",), True), GpuFacts(("0",), True)], "too-few-gpus"),
        ([GpuFacts(tuple("0123"))] * 3, ""),
        ([GpuFacts((name,), True) for name in "012"], ""),
        ([GpuFacts(("0",), True)] * 3, ""),  # each may be shown its own by that number
        ([GpuFacts(("0",))], ""),
    ],
)
def test_backend_cuda_needs_a_gpu_for_each_rank(facts: list[GpuFacts], key: str) -> None:
    [found] = node_checks.judge_gpus(view(len(facts), config=configuration("backend=cuda")), facts)
    assert (found.key, keys(node_checks.judge_gpus(view(len(facts), config=configuration("backend=numpy")), facts))) == (
        key,
        [""],
    )


@pytest.mark.parametrize(("visible", "names"), [("0,1", ("0", "1")), ("", ()), ("GPU-12ab, 3", ("GPU-12ab", "3"))])
def test_the_environment_names_the_gpus(visible: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("MPICH_GPU_SUPPORT_ENABLED", raising=False)
    follower = OwnPlace(Launcher("x", 2, 1, 2, 1), None, Path("runs"))  # who starts no process
    assert node_checks.gather_gpus(follower) == GpuFacts(names, True)


def test_data_that_do_not_fit_each_other_or_are_missing_are_a_fault(folder: Path) -> None:
    """Equal files on all ranks passed, although every training with them is refused."""
    content = [(np.zeros((2, 8, 8, 1), np.uint8), np.arange(2))]
    write_data_file(folder / "other.h5", 2, (8, 8, 1), [f"other {number}" for number in range(11)], content)
    for name, words, fix in (
        (f"{folder}/other.h5", f"other.h5 has other classes than {folder}/train.h5", ""),
        ("nowhere.h5", "There is no data file nowhere.h5.", "hpctrain data convert"),
    ):
        own = OwnPlace(ALONE, load(folder / "tiny.yaml", [f"data.test={name}"])[0], folder / "runs")
        place: Any = SimpleNamespace(own=own, world=SingleCommunicator())
        [found] = rank_checks.judge_training(view(1), [rank_checks.gather_training(place)])
        assert found.key == "refused"
        assert words in found.sentence
        assert fix in found.fix


FAST = KernelFacts("onednn")
SLOW = KernelFacts("numpy", "The oneDNN library cannot be loaded (no file); install onednn-cpu-gomp or set X.")


@pytest.mark.parametrize(
    ("facts", "overrides", "key"),
    [
        ([FAST, None, FAST, None], [], ""),
        ([SLOW, None, SLOW, None], [], "slow-kernels"),
        ([FAST, None, SLOW, None], [], "slow-kernels"),
        ([FAST, None, SLOW, None], ["backend=onednn"], "no-onednn"),
    ],
)
def test_nodes_without_onednn_are_named(facts: list[KernelFacts | None], overrides: list[str], key: str) -> None:
    [found] = node_checks.judge_kernels(view(2, 2, config=configuration(*overrides)), facts)
    assert found.key == key
    if key:
        assert (found.fix, "(nid1)" in found.sentence) == ("Install onednn-cpu-gomp or set X.", facts[0] is FAST)


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["backend=numpy"], KernelFacts("numpy")),
        (["backend=cuda"], KernelFacts("cuda")),
        (["dtype=float64"], KernelFacts("numpy")),
    ],
)
def test_the_configuration_decides(overrides: list[str], facts: KernelFacts) -> None:
    assert node_checks.gather_kernels(OwnPlace(Launcher("none"), configuration(*overrides), Path("runs"))) == facts


def test_the_library_is_asked_once_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_checks, "available", lambda: "There is none.")
    assert node_checks.gather_kernels(OwnPlace(Launcher("none"), None, Path("runs"))) == KernelFacts("numpy", "There is none.")
    assert node_checks.gather_kernels(OwnPlace(Launcher("x", 2, 1, 2, 1), None, Path("runs"))) is None


ROOM = ScratchFacts("/tmp", "", 0, 10**10)


@pytest.mark.parametrize(
    ("fact", "key", "fix"),
    [
        (ROOM, "", ""),
        (ScratchFacts("/local", "TMPDIR", errno.ENOENT, 0), "no-scratch", "export TMPDIR="),
        (ScratchFacts("/local", "TMPDIR", errno.EROFS, 0), "no-scratch", "export TMPDIR="),
        (ScratchFacts("/local", "TMPDIR", errno.ENOSPC, 0), "full-scratch", "Free space in /local"),
        (ScratchFacts("/local", "TMPDIR", 0, 10**6), "full-scratch", "Free space in /local"),
        (ScratchFacts("/dev/shm", "", 0, 10**6), "full-shared-memory", "Delete files"),
    ],
)
def test_each_place_is_judged_with_its_node(fact: ScratchFacts, key: str, fix: str) -> None:
    [found] = file_checks.judge_scratch(view(2, 1), [[ROOM], None, [fact]])
    assert found.key == key
    assert found.fix.startswith(fix)
    assert ("of nid1" in found.sentence) == bool(key)


def test_the_first_variable_that_is_set_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    places = file_checks.gather_scratch(OwnPlace(ALONE, None, Path("runs")))
    assert (places[0].path, places[0].variable, places[0].error) == (str(tmp_path), "TMPDIR", 0)
    assert places[0].free_bytes > 0
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "nowhere"))
    places = file_checks.gather_scratch(OwnPlace(ALONE, None, Path("runs")))
    assert (places[0].variable, places[0].error) == ("SLURM_TMPDIR", errno.ENOENT)
    assert (keys(file_checks.judge_scratch(view(1), [places]))[0], list(tmp_path.iterdir())) == ("no-scratch", [])
    assert file_checks.gather_scratch(OwnPlace(Launcher("x", 2, 1, 2, 1), None, Path("runs"))) is None
