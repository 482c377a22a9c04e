"""Plans: which are left out, built, timed, told to other ranks and run, by a stand-in for cuDNN; nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.backend.cuda import cudnn_graphs
from hpctrain.backend.cuda.cudnn_plans import WORKSPACE_LIMIT_BYTES, CudnnPlans, new_handle
from hpctrain.backend.cuda.device import ConvolutionKey
from hpctrain.errors import BackendError
from tests.support.fake_cudnn import FakeCudnn, FakePlan, Heuristic, Note

KEY = ConvolutionKey(
    "forward", (2, 7, 9, 4), (6, 3, 3, 4), (2, 7, 9, 6), (1, 1), (1, 1, 1, 1), (1, 1), 1, "float32", "float32", "bias"
)
LIST = [
    FakePlan("eng9_k2=1", 100, frozenset({Note.NONDETERMINISTIC})),
    FakePlan("eng4_k2=1", 900, frozenset({Note.TENSOR_CORE})),
    FakePlan("eng5", WORKSPACE_LIMIT_BYTES + 1),
    FakePlan("eng6", 300, works=False),
    FakePlan("eng7", 400, frozenset({Note.WINOGRAD, Note.WINOGRAD_TILE_6x6})),
    FakePlan("eng1_k2=1", 500),
    FakePlan("eng1_k2=1", 500),
    FakePlan("eng2", 700, frozenset({Note.WINOGRAD})),
    FakePlan("eng3", 200),
    FakePlan("eng8", 800),
]


@pytest.fixture
def cudnn(monkeypatch) -> FakeCudnn:
    module = FakeCudnn(plans=list(LIST))
    monkeypatch.setattr(cudnn_graphs, "library", lambda: module)
    return module


def test_takes_the_first_plan_that_is_left(cudnn) -> None:
    """Float32 without tensor cores; no plan whose sums come in another order each time, or that takes too much memory."""
    plan = CudnnPlans(new_handle()).plan(KEY)
    assert plan.names == ("eng1_k2=1",)
    assert plan.workspace_bytes == 500
    (graph,) = cudnn.graphs
    assert graph.heuristics == [Heuristic.A, Heuristic.FALLBACK]
    assert graph.limit_bytes == WORKSPACE_LIMIT_BYTES
    assert {Note.NONDETERMINISTIC, Note.TENSOR_CORE} <= graph.left_out


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "tf32"), ("bfloat16", "bfloat16")])
def test_tensor_cores_compute_in_other_precisions(cudnn, dtype: str, precision: str) -> None:
    plan = CudnnPlans(new_handle()).plan(replace(KEY, dtype=dtype, precision=precision))
    assert plan.name == "eng4_k2=1"
    assert Note.NONDETERMINISTIC in cudnn.graphs[0].left_out


def test_a_plan_is_made_once_for_a_key(cudnn) -> None:
    plans = CudnnPlans(new_handle())
    assert plans.plan(KEY) is plans.plan(replace(KEY))
    assert plans.plan(KEY) is not plans.plan(replace(KEY, fused=""))
    assert len(cudnn.graphs) == 2


def test_candidates_work_in_one_workspace(cudnn) -> None:
    plan = CudnnPlans(new_handle(), candidates=3).plan(KEY)
    assert plan.names == ("eng1_k2=1", "eng2", "eng3")
    assert plan.name == "eng1_k2=1"
    assert plan.workspace_bytes == 700
    assert cudnn.graphs[0].built == [5, 7, 8]


def test_runs_on_the_stream_with_plain_numbers(cudnn) -> None:
    plans = CudnnPlans(new_handle())
    plan, other = plans.plan(KEY), plans.plan(replace(KEY, kind="weight", fused=""))
    plan.run(5, 10, 20, 30, 40, 50)
    other.run(5, 11, 21, 31, 0)
    plan.run(6, 10, 20, 30, 40, 50)
    assert cudnn.executed == [
        (5, {1: 10, 2: 20, 3: 30, 4: 50}, 40, "eng1_k2=1"),
        (5, {1: 11, 2: 21, 3: 31}, 0, "eng1_k2=1"),
        (6, {1: 10, 2: 20, 3: 30, 4: 50}, 40, "eng1_k2=1"),
    ]
    assert cudnn.streams == [5, 6]


def test_the_fastest_candidate_is_chosen_and_run(cudnn) -> None:
    plans = CudnnPlans(new_handle(), candidates=3)
    plan = plans.plan(KEY)
    measured = []

    def measure(sizes, run) -> float:
        run(1, *range(100, 100 + len(sizes)))
        measured.append((sizes, cudnn.executed[-1]))
        return {"eng1_k2=1": 3.0, "eng2": 1.0, "eng3": 1.0}[cudnn.executed[-1][3]]

    plans.time(measure)
    sizes = [4 * 2 * 7 * 9 * 4, 4 * 6 * 3 * 3 * 4, 4 * 2 * 7 * 9 * 6, 700, 4 * 6]
    assert measured == [(sizes, (1, {1: 100, 2: 101, 3: 102, 4: 104}, 103, name)) for name in plan.names]
    assert plan.name == "eng2"  # the earliest of equals
    assert plans.seconds() == {cudnn_graphs.describe(KEY): {"eng1_k2=1": 3.0, "eng2": 1.0, "eng3": 1.0}}
    assert plan.workspace_bytes == 700
    plan.run(1, 2, 3, 4, 5, 6)
    assert cudnn.executed[-1][3] == "eng2"
    plans.time(measure)
    assert len(measured) == 3, "what was chosen stays"


@pytest.mark.parametrize("kind", ["input", "weight"])
def test_memory_for_times_is_in_the_order_of_run(cudnn, kind: str) -> None:
    plans = CudnnPlans(new_handle(), candidates=2)
    plans.plan(replace(KEY, kind=kind, fused="", dtype="bfloat16", precision="bfloat16"))
    seen = []
    plans.time(lambda sizes, run: seen.append(sizes) or 0.0)
    x, w, y = 2 * 2 * 7 * 9 * 4, 2 * 6 * 3 * 3 * 4, 2 * 2 * 7 * 9 * 6
    assert seen[0] == [*((y, w, x) if kind == "input" else (x, y, w)), 900, 0]


def test_nothing_is_timed_where_there_is_no_choice(cudnn) -> None:
    plans = CudnnPlans(new_handle())
    plans.plan(KEY)
    plans.time(lambda sizes, run: pytest.fail("one candidate"))
    assert plans.seconds() == {}
    assert plans.choices() == {cudnn_graphs.describe(KEY): "eng1_k2=1"}


def test_choices_are_taken_for_plans_before_and_after(cudnn) -> None:
    weight = replace(KEY, kind="weight", fused="")
    choices = {cudnn_graphs.describe(KEY): "eng3", cudnn_graphs.describe(weight): "eng8", "of another network": "eng5"}
    plans = CudnnPlans(new_handle(), candidates=3)
    assert plans.choices() == {}
    before = plans.plan(KEY)
    workspace_bytes = before.workspace_bytes
    plans.take_choices(choices)
    assert before.name == "eng3"
    assert before.workspace_bytes == workspace_bytes, "memory was planned already"
    after = plans.plan(weight)
    assert after.names == ("eng8",)
    plans.time(lambda sizes, run: pytest.fail("all are chosen"))
    assert plans.choices() == choices


def test_a_choice_that_this_device_has_not_is_refused(cudnn) -> None:
    plans = CudnnPlans(new_handle(), candidates=2)
    plans.plan(KEY)
    with pytest.raises(BackendError, match=r"The plan eng44 for forward.* none of this device's .eng1_k2=1, eng2.; all ranks"):
        plans.take_choices({cudnn_graphs.describe(KEY): "eng44"})
    plans = CudnnPlans(new_handle())
    plans.take_choices({cudnn_graphs.describe(KEY): "eng5"})
    with pytest.raises(BackendError, match="eng5 is not in its list"):
        plans.plan(KEY)


def test_no_plan_is_one_sentence(cudnn) -> None:
    cudnn.plans = LIST[:4]
    with pytest.raises(BackendError, match=r"cuDNN 9\.19\.0 has no deterministic plan for forward.bias x 2x7x9x4 .* 512 MiB .*;"):
        CudnnPlans(new_handle()).plan(KEY)
    cudnn.refusal = "No valid engine configs\nfor CONV"
    with pytest.raises(BackendError, match=r"in a workspace of at most 1 MiB \(No valid engine configs\); a smaller batch"):
        CudnnPlans(new_handle(), workspace_limit_bytes=1 << 20).plan(KEY)


def test_plans_for_a_device_that_is_not_here_are_made_by_its_properties_and_never_run(cudnn) -> None:
    plans = CudnnPlans(properties={"deviceVer": 903, "deviceName": "H100"})
    plan = plans.plan(KEY)
    arguments = cudnn.graphs[0].arguments
    assert arguments["sm_version"] == 90
    assert arguments["device_property"].text == '{"deviceVer": 903, "deviceName": "H100"}'
    assert "handle" not in arguments
    with pytest.raises(AssertionError, match="cannot be run"):
        plan.run(1, 2, 3, 4, 5, 6)
