"""Closed forms, bytes of steps and predictions agree with the plans of configurations."""

from pathlib import Path
from statistics import mean

import pytest

from hpctrain.backend.graph import Graph
from hpctrain.comm.link import LinkModel
from hpctrain.config.load import load
from hpctrain.data.sampler import counts
from hpctrain.models import catalogue
from hpctrain.nn.network import Lowering, declared
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.plan_report import LayerReport, PlanReport, report_plan
from hpctrain.planner.costs.compute_costs import RateCosts
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.planned_run import PlannedRun, averaging_bytes, description, prepare
from hpctrain.planner.program.group_schedules import group_schedules
from hpctrain.planner.program.step_program import exchanged_bytes, predict, split_bytes, step_program
from hpctrain.planner.simulation.tasks import Compute, Prediction
from hpctrain_testing import formulas
from hpctrain_testing.formulas import weighted_layers
from tests.support.planned import machine

BATCH, MODEL, DOMAIN = Parallelism
CONFIGS = Path(__file__).parents[2] / "configs"
ALPHA_SECONDS, BETA_SECONDS_PER_WORD = 2e-6, formulas.WORD_BYTES / 6e9
SAMPLES, RANKS = 2048, 512
DEEP = {"vgg11": (64, 62, 3), "alexnet": (227, 227, 3)}  # whose last layers still have some rows


def graph_of(name: str, samples: int = 1, width: float = 1.0) -> Graph:
    return Lowering(catalogue.build(name, {"width": width})).graph(samples, DEEP[name])


ALEXNET = weighted_layers(graph_of("alexnet"))
LINEAR = {layer.name: MODEL for layer in ALEXNET if not layer.images}
IMAGES = {layer.name: DOMAIN for layer in ALEXNET if layer.images}


