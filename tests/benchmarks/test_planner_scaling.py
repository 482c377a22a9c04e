"""The machines of the simulated scaling study: cores, nodes, and one number changed at a time."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.planner_scaling import CORES, batch_of, nodes_of, on_some_cores, one_rank_per_node, variations
from hpctrain.planner import machine_file


def test_cores_go_from_one_to_8192_and_nodes_have_32() -> None:
    assert (CORES[0], CORES[-1]) == (1, 8192)
    assert [nodes_of(cores) for cores in (1, 32, 64, 8192)] == [1, 1, 2, 256]


def test_batches_stay_or_grow_with_the_cores() -> None:
    assert {batch_of("strong", cores) for cores in CORES} == {256}
    assert all(batch_of("weak", cores) == cores for cores in CORES)
    assert all(batch_of(scaling, cores) >= nodes_of(cores) for scaling in ("strong", "weak") for cores in CORES)


def test_a_rank_that_has_a_node_has_all_of_its_cores_and_memory() -> None:
    machine = machine_file.read("xc40")
    whole = one_rank_per_node(machine)
    assert (whole.ranks_per_node, whole.ranks_per_card) == (1, 1)
    assert whole.cores_per_rank == machine.cores_per_rank * machine.ranks_per_node
    for kind, rate in machine.rates.items():
        assert whole.rates[kind].flops_per_second == pytest.approx(machine.ranks_per_node * rate.flops_per_second)
        assert whole.rates[kind].call_seconds == rate.call_seconds


def test_fewer_cores_compute_less_and_the_whole_node_is_itself() -> None:
    whole = one_rank_per_node(machine_file.read("xc40"))
    assert on_some_cores(whole, 32) == on_some_cores(whole, 64) == whole
    one, two = (on_some_cores(whole, cores) for cores in (1, 2))
    for kind in whole.rates:
        assert two.rates[kind].flops_per_second == pytest.approx(2 * one.rates[kind].flops_per_second)
        assert one.rates[kind].bytes_per_second < two.rates[kind].bytes_per_second <= whole.rates[kind].bytes_per_second


def test_a_variation_changes_one_number() -> None:
    machine = one_rank_per_node(machine_file.read("xc40"))
    flat = _flat(asdict(machine))
    varied = variations(machine, 1.25)
    assert len(varied) > 8
    for name, other in varied.items():
        changed = {key: value / flat[key] for key, value in _flat(asdict(other)).items() if value != flat[key]}
        assert len({key.split(".")[-1] for key in changed}) == 1, name
        assert all(ratio == pytest.approx(1.25) or ratio == pytest.approx(0.8) for ratio in changed.values()), name


def _flat(tree: object, at: str = "") -> dict[str, float]:
    if isinstance(tree, dict):
        return {key: value for name, branch in tree.items() for key, value in _flat(branch, f"{at}.{name}").items()}
    if isinstance(tree, list | tuple):
        return {key: value for number, branch in enumerate(tree) for key, value in _flat(branch, f"{at}{number}").items()}
    return {at: float(tree)} if isinstance(tree, int | float) else {}
