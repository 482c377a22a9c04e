"""Weights of classes in the loss of a run: balanced or given, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.writer import write_data_file
from hpctrain.storage import checkpoint
from tests.support.runs import train_virtual

#: of the classes, in the file below
COUNTS = (12, 3, 6)
BALANCED = [21 / (3 * count) for count in COUNTS]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a configuration in float64 with exact sums. Its last batch has one sample, so one of two ranks has none."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), (*COUNTS, 0))
    images = random.integers(0, 256, (len(labels), 8, 8, 3), np.uint8)
    for name, classes in (("train", "abc"), ("without", "abcd")):
        write_data_file(tmp_path / f"{name}.h5", len(labels), (8, 8, 3), tuple(classes), [(images, labels)])
    config = {
        "model": {"name": "small", "hidden": 8},
        "data": {"train": str(tmp_path / "train.h5"), "mixing": {"mixup": 0.4, "probability": 0.5}},
        "batch": 5,
        "epochs": 1,
        "dtype": "float64",
        "backend": "numpy",
        "exact": {"shards": 4},
        "optimizer": {"name": "sgd", "lr": 0.05},
        "schedule": "constant",
        "loss": {"label_smoothing": 0.1},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    return tmp_path / "config.yaml"


def trained(ranks: int, file: Path, weights: object) -> tuple[dict[str, bytes], list[float]]:
    """Return the parameters and the training losses of a run."""
    output = file.parent / f"runs-{len(list(file.parent.iterdir()))}"
    train_virtual(ranks, file, f"loss.class_weights={json.dumps(weights)}", f"output={output}")
    (run,) = output.iterdir()
    tensors = checkpoint.read(checkpoint.checkpoints(run / "checkpoints")[-1][1]).tensors
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {name: tensors[name].tobytes() for name in tensors}, [each["loss"] for each in records if each["kind"] == "epoch"]


def test_balanced_weights_are_those_of_the_labels_on_any_ranks(file: Path) -> None:
    """The divisor is the sum of weights over the samples of all ranks, and training steps use the weights."""
    alone = trained(1, file, "balanced")
    assert trained(2, file, BALANCED) == alone
    assert trained(2, file, None)[0] != alone[0]
    ones = trained(1, file, [2.0, 2.0, 2.0])
    assert ones[1] == pytest.approx(trained(2, file, None)[1], rel=1e-12)  # a common factor has no effect


@pytest.mark.parametrize(
    ("name", "weights", "words"),
    [
        ("train", "[1, 2]", "loss.class_weights has 2 weights, but .* has 3 classes"),
        ("without", "balanced", "has no image of the class 'd'"),
    ],
)
def test_weights_that_do_not_fit_the_data_are_refused(file: Path, name: str, weights: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        train_virtual(1, file, f"loss.class_weights={weights}", f"data.train={file.parent / name}.h5", f"output={file.parent}/r")