def milliseconds(uses: dict[str, Parallelism], rows: int) -> float:
    cost = formulas.step_cost(ALEXNET, uses, SAMPLES, rows, RANKS // rows)
    return 1e3 * cost.seconds(ALPHA_SECONDS, BETA_SECONDS_PER_WORD)


def test_layers_are_the_papers() -> None:
    assert [layer.outputs for layer in ALEXNET] == [290_400, 186_624, 64_896, 64_896, 43_264, 4096, 4096, 1000]
    assert [layer.inputs for layer in ALEXNET[1:]] == [27 * 27 * 96, 13 * 13 * 256, 64_896, 64_896, 9216, 4096, 4096]
    assert sum(layer.weights for layer in ALEXNET) == 62_367_776
    assert [layer.halo_rows for layer in ALEXNET] == [7, 2, 1, 1, 1, 0, 0, 0]
    assert [layer.boundary_rows for layer in ALEXNET] == [7, 4, 2, 2, 2, 0, 0, 0]
    assert [layer.passes_back for layer in ALEXNET] == [False] + 7 * [True]


@pytest.mark.parametrize(
    ("uses", "rows", "published"),
    [({}, 1, 83.3), ({**dict.fromkeys(IMAGES, MODEL), **LINEAR}, 4, 30.4), (LINEAR, 32, 11.2), ({**IMAGES, **LINEAR}, 16, 13.9)],
    ids=["batch", "one grid", "batch and model", "domain and model"],
)
def test_alexnet_takes_the_times_of_the_paper(uses: dict[str, Parallelism], rows: int, published: float) -> None:
    assert milliseconds(uses, rows) == pytest.approx(published, rel=0.01)


def test_crossovers_of_model_and_batch() -> None:
    linear = [round(formulas.crossover_batch(layer)) for layer in ALEXNET if not layer.images]
    assert linear == [3351, 2731, 891]
    assert max(formulas.crossover_batch(layer) for layer in ALEXNET if layer.images) == pytest.approx(14, rel=0.03)


@pytest.mark.parametrize(
    ("uses", "best"), [({**dict.fromkeys(IMAGES, MODEL), **LINEAR}, 4), (LINEAR, 32), ({**IMAGES, **LINEAR}, 16)]
)
def test_the_best_grids_are_those(uses: dict[str, Parallelism], best: int) -> None:
    assert min((2**power for power in range(10)), key=lambda rows: milliseconds(uses, rows)) == best


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", ["alexnet", "vgg16"])
def test_batchs_words_are_the_means_of_what_ranks_exchange(name: str, ranks: int) -> None:
    model = f"model={{name: {name}, width: 0.1}}"
    config, _ = load(CONFIGS / "imagenet-vgg16.yaml", [model, "averager=blocking", "batch=24", "backend=numpy"])
    task = prepare(config, ranks, (227, 227, 3), 10)
    layers = weighted_layers(task.job.graph_of(1))
    biases = sum(spec.shape[0] for parameter, spec in task.job.specs.items() if parameter.endswith("bias"))
    expected = sum(formulas.batch(layer, ranks).words for layer in layers) + 2 * (ranks - 1) / ranks * biases
    bytes_of_ranks = averaging_bytes(task, group_schedules(task.job, task.candidate, LinkModel(0.0, 0.0)))
    assert mean(bytes_of_ranks) / formulas.WORD_BYTES == pytest.approx(expected, rel=1e-12)


def report(name: str, use: Parallelism, rows: int, samples: int) -> PlanReport:
    model = catalogue.build(name, {"width": 0.1})
    specs, _ = declared(model, graph_of(name, width=0.1))
    shapes = {parameter: spec.shape for parameter, spec in specs.items()}
    plan = ParallelPlan(rows, 1, use)
    return report_plan(lambda batch: graph_of(name, batch, 0.1), plan, counts(samples, rows), shapes)


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("name", DEEP)
def test_models_words_are_the_means_of_what_ranks_exchange(name: str, rows: int) -> None:
    """A layer's inputs are gathered where they are read: the outputs of the layer before, pooled. Their gradients are summed to
    their owners, half of what a sum for everyone moves."""
    samples = 5
    gathers = {move.reader: move for move in report(name, MODEL, rows, samples).redistributions if move.target == "everything"}
    layers = weighted_layers(graph_of(name, width=0.1))
    assert layers[0].name not in gathers  # images are read from files
    for layer in layers[1:]:
        traffic = gathers[layer.name].traffic
        expected = formulas.gather(samples * layer.inputs, rows).words
        assert mean(traffic.forward) == pytest.approx(expected, rel=1e-12)
        both = formulas.model(layer, samples, rows).words - formulas.gather(samples * layer.outputs, rows).words
        assert mean(traffic.backward) == pytest.approx(both / 2, rel=1e-12)


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("name", DEEP)
def test_domains_words_are_the_means_of_what_ranks_exchange(name: str, rows: int) -> None:
    samples = 5
    entries = {entry.name: entry for entry in report(name, DOMAIN, rows, samples).entries if isinstance(entry, LayerReport)}
    convolutions = [layer for layer in weighted_layers(graph_of(name, width=0.1)) if layer.images]
    assert len(convolutions) >= 5
    for layer in convolutions:
        traffic = entries[layer.name].traffic
        expected = formulas.halo_words(layer, samples, rows, 1) if layer.passes_back else 0
        assert mean(traffic.forward) == mean(traffic.backward) == pytest.approx(expected, rel=1e-12), layer.name


GRIDS = [("grid.rows=1", 5, 2), ("grid.rows=2", 4, 2), ("grid.rows=2", 6, 4), ("grid.rows=4", 8, 2)]
PLANS = ["plan.default=batch", "plan.default=model", "plan.default=domain", "plan={default: domain, '*fc*': model}"]
AVERAGERS = [
    *("averager=sharded", "averager=bucketed", "averager=blocking", "averager=priority", "averager=overlap"),
    "averager={name: sharded, wire: bfloat16, wire_parameters: bfloat16}",
    "averager={name: bucketed, wire: bfloat16}",
    "averager={name: blocking, wire: bfloat16}",
    "averager={name: sparse, density: 0.05, compress: always}",
]


def task_of(model: str, ranks: int, *overrides: str) -> PlannedRun:
    config, _ = load(CONFIGS / "cifar10-resnet20.yaml", [f"model={model}", "batch=21", "backend=numpy", *overrides])
    return prepare(config, ranks, (32, 32, 3), 10)


def assert_equal_bytes(task: PlannedRun, per_node: int) -> None:
    report, nodes = description(task), machine(per_node)
    program = step_program(task.job, task.candidate, nodes, RateCosts(nodes))
    forward, backward = (
        direction(report.item_bytes) for direction in (report.traffic.bytes_forward, report.traffic.bytes_backward)
    )
    assert split_bytes(program) == sum(forward) + sum(backward)
    averaged = averaging_bytes(task, group_schedules(task.job, task.candidate, LinkModel(1e-5, 1e-9), per_node))
    assert exchanged_bytes(program) == sum(forward) + sum(backward) + sum(averaged)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("grid", "ranks", "per_node"), GRIDS)
