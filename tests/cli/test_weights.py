"""`hpctrain weights`: from a run to a file and back into a run, in every layout of checkpoints, to the last bit."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.main import cli
from hpctrain.models import catalogue
from hpctrain.models.state_dict import declared_state, is_counter, with_counters
from hpctrain.nn.initialise import generator
from hpctrain.runs import directory as best_record
from hpctrain.runs.directory import latest
from hpctrain.storage import weights_file
from hpctrain.storage.checkpoint import averaged_statistic_key, checkpoints, optimizer_key, parameter_key, read
from hpctrain.storage.weights_file import WeightsFile
from tests.support.run_in_process import prepare, train


def call(*words: object) -> Result:
    return CliRunner().invoke(cli, ["weights", *map(str, words)])


def done(*words: object) -> str:
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs with averaged weights that is done."""
    folder = tmp_path_factory.mktemp("run")
    prepare(folder)
    train(folder, "ema.decay=0.9")
    directory = latest(folder / "runs", "tiny")
    assert directory is not None
    return directory.path


def by_seed(name: str) -> dict[str, np.ndarray]:
    """A narrow model's state in torchvision's names, by seed."""
    entries = declared_state(catalogue.build(name, {"width": 0.02, "classes": 6}))
    return with_counters({key: generator(1, key).standard_normal(e.shape, np.float32) for key, e in entries.items()}, 4)


