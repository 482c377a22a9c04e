"""The stage that times plans: which convolutions it asks for, and how it adds up."""

from __future__ import annotations

import pytest

from benchmarks.gpu import plans
from benchmarks.gpu.convolutions import AskedDevice, convolutions
from benchmarks.gpu.settings import Settings, SkippedError
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.cuda.cudnn_graphs import describe


class TimedDevice(AskedDevice):
    """Has two plans for every convolution but those of the weight, the second of which is the faster one."""

    def time_plans(self) -> None:
        """Nothing: the times are known."""

    def plan_seconds(self) -> dict[str, dict[str, float]]:
        return {describe(key): {"eng1": 3.0, "eng2": 2.0} for key in self.keys if key.kind != "weight"}

    def plan_choices(self) -> dict[str, str]:
        return {describe(key): "eng1" if key.kind == "weight" else "eng2" for key in self.keys}


def test_times_of_all_convolutions_with_a_choice_add_up() -> None:
    keys = convolutions("resnet20", 2, "tf32")
    count = sum(key.kind != "weight" for key in keys)
    row = plans.times(TimedDevice(), "resnet20", 2, "tf32")
    assert (row["convolutions"], row["with_a_choice"]) == (len(keys), count)
    assert (row["first_seconds"], row["fastest_seconds"]) == (3.0 * count, 2.0 * count)
    assert set(row["plans"]) == {describe(key) for key in keys if key.kind != "weight"}


def test_the_emulated_device_has_nothing_to_time(tmp_path) -> None:
    with pytest.raises(SkippedError, match="one plan"):
        plans.run(Settings("emulated", tmp_path), StageReport(tmp_path / "plans.json", "plans", "emulated"))
