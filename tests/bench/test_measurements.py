"""What the benches measure: steps of the engine, layers, data, devices, processes in turn, and scaling."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.bench import data, engine, scaling
from hpctrain.bench.data import AUGMENT, NORMALISE, READ, WHOLE, DataRates, StageRate
from hpctrain.bench.engine import Measurement, device_gemm_peak, device_of, layer_table, measure
from hpctrain.bench.engine_step import EngineStep, Laps, fallbacks, gemm_peak, time_layers, workload
from hpctrain.bench.scaling import Point, ScalingStudy, with_efficiency
from hpctrain.config.load import parse
from hpctrain.config.schema import Config
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.data.writer import write_data_file
from tests.support.emulated import CudaKernelsFactory


def _step() -> EngineStep:
    return EngineStep(workload("small", 4, 9, {"channels": [3, 5], "hidden": 6, "grid": 2}), "numpy")


def test_steps_train_on_the_same_batches_in_turn() -> None:
    losses = [np.array([step.run() for _ in range(12)]) for step in (_step(), _step())]
    assert losses[0].tobytes() == losses[1].tobytes()
    first, later = losses[0][:3], losses[0][9:]
    assert (later < first).all(), "each of the three batches is learnt"


def test_laps_lose_no_time_between_operators() -> None:
    ticks = count()
    laps = Laps(lambda: float(next(ticks)))
    laps.start()
    for name, phase in (("a", "forward"), ("b", "forward"), ("b", "input"), ("a", "input")):
        laps.operator_done(name, phase)
    assert laps.seconds == {("a", "forward"): [1.0], ("b", "forward"): [1.0], ("b", "input"): [1.0], ("a", "input"): [1.0]}


def test_layers_are_timed_in_forward_order_with_their_floating_point_operations() -> None:
    ticks = count()
    step = _step()
    times = time_layers(step, 3, lambda: float(next(ticks)))
    assert [layer.name for layer in times[-2:]] == ["loss", "update"]
    convolutions = [layer for layer in times if layer.name.endswith(".conv")]
    assert [layer.name for layer in convolutions] == ["stage1.conv", "stage2.conv"]
    first, second = convolutions
    assert first.flops == 2 * first.forward_flops, "no layer needs the gradient of the images"
    assert second.flops == 3 * second.forward_flops
    assert all(layer.forward_seconds == 1.0 for layer in convolutions)


def test_layers_that_bring_their_operators_are_computed_in_numpy_on_the_host_only() -> None:
    program = EngineStep(workload("resnet20", 1, 8, {"width": 0.125}), "numpy").program
    own, others = fallbacks(program)
    pads = ["layer2.0.downsample.pad", "layer3.0.downsample.pad"]
    assert others == {"its layer defines its own operator": pads}
    assert fallbacks(program, on_host=False) == (own + len(pads), {})


def test_the_peak_of_products_is_the_best_of_all() -> None:
    instants = iter([0.0, 2.0, 2.0, 3.0, 3.0, 7.0])
    assert gemm_peak(10, 2, lambda: next(instants)) == pytest.approx(2 * 10**3 / 1.0 / 1e9)


@pytest.mark.parametrize(("batch", "pixels"), [(0, 28), (1, 0), (-1, None)])
def test_an_empty_workload_is_refused(batch: int, pixels: int | None) -> None:
    with pytest.raises(ConfigError, match="both must be at least 1"):
        workload("small", batch, pixels)


@pytest.fixture(scope="module")
def measured_engine() -> Measurement:
    return measure(workload("resnet20", 1, 8, {"width": 0.125}), "numpy", 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 130])
@pytest.mark.parametrize("slower", [1.0, 60.0, 4e3, 1e5])
def test_names_and_figures_of_operators_are_whole_in_a_narrow_terminal(
    measured_engine: Measurement, columns: int, slower: float
) -> None:
    measured = measured_engine
    names = ("forward_seconds", "parameters_seconds", "input_seconds")
    layers = [replace(layer, **{name: slower * getattr(layer, name) for name in names}) for layer in measured.layers]
    measured = replace(measured, layers=layers)
    text = io.StringIO()
    Console(file=text, width=columns).print(layer_table(measured))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert "\N{HORIZONTAL ELLIPSIS}" not in text.getvalue()
    shares = [line.split()[-1] for line in lines if line.rstrip().endswith("%")]
    assert len(shares) == len(measured.layers)
    if columns == 130:
        assert all(layer.name in text.getvalue() for layer in measured.layers)
    else:
        assert all(layer.name[:20] in text.getvalue() for layer in measured.layers)


def test_lines_of_onednn_are_read() -> None:
    lines = [
        "onednn_verbose,info,oneDNN v3.2.0",
        "onednn_verbose,exec,cpu,convolution,jit:avx2,forward_training,src_f32::blocked:aBcd8b::f0 wei_f32,attr-scratchpad:user,"
        "alg:convolution_direct,mb2_ic16oc32_ih14oh14,0.5",
        "onednn_verbose,exec,cpu,reorder,jit:blk,undef,src_f32 dst_f32,attr-scratchpad:user,,32x16x3x3,0.25",
        "something else",
    ]
    conv, copy = engine.parse(lines)
    assert (conv.kind, conv.implementation, conv.propagation) == ("convolution", "jit:avx2", "forward_training")
    assert (conv.problem, conv.seconds) == ("mb2_ic16oc32_ih14oh14", 0.0005)
    assert (copy.kind, copy.problem, copy.seconds) == ("reorder", "32x16x3x3", 0.00025)


CONFIG = """
{{model: {{name: small, channels: [4, 6], hidden: 9}}, data: {{train: {train}, augment: [{augment}]}}, batch: {batch}, epochs: 1,
 optimizer: {{name: sgd, lr: 0.05}}, schedule: constant, backend: numpy}}
