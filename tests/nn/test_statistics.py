"""Running statistics: one blend a step, from count-weighted sums."""

import numpy as np

from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.nn.parameter import StatisticSpec
from hpctrain.nn.statistics import FlatStatistics


def _statistics() -> FlatStatistics:
    specs = {
        "a.running_mean": StatisticSpec((2,), 0.0, 0.1),
        "a.running_var": StatisticSpec((2,), 1.0, 0.1),
        "b.running_mean": StatisticSpec((3,), 0.0, 0.5),
    }
    return FlatStatistics(specs, "float64")


def test_first_values_and_roles() -> None:
    statistics = _statistics()
    roles = statistics.by_role({"running_mean": "a.running_mean", "running_var": "a.running_var"})
    assert list(roles["running_var"]) == [1.0, 1.0]
    roles["batch_mean"][...] = 4.0
    assert list(statistics.batch) == [4.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_blend_weighs_by_count_and_momentum() -> None:
    statistics = _statistics()
    sums = 6 * np.array([1.0, 2.0, 3.0, 4.0, 8.0, 8.0, 8.0])
    statistics.blend(sums, 6)
    np.testing.assert_allclose(statistics.running, [0.1, 0.2, 1.2, 1.3, 4.0, 4.0, 4.0])


def test_a_step_without_samples_changes_nothing() -> None:
    statistics = _statistics()
    before = statistics.running.copy()
    statistics.blend(np.full(7, np.nan), 0)
    assert np.array_equal(statistics.running, before)


def test_a_rank_adds_statistics_for_the_samples_that_it_speaks_for() -> None:
    specs = {name: StatisticSpec((4,), 0.0, 0.1) for name in ("own", "split", "silent")}
    contributes = {"own": (True, False), "split": (False, True), "silent": (False, False)}
    statistics = FlatStatistics(specs, "float64", {"split": (1, 3)}, contributes.__getitem__)
    statistics.batch[...] = np.arange(12)
    statistics.batch[8:] = np.nan
    assert list(statistics.weighted(2, 5)) == [0, 2, 4, 6, 0, 25, 30, 0, 0, 0, 0, 0]
    statistics.batch[...] = np.nan
    assert list(statistics.weighted(0, 0)) == [0] * 12
    assert statistics.by_role({"running_mean": "split"})["batch_mean"].shape == (2,)


def test_kernels_elsewhere_read_a_copy_that_is_refreshed_before_an_evaluation() -> None:
    class Elsewhere(HostArithmetic):
        on_host = False

    specs = {"bn.running_mean": StatisticSpec((3,), 1.0, 0.5)}
    statistics = FlatStatistics(specs, "float64", arithmetic=Elsewhere())
    read = statistics.by_role({"running_mean": "bn.running_mean"})["running_mean"]
    statistics.refresh()
    assert read.tolist() == [1.0, 1.0, 1.0]
    statistics.blend(np.full(3, 6.0), 2)
    assert read.tolist() == [1.0, 1.0, 1.0]
    statistics.refresh()
    assert read.tolist() == [2.0, 2.0, 2.0]
    statistics.views["bn.running_mean"][...] = 7.0
    statistics.running_changed()
    statistics.refresh()
    assert read.tolist() == [7.0, 7.0, 7.0]
    assert not np.shares_memory(read, statistics.running)


def test_kernels_of_the_host_read_the_running_statistics_themselves() -> None:
    statistics = _statistics()
    read = statistics.by_role({"running_mean": "a.running_mean"})["running_mean"]
    assert np.shares_memory(read, statistics.running)
    statistics.batch[...] = 3.0
    assert statistics.fetch_batch().result() is statistics.batch
