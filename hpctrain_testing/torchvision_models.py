"""torchvision's own models by hpctrain's names. Importing this module imports torch and torchvision, also one built for a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch


def _declare_operators() -> torch.library.Library | None:
    """Declare the operators that torchvision looks up by name, if its own are built for a GPU and cannot be loaded.

    Its models do not use them.
    """
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    try:
        ctypes.CDLL(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return operators
    return None


_OPERATORS = _declare_operators()

from torchvision import models, transforms  # noqa: E402  needs the declared operators

__all__ = ["models", "transforms"]

#: hpctrain's name of a model -> torchvision's
NAMES = {
    "alexnet2014": "alexnet",
    **{f"resnet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    **{name: name for name in ("wide_resnet50_2", "wide_resnet101_2")},
    **{name: name for name in ("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d")},
    **{f"vgg{depth}{norm}": f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")},
}


def shapes(name: str, classes: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of torchvision's state dictionary, in its order, without allocating parameters."""
    return {key: tuple(tensor.shape) for key, tensor in _meta(name, classes).state_dict().items()}


def module(name: str, classes: int, seed: int) -> Any:
    """Return one of torchvision's models by hpctrain's name, filled with weights drawn from the seed, in evaluation mode."""
    return filled(_meta(name, classes), seed)


def narrow_vgg(name: str, classes: int, width: float, dropout: float = 0.0) -> Any:
    """Return a VGG of torchvision with fewer channels and features; the published VGG-16 has 138 million parameters."""
    published = models.vgg.cfgs[{"vgg11": "A", "vgg13": "B", "vgg16": "D", "vgg19": "E"}[name.removesuffix("_bn")]]
    channels = [one if one == "M" else round(one * width) for one in published]
    layers = models.vgg.make_layers(channels, batch_norm=name.endswith("_bn"))
    model = models.VGG(layers, classes, init_weights=False, dropout=dropout)
    hidden = round(4096 * width)
    for place, sizes in ((0, (channels[-2] * 49, hidden)), (3, (hidden, hidden)), (6, (hidden, classes))):
        model.classifier[place] = torch.nn.Linear(*sizes)
    return model


def filled(meta: Any, seed: int) -> Any:
    """Return a model without memory, filled with weights drawn from the seed, in evaluation mode."""
    model = meta.to_empty(device="cpu")
    random = np.random.default_rng(seed)
    state = {}
    for key, tensor in model.state_dict().items():
        if key.endswith("num_batches_tracked"):
            state[key] = torch.tensor(17)
            continue
        values = random.standard_normal(tuple(tensor.shape), np.float32)
        if key.endswith("running_var") or (key.endswith("weight") and values.ndim == 1):
            values = np.float32(0.5) + np.abs(values)
        elif values.ndim > 1:
            values *= np.float32(np.sqrt(2.0 / values[0].size))
        state[key] = torch.from_numpy(values)
    model.load_state_dict(state)
    return model.eval()


def _meta(name: str, classes: int) -> Any:
    with torch.device("meta"):
        return getattr(models, NAMES[name])(num_classes=classes)
