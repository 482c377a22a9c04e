"""Augmentations of images: each module defines one and is named after it.

`base` has the interfaces; read it first. `data.pipeline` creates augmentations by the registry `AUGMENTATIONS` and runs them.
This package imports the image operations of `data`, `backend` and `core`.
"""

from __future__ import annotations

from hpctrain.core.registry import Registry
from hpctrain.data.augmentations.base import Augmentation

AUGMENTATIONS: Registry[Augmentation] = Registry(__name__, "augmentation", Augmentation)
