"""Families of models: published counts, torchvision's names, gradients, what makes no network; and their catalogue."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.graph import Graph
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import StepContext
from hpctrain.backend.specs import Conv2dSpec, LinearSpec, TensorSpec
from hpctrain.core.errors import ConfigError, OptionError, ShapeError
from hpctrain.models import catalogue
from hpctrain.models.parts import MOST_CHANNELS, scaled, stochastic_depths
from hpctrain.models.sizes import size_of_model
from hpctrain.nn import initialise
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.network import Lowering, Network, declared
from hpctrain.testing.layers import check_gradients, exported_shapes, parameter_count

#: model -> (published number of parameters, digest of names and shapes in order, which tests/parity compares with torchvision's)
TORCHVISION = {
    "alexnet2014": (61_100_840, "fb0abbb96582"),
    "resnet18": (11_689_512, "6b38c1f050da"),
    "resnet34": (21_797_672, "b3ccc90e866e"),
    "resnet50": (25_557_032, "af2e2fe2ef39"),
    "resnet101": (44_549_160, "f6f3ebf58df3"),
    "resnet152": (60_192_808, "6d79e12b0801"),
    "wide_resnet50_2": (68_883_240, "29489e65ceef"),
    "wide_resnet101_2": (126_886_696, "5f5d9fbab351"),
    "resnext50_32x4d": (25_028_904, "5dde11419652"),
    "resnext101_32x8d": (88_791_336, "f500c8e7b596"),
    "resnext101_64x4d": (83_455_272, "9abda60a72bf"),
    "vgg11": (132_863_336, "37cf01db9dec"),
    "vgg13": (133_047_848, "2a806d8cb236"),
    "vgg16": (138_357_544, "e6f6dcd7f608"),
    "vgg19": (143_667_240, "94ee89e212fd"),
    "vgg11_bn": (132_868_840, "866fb7baa7c1"),
    "vgg13_bn": (133_053_736, "54b838a7b17c"),
    "vgg16_bn": (138_365_992, "055eecd1fdc7"),
    "vgg19_bn": (143_678_248, "7f93088e2fa9"),
}
SMALL = {"classes": 4, "channels": [3, 5], "hidden": 7, "grid": 2}


def built(name: str, **options: Any) -> Any:
    return catalogue.build(name, options)


def graph_of(model: Any, *shape: int) -> Graph:
    return Lowering(model).graph(1, shape)


@pytest.mark.parametrize("name", TORCHVISION)
def test_counts_are_the_published_ones_and_names_and_shapes_torchvisions(name: str) -> None:
    count, digest = TORCHVISION[name]
    model = built(name)
    assert parameter_count(model) == count
    assert hashlib.sha256(repr(list(exported_shapes(model).items())).encode()).hexdigest().startswith(digest)


def test_alexnet_is_the_published_one() -> None:
    """Krizhevsky et al. 2012, sections 3.5 and 5, each convolution over all channels of the one before it."""
    weights = [96 * 11 * 11 * 3, 256 * 5 * 5 * 96, 384 * 9 * 256, 384 * 9 * 384, 256 * 9 * 384]
    weights += [9216 * 4096, 4096 * 4096, 4096 * 1000]
    biases = 96 + 256 + 384 + 384 + 256 + 4096 + 4096 + 1000
    assert parameter_count(built("alexnet")) == sum(weights) + biases
    graph = graph_of(built("alexnet"), *catalogue.image_shape("alexnet"))
    sizes = [graph.tensors[node.output].size for node in graph.nodes if isinstance(node.spec, Conv2dSpec | LinearSpec)]
    assert sizes == [290_400, 186_624, 64_896, 64_896, 43_264, 4096, 4096, 1000]
    model = built("alexnet", width=0.25)
    specs, _ = declared(model, graph_of(model, 227, 227, 3))
    values = {name: initialise.first_value(spec, name, seed=3) for name, spec in specs.items()}
    first = [float(value.max()) for name, value in values.items() if name.endswith("bias") and value.max() == value.min()]
    assert first == [0, 1, 0, 1, 1, 1, 1, 0]
    for name, value in values.items():
        assert not name.endswith("weight") or np.std(value) == pytest.approx(0.01, rel=0.03), name


#: 1e9 forward multiply-adds of an image of 224 px, as torchvision publishes them with its weights
PUBLISHED_MULTIPLY_ADDS = {
    "resnet18": 1.814,
    "resnet34": 3.664,
    "resnet50": 4.089,
    "resnet101": 7.801,
    "resnet152": 11.514,
    "wide_resnet50_2": 11.398,
    "wide_resnet101_2": 22.753,
    "resnext50_32x4d": 4.230,
    "resnext101_32x8d": 16.414,
    "resnext101_64x4d": 15.460,
    "vgg11": 7.609,
    "vgg13": 11.308,
    "vgg16": 15.470,
    "vgg19": 19.632,
}


@pytest.mark.parametrize("name", PUBLISHED_MULTIPLY_ADDS)
def test_operations_are_the_published_ones(name: str) -> None:
    """Groups, stride and image size of each convolution are counted correctly."""
    size = size_of_model(name)
    assert size.parameters == TORCHVISION[name][0]
    assert size.flops / 2e9 == pytest.approx(PUBLISHED_MULTIPLY_ADDS[name], abs=0.0006)


@pytest.mark.parametrize("name", ["resnet20", "resnext50_32x4d", "wrn_28_10"])
def test_memory_of_an_image_is_that_of_a_training_plan(name: str) -> None:
    """The memory is that of the activations of one image. Images of other batches need as much, within 10 %."""
    size, model = size_of_model(name), built(name)
    plan = compile_graph(Lowering(model).graph(24, size.image_shape), NumpyKernelSet(), training=True)
    assert size.memory_bytes == pytest.approx(plan.arena_bytes / 24, rel=0.1)


def test_preactivation_networks_are_the_published_ones() -> None:
    """He et al. 2016b and Zagoruyko and Komodakis 2016, table 1: stem, blocks of two batch norms and convolutions, last norm."""

    def count(stem: int, stages: Sequence[int], blocks: int) -> int:
        total, inside = 27 * stem, stem
        for outside in stages:
            total += (inside * outside if inside != outside else 0) + (blocks - 1) * (4 * outside + 18 * outside**2)
            total += 2 * inside + 2 * outside + 9 * inside * outside + 9 * outside**2
            inside = outside
        return total + 2 * inside + 10 * inside + 10

    published = {
        "preact_resnet18": ((64, (64, 128, 256, 512), 2), 11_172_170),
        "wrn_16_8": ((16, (128, 256, 512), 2), 10_961_370),
        "wrn_28_10": ((16, (160, 320, 640), 4), 36_479_194),
    }
    for name, (sizes, total) in published.items():
        assert parameter_count(built(name)) == count(*sizes) == total, name
    names = list(exported_shapes(built("wrn_28_10")))
    assert names[:2] == ["conv1.weight", "layer1.0.bn1.weight"]
    assert [name for name in names if "downsample" in name] == [f"layer{stage}.0.downsample.weight" for stage in (1, 2, 3)]
    assert exported_shapes(built("preact_resnet18"))["layer2.0.downsample.weight"] == (128, 64, 1, 1)


def test_paths_of_a_block_share_its_activation_where_the_shape_changes_and_in_the_first_block() -> None:
    """A shortcut reads the activation there, and the raw input in another block (He et al. 2016b, section 4.1)."""
    graph = graph_of(built("preact_resnet18", width=0.125, dropout=0.3, stochastic_depth=0.2), 16, 16, 3)
    nodes = {node.name: node for node in graph.nodes}
    for name, (first, later) in {"layer1": ("add", "add"), "layer2": ("downsample", "add")}.items():
        activation = nodes[f"{name}.0.relu1"].output
        assert activation in nodes[f"{name}.0.{first}"].inputs
        assert nodes[f"{name}.0.add"].output in nodes[f"{name}.1.{later}"].inputs
        assert nodes[f"{name}.1.bn1"].inputs == (nodes[f"{name}.0.add"].output,)
        assert nodes[f"{name}.1.conv2"].inputs == (nodes[f"{name}.1.dropout"].output,)
    assert {node for node in nodes if "stochastic_depth" in node} >= {"layer4.1.stochastic_depth"}


@pytest.mark.parametrize("depth", [20, 32, 44, 56, 110])
def test_small_resnets_follow_the_papers_table(depth: int) -> None:
    """He et al. 2016, section 4.2: no bias before a batch norm, no parameters in shortcuts; the depth is that of weights."""
    n = (depth - 2) // 6
    total = 3 * 9 * 16 + 2 * 16 + 64 * 10 + 10
    for inside, planes in ((16, 16), (16, 32), (32, 64)):
        total += inside * 9 * planes + (2 * n - 1) * planes * 9 * planes + 2 * n * 2 * planes
    model = built(f"resnet{depth}")
    assert parameter_count(model) == total
    names = list(exported_shapes(model))
    assert sum(name.endswith("weight") and ".bn" not in name and not name.startswith("bn") for name in names) == depth
    assert names[:2] == ["conv1.weight", "bn1.weight"]
    assert f"layer3.{n - 1}.bn2.running_var" in names
    assert not [name for name in names if "downsample" in name]


def test_projections_of_small_resnets_have_parameters() -> None:
    assert parameter_count(built("resnet20", shortcut="projection")) == 272_474
    shapes = exported_shapes(built("resnet20", shortcut="projection"))
    assert shapes["layer2.0.downsample.0.weight"] == (32, 16, 1, 1)
    assert "layer1.0.downsample.0.weight" not in shapes


def test_resnet9_is_eight_convolutions_and_a_classifier() -> None:
    shapes = exported_shapes(built("resnet9"))
    convolutions = [shape for shape in shapes.values() if len(shape) == 4]
    expected = [(64, 3), (128, 64), (128, 128), (128, 128), (256, 128), (512, 256), (512, 512), (512, 512)]
    assert convolutions == [(*pair, 3, 3) for pair in expected]
    assert parameter_count(built("resnet9")) == 6_573_130
    names = list(shapes)
    assert names[:2] == ["layer0.conv.weight", "layer0.bn.weight"]
    assert {"layer1.block.conv1.weight", "layer3.block.bn2.running_var"} <= set(names)
    assert not [name for name in names if name.startswith("layer2.block")]
    assert names[-2:] == ["fc.weight", "fc.bias"]
    for width, channels in ((0.5, 32), (0.01, 1), (2.0, 128)):
        shapes = exported_shapes(built("resnet9", width=width, classes=7))
        assert (shapes["layer0.conv.weight"], shapes["fc.weight"]) == ((channels, 3, 3, 3), (7, round(512 * width)))


def test_a_small_vgg_starts_as_whitening_filters_and_identities() -> None:
    network = Network(built("vgg_small", channels=[32, 40]), (8, 8, 3), NumpyKernelSet())
    shapes = {name: parameter.data.shape for name, parameter in network.parameters.items() if parameter.data.ndim == 4}
    assert list(shapes.values()) == [(24, 2, 2, 3), (32, 3, 3, 24), (32, 3, 3, 32), (40, 3, 3, 32), (40, 3, 3, 40)]
    for name, (filters, _, _, channels) in list(shapes.items())[1:]:
        weight = np.array(network.parameters[name].data)
        expected = np.zeros((channels, 3, 3, channels))
        expected[range(channels), 1, 1, range(channels)] = 1.0
        np.testing.assert_array_equal(weight[:channels], expected)
        assert filters == channels or np.std(weight[channels:]) == pytest.approx((2 / 9 / filters) ** 0.5, rel=0.1)
    sizes = [tensor.shape[1] for tensor in graph_of(built("vgg_small"), 32, 32, 3).tensors if len(tensor.shape) == 4]
    assert sizes == [*[32] * 4, *[16] * 7, *[8] * 7, *[4] * 6, 1]
    assert len(exported_shapes(built("vgg_small", convolutions=3, channels=[32]))) == 1 + 3 * 5 + 2
    for options, words in (
        ({"channels": []}, "at least one stage"),
        ({"convolutions": 0}, "convolutions is 0, but must be at least 1"),
    ):
        with pytest.raises(OptionError, match=words):
            built("vgg_small", **options)


def test_the_small_network_has_what_its_options_say() -> None:
    shapes = exported_shapes(built("small", **SMALL, channels_in=2))
    norms = {f"stage{i}.bn.{role}": (c,) for i, c in ((1, 3), (2, 5)) for role in ("weight", "bias")}
    linear = {"fc1.weight": (7, 20), "fc1.bias": (7,), "fc2.weight": (4, 7), "fc2.bias": (4,)}
    convolutions = {"stage1.conv.weight": (3, 2, 3, 3), "stage2.conv.weight": (5, 3, 3, 3)}
    trained = {name: shape for name, shape in shapes.items() if "running" not in name}
    assert trained == {**convolutions, **norms, **{f"classifier.{name}": shape for name, shape in linear.items()}}
    with_norm, without = (parameter_count(built("small", **SMALL, batch_norm=b)) for b in (True, False))
    assert with_norm - without == 3 + 5  # a convolution has a bias only without batch norm
    shapes = exported_shapes(built("small", **SMALL, width=2.0))
    assert (shapes["stage2.conv.weight"], shapes["classifier.fc1.weight"]) == ((10, 6, 3, 3), (14, 40))


def test_bottlenecks_carry_the_stride_on_their_3x3_and_narrow_ones_keep_their_groups() -> None:
    graph = graph_of(built("resnet50", width=0.125), 65, 63, 3)
    strided = {n.name for n in graph.nodes if isinstance(n.spec, Conv2dSpec) and n.spec.window.stride == (2, 2)}
    assert strided == {"conv1", *(f"layer{stage}.0.{conv}" for stage in (2, 3, 4) for conv in ("conv2", "downsample.0"))}
    graph = graph_of(built("resnext50_32x4d", width=0.05, classes=5), 33, 33, 3)
    assert {n.spec.groups for n in graph.nodes if isinstance(n.spec, Conv2dSpec) and n.name.endswith("conv2")} == {32}


@pytest.mark.parametrize(
    ("name", "last", "blocks"),
    [("resnet18", ".bn2.weight", 8), ("resnet50", ".bn3.weight", 16), ("resnet9", ".block.bn2.weight", 2)],
)
def test_blocks_start_as_their_shortcut_on_request(name: str, last: str, blocks: int) -> None:
    network = Network(built(name, width=0.125, zero_init_residual=True), (33, 33, 3), NumpyKernelSet())
    zero = {n for n, parameter in network.parameters.items() if n.endswith("weight") and not parameter.data.any()}
    assert zero == {n for n in network.parameters if n.endswith(last)}
    assert len(zero) == blocks


def test_batch_norm_options_reach_every_batch_norm() -> None:
    model = built("resnet18", width=0.125, momentum=0.25, epsilon=0.01, synchronised=True)
    layers = [layer for _, layer in model.walk() if layer.statistics()]
    assert len(layers) == 20
    for layer in layers:
        assert {spec.momentum for spec in layer.statistics().values()} == {0.25}
        assert (layer.spec("bn").epsilon, layer.spec("bn").synchronised) == (0.01, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "image", "tolerances"),
    [
        *(("small", {**SMALL, **more}, (9, 7, 1), {"step": 1e-6}) for more in (
            {}, {"hidden": 0}, {"batch_norm": False}, {"dropout": 0.3}, {"dropout": 0.3, "hidden": 0}, {"grid": 1})),
        ("resnet9", {"width": 0.05, "classes": 5}, (9, 8, 3), {"step": 1e-7, "elements": 2}),
        *(("resnet20", {"shortcut": shortcut, "width": 0.2, "classes": 5}, (9, 7, 3), {"step": 1e-7, "elements": 2})
          for shortcut in ("padding", "projection")),
        ("preact_resnet", {"stem": 2, "channels": [2, 3], "blocks": [2, 1], "dropout": 0.3}, (7, 6, 3), {"step": 1e-7}),
    ],
)  # fmt: skip
def test_gradients(name: str, options: dict[str, Any], image: tuple[int, int, int], tolerances: dict[str, Any]) -> None:
    check_gradients(catalogue.build(name, options), image, tolerance=1e-6, **tolerances)


@pytest.mark.parametrize(
    ("name", "width", "sizes"),
    [
        ("alexnet", 0.1, [(67, 69), (224, 229)]),
        ("vgg16_bn", 0.125, [(32, 32), (65, 33), (225, 224)]),
        ("resnet9", 0.1, [(8, 8), (9, 15), (32, 225)]),
        ("resnet20", 0.1, [(1, 1), (7, 9), (33, 225)]),
        ("wrn_16_8", 0.05, [(1, 1), (7, 9), (33, 225)]),
    ],
)
def test_images_of_other_sizes_fit(name: str, width: float, sizes: list[tuple[int, int]]) -> None:
    model = built(name, width=width, classes=7, channels_in=2)
    assert [model.output(TensorSpec((3, *size, 2))).shape for size in sizes] == [(3, 7)] * len(sizes)


@pytest.mark.parametrize(
    ("channels", "width", "wanted"),
    [(64, 1.0, 64), (64, 0.001, 1), (3, 0.5, 2), (100, MOST_CHANNELS / 100, MOST_CHANNELS)],
)
def test_widths_are_rounded(channels: int, width: float, wanted: int) -> None:
    assert scaled(channels, width) == wanted


def test_depths_rise_linearly_to_the_last_block() -> None:
    ends = list(stochastic_depths(0.4, 5, 3))
    assert ends[0] == {}
    specs = [end["stochastic_depth"].spec("a") for end in ends[1:]]  # type: ignore[attr-defined]
    assert [spec.rate for spec in specs] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert all(spec.per_sample and spec.seed == 3 for spec in specs)
    assert list(stochastic_depths(0.0, 5, 3)) == [{}] * 5


FAMILIES = ("vgg11", "resnet18", "resnet20", "resnet9", "preact_resnet18", "small")
LARGEST = "the largest width for this layer is"


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        *((model, {"width": -1.0}, "width of -1") for model in FAMILIES),
        *((model, {"width": 0.0}, "width of 0.* leaves no channels") for model in FAMILIES),
        *((model, {"width": 1e308}, LARGEST) for model in FAMILIES),
        ("vgg", {"depth": 15}, r"no VGG of depth 15; known depths are \[11, 13, 16, 19\], the nearest is 16"),
        ("resnet", {"depth": 20}, r"no ResNet of depth 20; .* the nearest is 18"),
        ("resnet_small", {"depth": 18}, r"no small ResNet of depth 18; .* the nearest is 20"),
        *((model, {"dropout": 1.0}, "A dropout rate of 1.0 is outside") for model in ("vgg11", "small")),
        *((model, {"stochastic_depth": rate}, ".") for model in ("resnet20", "resnet50") for rate in (1.0, -0.1, float("nan"))),
        ("resnet34", {"groups": 2}, "groups is 2, but a ResNet of depth 34 has no bottlenecks, so it must be"),
        ("resnet34", {"width_per_group": 128}, "width_per_group is 128, but a ResNet of depth 34 has no bottlenecks"),
        *(("resnet50", {option: value}, ".") for option, value in (
            ("groups", 0), ("width_per_group", 0), ("width_per_group", 1_000_000), ("groups", 10**9))),
        *((model, {"channels": []}, "at least one stage") for model in ("small", "preact_resnet")),
        *(("preact_resnet", {"blocks": value}, ".") for value in ([2, 2], [], [2, 0, 1, 1])),
        ("preact_resnet", {"stem": 0}, "it must have at least 1"),
        *(("wrn_28_10", {option: 1.0}, "outside") for option in ("dropout", "stochastic_depth")),
        *(("small", more, "it must have at least 1") for more in ({"channels": [-4]}, {"channels": [4, 0]}, {"hidden": -1})),
    ],
)  # fmt: skip
def test_a_refusal_names_its_option(model: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence) as caught:
        catalogue.build(model, options)
    assert [caught.value.option] == list(options)


def test_enormous_layers_and_images_that_vanish_are_refused() -> None:
    for channels, width in ((64, 1e308), (64, float("inf")), (1, 1e7), (10**400, 1.0)):
        with pytest.raises(ConfigError, match=rf"into more than 1,000,000, the maximum of a layer; {LARGEST}"):
            scaled(channels, width)
    for channels in (0, -1, -(10**400)):
        with pytest.raises(ConfigError, match="it must have at least 1"):
            scaled(channels, 1.0)
    with pytest.raises(ShapeError, match=r"stage3\.pool.*the smallest height that fits is 2"):
        built("small", channels=[2, 2, 2]).output(TensorSpec((1, 7, 28, 1)))


def test_every_name_builds_at_its_own_image_size() -> None:
    for name in catalogue.names():
        model = catalogue.build(name, {"classes": 7, "width": 0.05})
        assert model.output(TensorSpec((2, *catalogue.image_shape(name)))).shape == (2, 7), name


@pytest.mark.parametrize("name", ["vgg11", "vgg11_bn", "resnet18", "resnet50", "resnet20", "preact_resnet18", "small"])
def test_a_rank_without_samples_has_zero_gradients(name: str) -> None:
    rows, columns, channels = catalogue.image_shape(name)
    shape = (min(rows, 33), min(columns, 35), channels)
    network = Network(catalogue.build(name, {"classes": 7, "width": 0.05}), shape, NumpyKernelSet())
    program = network.program(0, training=True)
    for parameter in network.parameters.values():
        parameter.grad[...] = np.nan
    assert program.forward(StepContext()).shape == (0, 7)
    assert program.loss(np.zeros(0, np.int64), 5).count == 0
    program.backward()
    for parameter_name, parameter in network.parameters.items():
        assert not parameter.grad.any(), parameter_name


def test_check_returns_all_options_with_values_of_their_types() -> None:
    checked = catalogue.check("resnet50", {"width": 2, "synchronised": True})
    assert isinstance(checked["width"], float)
    assert checked["synchronised"] is True
    assert checked["depth"] == 50
    assert checked.keys() == catalogue.options("resnet50").keys()


@pytest.mark.parametrize(("line", "channels"), [("IMAGE_SHAPE = (9, 8, 1)", 1), ("", 3)])
def test_a_users_model_is_built_for_its_images_without_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, channels: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one_layer.py").write_text(
        f"{line}\nfrom hpctrain.nn.layers import Conv2d\n"
        "def layer(classes: int, channels_in: int, seed: int = 5): return Conv2d(channels_in, classes, 3)\n"
    )
    name = "one_layer.py:layer"
    assert catalogue.check(name, {}) == {"classes": 10, "channels_in": channels, "seed": 5}
    assert catalogue.check(name, {"classes": 4, "channels_in": 2}) == {"classes": 4, "channels_in": 2, "seed": 5}
    if line:
        assert catalogue.image_shape(name) == (9, 8, 1)
    else:
        with pytest.raises(ConfigError, match="does not declare the size of its images; add a line such as IMAGE_SHAPE"):
            catalogue.image_shape(name)


@pytest.mark.parametrize("name", catalogue.names())
def test_a_name_may_be_given_what_it_stands_for(name: str) -> None:
    everything = catalogue.check(name, catalogue.options(name))
    assert catalogue.check(name, everything) == everything
