"""Augmentations: each module defines one, under the module's name."""

from __future__ import annotations

from hpctrain.core.registry import Registry
from hpctrain.data.augmentations.base import Augmentation

AUGMENTATIONS: Registry[Augmentation] = Registry(__name__, "augmentation", Augmentation)
