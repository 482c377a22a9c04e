"""Lifetimes and packing: nothing reads what is said to be unused, arenas are packed tightly and do not grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.binding import processor_flags
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.backend.operators import ALIGNMENT_BYTES, KernelSet, Operator, StepContext, aligned
from hpctrain.backend.specs import Spec, TensorSpec
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.memory import Block, lower_bound, meetings, pack
from hpctrain.nn.compile.plan import ExecutionPlan
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import Network
from hpctrain.nn.program import Program
from tests.support import nets
from tests.support.arena_sizes import arena_sizes, arena_sizes_with
from tests.support.poison import overwritten_share, poisoned


@st.composite
def _blocks(draw: st.DrawFn) -> list[Block]:
    found = []
    for _ in range(draw(st.integers(0, 25))):
        first = draw(st.integers(0, 30))
        last = first + draw(st.integers(0, 12))
        second = last + draw(st.integers(1, 9))
        again = draw(st.sampled_from([(), ((second, second + draw(st.integers(0, 5))),)]))  # live, free, and live once more
        found.append(Block(draw(st.integers(0, 5000)), first, last, again))
    return found


@given(_blocks(), st.sampled_from([ALIGNMENT_BYTES, 1, 256]))
def test_blocks_alive_together_never_overlap(blocks: list[Block], alignment_bytes: int) -> None:
    offsets, arena = pack(blocks, alignment_bytes)
    assert not arena % alignment_bytes
    assert lower_bound(blocks, alignment_bytes) <= arena <= sum(aligned(b.size_bytes, alignment_bytes) for b in blocks)
    for i, (a, low_a) in enumerate(zip(blocks, offsets, strict=True)):
        assert low_a % alignment_bytes == 0
        assert low_a + a.size_bytes <= arena
        for b, low_b in zip(blocks[:i], offsets[:i], strict=True):
            if a.meets(b) and a.size_bytes and b.size_bytes:
                assert low_a + a.size_bytes <= low_b or low_b + b.size_bytes <= low_a


def test_a_chain_reuses_two_buffers() -> None:
    chain = [Block(1024, k, k + 1) for k in range(10)]
    assert pack(chain)[1] == 2048


def test_memory_between_two_spans_is_used() -> None:
    """What is made again for backward leaves its memory to others in between, and to none while it lives."""
    twice, between, first, second = Block(1024, 0, 1, ((8, 9),)), Block(1024, 2, 7), Block(1024, 1, 2), Block(1024, 7, 8)
    assert pack([twice, between])[1] == 1024
    for other in (first, second):
        assert twice.meets(other)
        assert other.meets(twice)
        assert pack([twice, other])[1] == 2048
    assert not twice.meets(between)
    assert lower_bound([twice, between]) == 1024
    assert lower_bound([twice, first, second]) == 2048


@given(_blocks())
def test_blocks_meet_where_a_time_slot_is_in_both(blocks: list[Block]) -> None:
    slots = [{t for low, high in block.spans for t in range(low, high + 1)} for block in blocks]
    for a, mine in zip(blocks, slots, strict=True):
        for b, theirs in zip(blocks, slots, strict=True):
            assert a.meets(b) == bool(mine & theirs)


@given(_blocks())
def test_meetings_are_those_of_pairs(blocks: list[Block]) -> None:
    assert meetings(blocks).tolist() == [[a.meets(b) for b in blocks] for a in blocks]


BATCH = 3

NETWORKS: dict[str, tuple[Callable[[], Layer], int]] = {
    "plain": (lambda: nets.plain(dropout=0.3), 9),
    "residual": (nets.residual, 9),
    "vgg16": (lambda: catalogue.build("vgg16", {"width": 0.25, "classes": 5}), 33),
    "vgg11_bn": (lambda: catalogue.build("vgg", {"depth": 11, "batch_norm": True, "width": 0.5, "classes": 5}), 32),
    "resnet18": (lambda: catalogue.build("resnet", {"depth": 18, "width": 0.25, "classes": 5}), 65),
    "resnet50": (lambda: catalogue.build("resnet", {"depth": 50, "width": 0.25, "classes": 5}), 64),
    "resnet20": (lambda: catalogue.build("resnet20", {"classes": 5, "shortcut": "projection"}), 33),
}

KERNELS: dict[str, Callable[[], KernelSet]] = {"numpy": NumpyKernelSet, "onednn": OnednnKernelSet}


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    if request.param == "onednn" and available() is not None:
        pytest.skip(str(available()))
    return KERNELS[request.param]()


def _step(network: Network, *, input_gradient: bool) -> dict[str, np.ndarray]:
    """Logits, gradients, and the logits of an evaluation: all that a program hands out."""
    random = np.random.default_rng(1)
    x, labels = random.standard_normal((BATCH, *network.image_shape)), random.integers(0, 5, BATCH)
    context = StepContext(step=2, sample_ids=np.arange(BATCH))
    program = network.program(BATCH, training=True, input_gradient=input_gradient)
    program.x[...] = x
    logits = program.forward(context).copy()
    program.loss(labels, BATCH)
    program.backward()
    found = {"logits": logits, "gradients": network.groups["all"].grad.copy()}
    if input_gradient:
        assert program.x_grad is not None
        found["x"] = program.x_grad.copy()
    evaluation = network.program(BATCH, training=False)
    evaluation.x[...] = x
    return {**found, "evaluation": evaluation.forward(StepContext(training=False)).copy()}


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("input_gradient", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_memory_that_is_not_in_use_is_not_read(kernels: KernelSet, name: str, input_gradient: bool) -> None:
    build, side = NETWORKS[name]
    network = Network(build(), (side, side - 1 if side == 9 else side, 3), kernels)
    expected = _step(network, input_gradient=input_gradient)
    with poisoned() as poisoners:
        found = _step(network, input_gradient=input_gradient)
    assert overwritten_share(poisoners) > 1  # an action leaves much unused
    for what, values in expected.items():
        assert np.isfinite(values).all()
        np.testing.assert_array_equal(found[what], values, err_msg=what)


class _Forgetful(NumpyKernelSet):
    """Its operators say that backward reads no input."""

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        operator = super().make(spec, inputs, training=training, input_gradient=input_gradient)
        operator.needs_inputs = (False,) * len(inputs)
        return operator


def test_a_lifetime_cut_short_is_found() -> None:
    """The test above can fail: a network that reads in backward what its operators do not declare."""
    network = Network(nets.plain(), (9, 7, 3), NumpyKernelSet())
    expected = _step(network, input_gradient=False)
    forgetful = Network(nets.plain(), (9, 7, 3), _Forgetful())
    with poisoned():
        found = _step(forgetful, input_gradient=False)
    assert not np.array_equal(found["gradients"], expected["gradients"])


_RUNS = ("forward", "backward_parameters", "backward_input")

SAMPLES = 3

# The first has wide 3x3 convolutions, by Winograd; the others residual blocks, whose copies and batch norms run out of turn.
LARGE: dict[str, tuple[Callable[[], Layer], int]] = {
    "vgg11": (lambda: catalogue.build("vgg", {"depth": 11, "batch_norm": True, "width": 0.5, "classes": 5}), 64),
    "resnet18": (lambda: catalogue.build("resnet", {"depth": 18, "width": 0.5, "classes": 5}), 64),
    "resnet50": (lambda: catalogue.build("resnet", {"depth": 50, "width": 0.25, "classes": 5}), 64),
    "resnet20": (lambda: catalogue.build("resnet20", {"classes": 5}), 32),
}


@pytest.fixture(params=LARGE)
def network(request: pytest.FixtureRequest) -> Network:
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    build, side = LARGE[request.param]
    return Network(build(), (side, side, 3), OnednnKernelSet())


def _planned(network: Network, *, training: bool = True) -> ExecutionPlan:
    return compile_graph(network.graph(SAMPLES), network.kernels, training=training)


def _scribbling(operator: Operator, method: str) -> Callable[..., None]:
    run = getattr(operator, method)

    def scribble(*arguments: object) -> None:
        operator.buffers.scratch.fill(0xFF)  # not a number in float32
        run(*arguments)
        operator.buffers.scratch.fill(0xFF)

    return scribble


def _large_step(network: Network, program: Program) -> Iterator[np.ndarray]:
    """The logits and all gradients of one training step."""
    random = np.random.default_rng(1)
    program.x[...] = random.standard_normal(program.x.shape)
    yield program.forward(StepContext(step=0, sample_ids=np.arange(SAMPLES))).copy()
    program.loss(random.integers(0, 5, SAMPLES), SAMPLES)
    program.backward()
    yield network.groups["all"].grad.copy()


@pytest.mark.slow
@pytest.mark.sample(1)
def test_scratch_is_an_operators_own_only_while_it_runs(network: Network) -> None:
    """Filled with values that are no numbers before and after each use, it changes no bit of what anybody else reads."""
    program = network.program(SAMPLES, training=True)
    expected = list(_large_step(network, program))
    having = [step.operator for step in program.steps if step.operator.scratch_bytes]
    assert having
    for operator in having:
        for method in _RUNS:
            setattr(operator, method, _scribbling(operator, method))
    for found, wanted in zip(_large_step(network, program), expected, strict=True):
        assert np.isfinite(wanted).all()
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.sample(1)
def test_large_scratch_lies_where_activations_are_not(network: Network) -> None:
    planned = _planned(network)
    without = lower_bound([buffer.block for buffer in planned.buffers if buffer.owner[0] != "scratch"])
    largest = max(buffer.region.size_bytes for buffer in planned.buffers if buffer.owner[0] == "scratch")
    assert without <= planned.arena_bytes <= without + largest + (without >> 4)


# The memory of the five benchmark networks, in bytes of [training, evaluation]: golden numbers, which may fall but not rise. A
# change that needs less memory writes its numbers here. A change that needs more must save more than that elsewhere.
NUMPY_ARENAS = {
    "resnet50-224": [682899456, 57802752],
    "vgg16-224": [269494272, 107467776],
    "resnet34-48": [19167232, 6570048],
    "resnet20-32": [102641152, 17229568],
    "small-28": [10177024, 5341184],
}
# oneDNN's kernels ask for scratch of their own and choose layouts by the instruction set, so the library is held to one of two.
ONEDNN_ARENAS = {
    "AVX2": {
        "resnet50-224": [682324480, 57868288],
        "vgg16-224": [317308928, 102907904],
        "resnet34-48": [18089344, 9744384],
        "resnet20-32": [113611648, 12592128],
        "small-28": [4139904, 2007040],
    },
    "AVX512_CORE": {
        "resnet50-224": [682489216, 57868288],
        "vgg16-224": [317821824, 102907904],
        "resnet34-48": [18093824, 9744384],
        "resnet20-32": [113747584, 12592128],
        "small-28": [4301952, 2007040],
    },
}
_PROCESSOR_FLAG = {"AVX2": "avx2", "AVX512_CORE": "avx512bw"}


def _assert_not_above(measured: Mapping[str, list[int]], golden: Mapping[str, list[int]]) -> None:
    assert measured.keys() == golden.keys()
    risen = {
        name: f"{now:,} bytes, at most {allowed:,} are allowed"
        for name, sizes in golden.items()
        for now, allowed in zip(measured[name], sizes, strict=True)
        if now > allowed
    }
    assert not risen


def test_numpy_needs_no_more_memory_than_before() -> None:
    _assert_not_above(arena_sizes("numpy"), NUMPY_ARENAS)


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.parametrize("instruction_set", ONEDNN_ARENAS)
def test_onednn_needs_no_more_memory_than_before(instruction_set: str) -> None:
    if (reason := available()) is not None:
        pytest.skip(reason)
    if _PROCESSOR_FLAG[instruction_set] not in processor_flags():
        pytest.skip(f"The processor lacks {instruction_set}.")
    _assert_not_above(arena_sizes_with(instruction_set), ONEDNN_ARENAS[instruction_set])
