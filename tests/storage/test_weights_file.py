import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hpctrain.errors import CheckpointError
from hpctrain.storage import weights_file
from hpctrain.storage.weights_file import WeightsFile

_DTYPES = st.sampled_from(["<f4", "<f8", "<i8"]).map(np.dtype)
_SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@settings(max_examples=20, deadline=None)
@given(
    tensors=st.dictionaries(st.text("ab.0_é", min_size=1), arrays.arrays(_DTYPES, _SHAPES), min_size=1, max_size=3),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3),
)
def test_what_was_written_is_read_to_the_last_bit(
    tensors: dict[str, np.ndarray], metadata: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    weights_file.write(path, WeightsFile(tensors, metadata))
    content = weights_file.read(path)
    assert content.metadata == metadata
    assert content.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        assert content.tensors[name].dtype == array.dtype
        assert content.tensors[name].shape == array.shape
        assert content.tensors[name].tobytes() == array.tobytes()


def test_a_file_is_readable_by_who_may_read_others(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    weights_file.write(tmp_path / "w.safetensors", WeightsFile({"a": np.zeros(2)}))
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "w.safetensors"]


def test_sixteen_bits_become_the_same_numbers_in_32(tmp_path: Path) -> None:
    halves = np.array([1.5, -0.1, 6e-8, 65504], np.float16)
    weights_file.write(tmp_path / "half.safetensors", WeightsFile({"a": halves}))
    content = weights_file.read(tmp_path / "half.safetensors").tensors["a"]
    assert content.dtype == np.float32
    np.testing.assert_array_equal(content, halves)
    header = json.dumps({"b": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [0, 4]}}).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "brain.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\x80\x3f\xc0\xc0")
    np.testing.assert_array_equal(weights_file.read(tmp_path / "brain.safetensors").tensors["b"], [[1.0], [-6.0]])


@pytest.mark.parametrize("content", [b"", b"neither", b"\xff" * 64])
def test_a_damaged_file_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is no safetensors file that can be read \(.*\); write or fetch it again\.$"):
        weights_file.read(path)


@pytest.mark.parametrize("cut", [1, 8, 40])
def test_a_truncated_file_is_a_sentence(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "w.safetensors"
    weights_file.write(path, WeightsFile({"a": np.arange(10.0)}))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        weights_file.read(path)


def test_missing_files_and_other_kinds_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no file of weights"):
        weights_file.read(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"it must end in \.safetensors, \.pt or \.pth\.$"):
        weights_file.read(tmp_path / "w.h5")
    with pytest.raises(CheckpointError, match=r"it must end in \.safetensors\.$"):
        weights_file.check_suffix(tmp_path / "w.pt", (weights_file.SAFETENSORS,))


@pytest.mark.parametrize(("module", "name"), [("torch", "w.pt"), ("safetensors", "w.safetensors")])
def test_a_missing_package_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"pip install {module}"):
        weights_file.read(tmp_path / name)


def test_checksums_are_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert weights_file.checksum(tmp_path / "a").startswith("ba7816bf8f01cfea")


@pytest.mark.parametrize(
    "wrap",
    [
        "module.{}",
        "_orig_mod.{}",
        "module._orig_mod.{}",
        "_orig_mod.module.{}",
        "module.module.{}",
        "_fsdp_wrapped_module.{}",
        "module._orig_mod._checkpoint_wrapped_module.{}",
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_names_lose_what_wrappers_put_before_them(wrap: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".pth":
        pytest.importorskip("torch")
    tensors = {name: np.full(2, float(number)) for number, name in enumerate(("conv.weight", "fc.bias", "n_module.weight"))}
    path = tmp_path / f"w{suffix}"
    weights_file.write(path, WeightsFile({wrap.format(name): array for name, array in tensors.items()}))
    read = weights_file.read(path).tensors
    assert list(read) == list(tensors) or sorted(read) == sorted(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(read[name], array)


def test_names_lose_what_wrappers_put_inside_of_them(tmp_path: Path) -> None:
    names = {"features._orig_mod.0.weight": "features.0.weight", "fc.bias": "fc.bias", "module.x": "module.x"}
    weights_file.write(tmp_path / "w.safetensors", WeightsFile({name: np.zeros(1) for name in names}))
    assert sorted(weights_file.read(tmp_path / "w.safetensors").tensors) == sorted(names.values())


def test_names_of_a_file_of_ours_stay(tmp_path: Path) -> None:
    tensors = {"module.weight": np.zeros(1), "module.bias": np.zeros(1)}
    weights_file.write(tmp_path / "w.safetensors", WeightsFile(tensors, {"model": "package:Model"}))
    assert sorted(weights_file.read(tmp_path / "w.safetensors").tensors) == sorted(tensors)


def test_two_tensors_never_become_one(tmp_path: Path) -> None:
    tensors = {"a._orig_mod.weight": np.zeros(1), "a.weight": np.ones(1)}
    weights_file.write(tmp_path / "w.safetensors", WeightsFile(tensors))
    with pytest.raises(CheckpointError, match=r"has both a\S+ and a\S+, which are one name without the wrappers of PyTorch"):
        weights_file.read(tmp_path / "w.safetensors")