"""


def _config(train: object, augment: str = "flip", batch: int = 4) -> Config:
    return parse(CONFIG.format(train=train, augment=augment, batch=batch))[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_LEAST_SECONDS", 1e-4)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("batch", [4, 11, 99])
def test_stages_are_timed_for_each_number_of_threads(tmp_path: Path, batch: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (11, 9, 9, 3), np.uint8)
    write_data_file(tmp_path / "train.h5", 11, (9, 9, 3), ["a", "b"], [(images, np.arange(11) % 2)])
    rates = data.measure(_config(tmp_path / "train.h5", batch=batch), (1, 3), 1)
    assert (rates.images, rates.shape, rates.decodes) == (min(batch, 11), (9, 9, 3), False)
    assert (rates.names, rates.threads) == ((READ, AUGMENT, NORMALISE, WHOLE), (1, 3))
    of = {(each.stage, each.threads) for each in rates.stages}
    assert of == {(READ, 1), *((stage, count) for stage in (AUGMENT, NORMALISE, WHOLE) for count in (1, 3))}
    assert all(each.images_per_second > 0 and each.cpu_seconds >= 0 for each in rates.stages)
    assert rates.rate(READ, 3) == rates.rate(READ, 1)
    assert rates.needed is not None


@pytest.mark.usefixtures("quick")
def test_made_up_images_without_augmentation_have_no_such_stage() -> None:
    rates = data.measure(_config("synthetic", augment=""), (1,), 1, times_step=False)
    assert rates.names == (READ, NORMALISE, WHOLE)
    assert rates.needed is None


def _rates(whole: float, needed: float | None, *, read: float = 9000.0) -> DataRates:
    stages = {(READ, 1): read, (AUGMENT, 1): 1000.0, (AUGMENT, 2): 1900.0, (NORMALISE, 1): 5000.0, (NORMALISE, 2): 9900.0}
    stages |= {(WHOLE, 1): whole, (WHOLE, 2): 2 * whole}
    found = tuple(StageRate(stage, count, rate, 0.0) for (stage, count), rate in stages.items())
    return DataRates(4, (9, 9, 3), False, found, "resnet20", needed, 1)


def test_what_takes_longest_limits_where_steps_need_more_than_is_made() -> None:
    limited = _rates(910.0, 2400.0)
    assert limited.sentence(1) == "augment limits: 1 thread makes 910 images/s, a resnet20 step with 1 thread needs 2,400"
    assert limited.sentence(2) == "augment limits: 2 threads make 1,820 images/s, a resnet20 step with 1 thread needs 2,400"
    enough = "data do not limit: 2 threads make 1,820 images/s, a resnet20 step with 1 thread needs 400 (augment takes longest)"
    assert _rates(910.0, 400.0).sentence(2) == enough
    assert _rates(910.0, None).sentence(1) == "augment takes longest: 1 thread makes 910 images/s"
    assert _rates(910.0, None, read=950.0).sentence(1) == "read takes longest: 1 thread makes 910 images/s"


def test_the_device_is_that_of_the_kernel_set(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels("float32")
    assert device_of(kernels) is kernels.runtime.device
    assert device_of(NumpyKernelSet()) is None


def test_the_rate_is_that_of_ten_products_without_the_first(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels("bfloat16")
    device, calls = kernels.runtime.device, []
    gemm = device.gemm

    def counted(*arguments, **options) -> None:
        calls.append(options["precision"])
        gemm(*arguments, **options)

    device.gemm = counted  # type: ignore[method-assign]
    assert device_gemm_peak(kernels) > 0
    assert calls == ["bfloat16"] * 10


def _point(ranks: int, seconds: float, oversubscribed: bool = False) -> Point:
    return Point(ranks, 1, 32 * ranks, seconds, 0.8 * seconds, 0.3 * seconds, 0.1 * seconds, 0.9 * seconds, oversubscribed, {})


def test_weak_efficiency_compares_times_and_strong_efficiency_times_of_all_ranks() -> None:
    points = [_point(2, 0.10), _point(4, 0.08), _point(8, 0.05)]
    assert [each.efficiency for each in with_efficiency(points, "weak")] == pytest.approx([1.0, 1.25, 2.0])
    assert [each.efficiency for each in with_efficiency(points, "strong")] == pytest.approx([1.0, 0.625, 0.5])


def test_ranks_that_share_cores_have_no_efficiency() -> None:
    points = with_efficiency([_point(1, 0.1), _point(2, 0.1), _point(4, 0.3, oversubscribed=True)], "weak")
    assert [each.efficiency for each in points] == [1.0, 1.0, None]
    alone = with_efficiency([_point(4, 0.1, oversubscribed=True), _point(8, 0.1)], "weak")
    assert [each.efficiency for each in alone] == [None, None]
    text = scaling.lines(points, "weak")
    assert "oversubscribed" in text[3]
    assert "%" not in text[3]
    assert "share cores" in text[-1]


def test_only_runs_that_chose_a_plan_have_a_predicted_step() -> None:
    points = [_point(1, 0.1), _point(2, 0.2)]
    assert "predicted" not in scaling.lines(points, "weak")[0]
    heading, chose, none = scaling.lines([replace(points[0], predicted_seconds=0.09), points[1]], "weak")
    assert " step ms predicted ms " in heading
    assert (chose.split()[3], none.split()[3]) == ("90.00", "-")
    assert {line.index(value) + len(value) for line, value in ((heading, "predicted ms"), (chose, "90.00"))} == {37}


def test_the_report_is_json_with_the_machine(tmp_path: Path) -> None:
    points = with_efficiency([_point(1, 0.1)], "strong")
    scaling.write(tmp_path / "s.json", ScalingStudy(Path("x.yaml"), mode="strong"), points)
    content = json.loads((tmp_path / "s.json").read_text())
    assert content["points"][0]["efficiency"] == 1.0
    assert content["points"][0]["images_per_second"] == pytest.approx(320)
    assert content["machine"]["cores"] >= 1


@pytest.mark.job
@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("srun -n 4", r"must contain \{ranks\}"),
        ("no-such-launcher {ranks}", "Cannot start no-such-launcher"),
        ("false {ranks}", "exit code 1"),
    ],
)
def test_a_launcher_that_does_not_do_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    with pytest.raises(LaunchError, match=words):
        scaling.run(ScalingStudy(quickstart, launcher=launcher), [2], say=lambda text: None)
    assert list(tmp_path.iterdir()) == []
