"""Optimisers: each module defines one, under the module's name."""

from __future__ import annotations

from hpctrain.optim.base import Optimizer
from hpctrain.core.registry import Registry

OPTIMIZERS: Registry[Optimizer] = Registry(__name__, "optimizer", Optimizer)
