from collections.abc import Iterator

import pytest

from hpctrain.backend.kernels.graph import GraphBuilder
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import Conv2dSpec, TensorSpec
from hpctrain.errors import ConfigError
from hpctrain.models import catalogue
from hpctrain.models.families import resnet
from hpctrain.nn.network import Network
from hpctrain.testing.models import exported_shapes, parameter_count

COUNTS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "wide_resnet50_2": 68_883_240,
    "wide_resnet101_2": 126_886_696,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x8d": 88_791_336,
    "resnext101_64x4d": 83_455_272,
}
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert parameter_count(catalogue.build(name, {})) == COUNTS[name]


@pytest.mark.parametrize("name", [name for name in COUNTS if name.startswith("resnet")])
def test_names_and_shapes_are_torchvisions(name: str) -> None:
    assert list(exported_shapes(catalogue.build(name, {})).items()) == list(_torchvision(int(name[6:])))


def _norm(name: str, channels: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for role in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{role}", (channels,)


def _torchvision(depth: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    kernels, expansion = ((3, 3), 1) if depth < 50 else ((1, 3, 1), 4)
    yield "conv1.weight", (64, 3, 7, 7)
    yield from _norm("bn1", 64)
    inside = 64
    for stage, count in enumerate(BLOCKS[depth]):
        planes = 64 * 2**stage
        for block in range(count):
            prefix = f"layer{stage + 1}.{block}"
            widths = [inside, *[planes] * (len(kernels) - 1), planes * expansion]
            for i, kernel in enumerate(kernels):
                yield f"{prefix}.conv{i + 1}.weight", (widths[i + 1], widths[i], kernel, kernel)
                yield from _norm(f"{prefix}.bn{i + 1}", widths[i + 1])
            if block == 0 and (stage > 0 or expansion > 1):
                yield f"{prefix}.downsample.0.weight", (planes * expansion, inside, 1, 1)
                yield from _norm(f"{prefix}.downsample.1", planes * expansion)
            inside = planes * expansion
    yield "fc.weight", (1000, inside)
    yield "fc.bias", (1000,)


def test_bottlenecks_carry_the_stride_on_their_3x3() -> None:
    model = catalogue.build("resnet50", {"width": 0.125})
    builder = GraphBuilder(TensorSpec((1, 65, 63, 3)))
    graph = builder.build(model.lower(builder, 0, ""))
    strided = {n.name for n in graph.nodes if isinstance(n.spec, Conv2dSpec) and n.spec.window.stride == (2, 2)}
    blocks = [f"layer{stage}.0.{conv}" for stage in (2, 3, 4) for conv in ("conv2", "downsample.0")]
    assert strided == {"conv1", *blocks}


@pytest.mark.parametrize("depth", [18, 50])
def test_blocks_start_as_their_shortcut_on_request(depth: int) -> None:
    model = catalogue.build("resnet", {"depth": depth, "width": 0.125, "zero_init_residual": True})
    network = Network(model, (33, 33, 3), NumpyKernelSet())
    last = ".bn2.weight" if depth == 18 else ".bn3.weight"
    zero = {name for name, parameter in network.parameters.items() if name.endswith("weight") and not parameter.data.any()}
    assert zero == {name for name in network.parameters if name.endswith(last)}
    assert len(zero) == sum(BLOCKS[depth])


def test_batch_norm_options_reach_every_batch_norm() -> None:
    options = {"width": 0.125, "momentum": 0.25, "epsilon": 0.01, "synchronised": True}
    layers = [layer for _, layer in catalogue.build("resnet18", options).walk() if layer.statistics()]
    assert len(layers) == 20
    for layer in layers:
        assert {spec.momentum for spec in layer.statistics().values()} == {0.25}
        spec = layer.spec("bn")  # type: ignore[attr-defined]
        assert (spec.epsilon, spec.synchronised) == (0.01, True)


def test_a_depth_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no ResNet of depth 20; .* the nearest is 18"):
        resnet.build(depth=20)


@pytest.mark.parametrize(("option", "value"), [("groups", 2), ("width_per_group", 128)])
def test_networks_without_bottlenecks_have_no_groups(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value}, but a ResNet of depth 34 has no bottlenecks, so it must be"):
        catalogue.build("resnet34", {option: value})


def test_a_narrow_network_keeps_its_groups() -> None:
    model = catalogue.build("resnext50_32x4d", {"width": 0.05, "classes": 5})
    builder = GraphBuilder(TensorSpec((1, 33, 33, 3)))
    graph = builder.build(model.lower(builder, 0, ""))
    assert {n.spec.groups for n in graph.nodes if isinstance(n.spec, Conv2dSpec) and n.name.endswith("conv2")} == {32}
