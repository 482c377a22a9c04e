"""The closed forms give the numbers of the paper's network, and their words are the means of what `plan show` counts."""

from pathlib import Path
from statistics import mean

import pytest

from hpctrain.backend.kernels.graph import Graph, GraphBuilder
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.comm.link import LinkModel
from hpctrain.config.load import load
from hpctrain.data.sampler import counts
from hpctrain.experiment.dry_run import averaging_bytes, group_schedules, prepare
from hpctrain.models import catalogue
from hpctrain.nn.network import declared
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.plan_report import LayerReport, PlanReport
from hpctrain.parallel.plan_reporter import report_plan
from hpctrain.planner import formulas
from hpctrain.planner.formulas import WeightedLayer, weighted_layers

BATCH, MODEL, DOMAIN = Parallelism
CONFIG = Path(__file__).parents[2] / "configs" / "imagenet-vgg16.yaml"
ALPHA_SECONDS, BETA_SECONDS_PER_WORD = 2e-6, formulas.WORD_BYTES / 6e9
SAMPLES, RANKS = 2048, 512
DEEP = {"vgg11": (64, 62, 3), "alexnet": (227, 227, 3)}  # whose last layers still have some rows


def graph_of(name: str, samples: int = 1, width: float = 1.0) -> Graph:
    builder = GraphBuilder(TensorSpec((samples, *DEEP[name])))
    return builder.build(catalogue.build(name, {"width": width}).lower(builder, 0, ""))


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


@pytest.mark.parametrize(
    ("uses", "best"), [({**dict.fromkeys(IMAGES, MODEL), **LINEAR}, 4), (LINEAR, 32), ({**IMAGES, **LINEAR}, 16)]
)
def test_the_best_grids_are_those(uses: dict[str, Parallelism], best: int) -> None:
    assert min((2**power for power in range(10)), key=lambda rows: milliseconds(uses, rows)) == best


def test_crossovers_of_model_and_batch() -> None:
    linear = [round(formulas.crossover_batch(layer)) for layer in ALEXNET if not layer.images]
    assert linear == [3351, 2731, 891]
    assert max(formulas.crossover_batch(layer) for layer in ALEXNET if layer.images) == pytest.approx(14, rel=0.03)




def test_one_row_is_batch_and_one_column_is_model() -> None:
    for layer in ALEXNET:
        assert formulas.integrated(layer, 64, 1, 8) == formulas.batch(layer, 8)
        assert formulas.integrated(layer, 64, 8, 1) == formulas.model(layer, 64, 8)
        assert formulas.domain(layer, 64, 1, 8) == formulas.batch(layer, 8)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", ["alexnet", "vgg16"])
def test_batchs_words_are_the_means_of_what_ranks_exchange(name: str, ranks: int) -> None:
    config, _ = load(CONFIG, [f"model={{name: {name}, width: 0.1}}", "averager=blocking", "batch=24", "backend=numpy"])
    task = prepare(config, ranks, (227, 227, 3), 10)
    layers = weighted_layers(task.graph_of(1))
    biases = sum(spec.shape[0] for parameter, spec in task.specs.items() if parameter.endswith("bias"))
    expected = sum(formulas.batch(layer, ranks).words for layer in layers) + 2 * (ranks - 1) / ranks * biases
    bytes_of_ranks = averaging_bytes(task, group_schedules(task, LinkModel(0.0, 0.0)))
    assert mean(bytes_of_ranks) / formulas.WORD_BYTES == pytest.approx(expected, rel=1e-12)


def report(name: str, use: Parallelism, rows: int, samples: int) -> PlanReport:
    model = catalogue.build(name, {"width": 0.1})
    builder = GraphBuilder(TensorSpec((1, *DEEP[name])))
    specs, _ = declared(model, builder.build(model.lower(builder, 0, "")))
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


def test_seconds_are_those_of_messages_and_words() -> None:
    layer = WeightedLayer("conv", weights=60, outputs=7, inputs=5, passes_back=True, row_words=4, halo_rows=1, boundary_rows=2)
    assert formulas.batch(layer, 6).seconds(1.0, 0.0) == 2 * 3
    assert formulas.batch(layer, 6).seconds(0.0, 1.0) == 2 * 50
    assert formulas.domain(layer, 4, 2, 2).seconds(0.0, 1.0) == 2 * (4 / 2) * 4 * 1 + 2 * 45
