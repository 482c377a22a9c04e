"""Benchmarks of the planner: points, jobs, accuracies, picks, simulated scaling; quiet moments and figures of traced turns."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import planner_accuracy, planner_report, planner_scaling_report, posting
from benchmarks.core_speed import Yardstick, slowed, slowed_ranks
from benchmarks.planner_accuracy_ranks import mean_over_ranks
from benchmarks.planner_jobs import configuration, image_shape, made_up_batch, planned_run
from benchmarks.planner_points import AVERAGERS, NETWORKS, POINTS, SHARED_MEMORY, TRACED, Point
from benchmarks.planner_scaling import on_some_cores, one_rank_per_node, variations
from benchmarks.posting_ranks import delays_of, facts_of
from benchmarks.quiet import QuietCores
from hpctrain.backend.graph import GraphBuilder
from hpctrain.backend.specs import TensorSpec
from hpctrain.comm.base import Communicator
from hpctrain.data.loader import LoaderRank
from hpctrain.models import catalogue
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.planner import machine_file
from hpctrain.trace.tracer import Category
from hpctrain_testing.virtual.run import run_virtual
from tests.support.recorded import Script


def test_all_points_are_swept_unless_some_are_asked_for() -> None:
    assert planner_accuracy.chosen_points(planner_accuracy.parse([])) == list(POINTS)
    chosen = planner_accuracy.chosen_points(
        planner_accuracy.parse(["--links", f"1gbit,{SHARED_MEMORY}", "--ranks", "4", "--networks", "resnet18"])
    )
    assert chosen
    assert all(point.link in ("1gbit", SHARED_MEMORY) and point.ranks == 4 and point.network == "resnet18" for point in chosen)
    assert planner_accuracy.chosen_points(planner_accuracy.parse(["--averagers", "priority", "--plans", "domain"])) == []


@pytest.mark.parametrize(("which", "count"), [("named", len(TRACED)), ("all", len(POINTS)), ("none", 0)])
def test_traces_are_of_three_points_unless_others_are_asked_for(which: str, count: int) -> None:
    assert sum(planner_accuracy.traced(which, point) for point in POINTS) == count


def test_ranks_are_averaged_turn_by_turn() -> None:
    first = {"a": [{"seconds": 1.0}, {"seconds": 2.0}], "b": [{"seconds": 4.0}]}
    second = {"a": [{"seconds": 3.0}, {"seconds": 4.0}], "b": [{"seconds": 0.0}]}
    assert mean_over_ranks([first, second]) == {"a": [{"seconds": 2.0}, {"seconds": 3.0}], "b": [{"seconds": 2.0}]}


def test_only_traced_points_keep_their_tables() -> None:
    predictions: dict[str, dict[str, object]] = {name: {"step_seconds": 1.0, "table": {}} for name in "ab"}
    planner_accuracy.without_needless_tables(predictions, {"b": {}})
    assert predictions == {"a": {"step_seconds": 1.0}, "b": {"step_seconds": 1.0, "table": {}}}


@pytest.mark.parametrize("averager", AVERAGERS)
def test_configurations_have_what_the_point_says(averager: str) -> None:
    for point in (one for one in POINTS if one.averager == averager):
        config = configuration(point)
        assert (config.grid.rows, config.grid.cols) == (point.rows, point.cols)
        assert (config.plan.default, config.plan.patterns) == (point.default, point.use)
        assert (config.averager.name, config.averager.options) == AVERAGERS[averager]
        assert config.batch == NETWORKS[point.network].batch
        assert configuration(point, trace=True).trace


def test_a_planned_run_needs_no_data() -> None:
    point = next(one for one in POINTS if one.plan == "mixed" and one.ranks == 4)
    task = planned_run(point)
    assert (task.plan.rows, task.plan.cols) == (2, 2)
    assert task.job.image_shape == image_shape(point)
    assert sum(task.counts) == NETWORKS[point.network].batch


def test_ranks_share_the_same_made_up_images() -> None:
    point = Point("resnet20", "1gbit", 2, 1, "batch", "sharded")
    places: list[LoaderRank] = [{"rank": rank, "ranks": 2, "split_size": 1, "tiles": None, "shards": None} for rank in range(2)]
    batches = [made_up_batch(point, place) for place in places]
    count = NETWORKS["resnet20"].batch
    assert [len(batch.x) for batch in batches] == [count // 2, count // 2]
    assert not np.array_equal(batches[0].x, batches[1].x)
    assert batches[0].global_count == count


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name.replace(" ", "_"))
def test_every_point_is_a_plan_of_its_network(point: Point) -> None:
    network = NETWORKS[point.network]
    builder = GraphBuilder(TensorSpec((1, network.pixels, network.pixels, 3), "float32"))
    options = {**network.options, "classes": network.classes}
    graph = builder.build(catalogue.build(network.model, options).lower(builder, 0, ""))
    plan = ParallelPlan(point.rows, point.cols, point.default, point.use)  # type: ignore[arg-type]
    plan.check([node.name for node in graph.nodes])
    if point.rows > 1:
        assert partition_graph(graph, plan, (1, *(0,) * (point.rows - 1))).steps
    assert network.batch % point.ranks == 0


_JOB = [point for point in POINTS if point.job == ("resnet50", "2gbit", 2)]


def _turns(*seconds: float) -> list[dict[str, float]]:
    return [{"step_seconds": one, "waited_seconds": one / 10, "cpu_seconds": one} for one in seconds]


def _prediction(seconds: float, exposed: dict[str, float] | None = None) -> dict[str, Any]:
    rows = [{"name": name, "exposed_seconds": value} for name, value in (exposed or {}).items()]
    return {"step_seconds": seconds, "exposed_seconds": seconds / 20, "table": {"rows": rows}}


def _result(predicted: dict[Point, float], measured: dict[Point, tuple[float, ...]]) -> dict[str, Any]:
    run = {
        "predictions": {point.name: _prediction(seconds) for point, seconds in predicted.items()},
        "rounds": {point.name: _turns(*seconds) for point, seconds in measured.items()},
        "traces": {},
    }
    return {"runs": [run]}


def test_accuracy_is_that_of_the_less_disturbed_turns_at_the_speed_that_cores_had() -> None:
    first, second, *_ = _JOB
    result = _result({first: 0.9, second: 3.0}, {first: (1.5, 2.0, 1.0), second: (2.0, 2.0, 2.0)})
    result["runs"][0]["at_speed"] = {
        first.name: {"slowed": [[1.0, 1.6], [1.0, 1.1], [1.0, 1.0]], "step_seconds": [9.0, 1.6, 1.0]}
    }
    rows = planner_report.compared(result)
    assert [row.point for row in rows] == [first, second]
    assert [row.accuracy for row in rows] == pytest.approx([0.9, 0.5])
    assert rows[0].measured_seconds == pytest.approx(1.0)
    assert rows[0].measured_waited_seconds == pytest.approx(0.1)
    assert (rows[0].least_seconds, rows[0].median_seconds, rows[0].slowed) == (1.0, 1.5, 1.1)
    assert rows[1].slowed == 1


def test_a_pick_is_the_lowest_prediction_and_is_judged_by_its_measured_time() -> None:
    first, second, third, *_ = _JOB
    measured = {first: (1.0,), second: (1.04,), third: (2.0,)}
    (near,) = planner_report.picks(planner_report.compared(_result({first: 0.8, second: 0.7, third: 0.9}, measured)))
    assert (near.picked.point, near.best.point, near.candidates) == (second, first, 3)
    assert near.ratio == pytest.approx(1.04)
    assert near.good
    (far,) = planner_report.picks(planner_report.compared(_result({first: 0.8, second: 0.9, third: 0.7}, measured)))
    assert far.ratio == pytest.approx(2.0)
    assert not far.good


def test_jobs_pick_among_their_own_candidates() -> None:
    others = [point for point in POINTS if point.job == ("resnet20", "1gbit", 2)]
    points = [*_JOB, *others]
    result = _result(dict.fromkeys(points, 1.0), dict.fromkeys(points, (1.0,)))
    assert [pick.candidates for pick in planner_report.picks(planner_report.compared(result))] == [
        len(others),
        len(_JOB),
    ]  # in the order of the list


def test_traces_compare_exposed_seconds_row_by_row() -> None:
    name = _JOB[0].name
    result = _result({_JOB[0]: 1.0}, {_JOB[0]: (1.0,)})
    run = result["runs"][0]
    run["predictions"][name] = _prediction(1.0, {"fc": 0.1, "conv1": 0.3, "norm": 0.0})
    rows = [{"name": row, "exposed_seconds": value} for row, value in (("fc", 0.2), ("layer1", 0.1), ("bn", 0.0))]
    run["traces"] = {name: {"step_seconds": 2.0, "rows": rows}}
    (comparison,) = planner_report.traces(result)
    assert {row[0] for row in comparison.rows} == {"fc", "conv1", "layer1"}
    assert comparison.largest == ("conv1", pytest.approx(0.15))
    assert comparison.summed == pytest.approx((0.1 + 0.3 + 0.1) / 2)
    assert comparison.total == pytest.approx((0.4 - 0.3) / 2)
    text = planner_report.report(result)
    assert "| conv1 | 0.3000 | 0.0000 |" in text


def test_the_report_tells_named_points_by_themselves() -> None:
    named = next(point for point in _JOB if point.named)
    other = next(point for point in _JOB if not point.named)
    text = planner_report.report(_result({named: 1.0, other: 0.5}, {named: (1.0, 1.0, 1.0), other: (1.0, 1.0, 1.0)}))
    assert "2 points: accuracy 75.0% on average" in text
    assert "1 points: accuracy 100.0% on average" in text
    assert "1 below 80%" in text


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


def _curve(network: str, scaling: str, series: str, points: list[tuple[int, int, float]]) -> dict[str, Any]:
    names = ("cores", "batch", "step_seconds")
    return {
        "network": network,
        "scaling": scaling,
        "series": series,
        "points": [dict(zip(names, point, strict=True)) for point in points],
    }


def _scaling_result() -> dict[str, Any]:
    strong = [(1, 256, 100.0), (32, 256, 4.0), (8192, 256, 0.05)]
    weak = [(1, 1, 1.0), (32, 32, 1.0), (8192, 8192, 2.0)]
    sensitivity = {"network": "VGG-16", "series": "sharded", "cores": 8192, "speedup": 2000.0, "numbers": {"rate": [1500, 2200]}}
    curves = [_curve("VGG-16", scaling, "sharded", points) for scaling, points in (("strong", strong), ("weak", weak))]
    return {"curves": curves, "sensitivity": [sensitivity]}


def test_speedups_are_of_samples_a_second() -> None:
    strong, weak = _scaling_result()["curves"]
    assert planner_scaling_report.speedups(strong) == pytest.approx({1: 1.0, 32: 25.0, 8192: 2000.0})
    assert planner_scaling_report.speedups(weak) == pytest.approx({1: 1.0, 32: 32.0, 8192: 4096.0})


def test_a_curve_that_begins_above_one_core_counts_from_there_as_if_it_had_scaled() -> None:
    curve = _curve("VGG-16", "strong", "sharded", [(32, 256, 4.0), (64, 256, 2.5)])
    assert planner_scaling_report.speedups(curve) == pytest.approx({32: 32.0, 64: 51.2})


def test_every_table_says_that_it_is_simulated() -> None:
    text = planner_scaling_report.markdown(_scaling_result())
    titles = [line for line in text.splitlines() if line and not line.startswith(("|", "Lee"))]
    assert len(titles) == 3
    assert all(title.startswith("Simulated ") for title in titles)
    assert "2516x on 8192 cores" in text
    assert "| rate | 1500 (-25.0%) | 2200 (+10.0%) |" in text


@pytest.mark.slow
def test_the_plot_has_a_panel_for_each_scaling(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    planner_scaling_report.plot(_scaling_result(), tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def _turn(seconds: float, least: float) -> dict[str, float]:
    return {"yardstick_seconds": seconds, "yardstick_least_seconds": least}


def test_yardsticks_are_compared_with_the_least_of_their_network() -> None:
    turns = {"a": [_turn(2.0, 1.5), _turn(1.0, 1.0)], "b": [_turn(3.0, 3.0)], "c": [_turn(6.0, 4.0)]}
    of_rank = slowed(turns, {"a": "vgg16", "b": "vgg16", "c": "resnet20"})
    assert of_rank == {"a": pytest.approx([2.0, 1.0]), "b": pytest.approx([3.0]), "c": pytest.approx([1.5])}


def test_a_turn_has_the_slowness_of_each_rank() -> None:
    assert slowed_ranks([{"a": [1.0, 1.5]}, {"a": [1.2, 1.0]}], "a") == [{0: 1.0, 1: 1.2}, {0: 1.5, 1: 1.0}]


@pytest.mark.slow
def test_a_yardstick_is_a_step_of_the_network_without_other_ranks() -> None:
    point = next(point for point in POINTS if point.network == "resnet20")
    assert Yardstick(point).seconds() > 0


class _Paced(QuietCores):
    """Cores that take the seconds that a test says."""

    def __init__(self, world: Communicator, seconds: list[float]) -> None:
        self._paces = [1.0] * 50 + seconds
        super().__init__(world)

    def probe(self) -> float:
        return self._paces.pop(0) if len(self._paces) > 1 else self._paces[0]


def test_a_moment_is_quiet_where_no_rank_is_slowed() -> None:
    def moments(comm: Communicator) -> list[bool]:
        cores = _Paced(comm, [1.0, 1.5, 1.0] if comm.rank else [1.0, 1.0, 1.05])
        return [cores.now() for _ in range(3)]

    assert run_virtual(2, moments) == [[True, False, True]] * 2


def test_a_wait_ends_with_the_first_quiet_moment_or_when_its_time_is_up() -> None:
    def waits(comm: Communicator) -> tuple[bool, bool]:
        cores = _Paced(comm, [2.0, 2.0, 1.0, 3.0])
        return cores.wait(60.0), cores.wait(0.0)

    assert run_virtual(2, waits) == [(True, False)] * 2


def _traced_turn(delay: float) -> Script:
    script = Script()
    for at in (0, 10):
        script(Category.FORWARD, "conv", at, at + 6)
        script(Category.FORWARD, "fc", at + 6, at + 8)
        script(Category.COMMUNICATION, "conv.weight", at + 3 + delay, at + 9, 2 * at, "row")
        script(Category.COMMUNICATION, "fc.weight", at + 8, at + 9, 2 * at + 1, "row")
        if delay:
            script(Category.DELAY, "conv.weight", at + 3, at + 3 + delay, 2 * at, "row")
        script(Category.MESSAGES, "posting and progress", at + 8, at + 8.5)
        script(Category.WAIT, "fc.weight", at + 8.5, at + 9, 2 * at + 1, "row")
        script(Category.STEP, "step", at, at + 10, at)
    return script


def test_every_operation_counts_in_the_delays() -> None:
    assert sorted(delays_of(_traced_turn(3).events())) == pytest.approx([0, 0, 3e-3, 3e-3])
    assert delays_of(_traced_turn(0).events()) == [0.0] * 4


def test_figures_are_of_a_step() -> None:
    facts = facts_of(_traced_turn(3).events(), 2)
    assert facts["step_seconds"] == pytest.approx(10e-3)
    assert facts["exposed_seconds"] == pytest.approx(0.5e-3)
    assert facts["messages_seconds"] == pytest.approx(0.5e-3)
    assert facts["delay_seconds"] == pytest.approx(3e-3)
    assert (facts["operations"], facts["delay_of_operation_seconds"]) == (2, pytest.approx(1.5e-3))
    assert facts["operator_seconds"] == pytest.approx((36 + 4) / 8 * 1e-3)


def test_the_table_compares_steps_with_those_of_mode_test() -> None:
    turns = {
        mode: [facts_of(_traced_turn(delay).events(), 2) | {"cpu_seconds": 0.008}] * 3
        for mode, delay in (("test", 3), ("posting", 0))
    }
    shape = {"family": "vgg", "depth": 16, "width": 0.375, "pixels": 64, "batch": 32}
    lines = posting.markdown({"rounds": turns, "shape": shape, "averager": "sharded", "ranks": 2, "link": "1gbit"}).splitlines()
    assert lines[-2].startswith("| test | 10.0 | 1.00")
    assert "| 0.5 | 0.5 | 0.0 | 8.0 | 3.0 | 2 | 1.50 | 5.00 |" in lines[-2]
    assert "| 8.0 | 0.0 | 2 | 0.00 |" in lines[-1]


def test_mode_test_is_always_measured() -> None:
    assert posting.parse(["vgg16", "--modes", "posting"]).modes == ["test", "posting"]