def test_a_run_is_exported_with_all_that_a_reader_must_know(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "w.safetensors"
    printed = " ".join(done("export", run, "--out", out).split())
    assert re.search(r": 331 parameters and 4 running statistics in \d+ tensors of small, from ", printed)
    assert "Input: images of 7 x 6 pixels and 1 channel. Divide pixels by 255, subtract the mean " in printed
    assert f"Output: a logit for each of 3 classes. Train from it with init.weights={out}, or load" in printed
    content = weights_file.read(out)
    tensors = read(checkpoints(run / "checkpoints")[-1][1]).tensors
    weight = tensors[parameter_key("stage1.conv.weight")]
    np.testing.assert_array_equal(content.tensors["stage1.conv.weight"], weight.transpose(0, 3, 1, 2))
    assert content.tensors["stage1.bn.num_batches_tracked"] == 6
    facts = {key: json.loads(content.metadata[key]) for key in ("classes", "image_shape", "step")}
    assert facts == {"classes": ["a", "b", "c"], "image_shape": [7, 6, 1], "step": 6}
    options = json.loads(content.metadata["model_options"])
    assert (options["channels"], options["hidden"]) == ([2], 3)
    assert (content.metadata["format"], content.metadata["model"]) == ("pt", "small")
    assert len(json.loads(content.metadata["mean"])) == 1


def test_the_best_checkpoint_is_taken_where_it_is_asked_for(run: Path, tmp_path: Path) -> None:
    record = best_record.read_best(run / "checkpoints")
    assert record is not None
    assert record.checkpoint in done("export", run, "--best", "--out", tmp_path / "w.safetensors")
    result = call("export", tmp_path / "w.safetensors", "--best", "--out", tmp_path / "x.safetensors")
    assert (result.exit_code, "leave --best out" in result.stderr) == (2, True)


def test_averaged_weights_are_taken_where_they_are_asked_for(run: Path, tmp_path: Path) -> None:
    printed = done("export", run, "--averaged", "--out", tmp_path / "w.safetensors")
    assert "tensors, averaged, of small, from " in " ".join(printed.split())
    tensors = read(checkpoints(run / "checkpoints")[-1][1]).tensors
    content = weights_file.read(tmp_path / "w.safetensors")
    average = tensors[optimizer_key("ema", "stage1.conv.weight")]
    np.testing.assert_array_equal(content.tensors["stage1.conv.weight"], average.transpose(0, 3, 1, 2))
    assert not np.array_equal(average, tensors[parameter_key("stage1.conv.weight")])
    mean = content.tensors["stage1.bn.running_mean"]
    np.testing.assert_array_equal(mean, tensors[averaged_statistic_key("stage1.bn.running_mean")])
    assert content.metadata["averaged"] == "true"


def test_what_was_exported_starts_another_training_with_the_same_bits(run: Path, tmp_path: Path) -> None:
    prepare(tmp_path)
    done("export", run, "--out", tmp_path / "w.safetensors")
    train(tmp_path, f"init.weights={tmp_path}/w.safetensors", "epochs=0", "checkpoint.every_epochs=1", "on_nonfinite=rollback")
    directory = latest(tmp_path / "runs", "tiny")
    assert directory is not None
    again = read(checkpoints(directory.checkpoints)[0][1]).tensors
    for key, values in read(checkpoints(run / "checkpoints")[-1][1]).tensors.items():
        if not key.startswith(("optimizer/", "averaged_statistics/")):
            assert again[key].tobytes() == values.tobytes(), key


@pytest.mark.parametrize("name", catalogue.names())
def test_every_model_is_imported_to_the_last_bit(name: str, tmp_path: Path) -> None:
    state = by_seed(name)
    weights_file.write(tmp_path / "in.safetensors", WeightsFile(state))
    done("import", tmp_path / "in.safetensors", "--model", name, "--option", "width=0.02", "--out", tmp_path / "out.safetensors")
    content = weights_file.read(tmp_path / "out.safetensors")
    assert content.tensors.keys() == state.keys()
    assert all(content.tensors[key].tobytes() == array.tobytes() for key, array in state.items())
    assert content.metadata["model"] == name
    done("export", tmp_path / "out.safetensors", "--out", tmp_path / "again.safetensors")  # which knows its model
    again = weights_file.read(tmp_path / "again.safetensors")
    assert all(again.tensors[key].tobytes() == array.tobytes() for key, array in state.items())
    assert again.metadata == content.metadata


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d", "vgg11_bn"])
def test_files_of_timm_are_imported(name: str, dtype: str, tmp_path: Path) -> None:
    """Import a file with timm's names, convolutions in place of linear layers, 16-bit numbers and without counters.

    The numbers are multiples of 1/16 below 8, which all three dtypes represent exactly.
    """
    state = {
        key: (np.round(np.clip(array, -7, 7) * 16) / 16).astype(np.float32)
        for key, array in by_seed(name).items()
        if not is_counter(key)
    }
    theirs = {"classifier.0": "pre_logits.fc1", "classifier.3": "pre_logits.fc2", "classifier.6": "head.fc"}
    shapes = {"classifier.0.weight": (-1, 10, 7, 7), "classifier.3.weight": (-1, 82, 1, 1)}
    file = {}
    for key, array in state.items():
        layer, _, role = key.rpartition(".")
        file[f"{theirs.get(layer, layer)}.{role}"] = array.reshape(shapes.get(key, array.shape))
    write_safetensors(tmp_path / "in.safetensors", file, dtype)
    words = ("import", tmp_path / "in.safetensors", "--model", name, "--option", "width=0.02")
    done(*words, "--out", tmp_path / "out.safetensors")
    read = weights_file.read(tmp_path / "out.safetensors").tensors
    assert read.keys() == state.keys()
    assert all(read[key].dtype == np.float32 and read[key].tobytes() == array.tobytes() for key, array in state.items())


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str) -> None:
    """Write a file as other programs do, also in bfloat16, which NumPy and hpctrain's writer lack."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for key, array in tensors.items():
        raw = (array.view("<u4") >> 16).astype("<u2") if dtype == "bfloat16" else array.astype(dtype)
        code = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
        header[key] = {"dtype": code, "shape": array.shape, "data_offsets": [len(data), len(data) + raw.nbytes]}
        data += raw.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_file_is_shown(tmp_path: Path) -> None:
    weights_file.write(tmp_path / "w.safetensors", WeightsFile({"fc.weight": np.zeros((2, 3), np.float32)}, {"model": "own"}))
    text = done("show", tmp_path / "w.safetensors")
    assert "model: own\n" in text
    assert "  fc.weight  [2, 3] float32\n" in text
    assert text.endswith("6 parameters in 1 tensor, 24 bytes\n")
    values = json.loads(done("show", tmp_path / "w.safetensors", "--json"))
    assert values["tensors"] == {"fc.weight": {"shape": [2, 3], "dtype": "float32"}}


def test_an_onnx_file_computes_what_the_checkpoint_does(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed (make parity-install installs it)")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (make parity-install installs it)")
    done("export", run, "--out", tmp_path / "w.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "w.onnx"), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["N", 1, 7, 6]
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == ["a", "b", "c"]
    x = np.random.default_rng(0).standard_normal((2, 1, 7, 6), np.float32)
    (logits,) = session.run(None, {"images": x})
    assert logits.shape == (2, 3)
    done("export", run, "--out", tmp_path / "w.safetensors")
    done("export", tmp_path / "w.safetensors", "--out", tmp_path / "again.onnx")
    (again,) = onnxruntime.InferenceSession(str(tmp_path / "again.onnx"), providers=["CPUExecutionProvider"]).run(
        None, {"images": x}
    )
    np.testing.assert_array_equal(again, logits)