@pytest.mark.parametrize("model", ["resnet20", "{name: vgg11, width: 0.05}"])
def test_bytes_are_those_that_plan_show_tells(model: str, grid: str, ranks: int, per_node: int, plan: str) -> None:
    if "fc" in plan and "vgg" in model:
        plan = plan.replace("*fc*", "classifier.*")
    assert_equal_bytes(task_of(model, ranks, grid, plan), per_node)


@pytest.mark.slow
@pytest.mark.parametrize("averager", AVERAGERS)
def test_bytes_of_averagers_are_those_that_plan_show_tells(averager: str) -> None:
    assert_equal_bytes(task_of("{name: vgg11, width: 0.05}", 4, "grid.rows=2", "plan.default=model", averager), 2)


def prediction(nodes: Machine, *overrides: str, ranks: int = 4) -> Prediction:
    task = task_of("resnet20", ranks, "batch=16", *overrides)
    return predict(task.job, task.candidate, nodes, RateCosts(nodes))


@pytest.mark.slow
@pytest.mark.parametrize("averager", ["sharded", "bucketed", "blocking", "priority", "overlap"])
@pytest.mark.parametrize(
    "grid", [("grid.rows=1",), ("grid.rows=2", "plan.default=domain"), ("grid.rows=4", "plan.default=model")]
)
def test_a_step_takes_at_least_its_compute(averager: str, grid: tuple[str, ...]) -> None:
    nodes, task = machine(2), task_of("resnet20", 4, "batch=16", *grid, f"averager={averager}")
    predicted = predict(task.job, task.candidate, nodes, RateCosts(nodes))
    program = step_program(task.job, task.candidate, nodes, RateCosts(nodes))
    compute = max(sum(one.seconds for one in ranks.tasks if isinstance(one, Compute)) for ranks in program.classes)
    assert predicted.step.seconds >= compute * (1 - 1e-9)
    assert predicted.memory_bytes == max(ranks.memory_bytes for ranks in program.classes) > 0
    assert predicted.exchanged_bytes == exchanged_bytes(program) > 0
    assert predicted.measured_share == 0.0


@pytest.mark.slow
def test_slower_links_and_slower_ranks_take_longer() -> None:
    fast, slow = machine(1), machine(1).scaled(bandwidth=0.01)
    assert prediction(fast).step.seconds < prediction(slow).step.seconds
    assert prediction(fast).step.seconds < prediction(machine(1).scaled(compute=0.5)).step.seconds


def test_a_rank_alone_exchanges_nothing_and_does_not_wait() -> None:
    alone = prediction(machine(1), ranks=1)
    assert alone.exchanged_bytes == 0
    assert alone.step.exposed_seconds == pytest.approx(0.0, abs=1e-6)
