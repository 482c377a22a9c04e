"""Binding and threads, judged from made-up facts of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.doctor.check import OwnPlace
from hpctrain.doctor.findings import Severity
from hpctrain.doctor.subjects import cores
from hpctrain.doctor.subjects.cores import CoreFacts
from hpctrain.launch.launcher import Launcher
from tests.support.doctored import HYDRA, keys, view


def rank(cpus: Sequence[int], threads: int | None = 1, variables: Mapping[str, str] | None = None, **pools: int) -> CoreFacts:
    """A rank on a machine with two hardware threads per core: CPUs 0 and 1 are core 0."""
    return CoreFacts(frozenset(cpus), frozenset(str(cpu // 2) for cpu in cpus), threads, pools, "", variables or {})


def test_ranks_with_cores_of_their_own_are_well() -> None:
    facts = [rank([0, 1]), rank([2, 3]), rank([0, 1]), rank([2, 3])]
    assert keys(cores.judge_binding(view(2, 2), facts)) == [""]
    assert keys(cores.judge_threads(view(2, 2), facts)) == [""]


def test_ranks_that_share_all_cores_are_unbound() -> None:
    [found] = cores.judge_binding(view(2), [rank(range(8))] * 2)
    assert (found.key, found.severity, found.mend) == ("unbound", Severity.REMARK, "mpiexec -bind-to core:2 -n 2 ...")
    assert "shared by 2 ranks" in found.sentence


def test_cores_in_common_are_worse_than_no_binding() -> None:
    facts = [rank(range(8))] * 2 + [rank([0, 1, 2, 3]), rank([2, 3, 4, 5])]
    [found] = cores.judge_binding(view(2, 2), facts)
    assert (found.key, found.severity) == ("overlapping-cores", Severity.WARNING)
    assert "they overlap" in found.sentence


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Slurm srun", "srun --cpus-per-task=4 --cpu-bind=cores ..."),
        ("Open MPI mpiexec", "mpiexec --map-by slot:PE=4 --bind-to core ..."),
        ("Cray PALS mpiexec", "mpiexec --depth=4 --cpu-bind depth ..."),
        ("MPICH hydra mpiexec", "mpiexec -bind-to core:4 -n 2 ..."),
    ],
)
def test_the_line_that_binds_is_the_launchers(name: str, line: str) -> None:
    assert cores.bind_line(view(2, launcher=Launcher(name, 2, 0)), 4) == line


@given(
    st.lists(
        st.lists(st.tuples(st.sets(st.integers(0, 7), min_size=1), st.integers(1, 4)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    )
)
def test_threads_fit_where_no_node_has_more_than_cores(nodes: list[list[tuple[set[int], int]]]) -> None:
    facts = [rank(sorted(cpus), threads) for node in nodes for cpus, threads in node]
    [found] = cores.judge_threads(view(*map(len, nodes)), facts)
    over = [node for node in nodes if sum(threads for _, threads in node) > len({cpu // 2 for cpus, _ in node for cpu in cpus})]
    assert bool(found.key) == bool(over)
    if over:
        alone = all(threads == 1 for _, threads in over[0])
        assert found.key == ("too-many-ranks" if alone else "too-many-threads")


def test_the_variables_that_are_too_large_are_named() -> None:
    variables = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "8"}
    facts = [rank(range(8), 2, variables, openblas=8)] * 2
    [found] = cores.judge_threads(view(2), facts)
    assert found.sentence == "2 ranks compute with 16 threads on 4 cores (OPENBLAS_NUM_THREADS=8)."
    assert found.mend == "export OPENBLAS_NUM_THREADS=2"


def test_threads_that_a_training_refuses_are_named_by_its_sentence() -> None:
    facts = CoreFacts(frozenset({0}), frozenset({"0"}), None, {}, "threads: 8 does not fit; at most 1 can be asked for.", {})
    [found] = cores.judge_threads(view(1), [facts])
    assert (found.key, found.mend) == ("threads-refused", "At most 1 can be asked for.")


def test_pools_that_have_started_are_counted(tmp_path: object) -> None:
    facts = cores.gather(OwnPlace(HYDRA, None, None, 1, "", {"OMP_NUM_THREADS": "1"}))  # type: ignore[arg-type]
    assert facts.cpus
    assert facts.cores
    assert facts.most_threads >= 1
    assert "openblas" in facts.pools
