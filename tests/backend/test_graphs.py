"""Graphs before any kernel set: which neighbours become one node, what operators are able to, and labels that are checked."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.graph import Graph, GraphBuilder, fuse
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import (
    Accumulating,
    Array,
    InPlace,
    Operator,
    StepContext,
    checked_labels,
)
from hpctrain.backend.specs import (
    AddSpec,
    BatchNormSpec,
    Conv2dSpec,
    DropoutSpec,
    LinearSpec,
    ReluSpec,
    Spec,
    TensorSpec,
    Window,
    WithRelu,
)
from hpctrain.core.errors import DataError
from hpctrain.models import catalogue
from hpctrain.nn.network import Lowering, Network
from tests.support import nets

CONVOLUTION = Conv2dSpec(8, 8, Window((3, 3), (1, 1), (1, 1, 1, 1)))

NORM = BatchNormSpec(8)


WEIGHT = {"weight": "weight"}


def chain(*specs: Spec, shape: tuple[int, ...] = (2, 5, 5, 8)) -> Graph:
    """Each reads the output of the one before."""
    builder, tensor = GraphBuilder(TensorSpec(shape)), 0
    for i, spec in enumerate(specs):
        tensor = builder.emit(f"layer{i}", spec, (tensor,), parameters={} if isinstance(spec, ReluSpec) else WEIGHT)
    return builder.build(tensor)


def specs(graph: Graph) -> list[Spec]:
    return [node.spec for node in graph.nodes]


def test_a_relu_joins_what_is_before_it() -> None:
    assert specs(fuse(chain(CONVOLUTION, ReluSpec()))) == [WithRelu(CONVOLUTION)]
    assert specs(fuse(chain(NORM, ReluSpec()))) == [BatchNormSpec(8, relu=True)]
    linear = LinearSpec(8, 8)
    assert specs(fuse(chain(linear, ReluSpec(), shape=(2, 8)))) == [WithRelu(linear)]


def test_evaluation_leaves_stochastic_depth_out() -> None:
    """Else a batch norm and its sum would be two operators in evaluation, and rounded otherwise than without it."""
    counts = {}
    for rate in (0.3, 0.0):
        builder = GraphBuilder(TensorSpec((2, 9, 7, 3)))
        model = catalogue.build("resnet20", {"width": 0.25, "stochastic_depth": rate})
        graph = builder.build(model.lower(builder, 0, ""))
        counts[rate] = [len(fuse(graph, training=training).nodes) for training in (False, True)]
    assert counts[0.3][0] == counts[0.0][0] == counts[0.0][1] < counts[0.3][1]
    last = chain(NORM, DropoutSpec(0.5, "a", per_sample=True))
    assert fuse(last, training=False) == last


def test_a_product_joins_only_where_the_set_has_an_operator_for_both() -> None:
    linear = LinearSpec(8, 8)
    assert specs(fuse(chain(linear, ReluSpec(), shape=(2, 8)), products=(Conv2dSpec,))) == [linear, ReluSpec()]
    assert specs(fuse(chain(CONVOLUTION, ReluSpec()), products=(LinearSpec,))) == [CONVOLUTION, ReluSpec()]


def test_two_relus_stay_two() -> None:
    assert specs(fuse(chain(NORM, ReluSpec(), ReluSpec()))) == [BatchNormSpec(8, relu=True), ReluSpec()]


def test_statistics_of_several_ranks_stay_alone() -> None:
    norm = BatchNormSpec(8, synchronised=True)
    assert specs(fuse(chain(norm, ReluSpec()))) == [norm, ReluSpec()]


def residual(*, between: bool = False, order: tuple[int, int] = (0, 1)) -> Graph:
    """Two batch norms that are added, and a ReLU. between: a convolution after the later norm and before the sum."""
    builder = GraphBuilder(TensorSpec((2, 5, 5, 8)))
    norms = [builder.emit(f"norm{i}", NORM, (0,), parameters=WEIGHT) for i in range(2)]
    if between:
        builder.emit("apart", CONVOLUTION, (0,), parameters=WEIGHT)
    total = builder.emit("sum", AddSpec(), (norms[order[0]], norms[order[1]]))
    return builder.build(builder.emit("relu", ReluSpec(), (total,)))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_norms_the_later_one_joins_the_sum(order: tuple[int, int]) -> None:
    graph = fuse(residual(order=order))
    assert specs(graph) == [NORM, BatchNormSpec(8, relu=True, add=True)]
    first, second = graph.nodes
    assert second.name == "norm1"
    assert second.inputs == (0, first.output)
    assert second.output == graph.output


def test_no_norm_moves_after_other_parameters() -> None:
    assert specs(fuse(residual(between=True))) == [NORM, NORM, CONVOLUTION, AddSpec(relu=True)]


def test_a_tensor_with_other_readers_stays() -> None:
    builder = GraphBuilder(TensorSpec((2, 5, 5, 8)))
    norm = builder.emit("norm", NORM, (0,), parameters=WEIGHT)
    rectified = builder.emit("relu", ReluSpec(), (norm,))
    graph = builder.build(builder.emit("sum", AddSpec(), (rectified, norm)))
    assert fuse(graph) == graph


def test_the_output_of_a_graph_stays() -> None:
    builder = GraphBuilder(TensorSpec((2, 5, 5, 8)))
    norm = builder.emit("norm", NORM, (0,), parameters=WEIGHT)
    builder.emit("relu", ReluSpec(), (norm,))
    graph = builder.build(norm)
    assert fuse(graph) == graph


@pytest.mark.parametrize("model", ["resnet20", "resnet50", "vgg16"])
def test_models_of_the_catalogue_keep_their_tensors_parameters_and_order(model: str) -> None:
    graph = Lowering(catalogue.build(model, {})).graph(2, catalogue.image_shape(model))
    fused = fuse(graph)
    assert not any(isinstance(spec, ReluSpec) for spec in specs(fused))
    assert [node.parameters for node in fused.nodes if node.parameters] == [
        node.parameters for node in graph.nodes if node.parameters
    ]
    assert fused.output == graph.output
    written = {0}
    for node in fused.nodes:
        assert set(node.inputs) <= written
        assert node.output not in written
        written.add(node.output)


@pytest.mark.parametrize(
    ("inner", "shape"), [(Conv2dSpec(3, 8, Window((3, 3), (2, 2), (1, 1, 1, 1))), (2, 7, 9, 3)), (LinearSpec(5, 7), (2, 5))]
)
def test_a_relu_changes_neither_shape_nor_multiply_adds(inner, shape) -> None:
    x = TensorSpec(shape, "bfloat16")
    assert WithRelu(inner).output(x) == inner.output(x)
    assert WithRelu(inner).flops(x) == inner.flops(x)


class _PlainRelu(Operator):
    """As much as an author has to write: what it needs, forward and backward."""

    needs_output = True

    def __init__(self, spec: Spec, x: TensorSpec) -> None:
        self.spec, self.inputs, self.output = spec, (x.plain(),), x.plain()

    def forward(self, context: StepContext) -> None:
        np.maximum(self.buffers.inputs[0], 0, out=self.buffers.output)

    def backward_input(self) -> None:
        if self.buffers.input_grads[0] is not None:
            np.multiply(self.buffers.output_grad, self.buffers.output > 0, out=self.buffers.input_grads[0])


class _WithPlainRelu(NumpyKernelSet):
    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        if isinstance(spec, ReluSpec):
            return _PlainRelu(spec, inputs[0])
        return super().make(spec, inputs, training=training, input_gradient=input_gradient)


def _gradients(kernels: NumpyKernelSet) -> tuple[Array, int]:
    network = Network(nets.plain(), (9, 7, 3), kernels, dtype="float64")
    program = network.program(4, training=True)
    random = np.random.default_rng(0)
    program.x[...] = random.standard_normal(program.x.shape)
    program.forward(StepContext(sample_ids=np.arange(4)))
    program.loss(random.integers(0, 5, 4), 4)
    program.backward()
    return network.groups["all"].grad.copy(), sum(buffer.region.size_bytes for buffer in program.plan.buffers)


def test_an_operator_without_abilities_computes_the_same_in_more_buffers() -> None:
    assert not issubclass(_PlainRelu, InPlace | Accumulating)
    (plain, more), (able, less) = _gradients(_WithPlainRelu()), _gradients(NumpyKernelSet())
    np.testing.assert_array_equal(plain, able)
    assert more > less


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64])
def test_labels_of_any_integer_dtype_become_int64(dtype: type) -> None:
    labels = checked_labels(np.array([0, 8, 3], dtype), 9)
    assert labels.dtype == np.int64
    assert labels.tolist() == [0, 8, 3]
    assert checked_labels(np.zeros(0, dtype), 9).size == 0


@pytest.mark.parametrize(("label", "needed"), [(-1, r"\."), (9, "; .* at least 10 classes"), (250, "; .* at least 251 classes")])
def test_the_first_label_outside_is_named(label: int, needed: str) -> None:
    with pytest.raises(DataError, match=rf"Label {label} is outside .* 0 to 8{needed}"):
        checked_labels(np.array([5, label, 3]), 9)
