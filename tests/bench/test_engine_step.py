"""Steps of the engine by themselves: they train, their operators' times add up, and their counts are the network's."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from hpctrain.bench.engine_step import EngineStep, Laps, gemm_peak, stand_ins, time_layers, workload
from hpctrain.errors import ConfigError


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
    assert first.flops == 2 * first.forward_flops, "nobody needs the gradient of the images"
    assert second.flops == 3 * second.forward_flops
    assert all(layer.forward_seconds == 1.0 for layer in convolutions)


def test_layers_that_bring_their_operators_are_computed_in_numpy_on_the_host_only() -> None:
    program = EngineStep(workload("resnet20", 1, 8, {"width": 0.125}), "numpy").program
    own, others = stand_ins(program)
    pads = ["layer2.0.downsample.pad", "layer3.0.downsample.pad"]
    assert others == {"its layer brings its own": pads}
    assert stand_ins(program, on_host=False) == (own + len(pads), {})


def test_the_peak_of_products_is_the_best_of_all() -> None:
    instants = iter([0.0, 2.0, 2.0, 3.0, 3.0, 7.0])
    assert gemm_peak(10, 2, lambda: next(instants)) == pytest.approx(2 * 10**3 / 1.0 / 1e9)


@pytest.mark.parametrize(("batch", "pixels"), [(0, 28), (1, 0), (-1, None)])
def test_an_empty_workload_is_refused(batch: int, pixels: int | None) -> None:
    with pytest.raises(ConfigError, match="both must be at least 1"):
        workload("small", batch, pixels)
