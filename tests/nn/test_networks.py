"""One rank's copy of a model: first values, parameters for every split, running statistics, programs over one arena."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from hpctrain.backend.graph import Graph, GraphBuilder
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import Array, StepContext
from hpctrain.core.errors import ShapeError
from hpctrain.nn import initialise
from hpctrain.nn.layers import Layer, Sequential
from hpctrain.nn.network import ALL, Network, Shard, Undistributed, local_spec
from hpctrain.nn.parameter import FlatStatistics, ParameterSpec, StatisticSpec
from tests.support import nets

IMAGE = (9, 7, 3)


def network(**options: object) -> Network:
    return Network(nets.plain(), IMAGE, NumpyKernelSet(), **options)  # type: ignore[arg-type]


def test_programs_are_made_once_and_the_oldest_are_let_go() -> None:
    subject = network()
    first = subject.program(1, training=False)
    assert subject.program((1,), training=False) is first
    assert subject.program(1, training=True) is not first
    for batch in range(2, 8):
        subject.program(batch, training=False)
        assert subject.program(1, training=False) is first  # used again, so not the oldest
    for batch in range(8, 17):
        subject.program(batch, training=False)
    assert subject.program(1, training=False) is not first


def test_programs_are_let_go_once_their_work_is_done() -> None:
    """Captured work keeps no memory in use, and may come late."""

    class Kernels(NumpyKernelSet):
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    kernels = Kernels()
    subject = Network(nets.residual(), (6, 6, 3), kernels)
    for batch in range(1, 9):
        subject.program(batch, training=False)
    assert kernels.waits == 0
    subject.program(9, training=False)  # the oldest one goes
    assert kernels.waits == 1
    subject.program(9, training=True, image_shape=(11, 8, 3))  # all go
    assert kernels.waits == 3


def test_a_kernel_set_hears_of_each_forward_pass_before_it_begins() -> None:
    class Kernels(NumpyKernelSet):
        def __init__(self) -> None:
            self.begun: list[StepContext] = []

        def begin(self, context: StepContext) -> None:
            self.begun.append(context)

    kernels = Kernels()
    program = Network(nets.plain(), IMAGE, kernels).program(2, training=True)
    for step in range(2):
        context = StepContext(step=step, sample_ids=np.arange(2))
        program.forward(context)
        assert kernels.begun[step] is context
    program.loss(np.zeros(2, np.int64), 2)
    program.backward()
    assert len(kernels.begun) == 2


def test_arenas_are_aligned_as_the_kernel_set_asks() -> None:
    class Kernels(NumpyKernelSet):
        alignment_bytes = 4096

    for training in (True, False):
        plan = Network(nets.plain(), IMAGE, Kernels()).program(2, training=training).plan
        assert not any(buffer.region.offset % 4096 for buffer in plan.buffers)


def test_shadows_are_the_parameters_in_the_dtype_that_a_kernel_set_asks_for() -> None:
    """float32 with float64 stands for bfloat16 with float32, which NumPy does not know."""

    class Kernels(NumpyKernelSet):
        shadow_dtype = "float32"

    subject = Network(nets.plain(), IMAGE, Kernels(), dtype="float64")
    program = subject.program(2, training=True)
    for step in program.steps:
        for role, shadow in step.operator.buffers.shadows.items():
            data = step.operator.buffers.parameters[role]
            assert shadow.dtype == np.float32
            assert np.array_equal(shadow, data.astype(np.float32))
            data[...] += 1.0
            assert not np.array_equal(shadow, data.astype(np.float32))
    assert any(step.operator.buffers.shadows for step in program.steps)
    subject.parameters_changed()
    for parameter in subject.parameters.values():
        assert np.array_equal(parameter.shadow, parameter.data.astype(np.float32))
    assert all(parameter.shadow is None for parameter in network().parameters.values())


def test_all_programs_share_one_arena_of_the_largest_size() -> None:
    class Kernels(NumpyKernelSet):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        def allocate(self, size_bytes: int) -> Array:
            self.sizes.append(size_bytes)
            return super().allocate(size_bytes)

    kernels = Kernels()
    subject = Network(nets.plain(), IMAGE, kernels)
    subject.program(6, training=True)
    kernels.sizes.clear()
    for batch in (5, 1, 6):
        subject.program(batch, training=True)
    assert not [size for size in kernels.sizes if size >= subject.program(1, training=True).activation_bytes]


def test_larger_images_have_one_larger_arena_and_programs_of_smaller_ones_are_let_go() -> None:
    small, large = (6, 6, 3), (11, 8, 3)
    subject = Network(nets.residual(), small, NumpyKernelSet())
    for shape in (small, large):
        subject.program(4, training=True, image_shape=shape)
        subject.program(2, training=False, image_shape=shape)
    train, evaluate = (
        subject.program(4, training=True, image_shape=large),
        subject.program(2, training=False, image_shape=large),
    )
    assert train.memory is evaluate.memory
    assert train.memory.size == train.activation_bytes > subject.arena_bytes(4, training=True)
    assert all(program.memory is train.memory for programs in subject._programs.values() for program in programs)
    again = subject.program(4, training=True)
    assert again.memory is train.memory
    assert subject.program(4, training=True, image_shape=large) is train  # as many programs as sizes that come in turn
    assert again.x.shape == (4, *small)


def test_a_program_of_another_shape_computes_what_a_network_for_it_does() -> None:
    shape, random = (11, 8, 3), np.random.default_rng(0)
    images, labels = random.standard_normal((3, *shape)), np.array([0, 2, 1])
    gradients = []
    for subject in (Network(nets.residual(), shape, NumpyKernelSet()), Network(nets.residual(), IMAGE, NumpyKernelSet())):
        for training in (False, True):
            program = subject.program(3, training=training, image_shape=shape)
            program.set_input(images)
            program.forward(StepContext(training=training, sample_ids=np.arange(3)))
        program.loss(labels, 3)
        program.backward()
        gradients.append(subject.groups[ALL].grad.tobytes())
    assert gradients[0] == gradients[1]


def test_images_that_the_layers_do_not_take_are_refused() -> None:
    subject = network()
    subject.check_shape((10, 8, 3))
    with pytest.raises(ShapeError, match="fc1"):
        subject.check_shape((16, 16, 3))


def test_a_parameter_that_no_operation_uses_is_refused() -> None:
    class Forgetful(Layer):
        def parameters(self) -> Mapping[str, ParameterSpec]:
            return {"weight": ParameterSpec((3,), "zeros")}

        def lower(self, graph: GraphBuilder, x: int, name: str) -> int:
            return x

    model = Sequential({"forgetful": Forgetful(), "plain": nets.plain()})
    with pytest.raises(ShapeError, match=r"forgetful\.weight is used by 0 operations; each must be used by exactly one"):
        Network(model, IMAGE, NumpyKernelSet())


def test_the_distribution_makes_the_graph_of_a_program() -> None:
    class First(Undistributed):
        """The first rank of two, with its own samples alone."""

        def __init__(self) -> None:
            self.asked: list[tuple[int, tuple[int, ...]]] = []

        def local(self, graph: Graph, counts: Sequence[int]) -> Graph:
            self.asked.append((graph.tensors[0].shape[0], tuple(counts)))
            builder = GraphBuilder(graph.tensors[0].__class__((counts[0], *IMAGE), "float32"))
            return builder.build(nets.plain().lower(builder, 0, ""))

    distribution = First()
    program = network(distribution=distribution).program((3, 2), training=True)
    assert distribution.asked == [(5, (3, 2))]
    assert program.x.shape == (3, *IMAGE)


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
    assert list(statistics.weighted(2, 5, statistics.batch)) == [0, 2, 4, 6, 0, 25, 30, 0, 0, 0, 0, 0]
    statistics.batch[...] = np.nan
    assert list(statistics.weighted(0, 0, statistics.batch)) == [0] * 12
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


def test_a_value_depends_on_seed_and_name_only() -> None:
    spec = ParameterSpec((7, 9), initialise.normal(1.0))
    value = initialise.first_value(spec, "layer1.0.conv1.weight", 3)
    np.testing.assert_array_equal(initialise.first_value(spec, "layer1.0.conv1.weight", 3), value)
    for name, seed in (("layer1.0.conv2.weight", 3), ("layer1.0.conv1.weight", 4)):
        assert not np.array_equal(initialise.first_value(spec, name, seed), value)


def test_double_precision_starts_at_the_same_values() -> None:
    for drawn in (initialise.normal(0.1), initialise.uniform(0.1), initialise.kaiming_normal(9), initialise.constant(0.1)):
        spec = ParameterSpec((5, 3), drawn)
        single, double = (initialise.first_value(spec, "w", 0, dtype) for dtype in ("float32", "float64"))
        assert single.dtype == np.float32
        assert double.dtype == np.float64
        np.testing.assert_array_equal(double, single.astype(np.float64))


@pytest.mark.parametrize(("dim", "shape"), [(0, (2, 5, 6)), (1, (4, 2, 6)), (-1, (4, 5, 2))])
def test_the_declaration_of_a_shard(dim: int, shape: tuple[int, ...]) -> None:
    spec = ParameterSpec((4, 5, 6), "zeros")
    assert local_spec(spec, Shard(dim, (1, 3))).shape == shape
    assert local_spec(spec, None) is spec
