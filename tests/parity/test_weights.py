"""Weights of torchvision's own models: the same names, and the same logits after an import; files of PyTorch there and back."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")

import torch
from click.testing import CliRunner

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import StepContext
from hpctrain.cli.main import cli
from hpctrain.core.errors import CheckpointError
from hpctrain.models import catalogue
from hpctrain.models.state_dict import declared_state, with_counters
from hpctrain.nn.network import Network
from hpctrain.storage import weights_file
from hpctrain.storage.weights_file import WeightsFile
from tests.support import network_state

pytestmark = pytest.mark.torch

TORCHVISION = (
    "alexnet2014",
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *("wide_resnet50_2", "wide_resnet101_2", "resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
    *(f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")),
)
CLASSES = 7


@pytest.fixture(scope="module")
def theirs() -> Any:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed (make parity-install installs it)")
    from hpctrain_testing import torchvision_models

    return torchvision_models


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHVISION)
def test_names_shapes_and_order_are_torchvisions(theirs: Any, name: str) -> None:
    entries = declared_state(catalogue.build(name, {"classes": CLASSES}))
    ours = with_counters({key: np.broadcast_to(np.float32(0), entry.shape) for key, entry in entries.items()}, 0)
    assert {key: array.shape for key, array in ours.items()} == theirs.shapes(name, CLASSES)
    assert list(ours) == list(theirs.shapes(name, CLASSES))


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pixels", "width"),
    [
        ("resnet18", 33, 1.0),
        ("resnet50", 33, 1.0),
        ("resnext50_32x4d", 33, 1.0),
        ("wide_resnet50_2", 33, 1.0),
        ("vgg11_bn", 45, 0.1),
    ],
)
def test_imported_weights_give_torchvisions_logits(theirs: Any, name: str, pixels: int, width: float, tmp_path: Path) -> None:
    module = theirs.module(name, CLASSES, 3) if width == 1.0 else theirs.filled(theirs.narrow_vgg(name, CLASSES, width), 3)
    torch.save(module.state_dict(), tmp_path / "theirs.pth")
    words = ["weights", "import", str(tmp_path / "theirs.pth"), "--model", name, "--option", f"width={width}"]
    result = CliRunner().invoke(cli, [*words, "--out", str(tmp_path / "ours.safetensors")])
    assert result.exit_code == 0, result.output
    model = catalogue.build(name, {"classes": CLASSES, "width": width})
    network = Network(model, (pixels, pixels, 3), NumpyKernelSet())
    network_state.restore(network, weights_file.read(tmp_path / "ours.safetensors").tensors)
    x = np.random.default_rng(0).standard_normal((2, pixels, pixels, 3), np.float32)
    program = network.program(2, training=False)
    program.set_input(x)
    ours = program.forward(StepContext(training=False))
    with torch.no_grad():
        wanted = module(torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))).numpy()
    scale = max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(ours / scale, wanted / scale, rtol=0, atol=1e-4)


def test_files_of_pytorch_are_written_and_loaded_strictly(tmp_path: Path) -> None:
    from hpctrain_testing import torch_networks

    network = Network(catalogue.build("resnet20", {"classes": CLASSES}), (9, 9, 3), NumpyKernelSet(), seed=4)
    state = with_counters(network_state.export(network), 12)
    weights_file.write(tmp_path / "w.pt", WeightsFile(state))
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    module = torch_networks.build("resnet20", CLASSES, 1.0)
    module.load_state_dict(loaded, strict=True)
    assert module.state_dict()["bn1.num_batches_tracked"] == 12
    again = weights_file.read(tmp_path / "w.pt").tensors
    assert all(again[name].tobytes() == array.tobytes() and again[name].dtype == array.dtype for name, array in state.items())


def test_wrapped_and_nested_state_dictionaries_are_understood(tmp_path: Path) -> None:
    state = {"module.fc.weight": torch.ones(2, 3, dtype=torch.bfloat16), "module.fc.bias": torch.zeros(2)}
    torch.save({"epoch": 3, "state_dict": state, "lr": 0.1}, tmp_path / "w.pth")
    content = weights_file.read(tmp_path / "w.pth").tensors
    assert list(content) == ["fc.weight", "fc.bias"]
    np.testing.assert_array_equal(content["fc.weight"], np.ones((2, 3), np.float32))


class Sprung:
    """An object whose unpickling calls something."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("unpickled",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"fc.weight": Sprung()}, "Cannot read .* as tensors only"),
        ({"epoch": 3}, "contains no state dictionary"),
        ([], "contains no state"),
    ],
)
def test_other_files_of_pytorch_are_refused_and_run_nothing(
    content: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=words):
        weights_file.read(tmp_path / "w.pt")
    assert "unpickled" not in capsys.readouterr().out
    (tmp_path / "w.pt").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"Cannot read .* as tensors only"):
        weights_file.read(tmp_path / "w.pt")


_ONES = torch.ones(4, 4)
#: state dictionaries whose tensors are not plain numbers, or are far larger than their files
_ODD = {
    "8-bit floats": lambda: _ONES.to(torch.float8_e4m3fn), "sparse": _ONES.to_sparse, "compressed rows": _ONES.to_sparse_csr,
    "meta": lambda: torch.empty(4, 4, device="meta"), "quantised": lambda: torch.quantize_per_tensor(_ONES, 0.1, 0, torch.qint8),
    "conjugated": lambda: torch.view_as_complex(torch.ones(4, 2)).conj(),
    "negated": lambda: torch.view_as_complex(torch.ones(4, 2)).conj().imag,
    "stride 0": lambda: torch.ones(1).expand(74_000, 74_000),
    "overlapping": lambda: torch.ones(4000).as_strided((3000, 900), (1, 1)),
    "nested tensors": lambda: torch.nested.nested_tensor([_ONES, _ONES]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", _ODD)
def test_tensors_that_cannot_be_read_are_one_sentence(kind: str, tmp_path: Path) -> None:
    torch.save({"fc.weight": _ODD[kind]()}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"^Cannot read \S+w\.pt as tensors only \(.*\); save model"):
        weights_file.read(tmp_path / "w.pt")


def test_an_archive_that_unpacks_to_much_more_is_not_unpacked(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.zeros(1 << 18)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as plain, zipfile.ZipFile(tmp_path / "w.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CheckpointError, match=r"it has \S+ kB, but its tensors have 1\.05 MB"):
        weights_file.read(tmp_path / "w.pt")
