"""Augmentations: each module defines one, under the module's name."""

from __future__ import annotations

from hpctrain.data.augmentations.base import Augmentation
from hpctrain.core.registry import Registry

AUGMENTATIONS: Registry[Augmentation] = Registry(__name__, "augmentation", Augmentation)
